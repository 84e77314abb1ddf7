"""The host benchmark's figures of each case, its verdicts, and its tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiling.measure.host_time import Times
from profiling.measure.study import CellFailure, Record
from profiling.measure.tables import Table, number
from profiling.studies.host_cases import SDPA, Case
from profiling.studies.start import start_table

OURS, FLOOR = "cute_flash", "floor"


@dataclass(frozen=True)
class Figures:
    """The host times of one case in all processes. A figure is None if one of its calls was not measured."""

    process_us: dict[str, tuple[float, ...]]  # by name: cute_flash, the floor, or a backend of SDPA
    plain_us: float | None = None  # of cute_flash's plain call in the same direction

    def median_us(self, name: str) -> float | None:
        return statistics.median(self.process_us[name]) if self.process_us.get(name) else None

    @property
    def us(self) -> float | None:
        return self.median_us(OURS)

    @property
    def fastest_sdpa(self) -> str | None:
        return min(filter(self.median_us, SDPA), key=lambda name: self.median_us(name) or math.inf, default=None)

    @property
    def over_floor_us(self) -> float | None:
        floor = self.median_us(FLOOR)
        return None if self.us is None or floor is None else self.us - floor

    @property
    def ratio(self) -> float | None:
        """The ratio of our host time to that of the fastest backend of SDPA."""
        sdpa = self.median_us(self.fastest_sdpa or "")
        return self.us / sdpa if self.us and sdpa else None

    @property
    def over_plain(self) -> float | None:
        """The ratio of our host time to that of the plain call."""
        return self.us / self.plain_us if self.us and self.plain_us else None

    def meets(self, bounds: Mapping[str, float]) -> bool | None:
        """Whether all bounds are met; a missing figure does not meet its bound. None: there is no bound."""
        figures = {name: getattr(self, name) for name in bounds}
        return all(x is not None and x <= bounds[name] for name, x in figures.items()) if bounds else None


def figures_of(case: Case, processes: Sequence[Times]) -> Figures:
    def us_of(case_name: str, name: str) -> tuple[float, ...]:
        return tuple(times.us[case_name, name] for times in processes if (case_name, name) in times.us)

    by_name = {name: us_of(case.name, name) for name in (OURS, FLOOR, *case.sdpa)}
    plain = us_of(case.plain, OURS)
    return Figures({name: us for name, us in by_name.items() if us}, statistics.median(plain) if plain else None)


def case_record(case: Case, figures: Figures, base: Mapping[str, Any]) -> dict[str, Any]:
    """One case of the JSON. The goals that compare with the plain call are judged if that was measured."""
    bounds = case.goal.bounds(base.get("cases", {}).get(case.name, {}).get("ratio"))
    if figures.plain_us is None:
        bounds.pop("over_plain", None)
    by_name = {
        name: {"median_us": statistics.median(us), "lowest_us": min(us), "highest_us": max(us), "process_us": us}
        for name, us in figures.process_us.items()
    }
    return {
        "sides": by_name,
        "over_floor_us": figures.over_floor_us,
        "fastest_sdpa": figures.fastest_sdpa,
        "ratio": figures.ratio,
        "over_plain": figures.over_plain,
        "bounds": bounds,
        "is_met": figures.meets(bounds),
    }


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
