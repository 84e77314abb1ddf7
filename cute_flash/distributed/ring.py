"""Ring attention: each rank attends to the K/V shards of the ranks before it, while the next shards arrive.

At step s, rank r attends to the shard r - s (mod n), which rank r - s owns. Step 0 is its own shard. The other steps
form groups. The shards of a group arrive side by side in one buffer, so that one call can attend to all of them. For
each group, in both passes, a rank does the following:

    1. start to receive the shards of the next group from their owners, and to send its own shard to other ranks
    2. run the calls between its queries and the group
    3. backward only: send the shares of dk and dv (see `accumulate`) to the owners of the shards, and receive the
       shares of its own shard
    4. wait for the shards of the next group

A rank receives only keys that its queries see. Shares of dk and dv are sent in the dtype of the kernels if one call
computed them. The owner adds them in fp32, in the order of steps. All ranks derive the same schedule from the mask, the
sharding and the numbers of heads, so the two ends of a message always agree.

Each call costs a partial output in fp32, a merge, and idle SMs at its end. Large groups need fewer calls, so the groups
grow. The steps of 8 ranks with 32 heads and 8 K/V heads:

    forward     0 | 1 2 | 3 4 5 6 7
    backward    0 | 1 2 | 3 4 5 | 6 7

The first group is small, so that it arrives during step 0. A group is at most about `GROWTH` times as large as the
group before it, because it arrives during the calls of that group. In the backward, nothing hides the shares of the
last group, so it is small too. `max_steps` bounds the memory of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from cute_flash.distributed.accumulate import Gradients, KeyShare, Output, Saved, Scores
from cute_flash.distributed.calls import BandCall, Range, band_calls, join_keys, key_range
from cute_flash.distributed.comm import NOTHING, Axis, Message, Pair, Pending, connect, exchange
from cute_flash.distributed.sharding import Sharding
from cute_flash.spec.band import Band

# Steps of the first group, and of the last group of the backward.
EDGE_STEPS = 2
# The largest size of a group relative to the group before it, not counting a small remainder that joins the group.
GROWTH = 3


def max_steps(heads: int, heads_kv: int) -> int:
    """The largest number of steps of a group for a rank with these heads.

    With 16-bit tensors and D = Dv, K and V of one step take as much memory as an fp32 output of Hkv heads: two tensors
    of 2 bytes an element against one of 4 bytes. So K and V of 2 H / Hkv steps take as much as two fp32 outputs of all
    H heads, and a rank holds at least two of these anyway, until they are merged. Without GQA, a group has two steps.
    """
    return max(EDGE_STEPS, 2 * heads // max(heads_kv, 1))


@dataclass(frozen=True)
class Part:
    """The keys of a shard that a rank sees, and their place in the buffer of a group."""

    shard: int
    keys: Range
    begin: int

    @property
    def length(self) -> int:
        return self.keys[1] - self.keys[0]

    @property
    def place(self) -> Range:
        return self.begin, self.begin + self.length


@dataclass(frozen=True)
class Group:
    """A group of steps of a rank: the parts of the shards that it sees, side by side, and the calls over them."""

    parts: tuple[Part, ...]
    calls: tuple[BandCall, ...]

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)


@dataclass(frozen=True)
class Schedule:
    """The calls of each rank, and the keys that it needs for them.

    Attributes:
        sharding: The positions of each rank's tokens.
        band: The mask.
        by_segment: See `band_calls`.
        max_steps: The largest number of steps of a group (`max_steps`).
    """

    sharding: Sharding
    band: Band
    by_segment: bool = False
    max_steps: int = EDGE_STEPS

    def calls(self, rank: int, shard: int) -> tuple[BandCall, ...]:
        return band_calls(self.sharding.segments(rank), self.sharding.segments(shard), self.band, self.by_segment)

    def holder(self, shard: int, step: int) -> int:
        """The rank that attends to a shard at a step."""
        return (shard + step) % self.sharding.num_shards

    def shard(self, rank: int, step: int) -> int:
        """The shard to which a rank attends at a step."""
        return (rank - step) % self.sharding.num_shards

    def keys(self, rank: int, shard: int) -> Range | None:
        """The keys of another shard that a rank needs; None if it sees none."""
        return key_range(self.sharding.segments(rank), self.sharding.segments(shard), self.band)

    @property
    def groups(self) -> tuple[range, ...]:
        """The steps of each group in the forward; the first group is step 0.

        Calls by segment are not joined, so large groups would save no call.
        """
        return _groups(self.num_steps, EDGE_STEPS if self.by_segment else self.max_steps)

    @property
    def backward_groups(self) -> tuple[range, ...]:
        """The steps of each group in the backward.

        A rank holds dk and dv of a group beside its k and v, so a group has at most half of `max_steps`. The last group
        has at most `EDGE_STEPS`.
        """
        num, limit = self.num_steps, EDGE_STEPS if self.by_segment else max(EDGE_STEPS, self.max_steps // 2)
        begin = max(1 + EDGE_STEPS, num - EDGE_STEPS)
        if limit == EDGE_STEPS or begin >= num:
            return _groups(num, limit)
        return *_groups(begin, limit), range(begin, num)

    def group(self, rank: int, steps: range) -> Group:
        """The group of steps, one of `groups[1:]` or `backward_groups[1:]`."""
        return _group(self, rank, steps)

    @property
    def num_steps(self) -> int:
        return _sizes(self)[0]

    @property
    def num_sent_keys(self) -> int:
        """Keys that all ranks together send in a forward pass."""
        return _sizes(self)[1]

    def num_calls(self, rank: int, groups: tuple[range, ...]) -> int:
        """The calls of a rank in one pass, whose groups are `groups` or `backward_groups`."""
        return len(self.calls(rank, rank)) + sum(len(self.group(rank, steps).calls) for steps in groups[1:])


def _groups(num_steps: int, limit: int) -> tuple[range, ...]:
    """Step 0, and groups of the other steps, each with at most `limit` steps.

    A group has up to `GROWTH` times the steps of the group before it. If the steps after it are at most half as many,
    they join it.
    """
    groups, begin, size = [range(1)], 1, EDGE_STEPS
    while begin < num_steps:
        rest = num_steps - begin
        size = min(size, rest)
        if 2 * (rest - size) <= size and rest <= limit:
            size = rest
        groups.append(range(begin, begin + size))
        begin += size
        size = min(GROWTH * size, limit)
    return tuple(groups)


@lru_cache(maxsize=4096)
def _group(schedule: Schedule, rank: int, steps: range) -> Group:
    parts: list[Part] = []
    calls: list[BandCall] = []
    begin = 0
    for step in steps:
        shard = schedule.shard(rank, step)
        keys = schedule.keys(rank, shard)
        if keys is None:
            continue
        parts.append(Part(shard, keys, begin))
        offset = begin - keys[0]
        for call in schedule.calls(rank, shard):
            calls.append(replace(call, keys=(call.keys[0] + offset, call.keys[1] + offset)))
        begin += keys[1] - keys[0]
    return Group(tuple(parts), tuple(calls if schedule.by_segment else join_keys(calls)))


@lru_cache(maxsize=1024)
def _sizes(schedule: Schedule) -> tuple[int, int]:
    """The number of steps, and `Schedule.num_sent_keys`."""
    last = total = 0
    shards = range(schedule.sharding.num_shards)
    segments = [schedule.sharding.segments(shard) for shard in shards]
    for step in shards[1:]:
        for rank in shards:
            keys = key_range(segments[rank], segments[schedule.shard(rank, step)], schedule.band)
            if keys is not None:
                last, total = step, total + keys[1] - keys[0]
    return last + 1, total


# ---- tensors whose first dimension is the keys, so that a slice of keys is contiguous and can be sent


def keys_first(x: Tensor) -> Tensor:
    """(B, H, S, D) to (S, B, H, D), contiguous."""
    return x.permute(2, 0, 1, 3).contiguous()


def heads_first(x: Tensor) -> Tensor:
    """(S, B, H, D) to (B, H, S, D), a view."""
    return x.permute(1, 2, 0, 3)


@dataclass(frozen=True)
class Ring:
    """The method "ring" on one axis of ranks."""

    axis: Axis
    schedule: Schedule

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        rank, schedule = self.axis.index, self.schedule
        connect(self.axis, q.device)
        groups = schedule.groups
        output = Output(q, v, schedule.num_calls(rank, groups) + (scores.sinks is not None))
        for _steps, kv, calls, positions in self._groups(groups, k, v, scores):
            for call in calls:
                output.add(kv, call, scores, positions)
        num_rows = sum(segment.length for segment in schedule.sharding.segments(rank))
        return output.result(scores.sinks, num_rows)

    def backward(self, saved: Saved, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor | None, ...]:
        gradients = Gradients(saved, scores)
        own: Pair | None = None
        incoming: tuple[range, Pending] = (range(0), NOTHING)
        for steps, kv, calls, positions in self._groups(self.schedule.backward_groups, k, v, scores):
            shares = gradients.add(kv, calls, positions)
            own = self._add_received(gradients, (k, v), own, *incoming)
            if steps == range(1):
                own = gradients.sum_keys((k, v), own, shares)
            else:
                incoming = steps, self._exchange_shares(steps, kv, shares, gradients)
        own = self._add_received(gradients, (k, v), own, *incoming)
        assert own is not None
        return gradients.dq, *own, gradients.dalibi, gradients.dsinks

    def _groups(
        self, groups: tuple[range, ...], k: Tensor, v: Tensor, scores: Scores
    ) -> Iterator[tuple[range, Pair, tuple[BandCall, ...], Tensor | None]]:
        """Steps, (k, v), calls and key positions of each group. The next group is received while the caller works."""
        rank, schedule = self.axis.index, self.schedule
        own = (keys_first(k), keys_first(v)) if len(groups) > 1 else (k, v)
        pending = NOTHING
        for i, steps in enumerate(groups):
            kv = pending.wait()
            if i + 1 < len(groups):
                pending = self._fetch(groups[i + 1], own)
            if i == 0:
                yield steps, (k, v), schedule.calls(rank, rank), self._positions(rank, scores)
                continue
            group = schedule.group(rank, steps)
            if group.parts:
                assert kv is not None
                positions = [self._positions(part.shard, scores) for part in group.parts]
                slices = [x[slice(*part.keys)] for x, part in zip(positions, group.parts) if x is not None]
                all_positions = torch.cat(slices) if slices else None
                yield steps, (heads_first(kv[0]), heads_first(kv[1])), group.calls, all_positions
            else:
                # This rank has no call in the group, but other ranks may send it shares of dk and dv.
                yield steps, (k[:, :, :0], v[:, :, :0]), (), None

    def _fetch(self, steps: range, own: Pair) -> Pending:
        """Start to receive the shards of a group, and to send this rank's shard to the ranks that see it."""
        group = self.schedule.group(self.axis.index, steps)
        buffers = tuple(x.new_empty((group.length, *x.shape[1:])) for x in own)
        sends, receives = [], []
        for peer, keys in self._receivers(steps):
            sends += [Message(x[slice(*keys)], peer) for x in own]
        for part in group.parts:
            receives += [Message(x[slice(*part.place)], part.shard) for x in buffers]
        return exchange(self.axis, sends, receives, buffers, f"step {steps[0]} of the ring, K/V")

    def _share_dtype(self, peer: int, shard: int, k: Tensor, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which rank `peer` sends its shares of a shard: that of the kernels if one call computes them."""
        return k.dtype if len(self.schedule.calls(peer, shard)) == 1 else dtype

    def _exchange_shares(self, steps: range, kv: Pair, shares: list[KeyShare], gradients: Gradients) -> Pending:
        """Start to send shares of dk and dv to the owners of a group's shards, and to receive those of this shard."""
        rank, schedule = self.axis.index, self.schedule
        sends, receives = [], []
        for part in schedule.group(rank, steps).parts:
            dtype = self._share_dtype(rank, part.shard, kv[0], gradients.dtype)
            for x, y in zip(kv, gradients.shares_of(kv, shares, part.place, dtype)):
                assert x.shape[:2] == y.shape[:2]
                sends.append(Message(keys_first(y), part.shard))
        for peer, keys in self._receivers(steps):
            dtype = self._share_dtype(peer, rank, kv[0], gradients.dtype)
            for x in kv:
                shape = keys[1] - keys[0], x.shape[0], x.shape[1], x.shape[3]
                receives.append(Message(x.new_empty(shape, dtype=dtype), peer))
        buffers = tuple(message.tensor for message in receives)
        return exchange(self.axis, sends, receives, buffers, f"step {steps[0]} of the ring, dK/dV")

    def _receivers(self, steps: range) -> Iterator[tuple[int, Range]]:
        """The ranks that attend to this rank's shard in these steps, and the keys that they see."""
        rank, schedule = self.axis.index, self.schedule
        for step in steps:
            peer = schedule.holder(rank, step)
            keys = schedule.keys(peer, rank)
            if keys is not None:
                yield peer, keys

    def _add_received(
        self, gradients: Gradients, kv: Pair, own: Pair | None, steps: range, pending: Pending
    ) -> Pair | None:
        """Wait for the shares of this rank's shard from other ranks, and add them to its dk and dv, `own`."""
        received = pending.wait()
        for i, (_peer, keys) in enumerate(self._receivers(steps)):
            assert received is not None
            dk, dv = (heads_first(x) for x in received[2 * i : 2 * i + 2])
            own = gradients.sum_keys(kv, own, [(keys, dk, dv)])
        return own

    def _positions(self, shard: int, scores: Scores) -> Tensor | None:
        if scores.positions is None:
            return None
        return self.schedule.sharding.positions(shard, scores.positions.device).int()
