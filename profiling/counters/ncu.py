"""Run Nsight Compute on single launches, and read its reports.

Each case is a process of its own under `ncu`, which profiles one warm launch and replays it once for each group of
counters, with cold caches and unlocked clocks. Reading a report takes a second or two and no GPU, so the next case can
run at the same time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from profiling.counters.ncu_case import LAYOUTS, Case
from profiling.counters.ncu_metrics import COLLECTED, SECTIONS, Profile, parse_raw, trim_raw
from profiling.measure.machine import ROOT
from profiling.measure.shapes import Shape

LIMIT_S = 300.0
NO_PERMISSION = "ERR_NVGPUCTRPERM"
NOT_FOUND = (
    "{tool}: no such program. It belongs to Nsight Compute: install the nsight-compute package of the CUDA "
    "toolkit, or name the program with --ncu"
)
NOT_PERMITTED = (
    "the driver lets only administrators read the GPU's counters (ERR_NVGPUCTRPERM): run as root, in a "
    "container with --cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0; "
    "see https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)

# Command -> exit status and output.
Runner = Callable[[Sequence[str]], tuple[int, str]]


class NcuError(ValueError):
    """A launch could not be profiled; the message has the reason and, if known, a remedy."""


class NotPermittedError(ValueError):
    """The driver does not permit profiling, which no other launch would change."""


def run_command(
    command: Sequence[str], limit: float = LIMIT_S, stderr: int | None = subprocess.STDOUT
) -> tuple[int, str]:
    """Run a command in the C locale for at most `limit` seconds; `python` is the interpreter of this process.

    Returns the exit status, 124 after a timeout, and the output so far. `stderr=None`: it is not part of the output.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = {**os.environ, "LC_ALL": "C", "PATH": path}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": stderr, "cwd": ROOT, "env": environment}
    try:
        done = subprocess.run(command, timeout=limit, **options)
    except subprocess.TimeoutExpired as error:
        return 124, f"{(error.output or b'').decode(errors='replace')}\nstopped after {limit:g} s"
    return done.returncode, done.stdout.decode(errors="replace")


def choose(kernels: Iterable[str], variants: Sequence[str], shape: Shape, dtype: str) -> list[Case]:
    """The cases of each kernel: those of `variants` that it has, or all its layouts if `variants` is empty."""
    cases = []
    for kernel in kernels:
        if kernel not in LAYOUTS:
            raise ValueError(f"kernel {kernel!r}: choose from {', '.join(LAYOUTS)}")
        cases += [Case(kernel, v, shape, dtype) for v in LAYOUTS[kernel] if not variants or v in variants]
    possible = {case.layout for case in cases}
    if unknown := [variant for variant in variants if variant not in possible]:
        known = "; ".join(f"{kernel}: {', '.join(LAYOUTS[kernel])}" for kernel in kernels)
        raise ValueError(f"variants {', '.join(unknown)}: none of these kernels has them ({known})")
    return cases


@dataclass(frozen=True)
class Tool:
    """The profiler and the folder of its reports."""

    folder: Path
    program: str = "ncu"
    run: Runner = run_command

    def check(self) -> None:
        if shutil.which(self.program) is None:
            raise NcuError(NOT_FOUND.format(tool=self.program))

    @property
    def version(self) -> str | None:
        status, output = self.run((self.program, "--version"))
        return output.strip().splitlines()[-1] if status == 0 and output.strip() else None

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The counters that this ncu has for this GPU; all counters if it lists none."""
        _, output = self.run((self.program, "--query-metrics"))
        known = {line.split()[0] for line in output.splitlines() if "__" in line}
        return tuple(name for name in COLLECTED if name.partition(".")[0] in known) or COLLECTED

    def command(self, case: Case, report: Path, sections: Sequence[str], metrics: Sequence[str] = ()) -> list[str]:
        """The command that profiles a case. A report contains it, so it has no absolute paths of this machine."""
        export = report.with_suffix("")
        options = [
            "--force-overwrite",
            *("--export", str(export.relative_to(ROOT) if export.is_relative_to(ROOT) else export)),
            *("--profile-from-start", "off"),
            *("--kernel-name", f"regex:^{case.symbol}"),
            *("--launch-count", "1"),
            # Clocks are not fixed; caches are flushed before every pass.
            *("--clock-control", "none"),
            *("--cache-control", "all"),
        ]
        for section in sections:
            options += ["--section", section]
        if metrics:
            options += ["--metrics", ",".join(metrics)]
        python = Path(sys.executable).name
        return [self.program, *options, python, "-m", "profiling.counters.ncu_case", case.id, case.dtype]

    def report(self, case: Case) -> Path:
        return (self.folder / f"{case.id}.ncu-rep").absolute()

    def profile(self, case: Case) -> Profile:
        self.collect(case)
        return self.read(case)

    def collect(self, case: Case) -> None:
        """Run the case on the GPU and write its report."""
        self.folder.mkdir(parents=True, exist_ok=True)
        report = self.report(case)
        for suffix in (".ncu-rep", ".txt", ".csv"):
            report.with_suffix(suffix).unlink(missing_ok=True)
        output = self.must_run(self.command(case, report, SECTIONS, self.metrics), case)
        if not report.exists():
            raise NcuError(f"{case.id}: ncu wrote no report:\n{_tail(output)}")

    def read(self, case: Case) -> Profile:
        """The counters of a report; writes its details as .txt and the counters as .csv beside it."""
        report = self.report(case)
        read = (self.program, "--import", str(report))
        details = self.must_run((*read, "--page", "details"), case)
        report.with_suffix(".txt").write_text(details, encoding="utf-8")
        raw = self.must_run((*read, "--page", "raw", "--csv", "--print-units", "base"), case)
        profiles = parse_raw(raw)
        if len(profiles) != 1:
            raise NcuError(f"{case.id}: {len(profiles)} launches in {report.name}, expected one")
        report.with_suffix(".csv").write_text(trim_raw(raw), encoding="utf-8")
        return profiles[0]

    def must_run(self, command: Sequence[str], case: Case) -> str:
        status, output = self.run(command)
        if NO_PERMISSION in output:
            raise NotPermittedError(NOT_PERMITTED)
        if status:
            raise NcuError(f"{case.id}: {self.program} ended with status {status}:\n{_tail(output)}")
        return output


def _tail(output: str, lines: int = 15) -> str:
    return "\n".join(output.strip().splitlines()[-lines:])
