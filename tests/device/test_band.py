"""The band on traced integers, and the iterators over its blocks."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.scheduling.block_iterator import BlockIterator, OutwardBlockIterator, share_of
from cute_flash.device.scores.band import Band
from cute_flash.spec import band as spec
from cute_flash.spec.band import BlockRange
from tests.device.bands import SIDES, band_of

RANGES = [
    BlockRange(begin, full_begin, full_end, end)
    for begin, full_begin, full_end, end in itertools.combinations_with_replacement(range(6), 4)
]


@pytest.mark.parametrize("ascends", [False, True])
def test_iterators_visit_every_block_once_and_know_which_need_a_mask(ascends: bool) -> None:
    for blocks in RANGES:
        found = BlockIterator.of(blocks, ascends)
        visited = [found.block(i) for i in range(found.num)]
        assert visited == sorted(range(blocks.begin, blocks.end), reverse=not ascends)
        full = set(range(blocks.full_begin, blocks.full_end))
        assert {found.block(i) for i in range(found.full_begin, found.full_end)} == full
        assert [found.is_masked(i) for i in range(found.num)] == [block not in full for block in visited]
        if visited:
            assert found.starts_masked() == (visited[0] not in full)


def test_outward_iterators_start_at_a_block() -> None:
    """The band is unbounded, so only the last block may need a mask."""
    for num, has_tail, start in itertools.product(range(1, 6), (False, True), range(7)):
        blocks = BlockRange(0, 0, num - has_tail, num)
        found = OutwardBlockIterator.of(blocks, start)
        first = min(start, num - 1)
        visited = [found.block(i) for i in range(found.num)]
        assert visited == [*range(first, -1, -1), *range(first + 1, num)]
        masked = [found.is_masked(i) for i in range(num)]
        assert masked == [block >= blocks.full_end for block in visited]
        assert found.starts_masked() == masked[0]
        # The loops after the first block: full ones up to `full_end`, then the masked one.
        assert masked[1:] == [i >= found.full_end for i in range(1, num)]


# One traced program per tile size runs all cases. Inputs: (m_block, sq, sk, left, right, chunk). Outputs: six numbers
# for each of SIDES.
NUMBERS = 6


def traced_cases(tile_m: int) -> list[tuple[int, int, int, int, int, int]]:
    lengths = (1, 4, 13, 29)
    return [
        (m_block, sq, sk, left, right, chunk)
        for sq, sk in itertools.product(lengths, (0, *lengths))
        for left, right, chunk in ((0, 0, 1), (3, 0, 7), (0, 5, 5), (7, 2, 8), (40, 40, 6), (40, 40, 100))
        for m_block in range(-(-sq // tile_m))
    ]


def traced_results(cases: torch.Tensor, tile_m: int, tile_n: int) -> torch.Tensor:
    """(len(cases), len(SIDES), 6): lo and hi of the tile's first row, then its block range, from traced Int32s."""

    def one_case(case, out, i: int) -> None:  # type: ignore[no-untyped-def]
        m_block, sq, sk, *numbers = case
        band = band_of(Band, SIDES[i], *numbers)
        found = band.blocks(m_block, tile_m, tile_n, sq, sk)
        row = m_block * tile_m
        bounds = (band.lo(row, sq, sk), band.hi(row, sq, sk))
        for column, value in enumerate((*bounds, found.begin, found.full_begin, found.full_end, found.end)):
            out[NUMBERS * i + column] = cutlass.Int32(value)

    # No annotations: `from __future__ import annotations` makes them strings, but the DSL needs types. Without them, it
    # uses the types of the arguments.
    @cute.jit
    def program(cases, out):  # type: ignore[no-untyped-def]
        for c in range(cases.shape[0]):
            case = [cases[c, column] for column in range(6)]
            for i in cutlass.range_constexpr(len(SIDES)):
                one_case(case, out[c, None], i)

    results = torch.full((len(cases), len(SIDES) * NUMBERS), -1, dtype=torch.int32)
    program(from_dlpack(cases), from_dlpack(results))
    return results.view(len(cases), len(SIDES), NUMBERS)


@pytest.mark.parametrize(("sq", "sk"), [(100, 100), (100, 333), (333, 100), (1, 700)])
def test_the_diagonal_block_has_the_key_of_the_last_row(sq: int, sk: int) -> None:
    """Hopper tiles with a speculative row max visit this block first, where scores tend to be large."""
    for m_block in range(spec.ceil_div(sq, 64)):
        own_key = min(64 * m_block + 63, sq - 1) + sk - sq
        assert Band(None, 0).diagonal_block(m_block, 64, 48, sq, sk) == max(own_key, 0) // 48


@pytest.mark.compiles
@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 8), (8, 3)])
def test_traced_integers_agree_with_python(tile_m: int, tile_n: int) -> None:
    cases = traced_cases(tile_m)
    results = traced_results(torch.tensor(cases, dtype=torch.int32), tile_m, tile_n)
    for (m_block, sq, sk, *sizes), found in zip(cases, results.tolist(), strict=True):
        for sides, numbers in zip(SIDES, found, strict=True):
            band = band_of(spec.Band, sides, *sizes)
            row = m_block * tile_m
            blocks = band.blocks(m_block, tile_m, tile_n, sq, sk)
            bounds = [band.lo(row, sq, sk), band.hi(row, sq, sk)]
            assert numbers == [*bounds, blocks.begin, blocks.full_begin, blocks.full_end, blocks.end]


@pytest.mark.parametrize("shares", [1, 2, 3, 7, 64, 131_071])
def test_shares_of_a_range_are_consecutive_and_equal(shares):
    for total in (0, 1, 5, 63, 64, 65, 131_072):
        parts = [share_of(total, i, shares) for i in range(shares)]
        assert parts[0][0] == 0 and parts[-1][1] == total
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
        sizes = {end - begin for begin, end in parts}
        assert max(sizes) - min(sizes) <= 1 and sorted(sizes, reverse=True)[0] == -(-total // shares)
