"""Counters of Nsight Compute beside their predictions: bank conflicts by layout, and bytes of HBM.

Drawn from the record of `python -m profiling ncu`.
"""

from __future__ import annotations

from typing import Any

from profiling.axes import ROW_HEIGHT, Bar, bars, legend
from profiling.ncu_case import LAYOUTS
from profiling.svg import Canvas

Case = dict[str, Any]

WIDTH, NAMES, HEAD, GAP = 960, 128, 104, 62
# Title, and our names of the counters of wavefronts and conflicts, by instruction if there are such counters.
# The hardware counts no wavefront of cp.async as a conflict.
LOADS = ("ldmatrix conflicts", "sass_ldsm_wavefronts", "sass_ldsm_conflicts")
STORES = ("store conflicts", "st_wavefronts", "st_conflicts")
COPIES = ("cp.async wavefronts", "sass_ldgsts_wavefronts", None)
COUNTED = {"fwd-sm80": (LOADS, STORES, COPIES), "fwd-sm90": (STORES,)}
DIRECTIONS = (("read, MB", "dram_read_bytes"), ("written, MB", "dram_write_bytes"))


def _groups(record: dict[str, Any]) -> dict[str, list[Case]]:
    """Kernel and shape -> cases with different layouts, the default first."""
    groups: dict[str, list[Case]] = {}
    for case in record["cases"].values():
        if case["kernel"] in COUNTED and case["measured"]:
            groups.setdefault(f"{case['kernel']}, {_shape(case)}", []).append(case)
    for cases in groups.values():
        cases.sort(key=lambda case: LAYOUTS[case["kernel"]].index(case["layout"]))
    chosen = {title: cases for title, cases in groups.items() if len(cases) > 1}
    return dict(sorted(chosen.items(), key=lambda item: (item[1][0]["kernel"], -_head_dim(item[1][0]))))


def _head_dim(case: Case) -> int:
    return case["shape"]["head_dim"]


def _shape(case: Case) -> str:
    shape = case["shape"]
    mask = "causal" if shape["causal"] else "full"
    return f"B {shape['batch']}, H {shape['heads']}, S {shape['seqlen']}, D {shape['head_dim']}, {mask}"


def _setting(record: dict[str, Any]) -> str:
    machine = record["machine"]
    commit = (machine.get("git_commit") or "unknown")[:7]
    return f"{machine.get('gpu')}, commit {commit}, ncu {(record['ncu'] or '').removeprefix('Version ')}"


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.2f}M" if value >= 1e5 else f"{value:,.0f}"


def _count_bar(case: Case, wavefronts: str, conflicts: str | None) -> Bar:
    measured, predicted = case["measured"], case["predicted"]
    label = conflicts or wavefronts
    return Bar(
        predicted=predicted.get(wavefronts),
        measured=measured[wavefronts],
        label=f"{_count(measured[label])} ({_count(predicted.get(label))})",
        predicted_part=(predicted.get(conflicts) or 0.0) if conflicts else 0.0,
        measured_part=(measured[conflicts] or 0.0) if conflicts else 0.0,
    )


def _time_bar(case: Case) -> Bar:
    microseconds = case["measured"]["duration_ns"] / 1e3
    return Bar(None, microseconds, f"{microseconds:.1f}")


def conflicts(record: dict[str, Any], title: str) -> str:
    """A block for each kernel and shape, a row for each layout: wavefronts by instruction, and time."""
    groups = _groups(record)
    num_rows = sum(len(cases) for cases in groups.values())
    canvas = Canvas(WIDTH, HEAD + num_rows * ROW_HEIGHT + len(groups) * GAP, title)
    canvas.text(16, 46, _setting(record), "dim")
    entries = [("wavefronts", "square", "blue bar"), ("of them bank conflicts", "square", "red bar")]
    legend(canvas, (20, 70), [*entries, ("above, pale: predicted", "square", "blue faint")])
    canvas.text(520, 70, "numbers: measured (predicted)", "dim")
    top = float(HEAD)
    for name, cases in groups.items():
        columns = COUNTED[cases[0]["kernel"]]
        width = (WIDTH - NAMES - 16) / 4
        canvas.text(16, top, name, "ink bold")
        top += 30
        for index, (label, wavefronts, conflict) in enumerate(columns):
            rows = [_count_bar(case, wavefronts, conflict) for case in cases]
            bars(canvas, (NAMES + width * index, top), width, label, rows, room=112)
        time_at = (NAMES + width * len(columns), top)
        bars(canvas, time_at, width, "time, us", [_time_bar(case) for case in cases], room=60)
        for index, case in enumerate(cases):
            canvas.text(NAMES - 10, top + ROW_HEIGHT * index + 20, case["layout"], "ink", "end")
        top += ROW_HEIGHT * len(cases) + GAP - 30
    return canvas.render()


def _bytes_bar(case: Case, name: str) -> Bar:
    measured, expected = case["measured"][name], case["predicted"][name]
    if measured is None:
        return Bar(expected, None, "-")
    return Bar(expected, measured, f"{measured / 1e6:.2f} ({expected / 1e6:.2f})")


def hbm_bytes(record: dict[str, Any], title: str) -> str:
    """Every case: bytes read and written, predicted above measured."""
    cases = [case for case in record["cases"].values() if case["measured"]]
    order = list(LAYOUTS)
    cases.sort(
        key=lambda case: (order.index(case["kernel"]), -_head_dim(case), LAYOUTS[case["kernel"]].index(case["layout"]))
    )
    names, width = 210, (WIDTH - 210 - 16) / 2
    canvas = Canvas(WIDTH, HEAD + 20 + len(cases) * ROW_HEIGHT + 16, title)
    canvas.text(16, 46, f"{_setting(record)}; {_shape(cases[0])} or D as written", "dim")
    measured = ("measured, caches cold", "square", "blue bar")
    legend(canvas, (20, 70), [measured, ("predicted: every tensor once", "square", "blue faint")])
    canvas.text(500, 70, "numbers: measured (predicted)", "dim")
    top = HEAD + 20
    for index, case in enumerate(cases):
        label = f"{case['kernel']}, D {_head_dim(case)}, {case['layout']}"
        canvas.text(names - 10, top + ROW_HEIGHT * index + 20, label, "ink small", "end")
    for index, (label, name) in enumerate(DIRECTIONS):
        rows = [_bytes_bar(case, name) for case in cases]
        bars(canvas, (names + width * index, top), width, label, rows, room=120)
    return canvas.render()
