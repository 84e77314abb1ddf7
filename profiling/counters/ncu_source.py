"""Shared-memory wavefronts by SASS instruction: which instruction the counters of a launch come from.

The counters of the load/store unit add up all traffic through the banks of shared memory. Nsight Compute's section
SourceCounters attributes wavefronts to instructions, which distinguishes address conflicts from contention.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass

from profiling.counters.ncu import NcuError, Tool
from profiling.counters.ncu_case import Case
from profiling.measure.tables import Table

SECTION = "SourceCounters"
# Opcodes that use shared memory, and REDG, which adds to global memory.
OPCODES = ("LDS", "STS", "LDSM", "STSM", "LDGSTS", "ATOMS", "SYNCS", "UBLKRED", "UBLKCP", "UTMALDG", "UTMASTG", "REDG")
# Columns of the source page in lower case, without the words in brackets that may follow.
_SOURCE, _EXECUTED = "source", "instructions executed"
_WAVEFRONTS, _IDEAL = "l1 wavefronts shared", "l1 wavefronts shared ideal"
_OPCODE = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


@dataclass(frozen=True)
class Counted:
    executed: int = 0
    wavefronts: int = 0
    ideal: int = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.executed + other.executed, self.wavefronts + other.wavefronts, self.ideal + other.ideal)


def collect(tool: Tool, case: Case) -> dict[str, Counted]:
    """Profile a case and count by opcode. The whole source page is kept beside the reports as .tsv."""
    tool.folder.mkdir(parents=True, exist_ok=True)
    report = tool.folder.absolute() / f"{case.id}.source.ncu-rep"
    tool.must_run(tool.command(case, report, [SECTION]), case)
    page = ("--page", "source", "--csv", "--print-source", "sass")
    text = tool.must_run((tool.program, "--import", str(report), *page), case)
    (tool.folder / f"{case.id}.source.tsv").write_text(text, encoding="utf-8")
    report.unlink(missing_ok=True)
    return parse(text, case.id)


def parse(text: str, name: str) -> dict[str, Counted]:
    """Opcode with its suffixes -> counts, from the CSV of the source page."""
    rows = csv.reader(text.splitlines())
    header = next((names for row in rows if _SOURCE in (names := list(map(_column, row))) and len(row) > 3), None)
    if header is None:
        raise NcuError(f"{name}: the source page has no table")
    if not {_EXECUTED, _WAVEFRONTS, _IDEAL} <= set(header):
        raise NcuError(
            f"{name}: the source page has the columns {', '.join(header)}, without wavefronts of shared memory"
        )
    found: dict[str, Counted] = {}
    for cells in rows:
        row = dict(zip(header, cells))
        match = _OPCODE.match(row[_SOURCE].strip()) if len(cells) == len(header) else None
        if match and match[1].partition(".")[0] in OPCODES:
            counts = (int(float(row[column].replace(",", "") or 0)) for column in (_EXECUTED, _WAVEFRONTS, _IDEAL))
            found[match[1]] = found.get(match[1], Counted()) + Counted(*counts)
    return found


def _column(name: str) -> str:
    return re.sub(r"\s*[\[(].*", "", name).strip().lower()


def table(title: str, counted: dict[str, Counted]) -> Table:
    rows = [
        (opcode, f"{one.executed:,}", f"{one.wavefronts:,}", f"{one.ideal:,}", f"{one.wavefronts - one.ideal:,}")
        for opcode, one in sorted(counted.items(), key=lambda item: -item[1].wavefronts)
    ]
    return Table(title, ("instruction", "executed", "wavefronts", "ideal", "above ideal"), tuple(rows))


def read_tables(text: str) -> dict[str, dict[str, Counted]]:
    """Case -> opcode -> counts, from printed tables."""
    found: dict[str, dict[str, Counted]] = {}
    title = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 1 and line:
            title = line
        elif len(cells) == 5 and cells[1].replace(",", "").isdigit():
            counts = (int(cell.replace(",", "")) for cell in cells[1:4])
            found.setdefault(title, {})[cells[0]] = Counted(*counts)
    return found
