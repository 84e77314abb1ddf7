"""The host benchmark's figures of each case, its verdicts, and its tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiling.measure.host_time import Times
from profiling.measure.tables import Table
from profiling.studies.host_cases import SDPA, Case

OURS, FLOOR = "cute_flash", "floor"


@dataclass(frozen=True)
class Figures:
    """The host times of one case in all processes. A figure is None if one of its sides was not measured."""

    process_us: dict[str, tuple[float, ...]]  # by side

    def us(self, side: str) -> float | None:
        return statistics.median(self.process_us[side]) if self.process_us.get(side) else None

    @property
    def fastest_sdpa(self) -> str | None:
        return min(filter(self.us, SDPA), key=lambda side: self.us(side) or math.inf, default=None)

    @property
    def over_floor_us(self) -> float | None:
        ours, floor = self.us(OURS), self.us(FLOOR)
        return None if ours is None or floor is None else ours - floor

    @property
    def ratio(self) -> float | None:
        """The ratio of our host time to that of the fastest backend of SDPA."""
        ours, sdpa = self.us(OURS), self.us(self.fastest_sdpa or "")
        return ours / sdpa if ours and sdpa else None

    def meets(self, bounds: Mapping[str, float]) -> bool | None:
        """Whether all bounds are met; a missing figure does not meet its bound. None: there is no bound."""
        figures = {name: getattr(self, name) for name in bounds}
        return all(x is not None and x <= bounds[name] for name, x in figures.items()) if bounds else None


def figures_of(case: Case, processes: Sequence[Times]) -> Figures:
    sides = (OURS, FLOOR, *case.sdpa)
    places = {side: (case.name, side) for side in sides}
    process_us = {side: tuple(t.us[at] for t in processes if at in t.us) for side, at in places.items()}
    return Figures({side: us for side, us in process_us.items() if us})


def case_record(case: Case, figures: Figures, base: Mapping[str, Any]) -> dict[str, Any]:
    """One case of the JSON."""
    base_ratio = base.get("cases", {}).get(case.name, {}).get("ratio")
    bounds = case.goal.bounds(base_ratio)
    sides = {
        side: {"median_us": statistics.median(us), "lowest_us": min(us), "highest_us": max(us), "process_us": us}
        for side, us in figures.process_us.items()
    }
    return {
        "sides": sides,
        "over_floor_us": figures.over_floor_us,
        "fastest_sdpa": figures.fastest_sdpa,
        "ratio": figures.ratio,
        "bounds": bounds,
        "is_met": figures.meets(bounds),
    }


def has_failed(data: dict[str, Any]) -> bool:
    """Whether a goal is missed or cannot be judged, or cute_flash or a process failed."""
    is_missed = any(case["is_met"] is False for case in data["cases"].values())
    return is_missed or any(not name.endswith(tuple(SDPA)) for name in data["errors"])


def _us(side: dict[str, Any] | None) -> str:
    if side is None:
        return "-"
    return f"{side['median_us']:.1f} ({side['lowest_us']:.1f} to {side['highest_us']:.1f})"


def _goal(bounds: Mapping[str, float]) -> str:
    texts = {"over_floor_us": "floor + {:g}", "ratio": "{:.3g} x SDPA"}
    return ", ".join(texts[name].format(bound) for name, bound in bounds.items()) or "-"


def host_tables(data: dict[str, Any]) -> list[Table]:
    columns = ("case", OURS, FLOOR, "over floor", "SDPA (fastest)", "ratio", "goal, at most", "ok")
    rows, backends = [], []
    for name, case in data["cases"].items():
        sides, over, ratio, sdpa = case["sides"], case["over_floor_us"], case["ratio"], case["fastest_sdpa"]
        rows.append(
            (
                name,
                _us(sides.get(OURS)),
                _us(sides.get(FLOOR)),
                "-" if over is None else f"{over:+.1f}",
                "-" if sdpa is None else f"{sides[sdpa]['median_us']:.1f} ({sdpa.removeprefix('sdpa-')})",
                "-" if ratio is None else f"{ratio:.2f}",
                _goal(case["bounds"]),
                {True: "yes", False: "NO", None: "-"}[case["is_met"]],
            )
        )
        backends += [
            (name, backend, _us(sides[backend]), "fastest" if backend == sdpa else "")
            for backend in SDPA
            if backend in sides
        ]
    title = "Host time per warm call, us: median of the processes (lowest to highest)"
    tables = [Table(title, columns, tuple(rows))]
    if backends:
        tables.append(Table("Backends of SDPA, us", ("case", "backend", "host time", ""), tuple(backends)))
    return tables
