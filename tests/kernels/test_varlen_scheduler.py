"""The tile list of a varlen batch: its size, its order, and parts of the scheduler kernel that run on a CPU."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_flash.planning.varlen import (
    ASCENDING,
    BY_LENGTH,
    DESCENDING,
    NUM_LENGTH_CLASSES,
    length_class,
    longest_tile,
    max_tiles,
    num_blocks,
    num_padded_blocks,
    padded_block,
)
from cute_flash.spec.band import Band, ceil_div
from tests.fakes import varlen_model
from tests.fakes.varlen_model import VarlenTile
from tests.lengths import Lengths

BANDS = [
    *(Band(), Band(None, 0), Band(40, 0), Band(40, None), Band(3, 70)),
    *(Band(None, 0, 300), Band(None, None, 30), Band(90, 0, 500)),
]


def test_classes_are_ordered_and_few() -> None:
    found = [length_class(cost) for cost in range(1 << 14)]
    assert found[:64] == list(range(64))
    assert all(a <= b for a, b in pairwise(found))
    # The longest and the shortest tile of a class differ by at most 1/32.
    for _, group in groupby(range(1, 1 << 14), key=length_class):
        costs = list(group)
        assert costs[-1] - costs[0] <= costs[0] // 32
    assert found[0] == 0
    assert length_class((1 << 24) - 1) == length_class((1 << 31) - 1) == NUM_LENGTH_CLASSES - 1


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    of_keys=st.booleans(),
    order=st.sampled_from([ASCENDING, DESCENDING, BY_LENGTH]),
    band=st.sampled_from(BANDS),
    tiles=st.sampled_from([(128, 128), (192, 128), (64, 64), (128, 48), (64, 80)]),
)
def test_every_tile_once_and_the_longest_first(
    seed: int, of_keys: bool, order: int, band: Band, tiles: tuple[int, int]
) -> None:
    lengths, band = Lengths.drawn(seed, longest=2000), band.of_keys if of_keys else band
    side = (lengths.totals[1] if of_keys else lengths.totals[0]), tiles[0], len(lengths.queries)
    infos = varlen_model.sequences(lengths.cu_q, lengths.cu_k, lengths.used_k, lengths.totals, of_keys)
    found = list(varlen_model.tiles(infos, band, tiles, of_keys, order))
    assert len(found) <= max_tiles(*side, has_unused=of_keys and lengths.used is not None)

    def sequence(tile: VarlenTile) -> tuple[int, int]:
        return (tile.k_begin, tile.k_len) if of_keys else (tile.q_begin, tile.q_len)

    # Every row, padding and unused keys included, is in one tile.
    rows: Counter[int] = Counter()
    for tile in found:
        begin, length = sequence(tile)
        first = tile.block * tiles[0]
        assert 0 <= first < length
        rows.update(range(begin + first, begin + min(first + tiles[0], length)))
    assert rows == Counter(range(side[0]))

    # Long tiles come before short ones, up to the width of a class. The tiles of a sequence are neighbours and in
    # order, except that short ones are among tiles of their length.
    def costs(tile: VarlenTile) -> tuple[int, int]:
        rows, columns = (tile.k_len, tile.q_len) if of_keys else (tile.q_len, tile.k_len)
        return (num_blocks(band, tile.block, rows, columns, *tiles), longest_tile(band, rows, columns, *tiles))

    apart = [order == BY_LENGTH and 2 * own < most for own, most in map(costs, found)]
    classes = [length_class(own if x else most) for x, (own, most) in zip(apart, map(costs, found), strict=True)]
    assert classes == sorted(classes, reverse=True)
    seen = set()
    for key, group in groupby((tile for tile, x in zip(found, apart, strict=True) if not x), key=sequence):
        blocks = [tile.block for tile in group]
        assert key not in seen and blocks in (sorted(blocks), sorted(blocks, reverse=True))
        seen.add(key)
        if order != BY_LENGTH:
            assert blocks == sorted(blocks, reverse=order == DESCENDING)
            assert len(blocks) == ceil_div(key[1], tiles[0])


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("chunk", [200, 512, 1000, 3000])
def test_the_longest_tile_of_a_causal_mask_with_chunks(chunk: int, of_keys: bool) -> None:
    band = Band(None, 0, chunk).of_keys if of_keys else Band(None, 0, chunk)
    for sq, sk in ((2100, 2100), (512, 2100), (2100, 513), (1, 2000), (3, 0)):
        rows, columns = (sk, sq) if of_keys else (sq, sk)
        longest = max((num_blocks(band, i, rows, columns, 64, 64) for i in range(ceil_div(rows, 64))), default=0)
        # A sequence that begins or ends within a chunk may have a tile that is longer than the one found.
        found = longest_tile(band, rows, columns, 64, 64) if rows else 0
        assert longest // 2 <= found <= longest
        assert found == longest or (sq != sk and of_keys) or chunk == 200


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), tile=st.sampled_from([32, 64, 128]))
def test_padded_sequences_do_not_overlap(seed: int, tile: int) -> None:
    lengths = Lengths.drawn(seed, longest=1000)
    total, batch = lengths.totals[0], len(lengths.queries)
    begins = [*lengths.cu_q.tolist(), total]
    end = 0
    for b, (begin, following) in enumerate(pairwise(begins)):
        first = padded_block(begin, b, tile)
        assert first >= end
        end = first + ceil_div(following - begin, tile)
    assert end <= num_padded_blocks(total, tile, batch)


@pytest.mark.compiles
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(("seed", "decreasing"), [*((seed, "") for seed in range(8)), (3, "q"), (4, "k"), (5, "k")])
def test_segments_of_the_kernel(seed: int, of_keys: bool, decreasing: str) -> None:
    pytest.importorskip("cutlass")
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    from cute_flash.device.scores.band import Band as TracedBand
    from cute_flash.kernels.common.varlen_scheduler import TileListBuilder, VarlenBatch

    lengths, tiles, band = Lengths.drawn(seed), (128, 64), BANDS[seed % len(BANDS)]
    used = lengths.used_k
    cu_q, cu_k = lengths.cu_q, lengths.cu_k
    if decreasing:
        offsets = cu_q if decreasing == "q" else cu_k
        offsets[-2] = offsets[-1] + 1
    expected = varlen_model.sequences(cu_q, cu_k, used, lengths.totals, of_keys)

    @cute.jit
    def program(out, cu_q, cu_k, used_k, total_q, total_k, tile_rows, tile_columns):  # type: ignore[no-untyped-def]
        batch = VarlenBatch(cu_q, cu_k, used_k, total_q, total_k)
        sides = (Int32(1 << 29 if side is None else side) for side in band.bounds)
        bounds = TracedBand(*sides, chunk=None if band.chunk is None else Int32(band.chunk))
        bounds = bounds.of_keys if of_keys else bounds
        builder = TileListBuilder(out, batch, of_keys, False, tile_rows, tile_columns, bounds, Int32(0))
        out[0, 7] = builder.num_segments
        # As the threads of a CTA do: each checks every third sequence.
        decreases = batch.decreases(Int32(0), 3) or batch.decreases(Int32(1), 3) or batch.decreases(Int32(2), 3)
        for r in range(builder.num_segments):
            segment = builder.segment(Int32(r), not decreases)
            out[r, 0], out[r, 1], out[r, 2], out[r, 3], out[r, 4] = segment
            out[r, 5], out[r, 6] = builder.segment_tiles(segment)

    out = torch.full((len(expected), 8), -1, dtype=torch.int32)
    program(
        *map(from_dlpack, (out, cu_q, cu_k)),
        None if used is None else from_dlpack(used),
        *map(Int32, (*lengths.totals, *tiles)),
    )
    assert out[0, 7] == len(expected)
    for row, segment in zip(out.tolist(), expected, strict=True):
        rows, columns = (segment.k_len, segment.q_len) if of_keys else (segment.q_len, segment.k_len)
        # If there are no rows, the other values do not matter.
        if rows:
            cost = longest_tile(band.of_keys if of_keys else band, rows, columns, *tiles)
            assert row[:7] == [*segment, ceil_div(rows, tiles[0]), cost]
        else:
            assert row[5] == 0
