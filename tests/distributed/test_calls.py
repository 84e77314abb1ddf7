"""The calls between two shards cover each visible score once, with the fewest launches for the usual masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_flash.distributed.calls import BandCall, band_calls, key_range
from cute_flash.distributed.choice import choice_by_bytes
from cute_flash.distributed.ring import EDGE_STEPS, GROWTH, Schedule, max_steps
from cute_flash.distributed.sharding import SHARDINGS, Sharding, join, split
from cute_flash.spec.band import Band

BOUND = st.none() | st.integers(0, 20)


def covered(calls: tuple[BandCall, ...], length: int) -> Tensor:
    """How many calls compute each score between two shards."""
    count = torch.zeros(length, length, dtype=torch.int64)
    for call in calls:
        sq, sk = (end - begin for begin, end in (call.rows, call.keys))
        assert sq > 0 and sk > 0 and all(bound is None or bound >= 0 for bound in call.band.bounds)
        for i in range(sq):
            lo, hi = call.band.lo(i, sq, sk), call.band.hi(i, sq, sk)
            count[call.rows[0] + i, call.keys[0] + lo : call.keys[0] + max(lo, hi)] += 1
    return count


def by_position(sharding: Sharding, rank: int, shard: int, band: Band) -> Tensor:
    """The visible scores between two shards."""
    i, j = (sharding.positions(x)[:, None] for x in (rank, shard))
    is_token = torch.arange(sharding.shard_length)[:, None]
    i_real, j_real = (is_token < sum(s.length for s in sharding.segments(x)) for x in (rank, shard))
    distance = j.mT - i
    mask = i_real & j_real.mT
    if band.left is not None:
        mask &= distance >= -band.left
    if band.right is not None:
        mask &= distance <= band.right
    return mask


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(SHARDINGS), n=st.integers(1, 5), seqlen=st.integers(0, 40), left=BOUND, right=BOUND)
def test_calls_cover_each_visible_score_once(
    kind: str, n: int, seqlen: int, left: int | None, right: int | None
) -> None:
    sharding, band = Sharding.of(kind, n, seqlen), Band(left, right)
    for rank in range(n):
        for shard in range(n):
            calls = band_calls(sharding.segments(rank), sharding.segments(shard), band)
            mask = by_position(sharding, rank, shard, band)
            assert torch.equal(covered(calls, sharding.shard_length), mask.long())
            assert bool(calls) == bool(mask.any())
            ends = (min(x.keys[0] for x in calls), max(x.keys[1] for x in calls)) if calls else None
            assert key_range(sharding.segments(rank), sharding.segments(shard), band) == ends
            calls = band_calls(sharding.segments(rank), sharding.segments(shard), band, by_segment=True)
            assert torch.equal(covered(calls, sharding.shard_length), mask.long())
            for call in calls:
                for (begin, end), first, index in zip((call.rows, call.keys), call.first, (rank, shard)):
                    assert torch.equal(sharding.positions(index)[begin:end], torch.arange(first, first + end - begin))


@pytest.mark.parametrize("kind", SHARDINGS)
@pytest.mark.parametrize("band", [Band(), Band(None, 0)], ids=str)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_hop_is_one_call(kind: str, band: Band, n: int) -> None:
    schedule = Schedule(Sharding.of(kind, n, 64 * n), band)
    calls = [[len(schedule.calls(rank, shard)) for shard in range(n)] for rank in range(n)]
    if band == Band() or kind == "zigzag":
        assert calls == [[1] * n] * n
    else:
        assert calls == [[int(shard <= rank) for shard in range(n)] for rank in range(n)]


def test_zigzag_balances_a_causal_mask() -> None:
    n, sharding = 4, Sharding.of("zigzag", 4, 64)
    work = [
        sum(int(by_position(sharding, rank, shard, Band(None, 0)).sum()) for shard in range(n)) for rank in range(n)
    ]
    assert len(set(work)) == 1


@pytest.mark.parametrize(
    "kind, band, keys",
    [
        ("contiguous", Band(None, 0), [16 * 0, 16 * 1, 16 * 2, 16 * 3]),  # earlier shards only
        ("contiguous", Band(16, 0), [0, 16, 16, 16]),  # the window reaches one shard back
        ("contiguous", Band(17, 0), [0, 16, 32, 32]),
        ("contiguous", Band(4, 4), [4, 20, 20, 16]),  # the first keys of later shards
        ("contiguous", Band(), [48] * 4),
        ("zigzag", Band(None, 0), [48, 40, 32, 24]),  # the first half of earlier shards
    ],
)
def test_a_rank_receives_only_keys_that_it_sees(kind: str, band: Band, keys: list[int]) -> None:
    schedule = Schedule(Sharding.of(kind, 4, 64), band)
    found = [sum(schedule.group(rank, steps).length for steps in schedule.groups[1:]) for rank in range(4)]
    assert found == keys and schedule.num_sent_keys == sum(keys)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(SHARDINGS), n=st.integers(1, 9), seqlen=st.integers(0, 40), left=BOUND, right=BOUND,
    by_segment=st.booleans(), limit=st.integers(2, 9), backward=st.booleans(),
)  # fmt: skip
def test_groups_cover_each_visible_score_once(
    kind: str, n: int, seqlen: int, left: int | None, right: int | None, by_segment: bool, limit: int, backward: bool
) -> None:
    schedule = Schedule(Sharding.of(kind, n, seqlen), Band(left, right), by_segment, limit)
    length = schedule.sharding.shard_length
    groups = schedule.backward_groups if backward else schedule.groups
    for rank in range(n):
        seen = {rank}
        for steps in groups[1:]:
            group = schedule.group(rank, steps)
            masks = []
            for part in group.parts:
                mask = by_position(schedule.sharding, rank, part.shard, schedule.band)
                masks.append(mask[:, slice(*part.keys)])
                assert not mask[:, : part.keys[0]].any() and not mask[:, part.keys[1] :].any()
                seen.add(part.shard)
            if masks:
                size = max(length, group.length)
                found = covered(group.calls, size)[:length, : group.length]
                assert torch.equal(found, torch.cat(masks, dim=1).long())
        for shard in set(range(n)) - seen:
            assert not by_position(schedule.sharding, rank, shard, schedule.band).any()


@pytest.mark.parametrize("heads_kv", [32, 8, 1])
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_a_group_of_steps_is_one_call_unless_it_mixes_earlier_and_later_shards(n: int, heads_kv: int) -> None:
    limit = max_steps(32, heads_kv)
    causal, full = (Schedule(Sharding.of("zigzag", n, 64 * n), x, max_steps=limit) for x in (Band(None, 0), Band()))
    for groups in (causal.groups, causal.backward_groups):
        for rank in range(n):
            assert len(groups) <= causal.num_calls(rank, groups) <= len(groups) + 1
        assert full.num_calls(0, groups) == len(groups)


def sizes(n: int, heads: int, heads_kv: int) -> tuple[list[int], list[int]]:
    """The steps of each group after step 0, forward and backward, for a causal mask."""
    schedule = Schedule(Sharding.of("zigzag", n, 64 * n), Band(None, 0), max_steps=max_steps(heads, heads_kv))
    forward, backward = ([len(steps) for steps in x[1:]] for x in (schedule.groups, schedule.backward_groups))
    return forward, backward


@pytest.mark.parametrize(
    "n, heads, heads_kv, forward, backward",
    [
        (1, 32, 8, [], []),
        (2, 32, 8, [1], [1]),
        (3, 32, 8, [2], [2]),
        (4, 32, 8, [3], [2, 1]),
        (8, 32, 8, [2, 5], [2, 3, 2]),
        (11, 32, 8, [2, 8], [2, 4, 2, 2]),
        (12, 32, 8, [2, 6, 3], [2, 4, 3, 2]),
        (16, 32, 8, [2, 6, 7], [2, 4, 4, 3, 2]),
        (8, 8, 8, [2, 2, 2, 1], [2, 2, 2, 1]),
        (8, 8, 4, [2, 4, 1], [2, 2, 2, 1]),
        (16, 8, 1, [2, 6, 7], [2, 6, 5, 2]),
        (64, 64, 8, [2, 6, 16, 16, 16, 7], [2, 6, 8, 8, 8, 8, 8, 8, 5, 2]),
    ],
)
def test_groups_grow_with_the_query_heads_of_a_key_head(
    n: int, heads: int, heads_kv: int, forward: list[int], backward: list[int]
) -> None:
    assert sizes(n, heads, heads_kv) == (forward, backward)


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 80), heads_kv=st.integers(1, 8), ratio=st.integers(1, 16), by_segment=st.booleans())
def test_every_step_is_in_one_group_of_bounded_size(n: int, heads_kv: int, ratio: int, by_segment: bool) -> None:
    limit = max_steps(ratio * heads_kv, heads_kv)
    schedule = Schedule(Sharding.of("contiguous", n, n), Band(), by_segment, limit)
    for groups in (schedule.groups, schedule.backward_groups):
        assert [step for steps in groups for step in steps] == list(range(n))
        lengths = [len(steps) for steps in groups[1:]]
        assert all(1 <= x <= (EDGE_STEPS if by_segment else limit) for x in lengths)
        # A group has at most GROWTH times the steps of the previous one. If the steps after it are at most half as
        # many, they join it.
        assert all(y <= 1.5 * GROWTH * x for x, y in zip([1, *lengths], lengths))
    assert all(len(steps) <= EDGE_STEPS for steps in schedule.backward_groups[2:][-1:])


@pytest.mark.parametrize("heads_kv", [32, 8, 2, 1])
@pytest.mark.parametrize("n", [2, 4, 8, 16, 64])
def test_a_buffer_is_at_most_two_outputs_in_fp32(n: int, heads_kv: int) -> None:
    sharding, limit = Sharding.of("zigzag", n, 64 * n), max_steps(32, heads_kv)
    for band in (Band(), Band(None, 0)):
        schedule = Schedule(sharding, band, max_steps=limit)
        for rank in {0, n // 2, n - 1}:
            for groups, outputs in ((schedule.groups, 2), (schedule.backward_groups, 2 if heads_kv == 32 else 1)):
                keys = max(schedule.group(rank, steps).length for steps in groups[1:])
                # Bytes for one element of the head dim: K and V in 16 bit, and the outputs.
                assert 2 * 2 * heads_kv * keys <= outputs * 4 * 32 * sharding.shard_length


@settings(max_examples=50, deadline=None)
@given(kind=st.sampled_from(SHARDINGS), n=st.integers(1, 5), chunk=st.integers(0, 4))
def test_join_is_the_inverse_of_split(kind: str, n: int, chunk: int) -> None:
    sharding = Sharding.of(kind, n, n * 2 * chunk)
    x = torch.arange(sharding.num_shards * sharding.shard_length)
    shards = split(x, n, 0, kind)
    assert torch.equal(join(shards, 0, kind), x)
    for shard in range(n):
        assert torch.equal(shards[shard], sharding.positions(shard))


def test_the_reason_of_auto_is_true() -> None:
    fewest = choice_by_bytes({"ring": 10, "allgather": 100, "ulysses": 50})
    assert fewest.method == "ring" and fewest.reason.startswith("the fewest bytes")
    near = choice_by_bytes({"ring": 60, "allgather": 100})
    assert near.method == "allgather" and "a ring sends more than half as many bytes" in near.reason
    both = choice_by_bytes({"ring": 100, "allgather": 100})
    assert both.method == "allgather" and both.reason.startswith("the fewest bytes")
