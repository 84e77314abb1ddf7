"""Nsight Compute on single launches: a report, its text, and its numbers.

Each case is a process of its own under `ncu`, which profiles one warm launch, replayed once for each group of
counters, with cold caches and whatever clocks the card has. Reading its report takes a second or two and no
GPU, so that the next case can run meanwhile.
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

from profiling.machine import ROOT
from profiling.ncu_case import LAYOUTS, Case
from profiling.ncu_metrics import COLLECTED, SECTIONS, Profile, parse_raw, trim_raw
from profiling.suites import Shape

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

# A command to its exit status and what it printed.
Runner = Callable[[Sequence[str]], tuple[int, str]]


class NcuError(ValueError):
    """A launch could not be profiled; the message says why and what would help."""


class NotPermittedError(NcuError):
    """And no other can."""


def run_command(command: Sequence[str]) -> tuple[int, str]:
    """With plain numbers, whatever the locale; `python` is the one that runs here."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = {**os.environ, "LC_ALL": "C", "PATH": path}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            cwd=ROOT,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return 124, f"nothing after {LIMIT_S:g} s"
    return done.returncode, done.stdout


def choose(kernels: Iterable[str], variants: Sequence[str], shape: Shape, dtype: str) -> list[Case]:
    """Every kernel with those of the variants that it can have; none given: all."""
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
    """The profiler, and where it leaves its reports."""

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
        """Those that this ncu has for this GPU; all if it does not say."""
        _, output = self.run((self.program, "--query-metrics"))
        known = {line.split()[0] for line in output.splitlines() if "__" in line}
        return tuple(name for name in COLLECTED if name.partition(".")[0] in known) or COLLECTED

    def command(self, case: Case) -> list[str]:
        options = [
            "--force-overwrite",
            *("--export", _from_root(self.report(case).with_suffix(""))),
            *("--profile-from-start", "off"),
            *("--kernel-name", f"regex:^{case.symbol}"),
            *("--launch-count", "1"),
            # The card's clocks are left alone, and the caches are cold in every pass.
            *("--clock-control", "none"),
            *("--cache-control", "all"),
        ]
        for section in SECTIONS:
            options += ["--section", section]
        options += ["--metrics", ",".join(self.metrics)]
        # A report keeps its command line: no more of this machine's paths than must be.
        python = Path(sys.executable).name
        return [self.program, *options, python, "-m", "profiling.ncu_case", *case.arguments]

    def report(self, case: Case) -> Path:
        return (self.folder / f"{case.id}.ncu-rep").absolute()

    def profile(self, case: Case) -> Profile:
        self.collect(case)
        return self.read(case)

    def collect(self, case: Case) -> None:
        """Run the case on the GPU: leaves a report."""
        self.folder.mkdir(parents=True, exist_ok=True)
        report = self.report(case)
        for suffix in (".ncu-rep", ".txt", ".csv"):
            report.with_suffix(suffix).unlink(missing_ok=True)
        output = self._must_run(self.command(case), case)
        if not report.exists():
            raise NcuError(f"{case.id}: ncu wrote no report:\n{_tail(output)}")

    def read(self, case: Case) -> Profile:
        """The numbers of a report; writes its details as text and the counters that we name beside it."""
        report = self.report(case)
        read = (self.program, "--import", str(report))
        details = self._must_run((*read, "--page", "details"), case)
        report.with_suffix(".txt").write_text(details, encoding="utf-8")
        raw = self._must_run((*read, "--page", "raw", "--csv", "--print-units", "base"), case)
        profiles = parse_raw(raw)
        if len(profiles) != 1:
            raise NcuError(f"{case.id}: {len(profiles)} launches in {report.name}, expected one")
        report.with_suffix(".csv").write_text(trim_raw(raw), encoding="utf-8")
        return profiles[0]

    def _must_run(self, command: Sequence[str], case: Case) -> str:
        status, output = self.run(command)
        if NO_PERMISSION in output:
            raise NotPermittedError(NOT_PERMITTED)
        if status:
            raise NcuError(f"{case.id}: {self.program} ended with status {status}:\n{_tail(output)}")
        return output


def _from_root(path: Path) -> str:
    """Relative to where commands run, if it lies there."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _tail(output: str, lines: int = 15) -> str:
    return "\n".join(output.strip().splitlines()[-lines:])
