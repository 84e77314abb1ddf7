"""The benchmark itself: every provider on every shape, checked, then timed, then written down.

Nothing that one provider does in one cell ends the run: its error becomes the result of that cell. Only a
lost CUDA context does, and then what was measured so far is kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_flash import roofline
from profiling.accuracy import DISTRIBUTIONS, Accuracy, Oracle, draw, poison
from profiling.oracles import forward_oracle
from profiling.providers import Provider, as_bhsd
from profiling.record import Ceiling, Cell, Result, Run
from profiling.suites import DTYPES, Shape
from profiling.timing import Contender, DeviceLost, Failure, Timer, attempt, measure

METHOD = {
    "rounds": "in one process, every round times every provider once and begins with the next provider",
    "turn": "one untimed call, then back-to-back calls for about settings.ms milliseconds between two events",
    "ms": "median over rounds; spread = (max - min) / median",
    "warm_up": "the calls of the accuracy check, one more call, and an estimate of its time",
    "l2": "not flushed: back-to-back calls on the same buffers; see exceeds_l2 of each cell",
    "flops": "4 B H S^2 D, halved when causal",
    "inputs": "standard normal, (B, H, S, D) contiguous; peers that take (B, S, H, D) get contiguous copies",
    "accuracy": "against fp64 on one batch, two heads, up to 1024 rows; yardstick: unfused PyTorch",
}


@dataclass(frozen=True)
class Settings:
    suite: str = "quick"
    direction: str = "fwd"
    dtype: str = "bf16"
    kernels: str = "auto"
    reference: str = "sdpa-flash"
    rounds: int = 5
    ms: float = 25.0
    graph: bool = False
    outliers: bool = False
    seed: int = 0
    ceiling_size: int = 8192


@dataclass(frozen=True)
class Tools:
    """What the benchmark needs of the world; tests bring their own."""

    timer: Timer
    device: torch.device
    facts: Callable[[], dict[str, Any]]
    card_state: Callable[[], dict[str, Any]]
    progress: Callable[[str], None] = lambda line: None
    save: Callable[[Run], None] = lambda run: None


@dataclass
class _Checked:
    """The providers on one set of inputs, after their first call."""

    contenders: dict[str, Contender] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    oracle: Oracle | Failure | None = None


def _output(provider: Provider, contender: Contender, timer: Timer) -> Tensor:
    with contender.context():
        out = as_bhsd(provider, contender.call())
    timer.synchronize()
    return out


def _first_call(
    provider: Provider, inputs: tuple[Tensor, Tensor, Tensor], causal: bool, timer: Timer
) -> tuple[Contender, Tensor]:
    contender = Contender(provider.prepare(*inputs, causal), provider.context)
    poison(inputs[0])
    out = _output(provider, contender, timer)
    if out.shape != inputs[0].shape:
        raise ValueError(f"output of shape {tuple(out.shape)}, expected {tuple(inputs[0].shape)}")
    return contender, out


def _check(
    shape: Shape, providers: Sequence[Provider], distribution: str, settings: Settings, tools: Tools
) -> _Checked:
    inputs = draw(shape, DTYPES[settings.dtype], tools.device, settings.seed, distribution)
    found = _Checked(oracle=attempt(partial(forward_oracle, *inputs, shape.causal), tools.timer))
    for provider in providers:
        done = attempt(partial(_first_call, provider, inputs, shape.causal, tools.timer), tools.timer)
        if isinstance(done, Failure):
            found.errors[provider.name] = done.message
        else:
            found.contenders[provider.name], found.outputs[provider.name] = done
    if isinstance(found.oracle, Oracle):
        peer, judge = found.outputs.get(settings.reference), found.oracle.judge
        found.accuracy = {name: judge(out, peer) for name, out in found.outputs.items()}
    return found


def _is_repeatable(provider: Provider, contender: Contender, first: Tensor, timer: Timer) -> bool:
    """The same input gives the same bits: a forward pass that does not is racing."""
    return torch.equal(_output(provider, contender, timer), first)


def _blank(shape: Shape, settings: Settings, l2_bytes: int | None) -> Cell:
    """What is known of a cell before anything runs."""
    size = roofline.hbm_bytes(shape.problem(settings.dtype))
    return Cell(
        direction=settings.direction,
        dtype=settings.dtype,
        shape=shape,
        flops=shape.flops(settings.direction),
        working_set_bytes=size,
        exceeds_l2=None if l2_bytes is None else size > l2_bytes,
        results={},
    )


def _fill(cell: Cell, providers: Sequence[Provider], settings: Settings, tools: Tools) -> Cell:
    wanted = DISTRIBUTIONS if settings.outliers else DISTRIBUTIONS[:1]
    checks = {name: _check(cell.shape, providers, name, settings, tools) for name in wanted}
    normal = checks["normal"]
    measured = measure(normal.contenders, tools.timer, settings.rounds, settings.ms)
    results = {}
    for provider in providers:
        name = provider.name
        errors = [found.errors.get(name) for found in checks.values()] + [measured.errors.get(name)]
        result = Result(
            accuracy={d: found.accuracy[name] for d, found in checks.items() if name in found.accuracy},
            error=next((error for error in errors if error), None),
        )
        if name in measured.samples:
            again = partial(
                _is_repeatable, provider, normal.contenders[name], normal.outputs[name], tools.timer
            )
            is_repeatable = attempt(again, tools.timer) is True
            result = replace(
                result, is_repeatable=is_repeatable, **Result.timing(measured.samples[name], cell.flops)
            )
        results[name] = result
    oracles = {d: found.oracle for d, found in checks.items()}
    failed = [oracle.message for oracle in oracles.values() if isinstance(oracle, Failure)]
    return replace(
        cell,
        results=results,
        yardstick={d: oracle.yardstick for d, oracle in oracles.items() if isinstance(oracle, Oracle)},
        oracle_error=failed[0] if failed else None,
    )


def run_cell(cell: Cell, providers: Sequence[Provider], settings: Settings, tools: Tools) -> Cell:
    """The cell with its results. Where not even the inputs can be made, that is the result of all."""
    filled = attempt(partial(_fill, cell, providers, settings, tools), tools.timer)
    if isinstance(filled, Failure):
        return replace(cell, results={provider.name: Result(error=filled.message) for provider in providers})
    return filled


def measure_ceiling(settings: Settings, tools: Tools, earlier: Ceiling | None = None) -> Ceiling:
    """cuBLAS on random data; called again at the end of the run, it adds its rounds to the earlier ones."""
    size, dtype = settings.ceiling_size, DTYPES[settings.dtype]
    name = f"matmul {settings.dtype} {size}^3"

    def rounds() -> tuple[float, ...]:
        a, b = (torch.randn((size, size), device=tools.device).to(dtype) for _ in range(2))
        contender = Contender(lambda: a @ b)
        return measure({name: contender}, tools.timer, settings.rounds, settings.ms).samples[name].round_ms

    found = attempt(rounds, tools.timer)
    round_ms = (earlier.round_ms if earlier else ()) + (() if isinstance(found, Failure) else found)
    tflops = 2 * size**3 / statistics.median(round_ms) / 1e9 if round_ms else None
    return Ceiling(name, tflops, round_ms)


def _line(cell: Cell) -> str:
    values = [f"{n} {r.tflops:.0f}" if r.tflops else f"{n} failed" for n, r in cell.results.items()]
    return f"{cell.key}: {', '.join(values)} TFLOP/s"


@torch.no_grad()
def run_bench(
    shapes: Sequence[Shape],
    providers: Sequence[Provider],
    unavailable: dict[str, str],
    settings: Settings,
    tools: Tools,
) -> Run:
    """All cells, saved after each. The state of the card after one cell is that before the next."""
    run = Run(
        settings=asdict(settings),
        machine=tools.facts(),
        method=METHOD,
        ours=tuple(provider.name for provider in providers if provider.is_ours),
        providers=tuple(provider.name for provider in providers),
        unavailable=unavailable,
    )
    l2_bytes = run.machine.get("l2_bytes")
    try:
        run = replace(run, ceiling=measure_ceiling(settings, tools))
        before = tools.card_state()
        for shape in shapes:
            cell = run_cell(_blank(shape, settings, l2_bytes), providers, settings, tools)
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
