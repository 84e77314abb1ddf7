"""Our speed over the best peer in every cell of the paper suite: the figure of the README."""

from __future__ import annotations

import io
from collections.abc import Mapping

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from profiling.record import Run
from profiling.suites import MASKS

INK, DIM, GRID = "#1f2328", "#59636e", "#d8dee4"
COLOURS = {64: "#1a7f37", 128: "#0550ae", 256: "#bc4c00"}  # by head dim
DASHES = {"full": "-", "causal": (0, (4, 2))}
STYLE = {
    # Reproducible files: fixed ids, text as text.
    "svg.hashsalt": "cute_flash",
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": DIM,
    "xtick.color": GRID,
    "xtick.labelcolor": DIM,
    "ytick.color": GRID,
    "ytick.labelcolor": DIM,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def _ratios(run: Run, head_dim: int, mask: str) -> list[tuple[int, float]]:
    """Sequence length, and our speed over the fastest correct peer of that cell."""
    cells = (cell for cell in run.cells if (cell.shape.head_dim, cell.shape.mask) == (head_dim, mask))
    pairs = ((cell, run.best_peer(cell)) for cell in cells)
    ratios = ((cell.shape.seqlen, cell.ratio(run.ours[0], peer)) for cell, peer in pairs if peer)
    return [(seqlen, ratio) for seqlen, ratio in ratios if ratio is not None]


def summary(runs: Mapping[str, Run]) -> Figure:
    """A panel for each run, a line for each head dim and mask."""
    figure = Figure((9.6, 3.1), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True)
    for axes, (title, run) in zip(panels, runs.items(), strict=True):
        lengths = sorted({cell.shape.seqlen for cell in run.cells})
        for head_dim, colour in COLOURS.items():
            for mask in MASKS:
                points = _ratios(run, head_dim, mask)
                axes.plot(*zip(*points), color=colour, ls=DASHES[mask], marker="o", ms=3.5, lw=1.6)
        axes.axhline(1, color=INK, lw=1)
        axes.set_title(title, loc="left", weight="bold", size="medium")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.2f}×"))
        axes.grid(axis="y", color=GRID, lw=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("sequence length")
    panels[0].set_ylabel("speed over the best peer")
    dims = [Line2D([], [], color=colour, lw=1.6, label=f"D = {head_dim}") for head_dim, colour in COLOURS.items()]
    masks = [Line2D([], [], color=DIM, ls=DASHES[mask], lw=1.6, label=mask) for mask in MASKS]
    figure.legend(handles=[*dims, *masks], loc="outside upper right", ncols=5, frameon=False)
    return figure


def svg(runs: Mapping[str, Run]) -> str:
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        summary(runs).savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
