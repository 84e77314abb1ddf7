"""Ring attention: K/V shards travel from rank to rank, and each rank attends to the shard that it holds.

At step s, rank r holds the shard r - s (mod n). Step s of rank r, in both passes:

    1. start to send the K/V shard to rank r + 1, and to receive the next one from rank r - 1
    2. run the calls between the rank's queries and the shard, none if the mask hides it
    3. backward only: add the shares of dk and dv to the sums that came with the shard, and send them on
    4. wait for the K/V shard of the next step

A shard travels only as far as a rank that sees it. From there, its dk and dv return to their rank in one message. All
ranks derive the same schedule from the mask and the sharding, so the two ends of a message always agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cute_flash.distributed.accumulate import Gradients, Output, Saved, Scores
from cute_flash.distributed.calls import BandCall, band_calls
from cute_flash.distributed.comm import NOTHING, Axis, Pair, Pending, Receive, Send, connect, exchange
from cute_flash.distributed.sharding import Sharding
from cute_flash.spec.band import Band


@dataclass(frozen=True)
class Schedule:
    """The calls of each rank and the way of each shard."""

    sharding: Sharding
    band: Band
    by_segment: bool = False  # see `band_calls`

    def calls(self, rank: int, shard: int) -> tuple[BandCall, ...]:
        return band_calls(self.sharding.segments(rank), self.sharding.segments(shard), self.band, self.by_segment)

    def holder(self, shard: int, step: int) -> int:
        return (shard + step) % self.sharding.num_shards

    def shard(self, rank: int, step: int) -> int:
        """The shard that a rank holds at a step, if the shard travels that far."""
        return (rank - step) % self.sharding.num_shards

    def num_hops(self, shard: int) -> int:
        """The last step in which a rank needs the shard."""
        return _num_hops(self)[shard]

    @property
    def num_steps(self) -> int:
        return 1 + max(_num_hops(self))

    def num_calls(self, rank: int) -> int:
        return sum(len(self.calls(rank, shard)) for shard in range(self.sharding.num_shards))


@lru_cache(maxsize=1024)
def _num_hops(schedule: Schedule) -> tuple[int, ...]:
    shards = range(schedule.sharding.num_shards)
    return tuple(
        next((step for step in reversed(shards) if schedule.calls(schedule.holder(shard, step), shard)), 0)
        for shard in shards
    )


@dataclass(frozen=True)
class Ring:
    """The method "ring" on one axis of ranks."""

    axis: Axis
    schedule: Schedule

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        rank, schedule = self.axis.index, self.schedule
        connect(self.axis, q.device)
        output = Output(q, v, schedule.num_calls(rank) + (sinks is not None))
        held: Pair | None = (k, v)
        for step in range(schedule.num_steps):
            incoming = self._pass_on_keys(step, held, k, v)
            shard = schedule.shard(rank, step)
            for call in schedule.calls(rank, shard):
                assert held is not None
                output.add(held, call, scores, self._positions(shard, scores))
            held = incoming.wait()
        num_rows = sum(segment.length for segment in schedule.sharding.segments(rank))
        return output.result(sinks, num_rows)

    def backward(
        self, saved: Saved, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        rank, schedule = self.axis.index, self.schedule
        gradients = Gradients(saved, scores)
        held: Pair | None = (k, v)
        sums, returns = NOTHING, []
        own: Pair | None = None
        for step in range(schedule.num_steps):
            incoming = self._pass_on_keys(step, held, k, v)
            shard = schedule.shard(rank, step)
            shares = []
            if held is not None:
                shares = gradients.add(held, schedule.calls(rank, shard), self._positions(shard, scores))
            total = gradients.sum_keys((k, v), sums.wait(), shares)
            sums = self._pass_on_sums(step, total)
            returns.append(self._return_sums(step, total))
            if step == schedule.num_hops(rank) == 0:
                own = total
            held = incoming.wait()
        for pending in (sums, *returns):
            received = pending.wait()
            own = received if own is None else own
        assert own is not None
        dsinks = None if sinks is None else gradients.dsinks(sinks)
        return gradients.dq, *own, gradients.dalibi, dsinks

    def _positions(self, shard: int, scores: Scores) -> Tensor | None:
        if scores.positions is None:
            return None
        return self.schedule.sharding.positions(shard, scores.positions.device).int()

    def _pass_on_keys(self, step: int, held: Pair | None, k: Tensor, v: Tensor) -> Pending:
        """Start to send the K/V shard at hand to the next rank, and to receive that of the next step."""
        rank, n, schedule = self.axis.index, self.axis.size, self.schedule
        send = receive = None
        if held is not None and step < schedule.num_hops(schedule.shard(rank, step)):
            send = Send((held[0].contiguous(), held[1].contiguous()), (rank + 1) % n)
        if step < schedule.num_hops(schedule.shard(rank, step + 1)):
            receive = Receive((k.new_empty(k.shape), v.new_empty(v.shape)), (rank - 1) % n)
        return exchange(self.axis, send, receive, f"step {step} of the ring, K/V")

    def _pass_on_sums(self, step: int, total: Pair) -> Pending:
        """Start to send dk and dv of the shard at hand to the next rank, and to receive those of the next step."""
        rank, n, schedule = self.axis.index, self.axis.size, self.schedule
        send = receive = None
        if step < schedule.num_hops(schedule.shard(rank, step)):
            send = Send(total, (rank + 1) % n)
        if step < schedule.num_hops(schedule.shard(rank, step + 1)):
            receive = Receive((torch.empty_like(total[0]), torch.empty_like(total[1])), (rank - 1) % n)
        return exchange(self.axis, send, receive, f"step {step} of the ring, dK/dV")

    def _return_sums(self, step: int, total: Pair) -> Pending:
        """Start to send dk and dv of a shard at the end of its way to its rank, and to receive this rank's own."""
        rank, schedule = self.axis.index, self.schedule
        shard = schedule.shard(rank, step)
        send = receive = None
        if step == schedule.num_hops(shard) > 0:
            send = Send(total, shard)
        if step == schedule.num_hops(rank) > 0:
            receive = Receive((torch.empty_like(total[0]), torch.empty_like(total[1])), schedule.holder(rank, step))
        return exchange(self.axis, send, receive, f"step {step} of the ring, return of dK/dV")
