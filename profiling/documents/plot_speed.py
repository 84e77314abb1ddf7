"""TFLOP/s against sequence length, and our kernels under the roofline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from cute_flash.spec import arch
from cute_flash.tools.roofline import flops
from profiling.documents.plot_style import BLUE, DIM, GREEN, GREY, INK, LOOKS, ORANGE, add_legend, new_figure
from profiling.measure.record import Cell, Run
from profiling.measure.shapes import MASKS

# The lines of the summary, by head dim and by mask.
HEAD_DIMS = {64: GREEN, 128: BLUE, 256: ORANGE}
DASHES = {"full": "-", "causal": (0, (4, 2))}


def _head_dims(runs: Iterable[Run]) -> list[int]:
    return sorted({cell.shape.head_dim for run in runs for cell in run.cells})


def _setting(run: Run) -> str:
    machine = run.machine
    versions = f"torch {machine['torch']}, CUDA {machine['cuda']}, commit {machine['git_commit'][:7]}"
    return f"{machine['gpu']}, {run.settings['dtype']}, 16,384 tokens, hidden size 2048; {versions}"


def _power_of_two_ticks(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))


def _curves(axes: Axes, run: Run, head_dim: int, mask: str) -> None:
    """Draw all peers on the cells of a head dim and mask, and cuBLAS as a dashed line."""
    cells = [cell for cell in run.cells if (cell.shape.head_dim, cell.shape.mask) == (head_dim, mask)]
    for name in (name for name in LOOKS if name in run.names):
        label, marker, colour = LOOKS[name]
        points = [(cell.shape.seqlen, speed) for cell in cells if (speed := cell.tflops(name))]
        width, layer = (2.4, 3) if name in run.ours else (1.3, 2)
        axes.plot(*zip(*points), marker=marker, color=colour, label=label, lw=width, zorder=layer)
    if run.ceiling and run.ceiling.tflops:
        axes.axhline(run.ceiling.tflops, color=GREY, lw=1, ls=(0, (5, 3)), label="cuBLAS, 8192³")
    _power_of_two_ticks(axes, sorted({cell.shape.seqlen for cell in run.cells}))
    axes.set(title=f"D = {head_dim}, {mask}", xlabel="sequence length S", ylabel="TFLOP/s")


def speed(run: Run, title: str) -> Figure:
    """All peers of a run, with a panel for each mask and head dim."""
    head_dims = _head_dims([run])
    figure = new_figure(5.8, _setting(run))
    grid = figure.subplots(len(MASKS), len(head_dims), sharex=True, sharey=True, squeeze=False)
    for mask, row in zip(MASKS, grid, strict=True):
        for head_dim, axes in zip(head_dims, row, strict=True):
            _curves(axes, run, head_dim, mask)
            axes.label_outer()
    grid[0][0].set_ylim(bottom=0)
    add_legend(figure, title, grid[0][0].get_legend_handles_labels()[0])
    return figure


def _over_best(run: Run, head_dim: int, mask: str) -> list[tuple[int, float]]:
    """Sequence length, and our speed over the fastest correct peer of that cell."""
    cells = (cell for cell in run.cells if (cell.shape.head_dim, cell.shape.mask) == (head_dim, mask))
    pairs = ((cell, run.best_peer(cell)) for cell in cells)
    ratios = ((cell.shape.seqlen, cell.ratio(run.ours[0], peer)) for cell, peer in pairs if peer)
    return [(seqlen, ratio) for seqlen, ratio in ratios if ratio is not None]


def summary(runs: Mapping[str, Run]) -> Figure:
    """Our speed over the best peer in every cell: a panel for each run, a line for each head dim and mask."""
    figure = new_figure(3.1)
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (title, run) in zip(panels, runs.items(), strict=True):
        for (head_dim, colour), mask in product(HEAD_DIMS.items(), MASKS):
            points = _over_best(run, head_dim, mask)
            axes.plot(*zip(*points), color=colour, ls=DASHES[mask], marker="o", ms=3.5, lw=1.6)
        axes.axhline(1, color=INK, lw=1)
        _power_of_two_ticks(axes, sorted({cell.shape.seqlen for cell in run.cells}))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.2f}×"))
        axes.grid(visible=False, axis="x")
        axes.set(title=title, xlabel="sequence length S")
    panels[0].set_ylabel("speed over the best peer")
    dims = [Line2D([], [], color=colour, lw=1.6, label=f"D = {head_dim}") for head_dim, colour in HEAD_DIMS.items()]
    masks = [Line2D([], [], color=DIM, ls=DASHES[mask], lw=1.6, label=mask) for mask in MASKS]
    figure.legend(handles=[*dims, *masks], loc="outside upper right", ncols=5)
    return figure


@dataclass(frozen=True)
class Kernel:
    """A series of points: our results of a run."""

    label: str
    run: Run
    marker: str
    colour: str


def _intensity(cell: Cell) -> float:
    """FLOPs of the visible pairs per byte, with every tensor moved once."""
    # The ratio of a direction's FLOPs to those of the forward.
    factor = cell.flops / cell.shape.flops()
    return factor * flops(cell.shape.problem(cell.dtype)) / cell.working_set_bytes


def roofline(kernels: Sequence[Kernel], title: str) -> Figure:
    """Our points of each run, filled without a mask and hollow with a causal mask; one panel per head dim."""
    spec = arch.H200
    ceilings = [kernel.run.ceiling for kernel in kernels]
    cublas = max(ceiling.tflops or 0.0 for ceiling in ceilings if ceiling)
    roofs = f"roof: {spec.hbm_tbps} TB/s and {spec.tensor_tflops:.0f} TFLOP/s of the data sheet"
    figure = new_figure(3.9, f"{roofs}; dashed: cuBLAS in the best of these runs, {cublas:.0f} TFLOP/s")
    head_dims = _head_dims([kernel.run for kernel in kernels])
    panels = figure.subplots(1, len(head_dims), sharex=True, sharey=True, squeeze=False)[0]
    low, high = 16, 16384
    for head_dim, axes in zip(head_dims, panels, strict=True):
        ridge = spec.tensor_tflops / spec.hbm_tbps
        axes.plot([low, ridge, high], [low * spec.hbm_tbps, spec.tensor_tflops, spec.tensor_tflops], color=GREY)
        axes.plot([cublas / spec.hbm_tbps, high], [cublas, cublas], color=GREY, lw=1, ls=(0, (5, 3)))
        for kernel in kernels:
            for cell in kernel.run.cells:
                tflops = cell.tflops(kernel.run.ours[0])
                if cell.shape.head_dim == head_dim and tflops:
                    fill = "none" if cell.shape.causal else kernel.colour
                    axes.plot(_intensity(cell), tflops, kernel.marker, color=kernel.colour, markerfacecolor=fill)
        _power_of_two_ticks(axes, (32, 128, 512, 2048, 8192))
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(FixedLocator((50, 100, 200, 400, 800)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.set(xlim=(low, high), ylim=(50, 1200), title=f"D = {head_dim}", xlabel="FLOP per byte of HBM")
    panels[0].set_ylabel("TFLOP/s")
    entries = [
        *(Line2D([], [], ls="", marker=one.marker, color=one.colour, label=one.label) for one in kernels),
        Line2D([], [], ls="", marker="o", color=DIM, markerfacecolor="none", label="hollow: causal"),
    ]
    add_legend(figure, title, entries)
    return figure
