"""Time versions of cute_flash beside each other: before and after a change of a kernel.

Each version has its own process (`version_worker`), because Python imports a package once. The processes hold
the same inputs. In every round each process times its call once while the others wait; the order changes from round to
round. The results of a version must agree with those of the first version, the base. A version is a folder with a
checkout, or a commit.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import BytesIO
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

from profiling.measure.accuracy import relative_difference
from profiling.measure.machine import ROOT, source_digest
from profiling.measure.options import MS, ROUNDS, SEED, at_least_one, num_cores, option, settings_of
from profiling.measure.shapes import MASKS
from profiling.measure.study import CellFailure, Record, Step, Study, Tools
from profiling.measure.tables import Table, geometric_mean, number
from profiling.measure.timing import Samples, WallTimer, attempt_each, interleave
from profiling.measure.workers import Pool, TaskFailed
from profiling.peers.cute_flash import OPTIONS
from profiling.peers.directions import DIRECTIONS
from profiling.peers.peer import AGREEMENT
from profiling.tune.version_worker import Cell, request

# A process that does not answer for so long hangs. It may compile all kernels first.
LIMIT_S = 900.0


class VersionError(ValueError):
    """A version cannot be measured, or failed."""


@dataclass(frozen=True)
class Settings:
    directions: tuple[str, ...] = option(tuple(DIRECTIONS), choices=DIRECTIONS)
    features: tuple[str, ...] = option(("plain",), choices=OPTIONS)
    head_dims: tuple[int, ...] = option((64, 128, 256))
    masks: tuple[str, ...] = option(MASKS, choices=MASKS)
    lengths: tuple[int, ...] = option((512, 4096, 16384))
    tokens: int = option(16384)
    hidden: int = option(2048)
    rounds: int = ROUNDS(6)
    ms: float = MS(15.0)
    seed: int = SEED(0)
    jobs: int = option(num_cores(), "compiling processes of a version", type=at_least_one)

    def cells(self) -> list[Cell]:
        if any(size < 1 for size in (*self.head_dims, *self.lengths)):
            raise ValueError("head dims and lengths must be 1 or more")
        chosen = product(self.directions, self.features, self.head_dims, self.masks, self.lengths)
        cells = [Cell(*one, max(1, self.tokens // one[-1]), max(1, self.hidden // one[2])) for one in chosen]
        if not cells:
            raise ValueError("an empty list: nothing to measure")
        return cells


# ---- processes


# (name of a method of `VersionWorker`, arguments) -> its result; raises `TaskFailed`.
Ask = Callable[..., Any]


@dataclass(frozen=True)
class Version:
    text: str  # a folder or a commit
    source_digest: str
    ask: Ask


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


@contextmanager
def started(texts: Mapping[str, str]) -> Iterator[dict[str, Version]]:
    """The versions by name, each with its process. A process that ends or hangs is replaced at the next request."""
    with ExitStack() as stack:
        versions: dict[str, Version] = {}
        for name, text in texts.items():
            folder = stack.enter_context(folder_of(text))
            pool = stack.enter_context(Pool(1, {}, LIMIT_S, packages=folder))
            versions[name] = Version(text, source_digest(folder), partial(pool.call, request, folder))
            try:
                versions[name].ask("check_imports")
            except TaskFailed as error:
                raise VersionError(f"{name}: {error}; it may be too old for this profiling") from error
        yield versions


# ---- measuring


def compile_kernels(name: str, version: Version, settings: Settings) -> Record:
    """How many kernels a version has, and how many were compiled now."""
    try:
        kernels, compiled = version.ask("compile", settings.cells(), settings.jobs)
    except TaskFailed as error:
        return {name: f"kernels are compiled at their first call: {error}"}
    return {name: f"{kernels} kernels, {compiled} of them compiled now"}


def measure_cell(cell: Cell, versions: Mapping[str, Version], settings: Settings) -> Record:
    """Measure one cell.

    All versions compute the results. A version is timed if its results agree with those of the base. In each round,
    one version after the other is timed. If the base fails, no version is timed.
    """
    # The processes synchronize the GPU; here is nothing to synchronize.
    base, timer = next(iter(versions)), WallTimer()
    prepared = {name: partial(one.ask, "prepare", cell, settings.seed, settings.ms) for name, one in versions.items()}
    results, errors = attempt_each(prepared, timer)
    found = results if base in results else {}
    differences = {name: relative_difference(one, results[base]) for name, one in found.items()}
    ready = {name: partial(versions[name].ask, "time") for name, value in differences.items() if value < AGREEMENT}
    times, lost = interleave(ready, settings.rounds, timer)
    samples = {name: Samples(rounds[0][0], tuple(ms for _, ms in rounds)) for name, rounds in times.items()}
    return {
        **asdict(cell),
        "versions": {name: one.as_dict() for name, one in samples.items()},
        # From the results of the base. JSON has no infinity.
        "differences": {name: value if isfinite(value) else None for name, value in differences.items()},
        "errors": errors | lost,
    }


def steps(settings: Settings, tools: Tools, versions: Mapping[str, Version]) -> list[Step]:
    return [
        *(Step("kernels", name, partial(compile_kernels, name, one, settings)) for name, one in versions.items()),
        *(Step("cells", cell.name, partial(measure_cell, cell, versions, settings)) for cell in settings.cells()),
    ]


# ---- report
# -------------------------------------------------------------------------------------------------------


def _name(cell: Record) -> str:
    return Cell(**{name: cell[name] for name in Cell.__dataclass_fields__}).name


def failures(record: Record) -> list[CellFailure]:
    """The versions that failed in a cell, or whose results differ from those of the base."""
    base, found = next(iter(record["versions"])), []
    for cell in record["cells"]:
        texts = dict(cell["errors"])
        for name, value in cell["differences"].items():
            if value is None or value >= AGREEMENT:
                differ = f"results differ from those of {base} by {number(value, '.2g', 'inf')}"
                texts[name] = f"not timed: {'NaN or infinity' if name == base else differ}"
        found += [CellFailure(_name(cell), name, text) for name, text in texts.items()]
    return found


def speed(cell: Record, name: str, base: str) -> float | None:
    """The speed of a version over the base; None if one of them was not timed."""
    times = cell["versions"]
    return times[base]["ms"] / times[name]["ms"] if name in times and base in times else None


def tables(record: Record) -> list[Table]:
    """Times of all cells, and geometric means of the speed over the base by direction and feature."""
    base, *others = record["versions"]
    rows = []
    speeds: dict[str, dict[str, list[float]]] = {}
    for cell in record["cells"]:
        row = [_name(cell)]
        for name in (base, *others):
            samples, over_base = cell["versions"].get(name, {}), speed(cell, name, base)
            row += [number(samples.get("ms"), ".4f"), number(samples.get("spread"), ".1%")]
            if name != base:
                row.append(number(over_base, ".3f"))
            if name != base and over_base:
                of_feature = speeds.setdefault(f"{cell['direction']} {cell['feature']}", {})
                of_feature.setdefault(name, []).append(over_base)
        rows.append(tuple(row))
    columns = ["cell", f"{base} ms", "spread"]
    for name in others:
        columns += [f"{name} ms", "spread", f"speed over {base}"]
    means = []
    for label, of_feature in speeds.items():
        values = [of_feature.get(name, []) for name in others]
        texts = ((number(geometric_mean(one), ".3f"), str(len(one))) for one in values)
        means.append((label, *(text for pair in texts for text in pair)))
    # Without a CUDA device.
    title = "Wall-clock time of the CPU implementation: no CUDA device" if record["is_dry_run"] else "Device time"
    times = Table(title, tuple(columns), tuple(rows))
    headings = tuple(heading for name in others for heading in (name, "cells"))
    return [times, *([Table(f"Speed over {base}, geometric mean", ("", *headings), tuple(means))] if means else [])]


def study_of(versions: Mapping[str, Version]) -> Study[Settings]:
    texts = {name: {"version": one.text, "source_digest": one.source_digest} for name, one in versions.items()}
    return replace(
        STUDY,
        # The digests of `machine` are those of the command's checkout.
        parts=lambda settings, tools: {"versions": texts, "kernels": {}, "cells": []},
        steps=partial(steps, versions=versions),
    )


STUDY = Study(
    name="versions",
    help="versions of cute_flash: before and after a change",
    examples=(
        "before=main after=. --directions bwd --head-dims 128  # a commit and a folder",
        "a=../one b=../two --features deterministic,dropout --lengths 4096 --out versions.json",
    ),
    settings=Settings,
    check=Settings.cells,
    steps=partial(steps, versions={}),
    tables=tables,
    failures=failures,
    notes=lambda record: [f"{name}: {text}" for name, text in record["kernels"].items()],
    runs_on="any",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a folder with a checkout, or a commit; the first is the base"
    parser.add_argument("versions", nargs="+", metavar="NAME=VERSION", help=text)
    STUDY.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    named = [text.partition("=") for text in args.versions]
    chosen = {name: version for name, equals, version in named if name and equals and version}
    if len(chosen) < max(2, len(named)):
        raise ValueError(f"{' '.join(args.versions)}: expected at least two NAME=VERSION with different names")
    settings_of(Settings, args).cells()  # wrong settings are refused before a process starts
    with started(chosen) as versions:
        return study_of(versions).run(args)


COMMAND = replace(STUDY.command, add_arguments=add_arguments, run=run)
