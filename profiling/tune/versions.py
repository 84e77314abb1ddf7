"""Time versions of cute_flash beside each other: before and after a change of a kernel.

Each version has its own process (`version_worker`), because Python imports a package once. The processes hold
the same inputs. In every round each process times its call once while the others wait; the order changes from round to
round. The results of a version must agree with those of the first version, the base. A version is a folder with a
checkout, or a commit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import BytesIO
from itertools import product
from math import isfinite
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from cute_flash.spec import arch
from cute_flash.tools.progress import steps
from profiling.measure import machine
from profiling.measure.accuracy import relative_difference
from profiling.measure.machine import ROOT, source_digest
from profiling.measure.options import MS, ROUNDS, SEED, add_jobs, add_options, add_out, option, settings_of
from profiling.measure.record import write_json
from profiling.measure.shapes import MASKS
from profiling.measure.study import FAILED, OK, Command
from profiling.measure.tables import Table, geometric_mean, print_lines, show
from profiling.measure.timing import Samples, balanced
from profiling.peers.cute_flash import OPTIONS
from profiling.peers.directions import DIRECTIONS
from profiling.peers.peer import AGREEMENT
from profiling.tune.version_worker import Cell, receive, send

# A process that does not answer for so long hangs. It may compile all kernels first.
LIMIT_S = 900.0
# A process that has lost its pipe ends within this time.
END_S = 10.0
STDERR = 2  # file descriptor
# Variables with paths. They may be relative to the working directory of the command, which is not that of a process.
PATH_VARIABLES = ("CUTE_FLASH_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class VersionError(ValueError):
    """A version cannot be measured, or failed."""


@dataclass(frozen=True)
class Settings:
    directions: tuple[str, ...] = option(tuple(DIRECTIONS))
    features: tuple[str, ...] = option(("plain",), f"of {', '.join(OPTIONS)}")
    head_dims: tuple[int, ...] = option((64, 128, 256))
    masks: tuple[str, ...] = option(MASKS)
    lengths: tuple[int, ...] = option((512, 4096, 16384))
    tokens: int = option(16384)
    hidden: int = option(2048)
    rounds: int = ROUNDS(6)
    ms: float = MS(15.0)
    seed: int = SEED(0)

    def cells(self) -> list[Cell]:
        for names, known in ((self.directions, DIRECTIONS), (self.features, OPTIONS), (self.masks, MASKS)):
            for name in names:
                if name not in known:
                    raise ValueError(f"{name!r}: choose from {', '.join(known)}")
        if any(number < 1 for number in (*self.head_dims, *self.lengths)):
            raise ValueError("head dims and lengths must be 1 or more")
        chosen = product(self.directions, self.features, self.head_dims, self.masks, self.lengths)
        cells = [Cell(*one, max(1, self.tokens // one[-1]), max(1, self.hidden // one[2])) for one in chosen]
        if not cells:
            raise ValueError("an empty list: nothing to measure")
        return cells


@dataclass(frozen=True)
class CellResult:
    """The times, differences and errors of one cell; the keys are names of versions."""

    cell: Cell
    samples: dict[str, Samples] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)  # from the results of the base
    errors: dict[str, str] = field(default_factory=dict)

    def speed(self, name: str, base: str) -> float | None:
        """The speed of a version over the base; None if one of them was not timed."""
        if name not in self.samples or base not in self.samples:
            return None
        return self.samples[base].median_ms / self.samples[name].median_ms


# ---- processes


class Remote(Protocol):
    """A version: `ask("time")` calls `VersionWorker.time` in its process, and raises `VersionError` if that fails."""

    def ask(self, request: str, *arguments: Any) -> Any: ...


@contextmanager
def folder_of(version: str, run: Callable[..., Any] = subprocess.run) -> Iterator[Path]:
    """A folder with a copy of the package `cute_flash` of a version: a folder, or a commit of this repository."""
    with tempfile.TemporaryDirectory(prefix="cute_flash_version_") as name:
        folder, package = Path(name).resolve(), Path(version) / "cute_flash"
        if (package / "__init__.py").exists():
            # A copy: kernels are imported at their first use, and the checkout may be edited meanwhile.
            shutil.copytree(package, folder / "cute_flash", ignore=shutil.ignore_patterns("__pycache__"))
        else:
            done = run(["git", "archive", version, "cute_flash"], cwd=ROOT, capture_output=True, check=False)
            if done.returncode:
                reason = " ".join(done.stderr.decode().split())
                raise VersionError(f"{version!r} is neither a folder with cute_flash nor a commit here: {reason}")
            with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
                archive.extractall(folder, filter="data")
        yield folder


class Process:
    """The process of a version. One that ends or hangs is replaced at the next request."""

    def __init__(self, folder: Path, limit_s: float = LIMIT_S) -> None:
        self.folder, self.limit_s = folder, limit_s
        self._start()

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        paths = (str(self.folder), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
        environment = {name: os.path.abspath(os.environ[name]) for name in PATH_VARIABLES if os.environ.get(name)}
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "profiling.tune.version_worker", str(theirs.fileno())],
                # Python looks for packages in the working directory first.
                cwd=self.folder,
                env={**os.environ, **environment},
                pass_fds=(theirs.fileno(),),
                # The command's standard output is for tables.
                stdout=STDERR,
                # A new process group: `end` kills the group, which includes the processes that compile kernels.
                start_new_session=True,
            )

    def ask(self, request: str, *arguments: Any) -> Any:
        if self.connection.closed:
            self._start()
        try:
            send(self.connection, (request, arguments))
            if not self.connection.poll(self.limit_s):
                self.end(0.0)
                raise VersionError(f"no answer for {self.limit_s:g} s")
            kind, content = receive(self.connection)
        except (EOFError, OSError) as error:
            self.end()
            code = self.process.returncode
            ending = f"signal {-code}" if code < 0 else f"exit status {code}"
            raise VersionError(f"its process ended with {ending}") from error
        if kind == "lost":
            self.end()
        if kind != "value":
            raise VersionError(content)
        return content

    def end(self, wait_s: float = END_S) -> None:
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def started(versions: Mapping[str, str], digests: dict[str, str] | None = None) -> Iterator[dict[str, Remote]]:
    """The process of each version, by name. `digests`: receives the digest of the source of each version."""
    with ExitStack() as stack:
        remotes: dict[str, Remote] = {}
        for name, version in versions.items():
            folder = stack.enter_context(folder_of(version))
            if digests is not None:
                digests[name] = source_digest(folder)
            process = Process(folder)
            stack.callback(process.end)
            try:
                process.ask("check_imports")
            except VersionError as error:
                raise VersionError(f"{name}: {error}; it may be too old for this profiling") from error
            remotes[name] = process
        yield remotes


# ---- measuring


def measure_cell(cell: Cell, remotes: Mapping[str, Remote], settings: Settings) -> CellResult:
    """Measure one cell.

    All versions compute the results. A version is timed if its results agree with those of the base. In each round,
    one version after the other is timed. If the base fails, no version is timed.
    """
    result, base = CellResult(cell), next(iter(remotes))
    expected: list[Tensor] = []
    for name, remote in remotes.items():
        try:
            compared = remote.ask("prepare", cell, settings.seed, settings.ms)
        except VersionError as error:
            result.errors[name] = str(error)
            if name == base:
                return result
            continue
        expected = compared if name == base else expected
        result.differences[name] = relative_difference(compared, expected)
    ready = [name for name, value in result.differences.items() if value < AGREEMENT]
    times: dict[str, list[float]] = {name: [] for name in ready}
    calls: dict[str, int] = {}
    for i in range(settings.rounds):
        for name in balanced(list(times), i):
            try:
                calls[name], call_ms = remotes[name].ask("time")
            except VersionError as error:
                result.errors[name] = str(error)
                del times[name]
            else:
                times[name].append(call_ms)
    result.samples.update({name: Samples(calls[name], tuple(ms)) for name, ms in times.items()})
    return result


def run_versions(
    remotes: Mapping[str, Remote],
    settings: Settings,
    jobs: int = 1,
    step: Callable[[str], None] = lambda line: None,
    save: Callable[[list[CellResult]], None] = lambda results: None,
) -> list[CellResult]:
    """Measure all cells; `save` is called with all results after every cell."""
    results: list[CellResult] = []
    for name, remote in remotes.items():
        try:
            kernels, compiled = remote.ask("compile", settings.cells(), jobs)
            step(f"{name}: {kernels} kernels, {compiled} of them compiled now")
        except VersionError as error:
            step(f"{name}: kernels are compiled at their first call: {error}")
    for cell in settings.cells():
        results.append(measure_cell(cell, remotes, settings))
        step(cell.name)
        save(results)
    return results


# ---- reports


def failures(results: Sequence[CellResult], base: str) -> list[str]:
    """A line for each version that failed in a cell, or whose results differ from those of the base."""
    lines = []
    for one in results:
        lines += [f"{one.cell.name}: {name}: {error}" for name, error in one.errors.items()]
        for name, value in one.differences.items():
            if not value < AGREEMENT:
                what = "NaN or infinity" if name == base else f"results differ from those of {base} by {value:.2g}"
                lines.append(f"{one.cell.name}: {name}: not timed: {what}")
    return lines


def tables(results: Sequence[CellResult], names: Sequence[str], title: str = "Device time") -> list[Table]:
    """Times of all cells, and geometric means of the speed over the base by direction and feature."""
    base, rows = names[0], []
    speeds: dict[tuple[str, str], dict[str, list[float]]] = {}
    for one in results:
        row = [one.cell.name]
        for name in names:
            samples, speed = one.samples.get(name), one.speed(name, base)
            row += [f"{samples.median_ms:.4f}" if samples else "-", f"{samples.spread:.1%}" if samples else "-"]
            if name != base:
                row.append(f"{speed:.3f}" if speed else "-")
                if speed:
                    of_feature = speeds.setdefault((one.cell.direction, one.cell.feature), {})
                    of_feature.setdefault(name, []).append(speed)
        rows.append(tuple(row))
    columns = ["cell"]
    for name in names:
        columns += [f"{name} ms", "spread", *((f"speed over {base}",) if name != base else ())]
    means = []
    for (direction, feature), of_feature in speeds.items():
        row = [f"{direction} {feature}"]
        for name in names[1:]:
            values = of_feature.get(name, [])
            row += [f"{geometric_mean(values):.3f}" if values else "-", str(len(values))]
        means.append(tuple(row))
    times = Table(title, tuple(columns), tuple(rows))
    headings = tuple(heading for name in names[1:] for heading in (name, "cells"))
    return [times, *([Table(f"Speed over {base}, geometric mean", ("", *headings), tuple(means))] if means else [])]


def to_dict(
    results: Sequence[CellResult],
    settings: Settings,
    versions: Mapping[str, str],
    digests: Mapping[str, str],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The record of a run. `digests`: of the source of each version; those in `facts` are of the command's checkout."""
    cells = []
    for one in results:
        samples = {name: version.as_dict() for name, version in one.samples.items()}
        # JSON has no infinity.
        differences = {name: value if isfinite(value) else None for name, value in one.differences.items()}
        cells.append({**asdict(one.cell), "versions": samples, "differences": differences, "errors": one.errors})
    given = {name: {"version": text, "source_digest": digests.get(name)} for name, text in versions.items()}
    return {"settings": asdict(settings), "versions": given, "machine": dict(facts), "cells": cells}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a folder with a checkout, or a commit; the first is the base"
    parser.add_argument("versions", nargs="+", metavar="NAME=VERSION", help=text)
    add_options(parser, Settings)
    add_jobs(parser)
    add_out(parser)


def run(args: argparse.Namespace) -> int:
    named = [text.partition("=") for text in args.versions]
    chosen = {name: version for name, equals, version in named if name and equals and version}
    if len(chosen) < max(2, len(named)):
        raise ValueError(f"{' '.join(args.versions)}: expected at least two NAME=VERSION with different names")
    settings = settings_of(Settings, args)
    num_steps, facts, digests = len(chosen) + len(settings.cells()), machine.facts(), dict[str, str]()

    def save(results: Sequence[CellResult]) -> None:
        write_json(to_dict(results, settings, chosen, digests, facts), args.out)

    with started(chosen, digests) as remotes, steps("measuring", num_steps) as done:
        results = run_versions(remotes, settings, args.jobs, done, save)
    title = "Device time" if arch.has_gpu() else "Wall-clock time of the CPU implementation: no CUDA device"
    show(tables(results, list(chosen), title))
    lines = failures(results, next(iter(chosen)))
    print_lines("Failures", lines)
    return FAILED if lines else OK


COMMAND = Command(
    "versions",
    "versions of cute_flash: before and after a change",
    (
        "before=main after=. --directions bwd --head-dims 128  # a commit and a folder",
        "a=../one b=../two --features deterministic,dropout --lengths 4096 --out versions.json",
    ),
    add_arguments,
    run,
)
