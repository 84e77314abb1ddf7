"""Shared-memory wavefronts by SASS instruction: which instruction the counters of a launch come from.

The counters of the load/store unit add up all traffic through the banks of shared memory. Nsight Compute's section
SourceCounters attributes wavefronts to instructions, which distinguishes address conflicts from contention.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
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
    command = tool.command(case)
    at = command.index("--section")
    end = command.index("--metrics") + 2
    command[at:end] = ["--section", SECTION]
    command[command.index("--export") + 1] = str(report.with_suffix(""))
    tool.must_run(command, case)
    page = ("--page", "source", "--csv", "--print-source", "sass")
    text = tool.must_run((tool.program, "--import", str(report), *page), case)
    (tool.folder / f"{case.id}.source.tsv").write_text(text, encoding="utf-8")
    report.unlink(missing_ok=True)
    return parse(text, case.id)


def parse(text: str, name: str) -> dict[str, Counted]:
    """Opcode with its suffixes -> counts, from the CSV of the source page."""
    rows = list(csv.reader(text.splitlines()))
    start = next((i for i, row in enumerate(rows) if _find(row, _SOURCE) is not None and len(row) > 3), None)
    if start is None:
        raise NcuError(f"{name}: the source page has no table")
    header = rows[start]
    columns = [_find(header, column) for column in (_SOURCE, _EXECUTED, _WAVEFRONTS, _IDEAL)]
    if None in columns:
        raise NcuError(
            f"{name}: the source page has the columns {', '.join(header)}, without wavefronts of shared memory"
        )
    source, *counts = (column for column in columns if column is not None)
    found: dict[str, Counted] = {}
    for row in rows[start + 1 :]:
        match = _OPCODE.match(row[source].strip()) if len(row) > max(source, *counts) else None
        if match and match[1].partition(".")[0] in OPCODES:
            values = (int(float(row[column].replace(",", "") or 0)) for column in counts)
            found[match[1]] = found.get(match[1], Counted()) + Counted(*values)
    return found


def _find(header: Iterable[str], name: str) -> int | None:
    names = [re.sub(r"\s*[\[(].*", "", column).strip().lower() for column in header]
    return names.index(name) if name in names else None


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
