"""Standard attention beside cute_flash: time, peak memory and HBM bytes of both, forward and backward.

Standard attention runs Q Kᵀ, softmax and P V as separate torch kernels in bf16, with the N x N matrices in memory, and
autograd computes its gradients. The softmax scale is applied to Q, and a causal mask is filled in place, so that no
pass over the N x N matrix is wasted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_flash.planning.plan import CompileKey, plan_backward, plan_forward
from cute_flash.spec.arch import ArchSpec
from profiling.bench.suites import SUITES
from profiling.measure.accuracy import random_dout, random_inputs, relative_distance
from profiling.measure.shapes import DTYPES, MASKS, Shape
from profiling.measure.timing import EventTimer, GraphTimer, TimedCall, Timer, describe, measure
from profiling.peers.cute_flash import CuteFlash
from profiling.peers.peer import BackwardCall, Call, Peer, through_autograd

DTYPE = "bf16"
DIRECTIONS = ("fwd", "bwd")
STANDARD, OURS = NAMES = ("standard", "cute_flash")
# Sequences, then heads, are halved until the scores of all heads fit. The backward holds three such matrices.
MAX_SCORE_BYTES = 8 << 30
# Larger calls are not captured: they take milliseconds, far more than host time, and a graph would keep their memory.
MAX_GRAPH_SCORE_BYTES = 2 << 30


@dataclass(frozen=True)
class Standard:
    """Unfused attention as a peer."""

    name: str = STANDARD
    is_ours: ClassVar[bool] = False
    is_bshd: ClassVar[bool] = False

    def available(self, direction: str = "fwd") -> str | None:
        return None

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _forward(self, seqlen: int, causal: bool, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        # The mask is an input: it is made before anything is measured.
        mask = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu_(1) if causal else None

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            S = (q * q.shape[-1] ** -0.5) @ k.mT
            if mask is not None:
                S.masked_fill_(mask, -torch.inf)
            return torch.softmax(S, dim=-1) @ v

        return forward

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        forward = self._forward(q.shape[2], causal, q.device)
        return lambda: forward(q, k, v)

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        return through_autograd(self._forward(q.shape[2], causal, q.device), (q, k, v), dout)


PROVIDERS: tuple[Peer, ...] = (Standard(), CuteFlash())


@dataclass(frozen=True)
class Settings:
    """Shapes and effort. 16,384 tokens and hidden size 2048, as in the paper suite, while the scores fit."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    head_dims: tuple[int, ...] = (64, 128)
    masks: tuple[str, ...] = MASKS
    rounds: int = 3
    ms: float = 8.0
    seed: int = 0
    limit_s: float = 80.0
    max_score_bytes: int = MAX_SCORE_BYTES

    def shapes(self) -> list[Shape]:
        paper = SUITES["paper"].narrowed(self.lengths, self.head_dims, self.masks)
        return [fit(shape, self.max_score_bytes) for shape in paper.shapes()]

    def keys(self, spec: ArchSpec) -> list[CompileKey]:
        """The kernels of cute_flash, to compile them in parallel before the first call."""
        problems = [shape.problem(DTYPE) for shape in self.shapes()]
        plans = [plan(problem, spec) for problem in problems for plan in (plan_forward, plan_backward)]
        return list(dict.fromkeys(key for plan in plans for key in plan.launches))


def score_bytes(shape: Shape) -> int:
    """The bytes of one N x N matrix of all heads."""
    return shape.batch * shape.heads * shape.seqlen**2 * DTYPES[DTYPE].itemsize


def fit(shape: Shape, max_score_bytes: int) -> Shape:
    """The shape with fewer sequences, then fewer heads, so that its scores fit."""
    batch, heads = shape.batch, shape.heads
    while score_bytes(Shape(batch, heads, heads, shape.seqlen, shape.head_dim, shape.causal)) > max_score_bytes:
        if batch > 1:
            batch //= 2
        elif heads > 1:
            heads //= 2
        else:
            raise ValueError(f"S = {shape.seqlen}: the scores of one head take more than {max_score_bytes} bytes")
    return Shape(batch, heads, heads, shape.seqlen, shape.head_dim, shape.causal)


# ---- predicted bytes


def standard_bytes(shape: Shape, direction: str) -> int:
    """The fewest HBM bytes of standard attention, if nothing stays in L2 between its kernels.

    Forward: 6 tensors (Q, K, V and O once, and the scaled copy of Q written and read), and 4 passes over N x N (S
    written and read, P written and read). Backward: 12 tensors, twice those of the forward, and 7 passes (P read for
    dV; dP written; P and dP read and dS written by the softmax; dS read for dQ and for dK). A causal mask adds 2
    passes in each direction.
    """
    tensor = shape.batch * shape.heads * shape.seqlen * shape.head_dim * DTYPES[DTYPE].itemsize
    tensors, passes = (6, 4) if direction == "fwd" else (12, 7)
    return tensors * tensor + (passes + 2 * shape.causal) * score_bytes(shape)


# ---- measurement


@dataclass
class Measurement:
    """One peer in one cell. Times are medians over rounds."""

    ms: float | None = None
    round_ms: tuple[float, ...] = ()
    calls: int | None = None
    # Above the inputs. Forward: without gradients. Backward: the forward and the backward of a training step.
    peak_bytes: int | None = None
    error: str | None = None


@dataclass
class Cell:
    shape: Shape
    direction: str
    timer: str  # "graph": replays of CUDA graphs; "event": calls from the host
    score_bytes: int
    model_bytes: dict[str, int]  # predicted HBM bytes by peer
    results: dict[str, Measurement] = field(default_factory=dict)
    distance: float | None = None  # of the two outputs: ‖ours - standard‖ / ‖standard‖; forward only

    @property
    def key(self) -> str:
        return f"{self.direction}-{self.shape.id}"


@dataclass(frozen=True)
class Tools:
    """The functions of a measurement that need a GPU; tests replace them."""

    device: torch.device
    graph_timer: Timer
    event_timer: Timer
    peak: Callable[[Callable[[], Any]], int | None]
    release: Callable[[], None]  # gives cached memory back between cells
    now: Callable[[], float] = time.monotonic


def cuda_peak(call: Callable[[], Any]) -> int:
    """The most bytes that a call allocates at once beyond those that are allocated before it."""
    # The first call on a stream allocates workspaces of cuBLAS, which stay.
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cuda_release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


class HostTimer(EventTimer):
    """Wall time of calls, for a dry run on the CPU."""

    def milliseconds(self, run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)

    def synchronize(self) -> None:
        pass


def cuda_tools() -> Tools:
    return Tools(torch.device("cuda"), GraphTimer(), EventTimer(), cuda_peak, cuda_release)


def dry_tools() -> Tools:
    """For a dry run on the CPU: no memory is measured."""

    def no_peak(call: Callable[[], Any]) -> None:
        call()

    return Tools(torch.device("cpu"), HostTimer(), HostTimer(), no_peak, lambda: None)


DRY_SETTINGS = Settings((32, 64), (16,), MASKS, rounds=1, ms=0.01, max_score_bytes=1 << 16)


def _inputs(shape: Shape, settings: Settings, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = DTYPES[DTYPE]
    return *random_inputs(shape, dtype, device, settings.seed), random_dout(shape, dtype, device, settings.seed)


def _peak_call(peer: Peer, direction: str, tensors: Sequence[Tensor], causal: bool) -> Callable[[], Any]:
    q, k, v, dout = tensors
    if direction == "fwd":
        return peer.prepare(q, k, v, causal)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    forward = peer.prepare(leaves[0], leaves[1], leaves[2], causal)

    def step() -> Any:
        with torch.enable_grad():
            out = forward()
        return out, torch.autograd.grad(out, leaves, dout)

    return step


def _distance(timed_calls: Mapping[str, TimedCall]) -> float | None:
    """Between the outputs of both peers; None if a call fails, which the timed calls report."""
    try:
        return relative_distance(timed_calls[OURS].call(), timed_calls[STANDARD].call())
    except Exception:
        return None


def measure_cell(shape: Shape, direction: str, settings: Settings, tools: Tools) -> Cell:
    """Time and memory of all peers in one cell. A failure, such as too little memory, is recorded."""
    is_small = score_bytes(shape) <= MAX_GRAPH_SCORE_BYTES
    timer = tools.graph_timer if is_small else tools.event_timer
    model = {STANDARD: standard_bytes(shape, direction), OURS: shape.hbm_bytes(DTYPE, direction)}
    cell = Cell(shape, direction, "graph" if is_small else "event", score_bytes(shape), model)
    cell.results = {peer.name: Measurement() for peer in PROVIDERS}
    tensors = _inputs(shape, settings, tools.device)
    q, k, v, dout = tensors
    timed_calls = {}
    for peer in PROVIDERS:
        try:
            with timer.stream():
                if direction == "fwd":
                    call: Callable[[], Any] = peer.prepare(q, k, v, shape.causal)
                else:
                    call = peer.prepare_backward(q, k, v, dout, shape.causal)
            timed_calls[peer.name] = TimedCall(call, peer.context)
        except Exception as error:
            cell.results[peer.name].error = describe(error)
    if direction == "fwd" and len(timed_calls) == len(PROVIDERS):
        cell.distance = _distance(timed_calls)
    measured = measure(timed_calls, timer, settings.rounds, settings.ms)
    for name, samples in measured.samples.items():
        result = cell.results[name]
        result.ms, result.round_ms, result.calls = samples.median_ms, samples.round_ms, samples.calls
    for name, message in measured.errors.items():
        cell.results[name].error = message
    # The saved matrices of a timed backward are freed first.
    timed_calls.clear()
    tools.release()
    for peer in PROVIDERS:
        try:
            cell.results[peer.name].peak_bytes = tools.peak(_peak_call(peer, direction, tensors, shape.causal))
        except Exception as error:
            cell.results[peer.name].error = describe(error)
        tools.release()
    return cell


def cell_dict(cell: Cell) -> dict[str, Any]:
    return {**asdict(cell), "key": cell.key}


def run_standard(
    settings: Settings,
    tools: Tools,
    done: Callable[[str], None],
    save: Callable[[list[dict[str, Any]], list[str]], None],
) -> tuple[list[dict[str, Any]], list[str]]:
    """All cells, short sequences first; returns the cells, and those that were left out because the time was up.

    `save` gets both after every cell.
    """
    end = tools.now() + settings.limit_s
    cells: list[dict[str, Any]] = []
    left_out: list[str] = []
    with torch.no_grad():
        for shape in sorted(settings.shapes(), key=lambda shape: shape.seqlen):
            for direction in DIRECTIONS:
                title = f"{direction}-{shape.id}"
                if tools.now() > end:
                    left_out.append(title)
                else:
                    cell = measure_cell(shape, direction, settings, tools)
                    cells.append(cell_dict(cell))
                    times = {name: one.ms for name, one in cell.results.items()}
                    title += ": " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items() if ms is not None)
                save(cells, left_out)
                done(title)
    return cells, left_out
