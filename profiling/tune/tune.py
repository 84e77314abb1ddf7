"""Tuning: compiles variants of a kernel, checks them, and times them interleaved with their peers.

All variants are compiled in parallel before the first is launched, so that compilation takes no GPU time;
`compile_only` reports their resources on a machine without a GPU. One process owns the GPU. A variant that fails,
hangs or loses the CUDA context is recorded by name and left out; the others continue in a new process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from cute_flash.spec.arch import ArchSpec
from profiling.bench import bench
from profiling.bench.suites import SUITES
from profiling.measure.record import Cell, Result
from profiling.measure.shapes import Shape
from profiling.measure.workers import Outcome, Task
from profiling.peers.directions import DIRECTIONS
from profiling.tune import trial
from profiling.tune.ranking import Entry, Tuning
from profiling.tune.trial import Build
from profiling.tune.variants import Variant, family_of, forward_keys, sample_problem, table_rows

# The widest kernels compile in less than a minute on one core; a step on the GPU takes far less than a second.
COMPILE_LIMIT_S, GPU_LIMIT_S = 900.0, 120.0
METHOD = {
    **bench.METHOD,
    "check": f"against fp64 on {len(trial.ODD_SHAPES)} small shapes, NaN in new memory; a forward twice",
    "calls": "variants: their launches, without autograd; peers: as in bench",
    "ranking": "geometric mean of the speed over the cells, of variants that are right in all of them",
    "isolation": "all launches in one process, which is replaced if a variant breaks or hangs it",
}


@dataclass(frozen=True)
class Settings:
    family: str = "fwd_sm90"
    arch: str = "sm_90"
    dtype: str = "bf16"
    masks: tuple[str, ...] = ("full", "causal")
    lengths: tuple[int, ...] | None = None  # None: those of the quick suite
    peers: tuple[str, ...] = ("sdpa-flash",)
    rounds: int = 5
    ms: float = 25.0
    graph: bool = False
    seed: int = 0
    jobs: int = 1
    resources: bool = False
    compile_only: bool = False

    @property
    def direction(self) -> str:
        return family_of(self.family).direction

    def shapes(self, head_dims: Sequence[int]) -> list[Shape]:
        return SUITES["quick"].narrowed(self.lengths, head_dims, self.masks).shapes()

    @property
    def bench(self) -> bench.Settings:
        return bench.Settings(
            suite="tune",
            direction=self.direction,
            dtype=self.dtype,
            kernels=self.family,
            reference=self.peers[0],
            rounds=self.rounds,
            ms=self.ms,
            graph=self.graph,
            seed=self.seed,
        )


class Runner(Protocol):
    """A pool of worker processes."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]: ...


@dataclass(frozen=True)
class Tools:
    """The worker pool and callbacks of tuning; tests replace them."""

    pool: Callable[[int, Mapping[str, str], float], AbstractContextManager[Runner]]
    facts: Callable[[], dict[str, Any]]
    card_state: Callable[[], dict[str, Any]]
    progress: Callable[[str, int], AbstractContextManager[Callable[[str], None]]]
    save: Callable[[Tuning], None] = lambda tuning: None
    cache: Path | None = None  # folder of compiled kernels; None: a temporary one


@contextmanager
def _cache_folder(tools: Tools) -> Iterator[dict[str, str]]:
    """The environment of worker processes: they share a kernel cache that is not the user's."""
    with TemporaryDirectory(prefix="cute_flash_tune_") as folder:
        yield {"CUTE_FLASH_CACHE_DIR": str(tools.cache.absolute() if tools.cache else folder)}


def run_tune(
    variants: Sequence[Variant],
    arch: ArchSpec,
    settings: Settings,
    tools: Tools,
    unavailable: Mapping[str, str] | None = None,
) -> Tuning:
    """Compile, check and time all variants; results are saved after each of the three steps and after each cell.

    `unavailable`: the peers that cannot run here, with the reason.
    """
    head_dims = {variant.head_dim for variant in variants}
    rows = {row for d in head_dims for row in table_rows(settings.family, d, arch, settings.masks)}
    entries = [Entry(variant, variant in rows) for variant in variants]
    tuning = Tuning(
        settings=asdict(settings),
        machine=tools.facts(),
        method={**DIRECTIONS[settings.direction].method, **METHOD},
        entries=entries,
        peers=() if settings.compile_only else settings.peers,
        unavailable=dict(unavailable or {}),
    )
    with _cache_folder(tools) as environment:
        with tools.pool(settings.jobs, environment, COMPILE_LIMIT_S) as builders:
            _build_all(tuning, arch, settings, tools, builders)
        tools.save(tuning)
        if not settings.compile_only:
            with tools.pool(1, environment, GPU_LIMIT_S) as gpu:
                _check_all(tuning, arch, settings, tools, gpu)
                tools.save(tuning)
                _time_all(tuning, arch, settings, tools, gpu)
    tuning.is_complete = True
    tools.save(tuning)
    return tuning


def _build_all(tuning: Tuning, arch: ArchSpec, settings: Settings, tools: Tools, pool: Runner) -> None:
    stores_kernels = not settings.compile_only or tools.cache is not None
    reads_resources = settings.compile_only or settings.resources
    jobs = list(product(tuning.entries, settings.masks))
    tasks = []
    for entry, mask in jobs:
        plan = entry.variant.plan(sample_problem(entry.variant.head_dim, mask, settings.dtype), arch)
        tasks.append(Task(trial.build, (plan, stores_kernels, reads_resources)))
    if stores_kernels:
        forward = forward_keys(settings.family, tuning.head_dims, settings.masks, settings.dtype, arch)
        tasks += [Task(trial.precompile, (key,)) for key in forward]
    with tools.progress("compiling", len(tasks)) as done:
        for outcome in pool.run(tasks):
            if outcome.index >= len(jobs):
                if outcome.error is not None:
                    raise RuntimeError(f"a kernel of the forward pass was not compiled: {outcome.error}")
                done("a kernel of the forward pass: compiled")
                continue
            entry, mask = jobs[outcome.index]
            build = outcome.value if outcome.error is None else Build(error=outcome.error)
            entry.builds[mask] = build
            if build.error is not None:
                entry.error = f"{mask}: {build.error}"
            done(f"{entry.variant}, {mask}: {_built(build)}")
    for entry in tuning.entries:
        # In the order of the masks: processes end in any order.
        entry.builds = {mask: entry.builds[mask] for mask in settings.masks}


def _built(build: Build) -> str:
    if build.error is not None:
        return f"failed: {build.error}"
    uses = "" if build.registers is None else f", {build.registers} registers, {build.spill_bytes} B spilled"
    return f"built in {build.seconds:.1f} s{uses}"


def _check_all(tuning: Tuning, arch: ArchSpec, settings: Settings, tools: Tools, pool: Runner) -> None:
    for mask in settings.masks:
        # A variant that hung with one mask is not run with the next.
        entries = [entry for entry in tuning.entries if entry.is_right]
        tasks = [Task(trial.check, (entry.variant, arch, settings.dtype, mask)) for entry in entries]
        with tools.progress(f"checking, {mask}", len(tasks)) as done:
            for outcome in pool.run(tasks):
                entry = entries[outcome.index]
                if outcome.error is not None:
                    entry.error = f"{mask}, while it was checked: {outcome.error}"
                elif outcome.value is not None:
                    entry.wrong = outcome.value
                done(f"{entry.variant}, {mask}: {entry.complaint or 'right'}")


def _time_all(tuning: Tuning, arch: ArchSpec, settings: Settings, tools: Tools, pool: Runner) -> None:
    shapes, l2_bytes = settings.shapes(tuning.head_dims), tuning.machine.get("l2_bytes")
    peers = list(tuning.peers)
    before = tools.card_state()
    with tools.progress("timing", len(shapes)) as done:
        for shape in shapes:
            right = [e for e in tuning.entries if e.is_right and e.variant.head_dim == shape.head_dim]
            if not right:
                # Peers are not timed alone.
                done(f"{shape.id}: no variant is left")
                continue
            cell = bench.blank_cell(shape, settings.bench, l2_bytes)
            cell, broken = _time_cell(cell, [e.variant for e in right], peers, settings, arch, pool)
            # A peer that broke the process would do so in every cell.
            peers = [name for name in peers if name not in broken]
            after = tools.card_state()
            cell = replace(cell, before=before, after=after)
            before = after
            tuning.cells.append(cell)
            for entry in right:
                entry.read_cell(cell)
            tools.save(tuning)
            done(_line(cell, tuning))


def _time_cell(
    cell: Cell, variants: Sequence[Variant], peers: Sequence[str], settings: Settings, arch: ArchSpec, pool: Runner
) -> tuple[Cell, dict[str, Result]]:
    """The cell with its results, and the results of peers that broke the process.

    After each of those the others are timed again.
    """
    broken: dict[str, Result] = {}
    while True:
        left = [variant for variant in variants if variant.text not in broken]
        left_peers = [name for name in peers if name not in broken]
        task = Task(trial.time_cell, (cell, left, left_peers, settings.bench, arch))
        (outcome,) = pool.run([task])
        if outcome.error is None:
            return replace(outcome.value, results={**outcome.value.results, **broken}), broken
        failed = Result(error=outcome.error)
        if outcome.note is None:
            # No peer had run yet, so none can be left out.
            rest = dict.fromkeys([*left_peers, *(variant.text for variant in left)], failed)
            return replace(cell, results={**rest, **broken}), broken
        broken[outcome.note] = failed


def _line(cell: Cell, tuning: Tuning) -> str:
    best = next((one for one in tuning.standings(cell.shape.head_dim) if one.entry and one.tflops), None)
    speed = cell.tflops(best.name) if best else None
    theirs = cell.tflops(tuning.peers[0])
    parts = [f"{best.name} {speed:.0f}"] if best and speed else []
    parts += [f"{tuning.peers[0]} {theirs:.0f}"] if theirs else []
    return f"{cell.key}: {', '.join(parts)} TFLOP/s" if parts else f"{cell.key}: nothing was measured"
