"""`python -m profiling bench`: checks and times every peer on every shape, and compares with an earlier run.

If a peer fails in a cell, its error is recorded there, and the run continues. Only a lost CUDA context ends the
run; results up to then are saved.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from cute_flash.planning.launch import LaunchKey
from profiling.bench import compare, fa4_cache, report
from profiling.bench.compare import Change
from profiling.bench.suites import SUITES
from profiling.measure.accuracy import DISTRIBUTIONS, Accuracy, Oracle, poison
from profiling.measure.launches import needed_kernels
from profiling.measure.options import MS, ROUNDS, SEED, int_list, name_list, option
from profiling.measure.record import Ceiling, Cell, Result, Run, load
from profiling.measure.shapes import DTYPES, MASKS, Shape
from profiling.measure.study import CellFailure, Record, Step, Study, Tools
from profiling.measure.tables import Table, print_unavailable
from profiling.measure.timing import Failure, Measured, TimedCall, Timer, attempt, attempt_each, measure
from profiling.peers.directions import DIRECTIONS, Direction, Inputs, calls_of
from profiling.peers.peer import KERNELS, LAYOUTS, Peer, in_layout
from profiling.peers.registry import BY_NAME_ONLY, DEFAULT_NAMES, OURS, select, split_available

METHOD = {
    "rounds": "in one process, every round times every peer once; over as many rounds as there are "
    "peers (twice as many, if odd), each follows every other equally often (Williams design)",
    "batch": "back-to-back calls for about settings.ms ms between two events, after half as many untimed",
    "ms": "median over rounds; spread = (max - min) / median",
    "warm_up": "the calls of the accuracy check, one more call, and an estimate of its time",
    "l2": "not flushed: back-to-back calls on the same buffers; see exceeds_l2 of each cell",
    "inputs": "standard normal; settings.layout is their order in memory. If it is bhsd, peers that take "
    "(B, S, H, D) tensors get contiguous copies",
}


OF_SUITE = "default: those of the suite"


@dataclass(frozen=True)
class Settings:
    suite: str = option("quick", "shapes", choices=SUITES)
    direction: str = option("fwd", "forward or backward pass", choices=DIRECTIONS)
    dtype: str = option("bf16", choices=DTYPES)
    kernels: str = option("auto", "kernel family of cute_flash", choices=KERNELS)
    providers: tuple[str, ...] = option(DEFAULT_NAMES, f"also {','.join(BY_NAME_ONLY)}")
    reference: str = option("sdpa-flash", "peer of the column ours/ref", metavar="NAME")
    head_dims: tuple[int, ...] | None = option(None, OF_SUITE, type=int_list, metavar="LIST")
    masks: tuple[str, ...] | None = option(None, OF_SUITE, choices=MASKS, type=name_list, metavar="LIST")
    lengths: tuple[int, ...] | None = option(None, OF_SUITE, type=int_list, metavar="LIST")
    batch: int | None = option(None, "default: tokens of the suite / length", type=int, metavar="N")
    heads: int | None = option(
        None, "query heads (default: hidden size of the suite / head dim)", type=int, metavar="N"
    )
    rounds: int = ROUNDS(6)
    ms: float = MS(25.0)
    graph: bool = option(False, "time replays of CUDA graphs, without host time")
    outliers: bool = option(False, "check the accuracy on inputs with outliers too")
    layout: str = option("bhsd", "order of the inputs in memory", choices=LAYOUTS)
    seed: int = SEED(0)
    base: str | None = option(None, "compare with the JSON of an earlier run", metavar="FILE")
    threshold: float = option(0.05, "relative fall of ours/ref that is a regression", metavar="X")
    ceiling_size: int = 8192

    def shapes(self) -> list[Shape]:
        return SUITES[self.suite].narrowed(self.lengths, self.head_dims, self.masks, self.batch, self.heads).shapes()

    def peers(self) -> tuple[list[Peer], dict[str, str]]:
        """The peers that can run here, and the reason for each of the others."""
        return split_available(select(self.providers, self.kernels), self.direction)

    def check(self) -> None:
        """Raise `ValueError` or `OSError` if nothing can be measured or compared."""
        self.shapes()
        select([self.reference])
        if self.base is not None:
            load(Path(self.base))
        peers, unavailable = self.peers()
        if not peers:
            print_unavailable(unavailable)
            raise ValueError("nothing was measured; `cute-flash explain` predicts the time of a call without a GPU")


@dataclass
class _Checked:
    """The first call of each peer on one set of inputs; results by peer and output."""

    timed_calls: dict[str, TimedCall] = field(default_factory=dict)
    outputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    accuracy: dict[str, dict[str, Accuracy]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    oracles: dict[str, Oracle] | Failure = field(default_factory=dict)

    def judge(self, outputs: Mapping[str, Tensor], reference: str) -> dict[str, Accuracy]:
        peer = self.outputs.get(reference, {})
        oracles = {} if isinstance(self.oracles, Failure) else self.oracles
        return {name: oracle.judge(outputs[name], peer.get(name)) for name, oracle in oracles.items()}


def _outputs(direction: Direction, peer: Peer, timed_call: TimedCall, timer: Timer) -> dict[str, Tensor]:
    with timed_call.context(), timer.stream():
        outputs = direction.named(peer, timed_call.call())
    timer.synchronize()
    return outputs


def _first_call(
    direction: Direction, peer: Peer, inputs: Inputs, causal: bool, timer: Timer
) -> tuple[TimedCall, dict[str, Tensor]]:
    expected = dict(zip(direction.outputs, inputs, strict=False))
    with peer.context(), timer.stream():
        call = direction.prepare(peer, inputs, causal)
        poison(*expected.values())
    timed_call = TimedCall(call, peer.context)
    outputs = _outputs(direction, peer, timed_call, timer)
    for name, like in expected.items():
        if outputs[name].shape != like.shape:
            shape = tuple(outputs[name].shape)
            raise ValueError(f"{name} of shape {shape}, expected {tuple(like.shape)}")
    return timed_call, outputs


def _check(shape: Shape, peers: Sequence[Peer], distribution: str, settings: Settings, tools: Tools) -> _Checked:
    direction, timer = DIRECTIONS[settings.direction], tools.timer
    made = direction.inputs(shape, DTYPES[settings.dtype], tools.device, settings.seed, distribution)
    inputs = tuple(in_layout(x, settings.layout) for x in made)
    checked = _Checked(oracles=attempt(partial(direction.oracles, inputs, shape.causal), timer))
    calls = {peer.name: partial(_first_call, direction, peer, inputs, shape.causal, timer) for peer in peers}
    done, checked.errors = attempt_each(calls, timer)
    for name, (timed_call, outputs) in done.items():
        checked.timed_calls[name], checked.outputs[name] = timed_call, outputs
    for name, outputs in checked.outputs.items():
        checked.accuracy[name] = checked.judge(outputs, settings.reference)
    return checked


def _result(
    peer: Peer, checks: Mapping[str, _Checked], measured: Measured, cell: Cell, settings: Settings, timer: Timer
) -> Result:
    direction, name = DIRECTIONS[settings.direction], peer.name
    errors = [checked.errors.get(name) for checked in checks.values()] + [measured.errors.get(name)]
    accuracy = {
        direction.label(distribution, output): value
        for distribution, checked in checks.items()
        for output, value in checked.accuracy.get(name, {}).items()
    }
    result = Result(accuracy=accuracy, error=next((error for error in errors if error), None))
    if name not in measured.samples:
        return result
    result = replace(result, **measured.samples[name].with_tflops(cell.flops))
    normal = checks["normal"]
    again = attempt(partial(_outputs, direction, peer, normal.timed_calls[name], timer), timer)
    if isinstance(again, Failure):
        return replace(result, error=again.message)
    if direction.has_fixed_order:
        # A forward pass that gives other bits on the same inputs has a race.
        first = normal.outputs[name]
        return replace(result, is_repeatable=all(torch.equal(again[n], x) for n, x in first.items()))
    # Judge the last call too: it is wrong if accumulators are not zeroed before every call.
    later = {direction.label("normal", n): x for n, x in normal.judge(again, settings.reference).items()}
    return replace(result, accuracy={**accuracy, **{n: x for n, x in later.items() if x.is_wrong}})


def blank_cell(shape: Shape, settings: Settings, l2_bytes: int | None) -> Cell:
    """A cell without results."""
    size = shape.hbm_bytes(settings.dtype, settings.direction)
    return Cell(
        direction=settings.direction,
        dtype=settings.dtype,
        shape=shape,
        flops=shape.flops(settings.direction),
        working_set_bytes=size,
        exceeds_l2=None if l2_bytes is None else size > l2_bytes,
        results={},
    )


@dataclass
class MatrixProduct:
    """A large product through cuBLAS on random data. Every cell times it in the same rounds as the peers."""

    name: str
    flops: float
    timed_call: TimedCall
    round_ms: list[float] = field(default_factory=list)  # of all cells so far

    @staticmethod
    def of(settings: Settings, tools: Tools) -> MatrixProduct:
        size, dtype = settings.ceiling_size, DTYPES[settings.dtype]
        a, b = (torch.randn((size, size), device=tools.device).to(dtype) for _ in range(2))
        return MatrixProduct(f"matmul {settings.dtype} {size}^3", 2.0 * size**3, TimedCall(lambda: a @ b))

    def add(self, round_ms: Sequence[float]) -> float | None:
        """Add the rounds of a cell; return their TFLOP/s."""
        self.round_ms.extend(round_ms)
        return self._tflops(round_ms)

    def ceiling(self) -> Ceiling:
        return Ceiling(self.name, self._tflops(self.round_ms), tuple(self.round_ms))

    def _tflops(self, round_ms: Sequence[float]) -> float | None:
        return self.flops / statistics.median(round_ms) / 1e9 if round_ms else None


def _fill(cell: Cell, peers: Sequence[Peer], settings: Settings, tools: Tools, product: MatrixProduct | None) -> Cell:
    wanted = DISTRIBUTIONS if settings.outliers else DISTRIBUTIONS[:1]
    checks = {name: _check(cell.shape, peers, name, settings, tools) for name in wanted}
    normal = checks["normal"]
    timed_calls = normal.timed_calls | ({} if product is None else {product.name: product.timed_call})
    measured, ceiling = measure(timed_calls, tools.timer, settings.rounds, settings.ms), None
    if product is not None and product.name in measured.samples:
        ceiling = product.add(measured.samples[product.name].round_ms)
    label = DIRECTIONS[settings.direction].label
    oracles = {distribution: checked.oracles for distribution, checked in checks.items()}
    failed = [one.message for one in oracles.values() if isinstance(one, Failure)]
    return replace(
        cell,
        results={peer.name: _result(peer, checks, measured, cell, settings, tools.timer) for peer in peers},
        yardstick={
            label(distribution, output): oracle.yardstick
            for distribution, by_output in oracles.items()
            if not isinstance(by_output, Failure)
            for output, oracle in by_output.items()
        },
        oracle_error=failed[0] if failed else None,
        ceiling_tflops=ceiling,
    )


def run_cell(
    cell: Cell, peers: Sequence[Peer], settings: Settings, tools: Tools, product: MatrixProduct | None = None
) -> Cell:
    """The cell with its results. If the inputs cannot be made, that error is the result of all peers."""
    filled = attempt(partial(_fill, cell, peers, settings, tools, product), tools.timer)
    if isinstance(filled, Failure):
        return replace(cell, results={peer.name: Result(error=filled.message) for peer in peers})
    return filled


def steps(settings: Settings, tools: Tools) -> list[Step]:
    """The cells; then the matrix product in the rounds of all of them."""
    peers, _ = settings.peers()
    tools = tools if settings.graph else replace(tools, timer=tools.events)
    shapes, l2_bytes = settings.shapes(), tools.facts().get("l2_bytes")
    # The state of the card after each cell, and before the first.
    states: list[Record] = []
    product = cache(lambda: MatrixProduct.of(settings, tools))

    @torch.no_grad()
    def cell_of(shape: Shape) -> Record:
        before = states[-1] if states else tools.card_state()
        takers = [peer for peer in peers if peer.takes(shape.head_dim)]
        cell = run_cell(blank_cell(shape, settings, l2_bytes), takers, settings, tools, product())
        states.append(tools.card_state())
        return replace(cell, before=before, after=states[-1]).as_dict()

    ceiling = Step("ceiling", "the matrix product of all cells", lambda: asdict(product().ceiling()))
    cells = [Step("cells", shape.id, partial(cell_of, shape)) for shape in shapes]
    compiled = [Step(None, f"kernels of {fa4_cache.FA4}", partial(_compile_fa4, settings, tools.jobs))]
    return [*compiled * any(peer.name == fa4_cache.FA4 for peer in peers), *cells, ceiling]


def _compile_fa4(settings: Settings, jobs: int) -> Record:
    fa4_cache.fill(fa4_cache.representatives(settings.shapes()), settings.direction, settings.dtype, jobs)
    return {}


def kernels(settings: Settings, tools: Tools) -> list[LaunchKey]:
    peers, _ = settings.peers()
    dtype, directions = DTYPES[settings.dtype], (settings.direction,)
    return needed_kernels(calls_of(peers, settings.shapes(), directions, dtype, tools.device, settings.layout))


def _line(title: str, found: Record) -> str:
    """The progress of a cell."""
    results = found.get("results", {})
    values = [f"{name} {one['tflops']:.0f}" if one["tflops"] else f"{name} failed" for name, one in results.items()]
    return f"{title}: {', '.join(values)} TFLOP/s" if values else title


def parts(settings: Settings, tools: Tools) -> Record:
    peers, unavailable = settings.peers()
    return {
        "method": {**METHOD, **DIRECTIONS[settings.direction].method},
        "ours": [peer.name for peer in peers if peer.is_ours],
        "providers": [peer.name for peer in peers],
        "unavailable": unavailable,
        "ceiling": {},
        "cells": [],
    }


def changes(record: Record) -> list[Change] | None:
    """The changes since the base; None without a base."""
    base = record["settings"]["base"]
    return None if base is None else compare.changes(Run.from_dict(record), load(Path(base)))


def tables(record: Record) -> list[Table]:
    found, compared = report.tables(Run.from_dict(record)), changes(record)
    return found if compared is None else [*found, report.change_table(compared, record["settings"]["threshold"])]


def failures(record: Record) -> list[CellFailure]:
    found, compared, settings = report.failures(Run.from_dict(record)), changes(record), record["settings"]
    if compared == []:
        found.append(CellFailure("all cells", OURS[0], f"none of the base has a ratio to {settings['reference']}"))
    worse = [one for one in compared or () if one.is_regression(settings["threshold"])]
    return found + [CellFailure(one.key, OURS[0], "regression") for one in worse]


STUDY = Study(
    name="bench",
    help="speed and accuracy beside other libraries",
    examples=(
        "--suite paper --out paper.json",
        "--suite paper --direction bwd --base paper-bwd.json  # exit status 1 if a cell got slower",
        "--head-dims 128 --masks causal --lengths 512,4096 --providers cute_flash,sdpa-flash,flex",
        "--batch 2 --heads 32 --lengths 8192 --head-dims 128 --masks causal  # one shape",
    ),
    settings=Settings,
    check=Settings.check,
    kernels=kernels,
    parts=parts,
    steps=steps,
    tables=tables,
    failures=failures,
    notes=lambda record: [report.LEGEND, ""],
    line=_line,
    ours=(*OURS, report.ORACLE),
)
