"""The figure of standard attention beside cute_flash: speed-up, HBM bytes and memory by length."""

from __future__ import annotations

from itertools import product
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from profiling.documents.plot_style import BLUE, GREY, ORANGE, add_legend, entry, length, new_figure
from profiling.documents.sources import commit_of
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


def standard(record: Record, title: str = "Standard attention over cute_flash") -> Figure:
    machine = record["machine"]
    setting = f"{machine.get('gpu')}, bf16, commit {commit_of(machine)}; standard attention over cute_flash"
    figure = new_figure(3.8, f"{setting}. Backward memory: a whole training step")
    dims = head_dims(record)
    lengths = sorted({cell["shape"]["seqlen"] for cell in record["cells"]})
    for axes, (name, ratio) in zip(figure.subplots(1, len(RATIOS)), RATIOS.items(), strict=True):
        for direction, mask, (head_dim, marker) in product(DIRECTIONS, MASKS, zip(dims, MARKERS)):
            cells = select(record, direction, mask, head_dim)
            points = [(cell["shape"]["seqlen"], value) for cell in cells if (value := ratio(record, cell))]
            if points:
                axes.plot(*zip(*points), color=COLOURS[direction], linestyle=LINES[mask], marker=marker)
        axes.set(title=TITLES[name], xlabel="N", xscale="log", yscale="log")
        # The panels have the same lengths, although bytes were counted for some of them only.
        ticks = lengths[:: 2 if len(lengths) > 4 else 1]
        axes.set_xticks(ticks, [length(n) for n in ticks])
        axes.set_xticks((), minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} x")
        axes.yaxis.set_minor_locator(NullLocator())
    entries = [
        *(entry(LABELS[name], color=COLOURS[name]) for name in DIRECTIONS),
        *(entry(mask, color=GREY, linestyle=line) for mask, line in LINES.items()),
        *(entry(f"D = {dim}", color=GREY, linestyle="", marker=marker) for dim, marker in zip(dims, MARKERS)),
    ]
    add_legend(figure, title, entries)
    return figure
