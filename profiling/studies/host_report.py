"""The host benchmark's figures of each case, its verdicts, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from profiling.measure.host_time import Times
from profiling.measure.study import CellFailure, Record
from profiling.measure.tables import Table, number
from profiling.studies.host_cases import SDPA, Case

OURS, FLOOR = "cute_flash", "floor"


def case_record(case: Case, processes: Sequence[Times], base: Mapping[str, Any]) -> Record:
    """One case of the JSON: medians of the processes. A figure is None if one of its calls was not measured.

    The goals that compare with the plain call are judged if that was measured. `base`: the record of an earlier run.
    """

    def us_of(case_name: str, name: str) -> list[float]:
        return [times.us[case_name, name] for times in processes if (case_name, name) in times.us]

    process_us = {name: us for name in (OURS, FLOOR, *SDPA) if (us := us_of(case.name, name))}
    median = {name: statistics.median(us) for name, us in process_us.items()}
    plain = us_of(case.plain, OURS)
    fastest = min(filter(median.get, SDPA), key=lambda name: median[name], default=None)
    ours, floor = median.get(OURS), median.get(FLOOR)
    figures = {
        "us": ours,
        "over_floor_us": None if ours is None or floor is None else ours - floor,
        "ratio": ours / median[fastest] if ours and fastest else None,
        "over_plain": ours / statistics.median(plain) if ours and plain else None,
    }
    bounds = case.goal.bounds(base.get("cases", {}).get(case.name, {}).get("ratio"))
    if not plain:
        bounds.pop("over_plain", None)
    return {
        "sides": {
            name: {"median_us": median[name], "lowest_us": min(us), "highest_us": max(us), "process_us": us}
            for name, us in process_us.items()
        },
        **{name: figures[name] for name in ("over_floor_us", "ratio", "over_plain")},
        "fastest_sdpa": fastest,
        "bounds": bounds,
        "is_met": meets(figures, bounds),
    }


def meets(figures: Mapping[str, float | None], bounds: Mapping[str, float]) -> bool | None:
    """Whether all bounds are met; a missing figure does not meet its bound. None: there is no bound."""
    values = {name: figures[name] for name in bounds}
    return all(x is not None and x <= bounds[name] for name, x in values.items()) if bounds else None


def failures(record: Record) -> list[CellFailure]:
    """Missed goals, goals that cannot be judged, and failed calls and processes."""
    errors = dict(record["errors"])
    if "error" in record["start"]:
        errors["start"] = record["start"]["error"]
    found = []
    for key, text in errors.items():
        case, _, name = key.rpartition(" ")
        is_call = name in (OURS, FLOOR, *SDPA)
        found.append(CellFailure(case, name, text) if is_call else CellFailure(key, OURS, text))
    missed = [name for name, case in record["cases"].items() if case["is_met"] is False]
    return found + [CellFailure(name, OURS, f"goal: {_goal(record['cases'][name]['bounds'])}") for name in missed]


def _us(times: dict[str, Any] | None) -> str:
    if times is None:
        return "-"
    return f"{times['median_us']:.1f} ({times['lowest_us']:.1f} to {times['highest_us']:.1f})"


def _goal(bounds: Mapping[str, float]) -> str:
    texts = {"us": "{:g}", "over_floor_us": "floor + {:g}", "ratio": "{:.3g} x SDPA", "over_plain": "{:.3g} x plain"}
    return ", ".join(texts[name].format(bound) for name, bound in bounds.items()) or "-"


def host_tables(record: Record) -> list[Table]:
    """The cases; the backends of SDPA; the start, if it was measured."""
    rows, backends = [], []
    for name, case in record["cases"].items():
        by_name, sdpa = case["sides"], case["fastest_sdpa"]
        rows.append(
            (
                name,
                _us(by_name.get(OURS)),
                _us(by_name.get(FLOOR)),
                number(case["over_floor_us"], "+.1f"),
                "-" if sdpa is None else f"{by_name[sdpa]['median_us']:.1f} ({sdpa.removeprefix('sdpa-')})",
                number(case["ratio"]),
                number(case["over_plain"]),
                _goal(case["bounds"]),
                {True: "yes", False: "NO", None: "-"}[case["is_met"]],
            )
        )
        backends += [
            (name, backend, _us(by_name[backend]), "fastest" if backend == sdpa else "")
            for backend in SDPA
            if backend in by_name
        ]
    columns = ("case", OURS, FLOOR, "over floor", "SDPA (fastest)", "/ SDPA", "/ plain", "goal, at most", "ok")
    title = "Host time per warm call, us: median of the processes (lowest to highest); ratios of medians"
    tables = [Table(title, columns, tuple(rows))]
    if backends:
        tables.append(Table("Backends of SDPA, us", ("case", "backend", "host time", ""), tuple(backends)))
    return tables + ([start_table(record["start"])] if "cold" in record["start"] else [])


def start_table(times: Record) -> Table:
    """The table of a result of `start_times` without an error."""
    steps = tuple(step for step in times["cold"] if step.endswith("_ms"))
    kinds = {"cold": "empty cache", "warm": "filled cache", "pack": "pack, empty cache"}
    rows = [(kinds[kind], *(f"{times[kind][step]:.0f}" for step in steps)) for kind in kinds if kind in times]
    columns = ("kernels from", *(step.removesuffix("_ms").replace("_", " ") for step in steps))
    return Table("A fresh process after `import torch`, ms", columns, tuple(rows))
