"""The list of a packed batch's tiles: its bounds, its order, and parts of the kernel that run on a CPU."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_flash.planning.varlen import (
    ASCENDS,
    BUCKETS,
    BY_LENGTH,
    DESCENDS,
    bucket,
    max_items,
    most_blocks,
    num_blocks,
    num_padded_blocks,
    padded_block,
)
from cute_flash.spec.band import Band, ceil_div
from tests import packed_model
from tests.lengths import Lengths
from tests.packed_model import Item

BANDS = [Band(), Band(None, 0), Band(40, 0), Band(40, None), Band(3, 70)]


def test_classes_are_ordered_and_few() -> None:
    found = [bucket(cost) for cost in range(1 << 14)]
    assert found[:64] == list(range(64))
    assert all(a <= b for a, b in pairwise(found))
    # No more than 1 part in 32 between the longest and the shortest of a class.
    for _, group in groupby(range(1, 1 << 14), key=bucket):
        costs = list(group)
        assert costs[-1] - costs[0] <= costs[0] // 32
    assert found[0] == 0
    assert bucket((1 << 24) - 1) == bucket((1 << 31) - 1) == BUCKETS - 1


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    of_keys=st.booleans(),
    order=st.sampled_from([ASCENDS, DESCENDS, BY_LENGTH]),
    band=st.sampled_from(BANDS),
    tiles=st.sampled_from([(128, 128), (192, 128), (64, 64), (128, 48), (64, 80)]),
)
def test_every_tile_once_and_the_longest_first(
    seed: int, of_keys: bool, order: int, band: Band, tiles: tuple[int, int]
) -> None:
    lengths = Lengths.drawn(seed, most=2000)
    side = (lengths.totals[1] if of_keys else lengths.totals[0]), tiles[0], len(lengths.queries)
    runs = packed_model.runs(lengths.cu_q, lengths.cu_k, lengths.used_k, lengths.totals, of_keys)
    found = list(packed_model.items(runs, band, tiles, of_keys, order))
    assert len(found) <= max_items(*side, has_unused=of_keys and lengths.used is not None)

    def span(item: Item) -> tuple[int, int]:
        return (item.k_begin, item.k_len) if of_keys else (item.q_begin, item.q_len)

    # Every row, padding and unused keys included, is in one tile.
    rows: Counter[int] = Counter()
    for item in found:
        begin, length = span(item)
        first = item.block * tiles[0]
        assert 0 <= first < length
        rows.update(range(begin + first, begin + min(first + tiles[0], length)))
    assert rows == Counter(range(side[0]))

    # Long ones before short ones, up to the width of a class; a sequence's tiles in order, and side by side,
    # but that short ones stand among their likes.
    def costs(item: Item) -> tuple[int, int]:
        rows, columns = (item.k_len, item.q_len) if of_keys else (item.q_len, item.k_len)
        return (
            num_blocks(band, item.block, rows, columns, *tiles),
            most_blocks(band, rows, columns, *tiles),
        )

    apart = [order == BY_LENGTH and 2 * own < most for own, most in map(costs, found)]
    classes = [bucket(own if x else most) for x, (own, most) in zip(apart, map(costs, found), strict=True)]
    assert classes == sorted(classes, reverse=True)
    seen = set()
    for key, group in groupby((item for item, x in zip(found, apart, strict=True) if not x), key=span):
        blocks = [item.block for item in group]
        assert key not in seen and blocks in (sorted(blocks), sorted(blocks, reverse=True))
        seen.add(key)
        if order != BY_LENGTH:
            assert blocks == sorted(blocks, reverse=order == DESCENDS)
            assert len(blocks) == ceil_div(key[1], tiles[0])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), tile=st.sampled_from([32, 64, 128]))
def test_padded_sequences_do_not_overlap(seed: int, tile: int) -> None:
    lengths = Lengths.drawn(seed, most=1000)
    total, batch = lengths.totals[0], len(lengths.queries)
    begins = [*lengths.cu_q.tolist(), total]
    end = 0
    for b, (begin, following) in enumerate(pairwise(begins)):
        first = padded_block(begin, b, tile)
        assert first >= end
        end = first + ceil_div(following - begin, tile)
    assert end <= num_padded_blocks(total, tile, batch)


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_runs_as_the_kernel_finds_them(seed: int, of_keys: bool) -> None:
    pytest.importorskip("cutlass")
    from cute_flash.kernels.prepare import Batch, Tiles
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    lengths, tiles, band = Lengths.drawn(seed), (128, 64), BANDS[seed % len(BANDS)]
    used = lengths.used_k
    expected = packed_model.runs(lengths.cu_q, lengths.cu_k, used, lengths.totals, of_keys)

    @cute.jit
    def program(out, cu_q, cu_k, used_k, total_q, total_k, tile_rows, tile_columns):  # type: ignore[no-untyped-def]
        batch = Batch(cu_q, cu_k, used_k, total_q, total_k)
        bounds = Band(*(Int32(1 << 29 if side is None else side) for side in (band.left, band.right)))
        listed = Tiles(out, batch, of_keys, False, tile_rows, tile_columns, bounds, Int32(0))
        out[0, 7] = listed.num_runs
        for r in range(listed.num_runs):
            run = listed.run(Int32(r))
            out[r, 0], out[r, 1], out[r, 2], out[r, 3], out[r, 4] = run
            out[r, 5], out[r, 6] = listed.size(run)

    out = torch.full((len(expected), 8), -1, dtype=torch.int32)
    program(
        *map(from_dlpack, (out, lengths.cu_q, lengths.cu_k)),
        None if used is None else from_dlpack(used),
        *map(Int32, (*lengths.totals, *tiles)),
    )
    assert out[0, 7] == len(expected)
    for row, run in zip(out.tolist(), expected, strict=True):
        rows, columns = (run.k_len, run.q_len) if of_keys else (run.q_len, run.k_len)
        # Where there are no rows, the rest does not matter.
        if rows:
            cost = most_blocks(band, rows, columns, *tiles)
            assert row[:7] == [*run, ceil_div(rows, tiles[0]), cost]
        else:
            assert row[5] == 0
