"""Profiles beside predictions, as tables and as a record for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from profiling.counters.expect import Expected
from profiling.counters.ncu_case import Case
from profiling.counters.ncu_metrics import METRICS, Profile
from profiling.measure.tables import Table

SCHEMA = 1
NUM_STALLS = 3
LEGEND = (
    "measured (predicted). Wavefronts and conflicts of shared memory over the whole launch; ldmatrix is part "
    "of loads, stmatrix of stores. DRAM: cold caches; predicted by a replay of the tiles through an LRU model of L2. "
    "Stalls: average number of warps that wait for the reason per issued instruction."
)
# Label, metric, divisor, digits.
ROWS = (
    ("load conflicts", "ld_conflicts", 1.0, 0),
    ("ldmatrix conflicts (by instruction)", "sass_ldsm_conflicts", 1.0, 0),
    ("store conflicts", "st_conflicts", 1.0, 0),
    ("cp.async conflicts", "ldgsts_conflicts", 1.0, 0),
    ("load wavefronts", "ld_wavefronts", 1.0, 0),
    ("ldmatrix wavefronts (by instruction)", "sass_ldsm_wavefronts", 1.0, 0),
    ("store wavefronts", "st_wavefronts", 1.0, 0),
    ("cp.async wavefronts (by instruction)", "sass_ldgsts_wavefronts", 1.0, 0),
    ("ldmatrix instructions", "ldsm_instructions", 1.0, 0),
    ("cp.async instructions", "ldgsts_instructions", 1.0, 0),
    ("DRAM read, MB", "dram_read_bytes", 1e6, 2),
    ("DRAM written, MB", "dram_write_bytes", 1e6, 2),
    ("L2 hits, %", "l2_hit_percent", 1.0, 1),
    ("tensor pipe, %", "tensor_percent", 1.0, 1),
    ("XU pipe, %", "xu_percent", 1.0, 1),
    ("FMA pipe, %", "fma_percent", 1.0, 1),
    ("ALU pipe, %", "alu_percent", 1.0, 1),
    ("shared-memory data pipe, %", "lsu_data_percent", 1.0, 1),
    ("issue slots, %", "issue_percent", 1.0, 1),
    ("occupancy, %", "occupancy_percent", 1.0, 1),
    ("registers a thread", "registers", 1.0, 0),
    ("shared memory a CTA, KB", "smem_bytes", 1024.0, 1),
)


@dataclass(frozen=True)
class Finding:
    """A case, its prediction, and its profile or error."""

    case: Case
    expected: Expected
    profile: Profile | None = None
    error: str | None = None

    @property
    def tflops(self) -> float | None:
        duration = self.profile and self.profile["duration_ns"]
        return self.expected.flops / duration / 1e3 if duration else None

    def cell(self, metric: str, divisor: float, digits: int) -> str:
        measured = self.profile[metric] if self.profile else None
        predicted = self.expected.metrics.get(metric)
        text = "-" if measured is None else f"{measured / divisor:,.{digits}f}"
        return text if predicted is None else f"{text} ({predicted / divisor:,.{digits}f})"

    @property
    def time_cell(self) -> str:
        duration = self.profile and self.profile["duration_ns"]
        return f"{duration / 1e3:,.1f} ({self.expected.seconds * 1e6:,.1f})" if duration else "-"

    def stall_cell(self, rank: int) -> str:
        stalls = list(self.profile.stalls.items()) if self.profile else []
        return f"{stalls[rank][0]} {stalls[rank][1]:.2f}" if rank < len(stalls) else "-"

    def as_dict(self) -> dict[str, Any]:
        case = self.case
        return {
            "kernel": case.kernel,
            "layout": case.layout,
            "dtype": case.dtype,
            "shape": asdict(case.shape),
            "report": f"{case.id}.ncu-rep",
            "symbol": self.profile and self.profile.kernel,
            "measured": self.profile and self.profile.metrics,
            "stalls": self.profile and self.profile.stalls,
            "tflops": self.tflops,
            "predicted": {
                **self.expected.metrics,
                "least_read_bytes": self.expected.least_read_bytes,
                "output_bytes": self.expected.output_bytes,
                "seconds": self.expected.seconds,
            },
            "predicted_shared": {name: asdict(count) for name, count in self.expected.shared.items()},
            "error": self.error,
        }


def tables(findings: Iterable[Finding]) -> list[Table]:
    """One for each kernel and shape, with a column for each of its layouts."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        case = finding.case
        groups.setdefault(f"{case.kernel}, {case.shape.id}, {case.dtype}", []).append(finding)
    return [_table(title, group) for title, group in groups.items()]


def _table(title: str, findings: list[Finding]) -> Table:
    rows = [("time, us", *(one.time_cell for one in findings))]
    rows.append(("TFLOP/s", *("-" if one.tflops is None else f"{one.tflops:.0f}" for one in findings)))
    for label, metric, divisor, digits in ROWS:
        rows.append((label, *(one.cell(metric, divisor, digits) for one in findings)))
    for rank in range(NUM_STALLS):
        rows.append((f"stall {rank + 1}", *(one.stall_cell(rank) for one in findings)))
    with_values = tuple(row for row in rows if set(row[1:]) != {"-"})
    return Table(title, ("", *(one.case.layout for one in findings)), with_values)


def record(
    findings: Iterable[Finding], settings: dict[str, Any], machine: dict[str, Any], ncu: str | None
) -> dict[str, Any]:
    """For JSON: all counters and predictions, and the names of the counters."""
    return {
        "schema": SCHEMA,
        "settings": settings,
        "machine": machine,
        "ncu": ncu,
        "metrics": METRICS,
        "cases": {one.case.id: one.as_dict() for one in findings},
    }
