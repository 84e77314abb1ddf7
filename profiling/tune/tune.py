"""Tuning: compiles variants of a kernel, checks them, and times them interleaved with their peers.

All variants are compiled in parallel before the first is launched, so that compilation takes no GPU time;
`compile_only` reports their resources on a machine without a GPU. One process owns the GPU. A variant that fails,
hangs or loses the CUDA context is recorded by name and left out; the others continue in a new process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from cute_flash.spec.arch import ArchSpec
from cute_flash.tools.progress import steps
from profiling.bench import bench
from profiling.bench.suites import SUITES
from profiling.measure.options import (
    MS,
    ROUNDS,
    SEED,
    add_jobs,
    add_options,
    add_out,
    at_least_one,
    int_list,
    option,
    settings_of,
)
from profiling.measure.record import Cell, Result, write_json
from profiling.measure.shapes import DTYPES, MASKS, Shape
from profiling.measure.study import FAILED, OK, Command, Tools, target_arch
from profiling.measure.tables import print_lines, print_unavailable, show
from profiling.measure.workers import Pool, Task
from profiling.peers.directions import DIRECTIONS
from profiling.peers.registry import select, split_available
from profiling.tune import ranking, trial
from profiling.tune.ranking import Entry, Tuning, to_dict
from profiling.tune.trial import Build
from profiling.tune.variants import (
    FAMILIES,
    Selection,
    Variant,
    choose,
    family_of,
    forward_keys,
    sample_problem,
    table_rows,
)

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
    family: str = option("fwd_sm90", "kernel", choices=FAMILIES)
    arch: str = "sm_90"
    dtype: str = option("bf16", choices=DTYPES)
    masks: tuple[str, ...] = option(MASKS, choices=MASKS)
    lengths: tuple[int, ...] | None = option(None, "default: those of the quick suite", type=int_list, metavar="LIST")
    peers: tuple[str, ...] = option(("sdpa-flash",), "the first is the reference")
    rounds: int = ROUNDS(5)
    ms: float = MS(25.0)
    graph: bool = option(False, "time replays of CUDA graphs, without host time")
    seed: int = SEED(0)
    jobs: int = 1
    kernel_cache: str | None = option(None, "keep compiled kernels in DIR for later runs", metavar="DIR")
    resources: bool = option(False, "report registers and spills too, by a second compilation")
    compile_only: bool = option(False, "report registers, spills and shared memory; needs no GPU")

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


@contextmanager
def _kernel_cache(folder: str | None) -> Iterator[dict[str, str]]:
    """The environment of worker processes: they share a kernel cache that is not the user's."""
    with TemporaryDirectory(prefix="cute_flash_tune_") as temporary:
        yield {"CUTE_FLASH_CACHE_DIR": str(Path(folder or temporary).absolute())}


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
    tuning = Tuning(
        settings=asdict(settings),
        machine=tools.facts(),
        method={**DIRECTIONS[settings.direction].method, **METHOD},
        entries=[Entry(variant, variant in rows) for variant in variants],
        peers=() if settings.compile_only else settings.peers,
        unavailable=dict(unavailable or {}),
    )
    tuner = Tuner(tuning, arch, settings, tools)
    with _kernel_cache(settings.kernel_cache) as environment:
        with Pool(settings.jobs, environment, COMPILE_LIMIT_S) as builders:
            tuner.build_all(builders)
        if not settings.compile_only:
            with Pool(1, environment, GPU_LIMIT_S) as gpu:
                tuner.check_all(gpu)
                tuner.time_all(gpu)
    tuning.is_complete = True
    tools.save(to_dict(tuning))
    return tuning


@dataclass(frozen=True)
class Tuner:
    """The three steps of a run."""

    tuning: Tuning
    arch: ArchSpec
    settings: Settings
    tools: Tools

    def build_all(self, pool: Pool) -> None:
        tuning, settings = self.tuning, self.settings
        stores_kernels = not settings.compile_only or settings.kernel_cache is not None
        reads_resources = settings.compile_only or settings.resources
        jobs = list(product(tuning.entries, settings.masks))
        tasks = []
        for entry, mask in jobs:
            plan = entry.variant.plan(sample_problem(entry.variant.head_dim, mask, settings.dtype), self.arch)
            tasks.append(Task(trial.build, (plan, stores_kernels, reads_resources)))
        if stores_kernels:
            forward = forward_keys(settings.family, tuning.head_dims, settings.masks, settings.dtype, self.arch)
            tasks += [Task(trial.precompile, (key,)) for key in forward]
        with steps("compiling", len(tasks)) as done:
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
        self.tools.save(to_dict(tuning))

    def check_all(self, pool: Pool) -> None:
        for mask in self.settings.masks:
            # A variant that hung with one mask is not run with the next.
            entries = [entry for entry in self.tuning.entries if entry.is_right]
            tasks = [Task(trial.check, (entry.variant, self.arch, self.settings.dtype, mask)) for entry in entries]
            with steps(f"checking, {mask}", len(tasks)) as done:
                for outcome in pool.run(tasks):
                    entry = entries[outcome.index]
                    if outcome.error is not None:
                        entry.error = f"{mask}, while it was checked: {outcome.error}"
                    elif outcome.value is not None:
                        entry.wrong = outcome.value
                    done(f"{entry.variant}, {mask}: {entry.complaint or 'right'}")
        self.tools.save(to_dict(self.tuning))

    def time_all(self, pool: Pool) -> None:
        tuning, settings = self.tuning, self.settings
        shapes, l2_bytes, peers = settings.shapes(tuning.head_dims), tuning.machine.get("l2_bytes"), list(tuning.peers)
        before = self.tools.card_state()
        with steps("timing", len(shapes)) as done:
            for shape in shapes:
                right = [e for e in tuning.entries if e.is_right and e.variant.head_dim == shape.head_dim]
                if not right:
                    # Peers are not timed alone.
                    done(f"{shape.id}: no variant is left")
                    continue
                cell = bench.blank_cell(shape, settings.bench, l2_bytes)
                cell, broken = self._time_cell(cell, [entry.variant for entry in right], peers, pool)
                # A peer that broke the process would do so in every cell.
                peers = [name for name in peers if name not in broken]
                after = self.tools.card_state()
                cell = replace(cell, before=before, after=after)
                before = after
                tuning.cells.append(cell)
                for entry in right:
                    entry.read_cell(cell)
                self.tools.save(to_dict(tuning))
                done(_line(cell, tuning))

    def _time_cell(
        self, cell: Cell, variants: Sequence[Variant], peers: Sequence[str], pool: Pool
    ) -> tuple[Cell, dict[str, Result]]:
        """The cell with its results, and the results of peers that broke the process.

        After each of those the others are timed again.
        """
        broken: dict[str, Result] = {}
        while True:
            left = [variant for variant in variants if variant.text not in broken]
            left_peers = [name for name in peers if name not in broken]
            (outcome,) = pool.run([Task(trial.time_cell, (cell, left, left_peers, self.settings.bench, self.arch))])
            if outcome.error is None:
                return replace(outcome.value, results={**outcome.value.results, **broken}), broken
            failed = Result(error=outcome.error)
            if outcome.note is None:
                # No peer had run yet, so none can be left out.
                rest = dict.fromkeys([*left_peers, *(variant.text for variant in left)], failed)
                return replace(cell, results={**rest, **broken}), broken
            broken[outcome.note] = failed


def _built(build: Build) -> str:
    if build.error is not None:
        return f"failed: {build.error}"
    uses = "" if build.registers is None else f", {build.registers} registers, {build.spill_bytes} B spilled"
    return f"built in {build.seconds:.1f} s{uses}"


def _line(cell: Cell, tuning: Tuning) -> str:
    best = next((one for one in tuning.standings(cell.shape.head_dim) if one.entry and one.tflops), None)
    speed = cell.tflops(best.name) if best else None
    theirs = cell.tflops(tuning.peers[0])
    parts = [f"{best.name} {speed:.0f}"] if best and speed else []
    parts += [f"{tuning.peers[0]} {theirs:.0f}"] if theirs else []
    return f"{cell.key}: {', '.join(parts)} TFLOP/s" if parts else f"{cell.key}: nothing was measured"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tile",
        "--tiles",
        dest="tiles",
        action="append",
        default=[],
        metavar="EXPR|FILE",
        help='variants, such as "64: 192x{112,128} s{2,4} q2" (default: neighbours of the tile table\'s rows)',
    )
    add("--max-variants", type=at_least_one, default=30, metavar="N", help="per head dim (default: %(default)s)")
    add("--head-dims", type=int_list, metavar="LIST", help="default: those of the variants, or of the kernel")
    add_options(parser, Settings)
    add_jobs(parser)
    add_out(parser)
    add("--arch", metavar="sm_xx", help="architecture of --compile-only (default: the GPU here)")


def run(args: argparse.Namespace) -> int:
    settings = settings_of(Settings, args)
    compile_only = settings.compile_only
    target = target_arch(args.arch, compile_only, "--compile-only")
    selection = Selection(tuple(args.tiles), args.head_dims, settings.masks, args.max_variants)
    variants = choose(selection, settings.family, target)
    peers, unavailable = split_available([] if compile_only else select(settings.peers), settings.direction)
    print_unavailable(unavailable)
    if not compile_only and not peers:
        raise ValueError(f"--peers {','.join(settings.peers)}: none of them is available, so there is no reference")
    names = tuple(peer.name for peer in peers)
    settings = replace(settings, arch=target.name, peers=names, jobs=args.jobs)
    # Raises for a wrong mask or length, before anything is compiled.
    settings.shapes([variant.head_dim for variant in variants])
    tools = Tools(save=partial(write_json, path=args.out))
    tuning = run_tune(variants, target, settings, tools, unavailable)
    show(ranking.resource_tables(tuning) if compile_only else ranking.speed_tables(tuning))
    print(f"{ranking.RESOURCE_LEGEND if compile_only else ranking.SPEED_LEGEND}\n")
    print_lines("Not ranked", tuning.complaints())
    return FAILED if tuning.complaints() else OK


COMMAND = Command(
    "tune",
    "compile, check, time and rank tiles of a kernel",
    (
        "--head-dims 64,128 --lengths 512,16384 --out tune.json",
        '--tile "128: 128x{112,128,144} s2 q{1,2} c{0,1}" --masks causal',
        '--family bwd_sm80 --tile "128: 64x128 s2 p4 k{2,4} q2" --graph',
        "--compile-only --arch sm_90 --head-dims 128  # needs no GPU",
    ),
    add_arguments,
    run,
)
