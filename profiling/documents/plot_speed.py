"""TFLOP/s against sequence length, and our kernels under the roofline."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cute_flash.spec import arch
from cute_flash.tools.roofline import flops
from profiling.documents.plot_style import (
    BLUE,
    DIM,
    GREEN,
    GREY,
    INK,
    LOOKS,
    ORANGE,
    Look,
    add_legend,
    entry,
    length,
    new_figure,
    set_ticks,
)
from profiling.documents.sources import commit_of
from profiling.measure.record import Cell, Run
from profiling.measure.shapes import MASKS

# The lines of the summary, by head dim and by mask.
HEAD_DIMS = {64: GREEN, 128: BLUE, 256: ORANGE}
DASHES = {"full": "-", "causal": (0, (4, 2))}
# The runs of the roofline.
KERNELS = (
    Look("forward, sm90", "o", BLUE),
    Look("backward, sm90", "D", ORANGE),
    Look("forward, sm80 kernel on this GPU", "s", GREEN),
)


def _head_dims(runs: Iterable[Run]) -> list[int]:
    return sorted({cell.shape.head_dim for run in runs for cell in run.cells})


def _cells(run: Run, head_dim: int, mask: str) -> list[Cell]:
    return [cell for cell in run.cells if (cell.shape.head_dim, cell.shape.mask) == (head_dim, mask)]


def _setting(run: Run) -> str:
    machine = run.machine
    versions = f"torch {machine['torch']}, CUDA {machine['cuda']}, commit {commit_of(machine)}"
    return f"{machine['gpu']}, {run.settings['dtype']}, 16,384 tokens, hidden size 2048; {versions}"


def _length_axis(axes: Axes, run: Run) -> None:
    axes.set_xscale("log", base=2)
    set_ticks(axes.xaxis, sorted({cell.shape.seqlen for cell in run.cells}), length)
    axes.set_xlabel("sequence length S")


def _curves(axes: Axes, run: Run, head_dim: int, mask: str) -> None:
    """Draw all peers on the cells of a head dim and mask, and cuBLAS as a dashed line."""
    cells = _cells(run, head_dim, mask)
    for name in (name for name in LOOKS if name in run.names):
        label, marker, colour = LOOKS[name]
        points = [(cell.shape.seqlen, speed) for cell in cells if (speed := cell.tflops(name))]
        width, layer = (2.4, 3) if name in run.ours else (1.3, 2)
        axes.plot(*zip(*points), marker=marker, color=colour, label=label, lw=width, zorder=layer)
    if run.ceiling and run.ceiling.tflops:
        axes.axhline(run.ceiling.tflops, color=GREY, lw=1, ls=(0, (5, 3)), label="cuBLAS, 8192³")
    _length_axis(axes, run)
    axes.set(title=f"D = {head_dim}, {mask}", ylabel="TFLOP/s")


def speed(run: Run, title: str) -> Figure:
    """All peers of a run, with a panel for each mask and head dim."""
    head_dims = _head_dims([run])
    figure = new_figure(5.8, _setting(run))
    grid = figure.subplots(len(MASKS), len(head_dims), sharex=True, sharey=True, squeeze=False)
    for axes, (mask, head_dim) in zip(grid.flat, product(MASKS, head_dims), strict=True):
        _curves(axes, run, head_dim, mask)
        axes.label_outer()
    grid[0][0].set_ylim(bottom=0)
    add_legend(figure, f"{title}: TFLOP/s against sequence length", grid[0][0].get_legend_handles_labels()[0])
    return figure


def summary(forward: Run, backward: Run) -> Figure:
    """Our speed over the best peer in every cell: a panel for each run, a line for each head dim and mask."""
    figure = new_figure(3.1)
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("Forward, H200", "Backward (dq, dk, dv), H200")
    for axes, title, run in zip(panels, titles, (forward, backward), strict=True):
        for (head_dim, colour), mask in product(HEAD_DIMS.items(), MASKS):
            ratios = [(cell.shape.seqlen, run.over_best(cell)) for cell in _cells(run, head_dim, mask)]
            points = [(seqlen, ratio) for seqlen, ratio in ratios if ratio is not None]
            axes.plot(*zip(*points), color=colour, ls=DASHES[mask], marker="o", ms=3.5, lw=1.6)
        axes.axhline(1, color=INK, lw=1)
        _length_axis(axes, run)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.2f}×")
        axes.grid(visible=False, axis="x")
        axes.set_title(title)
    panels[0].set_ylabel("speed over the best peer")
    dims = [entry(f"D = {head_dim}", color=colour, lw=1.6) for head_dim, colour in HEAD_DIMS.items()]
    masks = [entry(mask, color=DIM, ls=DASHES[mask], lw=1.6) for mask in MASKS]
    figure.legend(handles=[*dims, *masks], loc="outside upper right", ncols=5)
    return figure


def _intensity(cell: Cell) -> float:
    """FLOPs of the visible pairs per byte, with every tensor moved once."""
    # The ratio of a direction's FLOPs to those of the forward.
    factor = cell.flops / cell.shape.flops()
    return factor * flops(cell.shape.problem(cell.dtype)) / cell.working_set_bytes


def roofline(*runs: Run) -> Figure:
    """Our points of each of `KERNELS`, filled without a mask and hollow with a causal mask; one panel per head dim."""
    spec = arch.H200
    cublas = max(run.ceiling.tflops or 0.0 for run in runs if run.ceiling)
    roofs = f"roof: {spec.hbm_tbps} TB/s and {spec.tensor_tflops:.0f} TFLOP/s of the data sheet"
    figure = new_figure(3.9, f"{roofs}; dashed: cuBLAS in the best of these runs, {cublas:.0f} TFLOP/s")
    head_dims = _head_dims(runs)
    panels = figure.subplots(1, len(head_dims), sharex=True, sharey=True)
    low, high = 16, 16384
    for head_dim, axes in zip(head_dims, panels, strict=True):
        ridge = spec.tensor_tflops / spec.hbm_tbps
        axes.plot([low, ridge, high], [low * spec.hbm_tbps, spec.tensor_tflops, spec.tensor_tflops], color=GREY)
        axes.plot([cublas / spec.hbm_tbps, high], [cublas, cublas], color=GREY, lw=1, ls=(0, (5, 3)))
        for look, run in zip(KERNELS, runs, strict=True):
            for cell in run.cells:
                tflops = cell.tflops(run.ours[0])
                if cell.shape.head_dim == head_dim and tflops:
                    fill = "none" if cell.shape.causal else look.colour
                    axes.plot(_intensity(cell), tflops, look.marker, color=look.colour, markerfacecolor=fill)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        set_ticks(axes.xaxis, (32, 128, 512, 2048, 8192), length)
        set_ticks(axes.yaxis, (50, 100, 200, 400, 800))
        axes.set(xlim=(low, high), ylim=(50, 1200), title=f"D = {head_dim}", xlabel="FLOP per byte of HBM")
    panels[0].set_ylabel("TFLOP/s")
    entries = [entry(look.label, ls="", marker=look.marker, color=look.colour) for look in KERNELS]
    hollow = entry("hollow: causal", ls="", marker="o", color=DIM, markerfacecolor="none")
    add_legend(figure, "The kernels under the roofline of an H200", [*entries, hollow])
    return figure
