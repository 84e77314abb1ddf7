"""`python -m profiling sanitize`: memcheck, racecheck and synccheck of compute-sanitizer over small launches.

All kernels are compiled first. Then every tool runs, in several processes that share the launches. If a process ends
before its last launch, another process runs the remaining launches. If a process hangs, it is stopped at the time
limit, and the log lists its remaining launches as not run. The log is written after every tool.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cute_flash.tools.precompile import precompile_keys
from profiling.counters.ncu import run_command
from profiling.counters.sanitize_case import BEGIN, END, SKIPPED, Launch, launches, names, needed_kernels
from profiling.measure import machine
from profiling.measure.options import add_jobs, at_least_one
from profiling.measure.study import FAILED, OK, Command, need_gpu

TOOLS = ("memcheck", "racecheck", "synccheck")
PROGRAM = "compute-sanitizer"
# Measured over 125 launches on an H200 with 16 cores and 8 processes: 18 s, 43 s and 18 s, after compiling.
SECONDS_PER_LAUNCH = {"memcheck": 0.15, "racecheck": 0.35, "synccheck": 0.15}
COMPILE_SECONDS = 75
NOT_FOUND = f"{PROGRAM}: no such program. It belongs to the CUDA toolkit (package cuda-sanitizer)"
# The first line of a report of the sanitizer, after its prefix of nine equal signs.
_REPORT = re.compile(r"=========\s+(Error: .*|Warning: .*|Invalid .*|Barrier error.*|Program hit .*|Race reported .*)")
# The next line of a race: the other access.
_OTHER_ACCESS = re.compile(r"=========\s+(and (?:Read|Write) access .*)")
_SUMMARY = re.compile(r"=========\s+((?:ERROR|RACECHECK) SUMMARY: .*)")
MAX_REPORTS = 3  # of a launch in the log

# Command and limit in seconds -> exit status and output; 124: out of time.
Runner = Callable[[Sequence[str], float], tuple[int, str]]


@dataclass
class Outcome:
    """The reports of a tool on the launches."""

    tool: str
    clean: list[str] = field(default_factory=list)
    forward_only: list[str] = field(default_factory=list)  # among the clean
    reports: dict[str, list[str]] = field(default_factory=dict)  # launch -> lines
    failed: dict[str, str] = field(default_factory=dict)  # launch -> the end of the output
    not_run: list[str] = field(default_factory=list)
    summaries: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.reports or self.failed or self.not_run)

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.tool,
            self.clean + other.clean,
            self.forward_only + other.forward_only,
            self.reports | other.reports,
            self.failed | other.failed,
            self.not_run + other.not_run,
            self.summaries + other.summaries,
        )


def run_tool(
    tool: str, chosen: Sequence[Launch], deadline: float, run: Runner, clock: Callable[[], float] = time.monotonic
) -> Outcome:
    """One tool over all launches, as far as the time allows."""
    outcome, left, begin = Outcome(tool), [launch.name for launch in chosen], clock()
    while left and clock() < deadline:
        python = Path(sys.executable).name
        command = [PROGRAM, "--tool", tool, python, "-m", "profiling.counters.sanitize_case", *left]
        status, output = run(command, deadline - clock())
        _read(outcome, output, status)
        lines = output.splitlines()
        started, done = names(lines, BEGIN), names(lines, END)
        left = [name for name in left if name not in done]
        if status == 124:
            break
        if left:
            # The process ended in the middle: the launch that was running failed.
            broken = next((name for name in reversed(started) if name in left), left[0])
            outcome.failed[broken] = f"status {status}: {_tail(output)}"
            left.remove(broken)
    outcome.not_run, outcome.seconds = left, clock() - begin
    return outcome


def run_processes(tool: str, chosen: Sequence[Launch], deadline: float, run: Runner, num: int) -> Outcome:
    """One tool in `num` processes at once, each with every num-th launch."""
    begin, shares = time.monotonic(), [chosen[i::num] for i in range(min(num, len(chosen)))]
    with ThreadPoolExecutor(len(shares)) as pool:
        whole = sum(pool.map(lambda share: run_tool(tool, share, deadline, run), shares), Outcome(tool))
    whole.seconds = time.monotonic() - begin
    return whole


def _read(outcome: Outcome, output: str, status: int) -> None:
    """Add the launches of a process that ended."""
    lines = output.splitlines()
    current, reports = "before the first launch", dict[str, list[str]]()
    for line in lines:
        if line.startswith(f"{BEGIN} "):
            current = line.removeprefix(BEGIN).strip()
        elif line.startswith(f"{END} "):
            current = f"after {line.removeprefix(END).strip()}"
        elif match := _REPORT.match(line):
            reports.setdefault(current, []).append(match[1])
        elif (match := _OTHER_ACCESS.match(line)) and current in reports:
            reports[current][-1] += f" {match[1]}"
        elif match := _SUMMARY.match(line):
            outcome.summaries.append(match[1])
    for name, found in reports.items():
        if name.startswith("after "):
            found.append(f"status {status}: {_tail(output)}")
    outcome.clean += [name for name in names(lines, END) if name not in reports]
    outcome.forward_only += names(lines, SKIPPED)
    outcome.reports |= reports


def _tail(output: str, num: int = 5) -> str:
    lines = [line for line in output.strip().splitlines() if not line.startswith((BEGIN, END))]
    return " / ".join(lines[-num:])


def log(outcomes: Sequence[Outcome], facts: dict[str, Any], version: str | None) -> str:
    """The text of the log: one paragraph per tool, then every report."""
    lines = [
        f"compute-sanitizer over small launches, {facts.get('gpu')}, driver {facts.get('driver')}, "
        f"commit {facts.get('git_commit')}, source {facts.get('source_digest')}, DSL {facts.get('cutlass_dsl')}, "
        f"{datetime.date.today()}",
        version or "",
        "A launch is a call and its gradients: family, head dim, dense, varlen or decode (no gradients), feature.",
    ]
    for one in outcomes:
        lines += [
            "",
            f"{one.tool}: {len(one.clean)} launches clean, {len(one.reports)} with reports, {len(one.failed)} failed, "
            f"{len(one.not_run)} not run; {one.seconds:.0f} s",
            *(f"  {summary}" for summary in one.summaries),
        ]
        lines += [f"  {name}: {error}" for name, error in one.failed.items()]
        for name, found in one.reports.items():
            counts = Counter(re.sub(r"0x[0-9a-f]+", "0x…", line) for line in found)
            lines += [f"  {name}: {num} x {line}" for line, num in counts.most_common(MAX_REPORTS)]
        if one.forward_only:
            lines.append(f"  no gradients in this family: {', '.join(one.forward_only)}")
        if one.not_run:
            lines.append(f"  not run: {', '.join(one.not_run)}")
        lines.append(f"  clean: {', '.join(one.clean)}")
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tool", dest="tools", action="append", choices=TOOLS, help="default: all; may be repeated")
    add("--minutes", type=float, default=20.0, metavar="N", help="stop after N minutes (default: %(default)s)")
    add("--only", default="*", metavar="PATTERN", help="names with * such as 'sm90-*-dropout', or a part of names")
    add("--list", action="store_true", help="print the launches and the expected time; needs no GPU")
    add("--processes", type=at_least_one, default=4, metavar="N", help="sanitizers at once (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="default: profiling/results/<gpu>/<date>-sanitize.txt")
    add_jobs(parser)


def run(args: argparse.Namespace) -> int:
    tools = tuple(dict.fromkeys(args.tools or TOOLS))
    chosen = launches(only=args.only)
    if not chosen:
        raise ValueError(f"--only {args.only}: no launch has such a name; --list prints all names")
    if args.list:
        seconds = COMPILE_SECONDS + sum(SECONDS_PER_LAUNCH[tool] * len(chosen) for tool in tools)
        print("\n".join(launch.name for launch in chosen))
        print(f"{len(chosen)} launches, {', '.join(tools)}: about {seconds:.0f} s on an H200 (an estimate)")
        return OK
    need_gpu("; --list prints the launches")
    if shutil.which(PROGRAM) is None:
        raise ValueError(NOT_FOUND)
    deadline = time.monotonic() + 60 * args.minutes
    facts = machine.facts()
    out = args.out or machine.default_path("sanitize", facts).with_suffix(".txt")
    precompile_keys(needed_kernels(chosen), args.jobs)
    version = machine.run_command((PROGRAM, "--version"))
    outcomes = []
    for tool in tools:
        outcomes.append(run_processes(tool, chosen, deadline, run_command, args.processes))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(log(outcomes, facts, version), encoding="utf-8")
    print(out.read_text(encoding="utf-8"))
    return OK if all(outcome.is_clean for outcome in outcomes) else FAILED


COMMAND = Command(
    "sanitize",
    "compute-sanitizer over every kind of kernel",
    ("--tool racecheck --minutes 8", "--list  # needs no GPU"),
    add_arguments,
    run,
)
