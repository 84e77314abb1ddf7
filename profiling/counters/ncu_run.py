"""Profiles cases one after the other and writes a record after each, or makes the record from the .csv exports."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from cute_flash.spec import arch
from cute_flash.tools.precompile import precompile_keys
from cute_flash.tools.progress import steps
from profiling.counters import ncu_source
from profiling.counters.expect import expected
from profiling.counters.ncu import NcuError, Tool, choose
from profiling.counters.ncu_case import BEYOND_L2, LAYOUTS, Case, case_of, dtype_of
from profiling.counters.ncu_metrics import parse_raw
from profiling.counters.ncu_report import LEGEND, Finding, record, tables
from profiling.measure import machine
from profiling.measure.options import add_jobs, name_list
from profiling.measure.record import write_json
from profiling.measure.shapes import DTYPES, MASKS, Shape
from profiling.measure.study import FAILED, OK, Command, target_arch
from profiling.measure.tables import print_lines, show

RECORD = "ncu.json"
# The layout of shared memory that every kernel has.
DEFAULT_LAYOUT = "swizzled"
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
        case = case_of(path.stem, dtype_of(profiles[0].kernel))
        spec = arch.by_name(f"sm_{profiles[0].capability.replace('.', '')}")
        spec = replace(spec, l2_bytes=l2_bytes or spec.l2_bytes)
        findings.append(Finding(case, expected(case, spec), profiles[0]))
    return sorted(findings, key=lambda finding: _order(finding.case))


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


def earlier_findings(folder: Path, machine: dict[str, Any]) -> list[Finding]:
    """The findings of an earlier part of the same run in the folder; cases that run again replace theirs."""
    before = facts_of(folder)["machine"]
    if any(name not in before or before[name] != machine.get(name) for name in SAME_RUN):
        return []
    return from_exports(folder)


def profile_all(
    tool: Tool, findings: Sequence[Finding], facts: dict[str, Any], step: Callable[[str], None]
) -> list[Finding]:
    """Profile all cases. A case that fails is recorded, and the others continue; `NotPermittedError` ends the run."""
    # Read before this run adds its exports to the folder.
    done = earlier_findings(tool.folder, facts["machine"])
    num_earlier = len(done)

    def read(finding: Finding) -> None:
        if finding.error is None:
            try:
                finding = replace(finding, profile=tool.read(finding.case))
            except NcuError as error:
                finding = replace(finding, error=str(error))
        done.append(finding)
        write_json(record(done, **facts), tool.folder / RECORD)
        step(f"{finding.case.id}: {finding.error or f'{finding.time_cell} us'}")

    # One thread reads reports and writes the record, while the next case runs.
    with ThreadPoolExecutor(1) as reader:
        reading = []
        for finding in findings:
            try:
                tool.collect(finding.case)
            except NcuError as error:
                finding = replace(finding, error=str(error))
            reading.append(reader.submit(read, finding))
    for future in reading:
        future.result()
    return done[num_earlier:]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kernels = tuple(LAYOUTS)
    add("--kernels", type=name_list, default=kernels, metavar="LIST", help=f"default: {','.join(kernels)}")
    add("--variants", type=name_list, default=(), metavar="LIST", help="layouts, such as swizzled,plain (default: all)")
    add("--batch", type=int, default=2, metavar="B", help="default: %(default)s")
    add("--heads", type=int, default=8, metavar="H", help="query heads (default: %(default)s)")
    add("--heads-kv", type=int, metavar="N", help="K/V heads (default: H)")
    add("--seqlen", type=int, default=2048, metavar="S", help="queries and keys (default: %(default)s)")
    add("--head-dim", type=int, default=128, metavar="D", help="default: %(default)s")
    add("--mask", choices=MASKS, default=MASKS[0], help="default: %(default)s")
    add("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    sizes = ", ".join(f"{name} {value}" for name, value in BEYOND_L2.items())
    add("--beyond-l2", action="store_true", help=f"a shape whose tensors exceed L2: {sizes}, default layouts")
    add("--by-instruction", action="store_true", help="count shared-memory wavefronts by SASS instruction instead")
    add("--out", type=Path, default=Path("build/ncu"), metavar="DIR", help="folder of reports (default: %(default)s)")
    add("--ncu", default="ncu", metavar="PROGRAM", help="path of Nsight Compute (default: %(default)s)")
    add_jobs(parser)
    add("--predict-only", action="store_true", help="print the predictions; needs no GPU")
    add("--from-exports", action="store_true", help="write ncu.json again from the .csv files in DIR; needs no GPU")
    add("--arch", metavar="sm_xx", help="architecture of --predict-only (default: the GPU here)")


def run(args: argparse.Namespace) -> int:
    if args.from_exports:
        findings, data = from_folder(args.out)
        write_json(data, args.out / RECORD)
        return _show_findings(findings)
    target, variants = target_arch(args.arch, args.predict_only, "--predict-only"), args.variants
    if args.beyond_l2:
        vars(args).update(BEYOND_L2)
    if args.beyond_l2 or args.by_instruction:
        variants = variants or (DEFAULT_LAYOUT,)
    heads_kv = args.heads if args.heads_kv is None else args.heads_kv
    shape = Shape(args.batch, args.heads, heads_kv, args.seqlen, args.head_dim, args.mask == MASKS[1])
    cases = choose(args.kernels, variants, shape, args.dtype)
    findings = [Finding(case, expected(case, target)) for case in cases]
    if not args.predict_only:
        tool = Tool(args.out, args.ncu)
        tool.check()
        keys = dict.fromkeys(key for case in cases for key in case.keys(target))
        precompile_keys(list(keys), args.jobs)
        if args.by_instruction:
            return _count_instructions(tool, cases)
        settings = {"kernels": args.kernels, "variants": variants, "jobs": args.jobs}
        facts = {"settings": settings, "machine": machine.facts(), "ncu": tool.version}
        with steps("profiling", len(findings)) as done:
            findings = profile_all(tool, findings, facts, done)
    return _show_findings(findings)


def _count_instructions(tool: Tool, cases: Sequence[Case]) -> int:
    failures = []
    for case in cases:
        try:
            show([ncu_source.table(case.id, ncu_source.collect(tool, case))])
        except NcuError as error:
            failures.append(str(error))
    print_lines("Failures", failures)
    return FAILED if failures else OK


def _show_findings(findings: Sequence[Finding]) -> int:
    show(tables(findings))
    print(f"{LEGEND}\n")
    failures = [f"{one.case.id}: {one.error}" for one in findings if one.error]
    print_lines("Failures", failures)
    return FAILED if failures else OK


COMMAND = Command(
    "ncu",
    "Nsight Compute counters beside their predictions",
    (
        "--out build/ncu",
        "--kernels fwd-sm80 --head-dim 96 --mask causal",
        "--predict-only --arch sm_90  # needs no GPU",
    ),
    add_arguments,
    run,
)
