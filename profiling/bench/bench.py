"""The benchmark: checks and times every peer on every shape, and records the results.

If a peer fails in a cell, its error is recorded there, and the run continues. Only a lost CUDA context ends the
run; results up to then are saved.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from profiling.bench.suites import SUITES
from profiling.measure.accuracy import DISTRIBUTIONS, Accuracy, Oracle, poison
from profiling.measure.options import MS, ROUNDS, SEED, option
from profiling.measure.record import Ceiling, Cell, Result, Run
from profiling.measure.shapes import DTYPES, Shape
from profiling.measure.study import Tools
from profiling.measure.timing import DeviceLost, Failure, Measured, TimedCall, Timer, attempt, measure
from profiling.peers.directions import DIRECTIONS, Direction, Inputs
from profiling.peers.peer import KERNELS, LAYOUTS, Peer, in_layout

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


@dataclass(frozen=True)
class Settings:
    suite: str = option("quick", "shapes", choices=SUITES)
    direction: str = option("fwd", "forward or backward pass", choices=DIRECTIONS)
    dtype: str = option("bf16", choices=DTYPES)
    kernels: str = option("auto", "kernel family of cute_flash", choices=KERNELS)
    reference: str = option("sdpa-flash", "peer of the column ours/ref", metavar="NAME")
    rounds: int = ROUNDS(6)
    ms: float = MS(25.0)
    graph: bool = option(False, "time replays of CUDA graphs, without host time")
    outliers: bool = option(False, "check the accuracy on inputs with outliers too")
    layout: str = option("bhsd", "order of the inputs in memory", choices=LAYOUTS)
    seed: int = SEED(0)
    ceiling_size: int = 8192


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
    for peer in peers:
        done = attempt(partial(_first_call, direction, peer, inputs, shape.causal, timer), timer)
        if isinstance(done, Failure):
            checked.errors[peer.name] = done.message
        else:
            checked.timed_calls[peer.name], checked.outputs[peer.name] = done
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


def _fill(cell: Cell, peers: Sequence[Peer], settings: Settings, tools: Tools) -> Cell:
    wanted = DISTRIBUTIONS if settings.outliers else DISTRIBUTIONS[:1]
    checks = {name: _check(cell.shape, peers, name, settings, tools) for name in wanted}
    normal = checks["normal"]
    measured = measure(normal.timed_calls, tools.timer, settings.rounds, settings.ms)
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
    )


def run_cell(cell: Cell, peers: Sequence[Peer], settings: Settings, tools: Tools) -> Cell:
    """The cell with its results. If the inputs cannot be made, that error is the result of all peers."""
    filled = attempt(partial(_fill, cell, peers, settings, tools), tools.timer)
    if isinstance(filled, Failure):
        return replace(cell, results={peer.name: Result(error=filled.message) for peer in peers})
    return filled


def measure_ceiling(settings: Settings, tools: Tools, earlier: Ceiling | None = None) -> Ceiling:
    """The speed of cuBLAS on random data. A second call, at the end of the run, adds its rounds to `earlier`."""
    size, dtype = settings.ceiling_size, DTYPES[settings.dtype]
    name = f"matmul {settings.dtype} {size}^3"

    def rounds() -> tuple[float, ...]:
        a, b = (torch.randn((size, size), device=tools.device).to(dtype) for _ in range(2))
        timed_call = TimedCall(lambda: a @ b)
        return measure({name: timed_call}, tools.timer, settings.rounds, settings.ms).samples[name].round_ms

    times = attempt(rounds, tools.timer)
    round_ms = (earlier.round_ms if earlier else ()) + (() if isinstance(times, Failure) else times)
    tflops = 2 * size**3 / statistics.median(round_ms) / 1e9 if round_ms else None
    return Ceiling(name, tflops, round_ms)


def _line(cell: Cell) -> str:
    values = [f"{n} {r.tflops:.0f}" if r.tflops else f"{n} failed" for n, r in cell.results.items()]
    return f"{cell.key}: {', '.join(values)} TFLOP/s"


@torch.no_grad()
def run_bench(
    shapes: Sequence[Shape], peers: Sequence[Peer], unavailable: dict[str, str], settings: Settings, tools: Tools
) -> Run:
    """Run all cells; results are saved after each."""
    run = Run(
        settings=asdict(settings),
        machine=tools.facts(),
        method={**METHOD, **DIRECTIONS[settings.direction].method},
        ours=tuple(peer.name for peer in peers if peer.is_ours),
        names=tuple(peer.name for peer in peers),
        unavailable=unavailable,
    )
    l2_bytes = run.machine.get("l2_bytes")
    try:
        run = replace(run, ceiling=measure_ceiling(settings, tools))
        before = tools.card_state()
        for shape in shapes:
            cell = run_cell(blank_cell(shape, settings, l2_bytes), peers, settings, tools)
            after = tools.card_state()
            cell = replace(cell, before=before, after=after)
            before = after
            run = replace(run, cells=(*run.cells, cell))
            tools.save(run)
            tools.progress(_line(cell))
        run = replace(run, ceiling=measure_ceiling(settings, tools, run.ceiling), is_complete=True)
    except DeviceLost as lost:
        at = shapes[len(run.cells)].id if len(run.cells) < len(shapes) else "the matrix product"
        run = replace(run, stopped=f"the CUDA context was lost at {at}: {lost}")
    tools.save(run)
    return run
