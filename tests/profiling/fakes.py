"""A fake clock, peers with given speeds and errors, and a GPU that runs launches on CPU tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.planning.plan import CompileKey
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import Band
from profiling.bench import report
from profiling.bench.bench import STUDY, Settings
from profiling.measure.accuracy import Accuracy, Errors
from profiling.measure.record import Ceiling, Cell, Result, Run
from profiling.measure.shapes import Shape
from profiling.measure.study import Tools
from profiling.measure.timing import Batch, repeat
from profiling.peers.peer import Peer
from profiling.peers.registry import OURS
from tests.fakes.recording import RecordingGpu


@dataclass
class FakeTimer:
    now_ms: float = 0.0
    # Two events always have different times, even if nothing between them advances the clock.
    event_ms: float = 1e-9
    is_lost: bool = False
    intervals: list[float] = field(default_factory=list)
    is_on_stream: bool = False

    def batch(self, call: Callable[[], Any], calls: int) -> Batch:
        return Batch(lambda: repeat(call, calls), calls)

    def milliseconds(self, run: Callable[[], None]) -> float:
        start = self.now_ms
        run()
        self.now_ms += self.event_ms
        self.intervals.append(self.now_ms - start)
        return self.intervals[-1]

    def synchronize(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.is_on_stream = True
        yield
        self.is_on_stream = False


@dataclass(frozen=True)
class FakePeer:
    """Attention in the input's dtype that takes `call_ms`; `spoil` and `spoil_gradients` change its results."""

    name: str
    timer: FakeTimer
    call_ms: float = 1.0
    is_ours: bool = False
    is_bshd: bool = False
    spoil: Callable[[Tensor], Any] = lambda out: None
    spoil_gradients: Callable[[Tensor, Tensor, Tensor], Any] = lambda dq, dk, dv: None
    reason: str | None = None
    backward_reason: str | None = None
    head_dims: range = range(1, 1000)

    def takes(self, head_dim: int) -> bool:
        return head_dim in self.head_dims

    def available(self, direction: str = "fwd") -> str | None:
        return self.reason or (self.backward_reason if direction == "bwd" else None)

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
        exact, _, _ = reference.forward(q, k, v, reference.plain_args(q, Band.of(causal, (None, None))))

        def call() -> Tensor:
            self.timer.now_ms += self.call_ms
            out = exact.clone()
            self.spoil(out)
            return out.transpose(1, 2).contiguous() if self.is_bshd else out

        return call

    def prepare_backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool
    ) -> Callable[[], tuple[Tensor, ...]]:
        args = reference.plain_args(q, Band.of(causal, (None, None)))
        out, lse, _ = reference.forward(q, k, v, args)
        *exact, _ = reference.backward(dout, None, q, k, v, out, lse, args)

        def call() -> tuple[Tensor, ...]:
            self.timer.now_ms += self.call_ms
            grads = tuple(x.clone() for x in exact)
            self.spoil_gradients(*grads)
            return tuple(x.transpose(1, 2).contiguous() for x in grads) if self.is_bshd else grads

        return call


class CpuGpu(RecordingGpu):
    """A GPU for CPU tensors whose launches call `launch(key, operands)`, with the operands by name."""

    def __init__(self, arch: ArchSpec, launch: Callable[[CompileKey, dict[str, Any]], None]) -> None:
        super().__init__(arch)
        self.launch = launch

    def kernel(self, key: CompileKey) -> Callable[..., None]:
        return lambda *args: self.launch(key, dict(zip(key.operands, args, strict=True)))


SMALL = Shape(batch=2, heads=3, heads_kv=3, seqlen=300, head_dim=16, causal=True)


SETTINGS = Settings(rounds=3, ms=5.0, ceiling_size=16)


def tools(timer: FakeTimer, **overrides: Any) -> Tools:
    facts = {"gpu": "fake", "l2_bytes": 1 << 40, "git_commit": "c"}
    defaults: dict[str, Any] = {"facts": lambda: facts, "card_state": dict, "clock": lambda: timer.now_ms / 1e3}
    return Tools(timer, timer, torch.device("cpu"), **{**defaults, **overrides})


def settings_of(
    peers: Sequence[Peer], shapes: Sequence[Shape] = (SMALL,), settings: Settings = SETTINGS,
    unavailable: dict[str, str] | None = None,
) -> Settings:  # fmt: skip
    """Settings of `bench` with given shapes and peers in place of those of a suite and of the registry."""

    class Chosen(Settings):
        def shapes(self) -> list[Shape]:
            return list(shapes)

        def peers(self) -> tuple[list[Peer], dict[str, str]]:
            return list(peers), unavailable or {}

    return Chosen(**vars(settings))


def bench(
    timer: FakeTimer, *chosen: Any, settings: Settings = SETTINGS, unavailable: Any = None, **overrides: Any
) -> Run:
    """The run of `bench` as its file has it. `chosen`: peers, and shapes."""
    record = STUDY.measure(settings_of(*chosen, settings=settings, unavailable=unavailable), tools(timer, **overrides))
    return Run.from_dict(json.loads(json.dumps(record, allow_nan=False)))


def failures(run: Run) -> list[str]:
    """The failures of ours, as they are printed."""
    return [str(one) for one in report.failures(run) if one.name in (*OURS, report.ORACLE)]


def notes(run: Run) -> list[str]:
    """The failures of peers."""
    return [str(one) for one in report.failures(run) if one.name not in (*OURS, report.ORACLE)]


def result(tflops: float | None, error: float = 2e-3, is_wrong: bool = False, **fields: Any) -> Result:
    if tflops is None:
        return Result(error="RuntimeError: no kernel")
    accuracy = {"normal": Accuracy(error, 1e-2, 0, 3e-3, is_wrong)}
    times = {"tflops": tflops, "ms": 1.0, "spread": 0.01, "calls": 7, "round_ms": (0.99, 1.0, 1.0)}
    return Result(**{**times, "accuracy": accuracy, "is_repeatable": True, **fields})


def cell(seqlen: int = 512, **results: Result) -> Cell:
    shape = Shape(16384 // seqlen, 16, 16, seqlen, 128, False)
    names = {name.replace("_", "-") if name.startswith("sdpa") else name: r for name, r in results.items()}
    yardstick = {"normal": Errors(2.4e-3, 1.5e-2)}
    state = {"sm_mhz": 1980.0, "clock_reasons": ["sw_power_cap"]}
    return Cell("fwd", "bf16", shape, shape.flops(), 1 << 28, True, names, yardstick, after=state)


def run(*cells: Cell, **fields: Any) -> Run:
    """A run of cells made by `cell`, in which `cute_flash` is ours."""
    names = tuple(cells[0].results)
    defaults: dict[str, Any] = {
        "settings": {"reference": "sdpa-flash"},
        "machine": {"gpu": "fake"},
        "ours": tuple(name for name in names if name.startswith("cute_flash")),
        "names": names,
        "unavailable": {},
        "ceiling": Ceiling("matmul bf16 8192^3", 800.0, (1.4,)),
        "is_complete": True,
    }
    return Run(cells=cells, **{**defaults, **fields})
