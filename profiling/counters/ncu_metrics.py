"""The Nsight Compute counters that the tables use, and the parser of `ncu --page raw --csv`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

# Each section costs passes and adds to the size of the report. InstructionStats and MemoryWorkloadAnalysis_Tables,
# which took a third of the size, are left out; METRICS has the counters of ComputeWorkloadAnalysis.
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats", "LaunchStats", "Occupancy")

_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
# The same, attributed to instructions: traffic of other units through the data banks is not included.
_SASS_CONFLICTS = "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
_SASS_WAVEFRONTS = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"

# Our name -> ncu's name. Conflicts and wavefronts of "ld" include ldmatrix, those of "st" stmatrix.
METRICS = {
    "duration_ns": "gpu__time_duration.sum",
    **{f"{op}_conflicts": _CONFLICTS.format(op) for op in ("ld", "st", "ldgsts")},
    **{f"{op}_wavefronts": _WAVEFRONTS.format(op) for op in ("ld", "st", "ldgsts")},
    **{f"sass_{op}_conflicts": _SASS_CONFLICTS.format(op) for op in ("ldsm", "st", "ldgsts")},
    **{f"sass_{op}_wavefronts": _SASS_WAVEFRONTS.format(op) for op in ("ldsm", "ldgsts")},
    "ldsm_instructions": "smsp__inst_executed_op_ldsm.sum",
    "ldgsts_instructions": "smsp__inst_executed_op_ldgsts.sum",
    "ld_instructions": "smsp__inst_executed_op_shared_ld.sum",
    "st_instructions": "smsp__inst_executed_op_shared_st.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "tensor_instructions": "sm__inst_executed_pipe_tensor.sum",
    "hmma_instructions": "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "wgmma_instructions": "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "xu_instructions": "sm__inst_executed_pipe_xu.sum",
    "xu_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "fma_percent": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "alu_percent": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "lsu_data_percent": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "smem_bytes": "launch__shared_mem_per_block_dynamic",
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
}
# Compute capability -> counters that this GPU does not have. Any other counter without a value is an error.
ABSENT = {"9.0": ("ldgsts_wavefronts", "sass_st_conflicts")}
# Counters that sections collect.
_OF_SECTIONS = ("registers", "smem_bytes", "blocks", "threads")
COLLECTED = tuple(name for key, name in METRICS.items() if key not in _OF_SECTIONS)

# Columns of the raw page that identify a launch.
_IDENTITY = ("ID", "Kernel Name", "Block Size", "Grid Size", "CC")
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
# ncu lists "selected" warps, which issue an instruction, among the stall reasons; they are not stalled.
_NO_STALL = "selected"


@dataclass(frozen=True)
class Profile:
    """The counters of one kernel launch."""

    kernel: str
    values: Mapping[str, float]  # by ncu's names
    capability: str = ""  # such as 9.0

    def __getitem__(self, key: str) -> float | None:
        """A counter by our name; None if this GPU or this ncu does not have it."""
        return self.values.get(METRICS[key])

    @property
    def metrics(self) -> dict[str, float | None]:
        return {key: self[key] for key in METRICS}

    @property
    def stalls(self) -> dict[str, float]:
        """Reason -> average number of waiting warps per issued instruction, the largest first."""
        reasons = {match[1]: v for name, v in self.values.items() if (match := _STALL.fullmatch(name))}
        stalls = {reason: value for reason, value in reasons.items() if reason != _NO_STALL and value > 0}
        return dict(sorted(stalls.items(), key=lambda item: -item[1]))


def _table(text: str) -> list[dict[str, str]]:
    """The units, and a row for each launch."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no table in the output of ncu --page raw --csv")
    return list(csv.DictReader(lines[start:], restval=""))


def trim_raw(text: str) -> str:
    """The table with only the columns that `parse_raw` reads, of more than a thousand."""
    rows, wanted, out = _table(text), {*_IDENTITY, *METRICS.values()}, io.StringIO()
    names = [name for name in rows[0] if name in wanted or _STALL.fullmatch(name)]
    writer = csv.DictWriter(out, names, extrasaction="ignore", quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def parse_raw(text: str) -> list[Profile]:
    """The launches in the output of `ncu --import FILE --page raw --csv --print-units base`, or trimmed."""
    _units, *rows = _table(text)
    return [Profile(row.get("Kernel Name", ""), _numbers(row), row.get("CC", "")) for row in rows]


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    found = {}
    for name, cell in row.items():
        with suppress(ValueError):
            found[name] = float(cell.replace(",", ""))
    return found
