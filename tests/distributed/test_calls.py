"""The calls between two shards cover each visible score once, with the fewest launches for the usual masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_flash.distributed.calls import BandCall, band_calls, key_range
from cute_flash.distributed.ring import Schedule
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
        ("contiguous", Band(4, 4), [4, 20, 20, 16]),  # of later shards, the first keys
        ("contiguous", Band(), [48] * 4),
        ("zigzag", Band(None, 0), [48, 40, 32, 24]),  # of earlier shards, the first half
    ],
)
def test_a_rank_receives_only_keys_that_it_sees(kind: str, band: Band, keys: list[int]) -> None:
    schedule = Schedule(Sharding.of(kind, 4, 64), band)
    found = [sum(schedule.group(rank, steps).length for steps in schedule.groups[1:]) for rank in range(4)]
    assert found == keys and schedule.num_sent_keys == sum(keys)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(SHARDINGS), n=st.integers(1, 6), seqlen=st.integers(0, 40), left=BOUND, right=BOUND,
    by_segment=st.booleans(),
)  # fmt: skip
def test_groups_cover_each_visible_score_once(
    kind: str, n: int, seqlen: int, left: int | None, right: int | None, by_segment: bool
) -> None:
    schedule = Schedule(Sharding.of(kind, n, seqlen), Band(left, right), by_segment)
    length = schedule.sharding.shard_length
    for rank in range(n):
        seen = {rank}
        for steps in schedule.groups[1:]:
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


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_a_group_of_steps_is_one_call_unless_it_mixes_earlier_and_later_shards(n: int) -> None:
    schedule = Schedule(Sharding.of("zigzag", n, 64 * n), Band(None, 0))
    for rank in range(n):
        calls = [len(schedule.group(rank, steps).calls) for steps in schedule.groups[1:]]
        assert sum(calls) <= len(calls) + 1 and len(calls) == n // 2
    assert Schedule(Sharding.of("zigzag", n, 64 * n), Band()).num_calls(0) == 1 + n // 2


@settings(max_examples=50, deadline=None)
@given(kind=st.sampled_from(SHARDINGS), n=st.integers(1, 5), chunk=st.integers(0, 4))
def test_join_is_the_inverse_of_split(kind: str, n: int, chunk: int) -> None:
    sharding = Sharding.of(kind, n, n * 2 * chunk)
    x = torch.arange(sharding.num_shards * sharding.shard_length)
    shards = split(x, n, 0, kind)
    assert torch.equal(join(shards, 0, kind), x)
    for shard in range(n):
        assert torch.equal(shards[shard], sharding.positions(shard))
