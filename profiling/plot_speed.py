"""TFLOP/s against length, a panel for each mask and head dim; and our kernels under the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cute_flash.spec import arch
from cute_flash.tools.roofline import flops
from profiling.axes import Panel, Scale, legend, linear
from profiling.record import Cell, Run
from profiling.suites import MASKS
from profiling.svg import Canvas

# Provider -> label, marker, colour. The same in every figure.
LOOKS = {
    "cute_flash": ("cute_flash", "circle", "blue"),
    "fa3": ("FlashAttention-3", "square", "orange"),
    "fa4": ("FlashAttention-4", "diamond", "purple"),
    "sdpa-cudnn": ("cuDNN", "up", "green"),
    "sdpa-flash": ("FlashAttention-2 (torch)", "down", "red"),
    "sdpa-efficient": ("memory-efficient (torch)", "square", "grey"),
    "flash_attn": ("FlashAttention-2", "up", "pink"),
    "flex": ("FlexAttention", "diamond", "teal"),
}
WIDTH, LEFT, TOP, GAP_X, GAP_Y, PANEL_HEIGHT = 960, 48, 100, 44, 58, 190
MARGIN_RIGHT = 20


def _grid(num: int) -> tuple[float, list[float]]:
    """The width of each of `num` panels in a row, and their left edges."""
    width = (WIDTH - LEFT - MARGIN_RIGHT - GAP_X * (num - 1)) / num
    return width, [LEFT + (width + GAP_X) * index for index in range(num)]


def _of(run: Run, head_dim: int, mask: str) -> list[Cell]:
    return [cell for cell in run.cells if (cell.shape.head_dim, cell.shape.mask) == (head_dim, mask)]


def _head_dims(runs: Sequence[Run]) -> list[int]:
    return sorted({cell.shape.head_dim for run in runs for cell in run.cells})


def _setting(run: Run) -> str:
    machine = run.machine
    commit, versions = machine["git_commit"][:7], f"torch {machine['torch']}, CUDA {machine['cuda']}"
    dtype, gpu = run.settings["dtype"], machine["gpu"]
    return f"{gpu}, {dtype}, 16,384 tokens, hidden size 2048; commit {commit}, {versions}"


def _lengths(run: Run) -> Scale:
    lengths = sorted({cell.shape.seqlen for cell in run.cells})
    return Scale(lengths[0] / 1.25, lengths[-1] * 1.25, tuple(lengths), is_log=True)


def speed(run: Run, title: str) -> str:
    """All providers; the dashed line is cuBLAS in the same run."""
    head_dims = _head_dims([run])
    width, lefts = _grid(len(head_dims))
    canvas = Canvas(WIDTH, TOP + len(MASKS) * (PANEL_HEIGHT + GAP_Y), title)
    canvas.text(16, 46, _setting(run), "dim")
    known = [name for name in LOOKS if name in run.providers]
    legend(canvas, (20, 70), [LOOKS[name] for name in known])
    ceiling = run.ceiling.tflops if run.ceiling and run.ceiling.tflops else None
    fastest = max(cell.tflops(name) or 0.0 for cell in run.cells for name in known)
    x, y = _lengths(run), linear(max(fastest, ceiling or 0.0))
    for row, mask in enumerate(MASKS):
        for head_dim, left in zip(head_dims, lefts, strict=True):
            top = TOP + row * (PANEL_HEIGHT + GAP_Y)
            panel = Panel(canvas, left, top, width, PANEL_HEIGHT, x, y)
            panel.frame(f"D = {head_dim}, {mask}", "S" if row == len(MASKS) - 1 else "", "TFLOP/s")
            if ceiling:
                canvas.line(panel.at(x.low, ceiling), panel.at(x.high, ceiling), "grey dashed")
                x_text, y_text = panel.at(x.low, ceiling)
                canvas.text(x_text + 6, y_text - 4, f"cuBLAS {ceiling:.0f}", "dim small")
            # Ours last, over the others.
            for name in reversed(known):
                _, shape, colour = LOOKS[name]
                cells = [cell for cell in _of(run, head_dim, mask) if cell.tflops(name)]
                points = [(cell.shape.seqlen, cell.tflops(name) or 0.0) for cell in cells]
                panel.curve(points, shape, colour, is_thick=name == "cute_flash")
    return canvas.render()


@dataclass(frozen=True)
class Kernel:
    """A series of points: our results of a run."""

    label: str
    run: Run
    shape: str
    colour: str


def _intensity(cell: Cell) -> float:
    """FLOPs of the visible pairs per byte, with every tensor moved once."""
    # The ratio of a direction's FLOPs to those of the forward.
    factor = cell.flops / cell.shape.flops()
    return factor * flops(cell.shape.problem(cell.dtype)) / cell.working_set_bytes


def roofline(kernels: Sequence[Kernel], title: str) -> str:
    """Our points of each run, filled without a mask and hollow with a causal mask; one panel per head dim."""
    spec = arch.H200
    head_dims = _head_dims([kernel.run for kernel in kernels])
    width, lefts = _grid(len(head_dims))
    canvas = Canvas(WIDTH, TOP + 300 + GAP_Y, title)
    ceilings = [kernel.run.ceiling for kernel in kernels]
    cublas = max(ceiling.tflops or 0.0 for ceiling in ceilings if ceiling)
    text = f"ceilings: {spec.hbm_tbps} TB/s and {spec.tensor_tflops:.0f} TFLOP/s of the data sheet"
    canvas.text(16, 46, f"{text}; dashed: cuBLAS in the best of these runs, {cublas:.0f} TFLOP/s", "dim")
    entries = [(kernel.label, kernel.shape, kernel.colour) for kernel in kernels]
    legend(canvas, (20, 70), [*entries, ("causal", "circle", "grey hollow")])
    x = Scale(16, 16384, (32, 128, 512, 2048, 8192), is_log=True)
    y = Scale(50, 1200, (50, 100, 200, 400, 800), is_log=True)
    for head_dim, left in zip(head_dims, lefts, strict=True):
        panel = Panel(canvas, left, TOP, width, 300, x, y)
        panel.frame(f"D = {head_dim}", "FLOP a byte of HBM", "TFLOP/s")
        corner = spec.tensor_tflops / spec.hbm_tbps
        roof = [(x.low, x.low * spec.hbm_tbps), (corner, spec.tensor_tflops), (x.high, spec.tensor_tflops)]
        canvas.path([panel.at(*point) for point in roof], "grey line")
        canvas.line(panel.at(cublas / spec.hbm_tbps, cublas), panel.at(x.high, cublas), "grey dashed")
        canvas.text(*panel.at(x.low * 1.15, 900), f"{spec.hbm_tbps} TB/s", "dim small")
        canvas.text(*panel.at(x.high / 9, cublas * 1.06), "cuBLAS", "dim small")
        for kernel in kernels:
            ours = kernel.run.ours[0]
            for cell in kernel.run.cells:
                if cell.shape.head_dim == head_dim and cell.tflops(ours):
                    kind = kernel.colour + (" hollow" if cell.shape.causal else "")
                    canvas.marker(panel.at(_intensity(cell), cell.tflops(ours) or 0.0), kernel.shape, kind)
    return canvas.render()
