"""A study: one command, its settings, its steps, the kernels to compile first, its result file and its tables.

    settings   a frozen dataclass; fields made by `option` are options of the command
    kernels    the kernels of cute_flash in a run; they are compiled in parallel before the first step
    steps      the measurements, in order; each adds its result to a part of the record
    record     the dict that is written as JSON after every step
    tables     of a record, so that they can be made from a file too

profiling/README.md has an example. `Tools` is all that a measurement needs of the machine; tests replace it.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple

import torch

from cute_flash.planning.launch import LaunchKey
from cute_flash.spec import arch
from cute_flash.spec.arch import ArchSpec
from cute_flash.tools.precompile import precompile_keys
from cute_flash.tools.progress import steps
from profiling.measure import machine
from profiling.measure.options import S, add_jobs, add_options, add_out, settings_of
from profiling.measure.record import write_json
from profiling.measure.tables import Table, markdown, print_lines, print_unavailable, show
from profiling.measure.timing import DeviceLost, EventTimer, GraphTimer, Timer, WallTimer

SCHEMA = 1
# Exit status: 0 success, 1 a failure, a regression or a missed goal, 2 nothing was measured.
OK, FAILED, NOT_MEASURED = 0, 1, 2
Record = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """A command of `python -m profiling`: its parser, and a function that returns its exit status."""

    name: str
    help: str
    examples: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def need_gpu(remedy: str = "") -> None:
    if not arch.has_gpu():
        raise ValueError(f"no CUDA device: nothing can be measured{remedy}")


def target_arch(name: str | None, is_without_gpu: bool, option_name: str) -> ArchSpec:
    """The architecture of the GPU here, or of --arch with the option that needs no GPU."""
    if name and not is_without_gpu:
        raise ValueError(f"--arch {name}: timed kernels run on the GPU here; use it with {option_name}")
    if name:
        return arch.by_name(name)
    if not arch.has_gpu():
        raise ValueError(f"no CUDA device; without one: {option_name} --arch sm_90")
    return arch.detect(torch.cuda.current_device())


@dataclass(frozen=True)
class Tools:
    """Timers, device, facts and callbacks of a measurement."""

    timer: Timer = field(default_factory=GraphTimer)  # device time
    events: Timer = field(default_factory=EventTimer)  # with host time
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    facts: Callable[[], Record] = lambda: machine.facts()
    card_state: Callable[[], Record] = lambda: machine.card_state()
    clock: Callable[[], float] = time.perf_counter
    jobs: int = 1  # compiling processes
    progress: Callable[[str], None] = lambda line: None
    save: Callable[[Any], None] = lambda record: None

    @staticmethod
    def on_cpu() -> Tools:
        """For a dry run: wall time on the CPU."""
        return Tools(WallTimer(), WallTimer(), torch.device("cpu"))

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """The most bytes that a call allocates at once beyond those that are allocated before it; None on the CPU."""
        # The first call on a stream allocates workspaces of cuBLAS, which stay.
        call()
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def release(self) -> None:
        """Give cached memory back."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


class CellFailure(NamedTuple):
    """A call or a peer that failed in a cell, or whose result is wrong."""

    cell: str
    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.cell}, {self.name}: {self.message}"


def failures_in(cells: Iterable[Record], title: Callable[[Record], str]) -> list[CellFailure]:
    """The entries of "failures" of each cell."""
    return [CellFailure(title(cell), name, text) for cell in cells for name, text in cell["failures"].items()]


def _add(record: Record, found: Record) -> None:
    """Add the results of a step to the parts of a record."""
    for name, value in found.items():
        if isinstance(record.get(name), list):
            record[name] += value if isinstance(value, list) else [value]
        else:
            record[name] = {**record.get(name, {}), **value}


class Step(NamedTuple):
    """A measurement. Its result is added to a part of the record, which is a list or a dict.

    Without a part, the result is a dict of parts.
    """

    part: str | None
    title: str
    measure: Callable[[], Any]


@dataclass(frozen=True)
class Study(Generic[S]):
    name: str
    help: str
    examples: tuple[str, ...]
    settings: type[S]
    steps: Callable[[S, Tools], Sequence[Step]]
    tables: Callable[[Record], list[Table]]
    kernels: Callable[[S, Tools], Sequence[LaunchKey]] | None = None
    method: Mapping[str, Any] = field(default_factory=dict)
    # The parts of the record besides settings, machine and method.
    parts: Callable[[S, Tools], Record] = lambda settings, tools: {"cells": []}
    check: Callable[[S], Any] = lambda settings: None  # raises ValueError for wrong settings
    failures: Callable[[Record], list[CellFailure]] = lambda record: []
    line: Callable[[str, Any], str] = lambda title, found: title  # of the progress: the title and result of a step
    # The names whose failure fails the command; None: all. Peers may fail.
    ours: Collection[str] | None = None
    # Entered around compilation and measurement.
    context: Callable[[S], AbstractContextManager[Any]] = lambda settings: nullcontext()
    notes: Callable[[Record], list[str]] = lambda record: []  # lines below the tables
    # A file results/<gpu>/<date>-<name>.json, and .txt with the tables, if --out names no other file.
    has_own_file: bool = False
    small: S | None = None  # of a dry run on the CPU; None: the command has no --dry-run
    # "cuda"; "cpu"; or "any": on a GPU if there is one.
    runs_on: str = "cuda"

    @property
    def command(self) -> Command:
        return Command(self.name, self.help, self.examples, self.add_arguments, self.run)

    def measure(self, settings: S, tools: Tools, steps: Sequence[Step] | None = None) -> Record:
        """Run the steps, by default all; `tools.save` gets the record after each.

        Steps beyond `settings.limit_s` are left out.
        """
        record: Record = {
            "schema": SCHEMA,
            "settings": asdict(settings),  # type: ignore[call-overload]
            "machine": tools.facts(),
            "method": dict(self.method),
            "card": {"before": tools.card_state(), "after": None},
            "left_out": [],
            "is_dry_run": tools.device.type == "cpu",
            "is_complete": False,
            "stopped": None,
            **self.parts(settings, tools),
        }
        end = tools.clock() + getattr(settings, "limit_s", math.inf)
        try:
            for part, title, measure_step in self.steps(settings, tools) if steps is None else steps:
                found: Any = {}
                if tools.clock() > end:
                    record["left_out"].append(title)
                else:
                    found = measure_step()
                    _add(record, found if part is None else {part: found})
                tools.save(record)
                tools.progress(self.line(title, found))
            record["is_complete"] = True
        except DeviceLost as lost:
            record["stopped"] = f"the CUDA context was lost at {title}: {lost}"
        record["card"]["after"] = tools.card_state()
        tools.save(record)
        return record

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_options(parser, self.settings)
        if self.kernels is not None:
            add_jobs(parser)
        if self.has_own_file:
            add_out(parser, f"default: results/<gpu>/<date>-{self.name}.json")
        else:
            add_out(parser)
        if self.small is not None:
            parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU; writes only to --out")

    def run(self, args: argparse.Namespace) -> int:
        is_dry_run = self.small is not None and args.dry_run
        settings = settings_of(self.settings, args, self.small if is_dry_run else None)
        # Wrong settings are refused before anything is compiled.
        self.check(settings)
        if self.runs_on == "cuda" and not is_dry_run:
            need_gpu("; --dry-run tries it on the CPU" if self.small is not None else "")
        is_on_gpu = self.runs_on != "cpu" and not is_dry_run and arch.has_gpu()
        tools = Tools() if is_on_gpu else Tools.on_cpu()
        facts = {**tools.facts(), "gpu": None} if self.runs_on == "cpu" else tools.facts()
        path = args.out or (machine.default_path(self.name, facts) if self.has_own_file and not is_dry_run else None)
        jobs = getattr(args, "jobs", 1)
        tools = replace(tools, facts=lambda: facts, save=partial(write_json, path=path), jobs=jobs)
        with self.context(settings):
            if self.kernels is not None and is_on_gpu:
                precompile_keys(list(self.kernels(settings, tools)), jobs)
            chosen = self.steps(settings, tools)
            with steps(f"measuring {self.name}", len(chosen)) as done:
                record = self.measure(settings, replace(tools, progress=done), chosen)
        return self.report(record, path if self.has_own_file else None)

    def report(self, record: Record, path: Path | None) -> int:
        """Print the tables; with a path, write the record there and the tables beside it."""
        tables, notes = self.tables(record), self.notes(record)
        failures = [*map(str, self.failures(record))]
        failures += [f"{title}: left out, the time was up" for title in record.get("left_out", ())]
        failures += [record["stopped"]] if record.get("stopped") else []
        print_unavailable(record.get("unavailable", {}))
        show(tables)
        print("\n".join(notes), end="\n" if notes else "")
        print_lines("Failures", failures)
        if path is not None:
            write_json(record, path)
            text = "\n".join([machine.headline(record["machine"]), "", *map(markdown, tables), *notes, *failures, ""])
            path.with_suffix(".txt").write_text(text, encoding="utf-8")
        return FAILED if self.has_failed(record) else OK

    def has_failed(self, record: Record) -> bool:
        """Whether a call of ours failed, or a step was left out."""
        is_ours = [self.ours is None or one.name in self.ours for one in self.failures(record)]
        return any(is_ours) or bool(record.get("left_out") or record.get("stopped"))
