"""Counters of Nsight Compute beside their predictions: bank conflicts by layout, and bytes of HBM.

The figures are drawn from the record of `python -m profiling ncu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from profiling.counters.ncu_case import is_beyond_l2, measured_cases
from profiling.documents.plot_style import BLUE, DIM, RED, add_legend, new_figure
from profiling.documents.sources import commit_of

Case = dict[str, Any]

# Title, and the names of the counters of wavefronts and conflicts, by instruction if there are such counters.
# The hardware counts no wavefront of cp.async as a conflict.
LOADS = ("ldmatrix conflicts", "sass_ldsm_wavefronts", "sass_ldsm_conflicts")
STORES = ("store conflicts", "st_wavefronts", "st_conflicts")
COPIES = ("cp.async wavefronts", "sass_ldgsts_wavefronts", None)
COUNTED = {"fwd-sm80": (LOADS, STORES, COPIES), "fwd-sm90": (STORES,)}
DIRECTIONS = (("read, MB", "dram_read_bytes"), ("written, MB", "dram_write_bytes"))
# Opacity of predictions.
PALE = 0.35
# The part of a panel's width that is left for the numbers beside the longest bar.
ROOM = 0.45


class Bar(NamedTuple):
    """A predicted and a measured value, each with its conflicts."""

    text: str
    measured: float | None
    predicted: float | None = None
    measured_conflicts: float = 0.0
    predicted_conflicts: float = 0.0


def _shape(case: Case) -> str:
    shape = case["shape"]
    mask = "causal" if shape["causal"] else "full"
    return f"B {shape['batch']}, H {shape['heads']}, S {shape['seqlen']}, D {shape['head_dim']}, {mask}"


def _setting(record: dict[str, Any]) -> str:
    machine = record["machine"]
    version = (record["ncu"] or "").removeprefix("Version ").partition(" ")[0]
    return f"{machine.get('gpu')}, commit {commit_of(machine)}, ncu {version}; numbers: measured (predicted)"


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.2f}M" if value >= 1e5 else f"{value:,.0f}"


def _count_bar(case: Case, wavefronts: str, conflicts: str | None) -> Bar:
    measured, predicted = case["measured"], case["predicted"]
    shown = conflicts or wavefronts
    text = f"{_count(measured[shown])} ({_count(predicted.get(shown))})"
    found = [(values.get(conflicts) or 0.0) if conflicts else 0.0 for values in (measured, predicted)]
    return Bar(text, measured[wavefronts], predicted.get(wavefronts), *found)


def _bytes_bar(case: Case, name: str) -> Bar:
    measured, expected = case["measured"][name], case["predicted"][name]
    text = "-" if measured is None else f"{measured / 1e6:.2f} ({expected / 1e6:.2f})"
    return Bar(text, measured, expected)


def _draw(axes: Axes, title: str, labels: Sequence[str], bars: Sequence[Bar]) -> None:
    """A row for each bar: predicted above in pale colours, measured below, conflicts in red."""
    longest = max([value for bar in bars for value in (bar.measured, bar.predicted) if value], default=1.0)
    for y, bar in enumerate(bars):
        pairs = (
            (y - 0.17, bar.predicted, bar.predicted_conflicts, PALE),
            (y + 0.17, bar.measured, bar.measured_conflicts, 1.0),
        )
        for place, value, conflicts, opacity in pairs:
            if value is not None:
                axes.barh(place, value - conflicts, 0.32, color=BLUE, alpha=opacity)
                if conflicts:
                    axes.barh(place, conflicts, 0.32, value - conflicts, color=RED, alpha=opacity)
        end = max(bar.measured or 0.0, bar.predicted or 0.0)
        axes.annotate(bar.text, (end, y), (4, 0), textcoords="offset points", va="center", size="small")
    axes.set(title=title, xlim=(0, longest / (1 - ROOM)), ylim=(len(bars) - 0.45, -0.55), xticks=[])
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)


def conflicts(
    record: dict[str, Any], title: str = "Shared memory by layout: wavefronts, bank conflicts, time"
) -> Figure:
    """A block for each kernel and shape, a row for each layout: wavefronts by instruction, and time."""
    blocks: dict[tuple[str, str], list[Case]] = {}
    for case in measured_cases(record):
        if case["kernel"] in COUNTED:
            blocks.setdefault((case["kernel"], _shape(case)), []).append(case)
    blocks = {name: cases for name, cases in blocks.items() if len(cases) > 1}
    num_rows = [len(cases) + 1.2 for cases in blocks.values()]
    figure = new_figure(1.2 + 0.3 * sum(num_rows), _setting(record))
    num_columns = 1 + max((len(COUNTED[kernel]) for kernel, _ in blocks), default=0)
    areas = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=num_rows)[:, 0]
    for ((kernel, shape), cases), area in zip(blocks.items(), areas, strict=True):
        area.suptitle(f"{kernel}, {shape}", x=0.01, ha="left", weight="bold", size="medium", color=DIM)
        panels = area.subplots(1, num_columns, squeeze=False)[0]
        columns = {label: [_count_bar(case, *names) for case in cases] for label, *names in COUNTED[kernel]}
        times = [case["measured"]["duration_ns"] / 1e3 for case in cases]
        columns["time, us"] = [Bar(f"{time:.1f}", time) for time in times]
        labels = [case["layout"] for case in cases]
        for axes, (label, bars) in zip(panels, columns.items()):
            _draw(axes, label, labels if axes is panels[0] else [""] * len(labels), bars)
        for axes in panels[len(columns) :]:
            axes.set_axis_off()
    entries = [
        Patch(color=BLUE, label="wavefronts, measured"),
        Patch(color=RED, label="bank conflicts among them"),
        Patch(facecolor=BLUE, alpha=PALE, label="predicted"),
    ]
    add_legend(figure, title, entries)
    return figure


def hbm_bytes(record: dict[str, Any], title: str = "HBM traffic of one launch") -> Figure:
    """Bytes read and written in all cases but those beyond L2, whose scale is larger; predicted above measured."""
    cases = [case for case in measured_cases(record) if not is_beyond_l2(case)]
    figure = new_figure(1.2 + 0.3 * len(cases), f"{_setting(record)}; {_shape(cases[0])}, or D as written")
    labels = [f"{case['kernel']}, D {case['shape']['head_dim']}, {case['layout']}" for case in cases]
    panels = figure.subplots(1, len(DIRECTIONS))
    for axes, (label, name) in zip(panels, DIRECTIONS, strict=True):
        bars = [_bytes_bar(case, name) for case in cases]
        _draw(axes, label, labels if axes is panels[0] else [""] * len(labels), bars)
    entries = [
        Patch(color=BLUE, label="measured, caches cold"),
        Patch(facecolor=BLUE, alpha=PALE, label="predicted: LRU model of L2"),
    ]
    add_legend(figure, title, entries)
    return figure
