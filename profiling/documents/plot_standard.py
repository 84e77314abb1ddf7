"""The figure of standard attention beside cute_flash: speed-up, HBM bytes and memory by length."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from profiling.documents.plot_style import BLUE, GREY, ORANGE, add_legend, new_figure
from profiling.measure.shapes import MASKS
from profiling.peers.directions import DIRECTIONS
from profiling.studies.standard_report import LABELS, RATIOS, Record, head_dims, select

COLOURS = dict(zip(DIRECTIONS, (BLUE, ORANGE), strict=True))
MARKERS = ("o", "s", "D", "^")
LINES: dict[str, Any] = dict(zip(MASKS, ("-", "--"), strict=True))
TITLES = {
    "speed-up": "Time",
    "fewer HBM bytes": "HBM bytes, by Nsight Compute",
    "less memory": "Peak memory above the inputs",
}


def _times(value: float, _: Any = None) -> str:
    return f"{value:g} x"


def _length(value: float, _: Any = None) -> str:
    return f"{value / 1024:.0f}k" if value >= 1024 else f"{value:.0f}"


def standard(record: Record, title: str) -> Figure:
    machine = record["machine"]
    commit = (machine.get("git_commit") or "unknown")[:7]
    caption = f"{machine.get('gpu')}, bf16, commit {commit}; standard attention over cute_flash. Backward memory: a "
    figure = new_figure(3.8, f"{caption}whole training step")
    dims = head_dims(record)
    lengths = sorted({cell["shape"]["seqlen"] for cell in record["cells"]})
    for axes, (name, ratio) in zip(figure.subplots(1, len(RATIOS)), RATIOS.items(), strict=True):
        for direction in DIRECTIONS:
            for mask in MASKS:
                for head_dim, marker in zip(dims, MARKERS):
                    cells = select(record, direction, mask, head_dim)
                    points = [(cell["shape"]["seqlen"], value) for cell in cells if (value := ratio(record, cell))]
                    if points:
                        style = {"color": COLOURS[direction], "linestyle": LINES[mask], "marker": marker}
                        axes.plot(*zip(*points), **style)
        axes.set(title=TITLES[name], xlabel="N", xscale="log", yscale="log")
        axes.set_xticks(lengths[:: 2 if len(lengths) > 4 else 1])
        axes.xaxis.set_major_formatter(FuncFormatter(_length))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(_times))
        axes.yaxis.set_minor_locator(NullLocator())
    entries = [Line2D([], [], color=COLOURS[name], label=LABELS[name]) for name in DIRECTIONS]
    entries += [Line2D([], [], color=GREY, linestyle=line, label=mask) for mask, line in LINES.items()]
    entries += [
        Line2D([], [], color=GREY, linestyle="", marker=marker, label=f"D = {dim}")
        for dim, marker in zip(dims, MARKERS)
    ]
    add_legend(figure, title, entries)
    return figure
