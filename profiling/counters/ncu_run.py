"""Profiles cases one after the other and writes a record after each, or makes the record from the .csv exports."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from cute_flash.spec import arch
from profiling.counters.expect import expected
from profiling.counters.ncu import NcuError, NotPermittedError, Tool
from profiling.counters.ncu_case import LAYOUTS, Case, case_of
from profiling.counters.ncu_metrics import parse_raw, raw_of
from profiling.counters.ncu_report import Finding, record
from profiling.measure.record import write_json

RECORD = "ncu.json"
# If these facts are the same, an earlier run in the folder is part of this run, and its cases stay in the record.
SAME_RUN = ("gpu", "driver", "source_digest")
# Facts of a run that its exports do not have.
FACTS: dict[str, Any] = {"settings": {}, "machine": {}, "ncu": None}


def from_exports(folder: Path) -> list[Finding]:
    """Every case with a .csv in the folder, and its current prediction. Needs neither ncu nor a GPU."""
    findings, l2_bytes = [], facts_of(folder)["machine"].get("l2_bytes")
    for path in sorted(folder.glob("*.csv")):
        profiles = parse_raw(path.read_text(encoding="utf-8"))
        if len(profiles) != 1:
            raise ValueError(f"{path}: {len(profiles)} launches, expected one")
        case = case_of(path.stem, profiles[0].kernel)
        spec = arch.by_name(f"sm_{profiles[0].capability.replace('.', '')}")
        spec = replace(spec, l2_bytes=l2_bytes or spec.l2_bytes)
        findings.append(Finding(case, expected(case, spec), profiles[0]))
    return sorted(findings, key=lambda finding: _order(finding.case))


def export_record(folder: Path) -> None:
    """Write the missing .csv of every case in the record; older versions wrote none."""
    path = folder / RECORD
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": {}}
    for case_id, case in data["cases"].items():
        target = folder / f"{case_id}.csv"
        if case["measured"] and not target.exists():
            digits = data["machine"]["capability"].removeprefix("sm_")
            capability = f"{digits[:-1]}.{digits[-1]}"
            text = raw_of(case["symbol"], capability, case["measured"], case["stalls"])
            target.write_text(text, encoding="utf-8")


def _order(case: Case) -> tuple[int, str, int]:
    return list(LAYOUTS).index(case.kernel), case.shape.id, LAYOUTS[case.kernel].index(case.layout)


def facts_of(folder: Path) -> dict[str, Any]:
    """The facts of the record in the folder; empty without a record."""
    path = folder / RECORD
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else FACTS
    return {name: data[name] for name in FACTS}


def from_folder(folder: Path) -> tuple[list[Finding], dict[str, Any]]:
    """The findings of a folder's exports, and a new record of them. Writes nothing."""
    findings = from_exports(folder)
    if not findings:
        raise ValueError(f"{folder}: no .csv of a profiled case; run without --from-exports first")
    return findings, record(findings, **facts_of(folder))


def earlier_findings(folder: Path, machine: dict[str, Any], running: Sequence[Finding]) -> list[Finding]:
    """The findings of an earlier part of the same run in the folder, without the cases that run now."""
    before = facts_of(folder)["machine"]
    if any(name not in before or before[name] != machine.get(name) for name in SAME_RUN):
        return []
    ids = {finding.case.id for finding in running}
    return [finding for finding in from_exports(folder) if finding.case.id not in ids]


def profile_all(
    tool: Tool, findings: Sequence[Finding], facts: dict[str, Any], step: Callable[[str], None]
) -> list[Finding]:
    """Profile all cases. A case that fails is recorded, and the others continue; `NotPermittedError` ends the run."""
    # Read before this run adds its exports to the folder.
    done = earlier_findings(tool.folder, facts["machine"], findings)
    num_earlier = len(done)

    def record_finding(finding: Finding) -> None:
        done.append(finding)
        write_json(record(done, **facts), tool.folder / RECORD)
        step(f"{finding.case.id}: {finding.error or f'{finding.time_cell} us'}")

    def read(finding: Finding) -> None:
        try:
            record_finding(replace(finding, profile=tool.read(finding.case)))
        except NcuError as error:
            record_finding(replace(finding, error=str(error)))

    # One thread reads reports and writes the record, while the next case runs.
    with ThreadPoolExecutor(1) as reader:
        reading = []
        for finding in findings:
            try:
                tool.collect(finding.case)
            except NotPermittedError:
                raise
            except NcuError as error:
                reading.append(reader.submit(record_finding, replace(finding, error=str(error))))
            else:
                reading.append(reader.submit(read, finding))
    for future in reading:
        future.result()
    return done[num_earlier:]
