"""All-gather attention: each rank gathers K and V of all ranks, and attends to them at once.

The backward pass gathers K and V again, so that only shards are kept between the passes. dk and dv of the whole
sequence are summed over ranks in fp32, and each rank keeps those of its shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash.distributed.accumulate import Gradients, Output, Saved, Scores
from cute_flash.distributed.calls import BandCall, band_calls
from cute_flash.distributed.comm import Axis, all_gather, reduce_scatter
from cute_flash.distributed.sharding import Segment, Sharding, join, split
from cute_flash.spec.band import Band


@dataclass(frozen=True)
class AllGather:
    """The method "allgather" on one axis of ranks."""

    axis: Axis
    sharding: Sharding
    band: Band
    by_segment: bool = False  # see `band_calls`

    @property
    def calls(self) -> tuple[BandCall, ...]:
        keys = (Segment(0, 0, self.sharding.seqlen),)
        return band_calls(self.sharding.segments(self.axis.index), keys, self.band, self.by_segment)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        k, v = self._gather(k), self._gather(v)
        output = Output(q, v, len(self.calls) + (scores.sinks is not None))
        for call in self.calls:
            output.add((k, v), call, scores, self._positions(scores))
        num_rows = sum(segment.length for segment in self.sharding.segments(self.axis.index))
        return output.result(scores.sinks, num_rows)

    def backward(self, saved: Saved, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor | None, ...]:
        gradients = Gradients(saved, scores)
        keys, values = self._gather(k), self._gather(v)
        shares = gradients.add((keys, values), self.calls, self._positions(scores))
        totals = gradients.sum_keys((keys, values), None, shares)
        # dk and dv are sent in the dtype of k, in which the backward kernels return them.
        dk, dv = (self._scatter(share.to(k.dtype), saved.lse.dtype) for share in totals)
        return gradients.dq, dk, dv, gradients.dalibi, gradients.dsinks

    def _gather(self, x: Tensor) -> Tensor:
        return join(all_gather(x, self.axis), 2, self.sharding.kind)

    def _scatter(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return reduce_scatter(split(x, self.axis.size, 2, self.sharding.kind), self.axis, dtype)

    def _positions(self, scores: Scores) -> Tensor | None:
        if scores.positions is None:
            return None
        return torch.arange(self.sharding.seqlen, device=scores.positions.device, dtype=torch.int32)
