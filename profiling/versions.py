"""Time versions of cute_flash beside each other: before and after a change of a kernel.

Each version has its own process (`profiling.version_worker`), because Python imports a package once. The processes hold
the same inputs. In every round each times its call once, in another order, while the others wait. The results of all
versions are compared with those of the first. A version is a folder with a checkout, or a commit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from io import BytesIO
from itertools import product
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from profiling.machine import ROOT
from profiling.report import geometric_mean
from profiling.suites import MASKS
from profiling.terminal import Table
from profiling.timing import Samples, balanced
from profiling.version_worker import CALLS, Cell, receive, send

DIRECTIONS = ("fwd", "bwd")
# The largest relative difference, ‖a - b‖ / ‖b‖, of the results of two versions.
AGREEMENT = 2e-2
STDERR = 2  # file descriptor


@dataclass(frozen=True)
class Settings:
    directions: tuple[str, ...] = ("fwd", "bwd")
    calls: tuple[str, ...] = ("plain",)
    head_dims: tuple[int, ...] = (64, 128, 256)
    masks: tuple[str, ...] = MASKS
    lengths: tuple[int, ...] = (512, 4096, 16384)
    tokens: int = 16384
    hidden: int = 2048
    rounds: int = 6
    ms: float = 15.0
    seed: int = 0

    def cells(self) -> list[Cell]:
        for names, known in ((self.directions, DIRECTIONS), (self.calls, CALLS), (self.masks, MASKS)):
            for name in names:
                if name not in known:
                    raise ValueError(f"{name!r}: choose from {', '.join(known)}")
        return [
            Cell(direction, call, d, mask, seqlen, max(1, self.tokens // seqlen), max(1, self.hidden // d))
            for direction, call, d, mask, seqlen in product(
                self.directions, self.calls, self.head_dims, self.masks, self.lengths
            )
        ]


class Remote(Protocol):
    """A version: `ask("time")` calls `VersionWorker.time` in its process. Raises `VersionError` if that fails."""

    def ask(self, name: str, *arguments: Any) -> Any: ...


class VersionError(ValueError):
    """A version cannot be measured, or failed."""


@dataclass(frozen=True)
class CellResult:
    cell: Cell
    samples: dict[str, Samples] = field(default_factory=dict)  # by version
    differences: dict[str, float] = field(default_factory=dict)  # from the results of the first version
    errors: dict[str, str] = field(default_factory=dict)

    def ratio(self, version: str, base: str) -> float | None:
        """The speed of a version over the base."""
        if version not in self.samples or base not in self.samples:
            return None
        return self.samples[base].median_ms / self.samples[version].median_ms


# ---- processes


@contextmanager
def folder_of(version: str, run: Callable[..., Any] = subprocess.run) -> Iterator[Path]:
    """A folder with the package `cute_flash` of a version, which is a folder or a commit of this repository."""
    with tempfile.TemporaryDirectory(prefix="cute_flash_version_") as name:
        folder = Path(name)
        if (Path(version) / "cute_flash" / "__init__.py").exists():
            (folder / "cute_flash").symlink_to((Path(version) / "cute_flash").resolve())
        else:
            done = run(["git", "archive", version, "cute_flash"], cwd=ROOT, capture_output=True, check=False)
            if done.returncode:
                reason = " ".join(done.stderr.decode().split())
                raise ValueError(f"{version!r} is neither a folder with cute_flash nor a commit here: {reason}")
            with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
                archive.extractall(folder, filter="data")
        yield folder


class Process:
    """The worker process of a version."""

    def __init__(self, folder: Path) -> None:
        self.connection, theirs = Pipe()
        path = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH", ""))))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "profiling.version_worker", str(theirs.fileno())],
                # Python looks for packages in the working directory first.
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=(theirs.fileno(),),
                # The command's standard output is for tables.
                stdout=STDERR,
            )

    def ask(self, name: str, *arguments: Any) -> Any:
        try:
            send(self.connection, (name, arguments))
            kind, content = receive(self.connection)
        except (EOFError, OSError) as error:
            raise VersionError(f"its process ended with exit status {self.process.wait()}") from error
        if kind == "error":
            raise VersionError(content)
        return content

    def end(self) -> None:
        self.connection.close()
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def started(versions: Mapping[str, str]) -> Iterator[dict[str, Remote]]:
    """The process of each version, by name."""
    with ExitStack() as stack:
        found: dict[str, Remote] = {}
        for name, version in versions.items():
            folder = stack.enter_context(folder_of(version))
            process = Process(folder)
            stack.callback(process.end)
            try:
                sources = process.ask("sources")
            except VersionError as error:
                raise VersionError(f"{name}: {error}; it may be too old for this profiling") from error
            expected = str((folder / "cute_flash").resolve().parent)
            if sources != {expected}:
                others = ", ".join(sorted(sources - {expected}))
                raise VersionError(f"{name}: modules of {others} were imported beside those of {version}")
            found[name] = process
        yield found


# ---- measuring


def difference(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest relative difference of all results; infinite for NaN."""
    found = [((x - y).norm() / y.norm().clamp_min(1e-30)).item() for x, y in zip(mine, theirs, strict=True)]
    return max(x if x == x else float("inf") for x in found)


def measure_cell(cell: Cell, remotes: Mapping[str, Remote], settings: Settings) -> CellResult:
    """Prepare a cell in all versions, compare their results, and time the versions in turns."""
    result, expected = CellResult(cell), None
    for name, remote in remotes.items():
        try:
            found = remote.ask("prepare", cell, settings.seed, settings.ms)
        except VersionError as error:
            result.errors[name] = str(error)
            continue
        expected = found if expected is None else expected
        result.differences[name] = difference(found, expected)
    times: dict[str, list[float]] = {name: [] for name in result.differences}
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
            count = remote.ask("compile", settings.cells(), jobs)
        except VersionError as error:
            raise VersionError(f"{name}: {error}") from error
        step(f"{name}: {count} kernels compiled")
    for cell in settings.cells():
        results.append(measure_cell(cell, remotes, settings))
        step(cell.name)
        save(results)
    return results


# ---- reports


def failures(results: Sequence[CellResult]) -> list[str]:
    """A line for each call that failed, and for each result that differs from the first version's."""
    lines = []
    for one in results:
        lines += [f"{one.cell.name}: {name}: {error}" for name, error in one.errors.items()]
        for name, found in one.differences.items():
            if not found < AGREEMENT:
                lines.append(f"{one.cell.name}: {name}: results differ by {found:.2g}")
    return lines


def tables(results: Sequence[CellResult], names: Sequence[str], title: str = "Device time") -> list[Table]:
    """Times of all cells, and geometric means of the speed over the first version by direction and call."""
    base, rows = names[0], []
    by_call: dict[tuple[str, str], dict[str, list[float]]] = {}
    for one in results:
        row = [one.cell.name]
        for name in names:
            samples, ratio = one.samples.get(name), one.ratio(name, base)
            row += [f"{samples.median_ms:.4f}" if samples else "-", f"{samples.spread:.1%}" if samples else "-"]
            if name != base:
                row.append(f"{ratio:.3f}" if ratio else "-")
                if ratio:
                    by_call.setdefault((one.cell.direction, one.cell.call), {}).setdefault(name, []).append(ratio)
        rows.append(tuple(row))
    columns = ["call"]
    for name in names:
        columns += [f"{name} ms", "spread", *((f"over {base}",) if name != base else ())]
    means = []
    for (direction, call), ratios in by_call.items():
        found = (f"{geometric_mean(ratios[name]):.3f}" if name in ratios else "-" for name in names[1:])
        means.append((f"{direction} {call}", *found))
    times = Table(title, tuple(columns), tuple(rows))
    summary = Table(f"Speed over {base}, geometric mean", ("call", *names[1:]), tuple(means))
    return [times, summary] if means else [times]


def to_dict(
    results: Sequence[CellResult], settings: Settings, versions: Mapping[str, str], facts: Mapping[str, Any]
) -> dict[str, Any]:
    cells = []
    for one in results:
        samples = {
            name: {"ms": x.median_ms, "spread": x.spread, "calls": x.calls, "round_ms": x.round_ms}
            for name, x in one.samples.items()
        }
        cells.append({**asdict(one.cell), "versions": samples, "differences": one.differences, "errors": one.errors})
    return {"settings": asdict(settings), "versions": dict(versions), "machine": dict(facts), "cells": cells}
