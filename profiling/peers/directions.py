"""Forward and backward as the benchmark sees them: inputs, outputs, oracles, and a description of the method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profiling.measure.accuracy import Oracle, random_dout, random_inputs
from profiling.measure.oracles import GRADIENTS, backward_oracles, forward_oracle
from profiling.measure.shapes import Shape
from profiling.measure.timing import TimedCall, Timer
from profiling.peers.peer import Peer, as_bhsd, in_layout

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Direction:
    """One direction. The i-th output has the shape of the i-th input."""

    outputs: tuple[str, ...]
    # `prepare` and `oracles` take the inputs q, k and v; of the backward dout too.
    inputs: Callable[[Shape, torch.dtype, torch.device, int, str], Inputs]
    prepare: Callable[[Peer, Inputs, bool], Callable[[], Any]]
    oracles: Callable[[Inputs, bool], dict[str, Oracle]]  # by output
    has_fixed_order: bool  # whether the same inputs must give the same bits
    method: Mapping[str, str]

    def named(self, peer: Peer, result: Any) -> dict[str, Tensor]:
        """The results of a call by name, as (B, H, S, D) views."""
        tensors = (result,) if len(self.outputs) == 1 else result
        if len(tensors) != len(self.outputs):
            raise ValueError(f"{len(tensors)} tensors, expected {', '.join(self.outputs)}")
        return {name: as_bhsd(peer, x) for name, x in zip(self.outputs, tensors, strict=True)}

    def label(self, distribution: str, output: str) -> str:
        """The key of an output's accuracy: "normal", or "normal dq" if there are several outputs."""
        return distribution if len(self.outputs) == 1 else f"{distribution} {output}"


def _backward_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, distribution: str) -> Inputs:
    return *random_inputs(shape, dtype, device, seed, distribution), random_dout(shape, dtype, device, seed)


DIRECTIONS = {
    "fwd": Direction(
        outputs=("out",),
        inputs=random_inputs,
        prepare=lambda peer, x, causal: peer.prepare(x[0], x[1], x[2], causal),
        oracles=lambda x, causal: {"out": forward_oracle(x[0], x[1], x[2], causal)},
        has_fixed_order=True,
        method={
            "flops": "4 B H S^2 D, halved when causal",
            "accuracy": "against fp64 on one batch, two heads, up to 1024 rows; yardstick: unfused PyTorch",
        },
    ),
    "bwd": Direction(
        outputs=GRADIENTS,
        inputs=_backward_inputs,
        prepare=lambda peer, x, causal: peer.prepare_backward(x[0], x[1], x[2], x[3], causal),
        oracles=lambda x, causal: backward_oracles(x[0], x[1], x[2], x[3], causal),
        # dQ is summed by atomic additions, in no fixed order.
        has_fixed_order=False,
        method={
            "flops": "10 B H S^2 D, halved when causal: 2.5 times the forward pass",
            "calls": "dq, dk and dv after one forward pass that is not timed; autograd.grad, but fa3: its op",
            "accuracy": "dq, dk and dv, before and after the timed calls, against fp64 on one batch and two "
            "K/V heads with all their query heads, all rows; yardstick: unfused PyTorch",
        },
    ),
}


def timed_call(peer: Peer, direction: str, inputs: Inputs, causal: bool, timer: Timer) -> TimedCall:
    """The call of a peer. A forward pass whose gradients are timed runs on the stream that is captured."""
    with peer.context(), timer.stream():
        return TimedCall(DIRECTIONS[direction].prepare(peer, inputs, causal), peer.context)


def calls_of(
    peers: Sequence[Peer],
    shapes: Sequence[Shape],
    directions: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "bhsd",
) -> Iterator[Callable[[], Any]]:
    """A call of each of cute_flash's peers on each shape, to record the kernels that a run needs."""

    def call(peer: Peer, direction: Direction, inputs: Inputs, causal: bool) -> None:
        with torch.no_grad(), peer.context():
            direction.prepare(peer, inputs, causal)()

    for shape in shapes:
        for name in directions:
            made = DIRECTIONS[name].inputs(shape, dtype, device, 0, "normal")
            inputs = tuple(in_layout(x, layout) for x in made)
            yield from (partial(call, one, DIRECTIONS[name], inputs, shape.causal) for one in peers if one.is_ours)
