"""Standard attention beside cute_flash: time, peak memory and HBM bytes of both, forward and backward.

Standard attention runs Q Kᵀ, softmax and P V as separate torch kernels in bf16, with the N x N matrices in memory, and
autograd computes its gradients. The softmax scale is applied to Q, and a causal mask is filled in place, so that no
pass over the N x N matrix is wasted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_flash.planning.launch import LaunchKey
from profiling.bench.suites import SUITES
from profiling.measure.accuracy import relative_distance
from profiling.measure.launches import needed_kernels
from profiling.measure.options import LIMIT_S, MS, ROUNDS, option
from profiling.measure.shapes import DTYPES, MASKS, Shape
from profiling.measure.study import Record, Step, Tools
from profiling.measure.timing import TimedCall, attempt_each, describe, measure
from profiling.peers.cute_flash import our_peer
from profiling.peers.directions import DIRECTIONS, calls_of, timed_call
from profiling.peers.peer import Forward, Peer

DTYPE = "bf16"
STANDARD, OURS = "standard", "cute_flash"
# Sequences, then heads, are halved until the scores of all heads fit. The backward holds three such matrices.
MAX_SCORE_BYTES = 8 << 30
# Larger calls are not captured: they take milliseconds, far more than host time, and a graph would keep their memory.
MAX_GRAPH_SCORE_BYTES = 2 << 30


def standard_forward(q: Tensor, k: Tensor, causal: bool) -> Forward:
    """Unfused attention."""
    # The mask is an input: it is made before anything is measured.
    length = q.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1) if causal else None

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S = (q * q.shape[-1] ** -0.5) @ k.mT
        if mask is not None:
            S.masked_fill_(mask, -torch.inf)
        return torch.softmax(S, dim=-1) @ v

    return forward


PEERS: tuple[Peer, ...] = (Peer(STANDARD, lambda: standard_forward), our_peer())


@dataclass(frozen=True)
class Settings:
    """Shapes and effort. 16,384 tokens and hidden size 2048, as in the paper suite, while the scores fit."""

    lengths: tuple[int, ...] = option((512, 1024, 2048, 4096, 8192, 16384, 32768), "with --bytes 1024,4096,16384")
    head_dims: tuple[int, ...] = option((64, 128))
    masks: tuple[str, ...] = option(MASKS, "with --bytes full", choices=MASKS)
    rounds: int = ROUNDS(3)
    ms: float = MS(8.0)
    seed: int = 0
    limit_s: float = LIMIT_S(80.0)
    max_score_bytes: int = MAX_SCORE_BYTES

    def shapes(self) -> list[Shape]:
        paper = SUITES["paper"].narrowed(self.lengths, self.head_dims, self.masks)
        return [fit(shape, self.max_score_bytes) for shape in paper.shapes()]


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


DRY_SETTINGS = Settings((32, 64), (16,), MASKS, rounds=1, ms=0.01, max_score_bytes=1 << 16)


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


@torch.no_grad()
def measure_cell(shape: Shape, direction: str, settings: Settings, tools: Tools) -> Record:
    """Time and memory of all peers in one cell. A failure, such as too little memory, is recorded."""
    is_small = score_bytes(shape) <= MAX_GRAPH_SCORE_BYTES
    timer, dtype = tools.timer if is_small else tools.events, DTYPES[DTYPE]
    tensors = DIRECTIONS["bwd"].inputs(shape, dtype, tools.device, settings.seed, "normal")
    inputs = tensors[:3] if direction == "fwd" else tensors
    makes = {peer.name: partial(timed_call, peer, direction, inputs, shape.causal, timer) for peer in PEERS}
    timed_calls, errors = attempt_each(makes, timer)
    # Of the two outputs: ‖ours - standard‖ / ‖standard‖.
    distance = _distance(timed_calls) if direction == "fwd" and len(timed_calls) == len(PEERS) else None
    measured = measure(timed_calls, timer, settings.rounds, settings.ms)
    errors |= measured.errors
    # The saved matrices of a timed backward are freed first.
    timed_calls.clear()
    tools.release()
    results: dict[str, Record] = {}
    for name, peer in ((peer.name, peer) for peer in PEERS):
        samples, peak = measured.samples.get(name), None
        try:
            peak = tools.peak_bytes(_peak_call(peer, direction, tensors, shape.causal))
        except Exception as error:
            errors[name] = describe(error)
        tools.release()
        results[name] = {
            "ms": samples and samples.median_ms,
            "round_ms": samples.round_ms if samples else (),
            "calls": samples and samples.calls,
            # Above the inputs. Forward: without gradients. Backward: the forward and the backward of a training step.
            "peak_bytes": peak,
            "error": errors.get(name),
        }
    return {
        "key": f"{direction}-{shape.id}",
        "shape": asdict(shape),
        "direction": direction,
        "timer": "graph" if is_small else "event",  # replays of CUDA graphs, or calls from the host
        "score_bytes": score_bytes(shape),
        # The predicted HBM bytes.
        "model_bytes": {STANDARD: standard_bytes(shape, direction), OURS: shape.hbm_bytes(DTYPE, direction)},
        "results": results,
        "distance": distance,
    }


def steps(settings: Settings, tools: Tools) -> list[Step]:
    """All cells, short sequences first."""
    return [
        Step("cells", f"{direction}-{shape.id}", partial(measure_cell, shape, direction, settings, tools))
        for shape in sorted(settings.shapes(), key=lambda shape: shape.seqlen)
        for direction in DIRECTIONS
    ]


def kernels(settings: Settings, tools: Tools) -> list[LaunchKey]:
    return needed_kernels(calls_of(PEERS, settings.shapes(), tuple(DIRECTIONS), DTYPES[DTYPE], tools.device))
