"""The band against its definition, key by key: on Python integers, and on integers traced by the DSL."""

from __future__ import annotations

import itertools

import pytest
import torch

from cute_flash.spec.band import Band, BlockRange

SIDES = (None, 0, 1, 2, 3, 7)


def sees(band: Band, i: int, j: int, sq: int, sk: int) -> bool:
    """The definition: key j is at most `left` before and `right` after row i's own key, i + Sk - Sq."""
    distance = j - (i + sk - sq)
    before = band.left is None or -distance <= band.left
    after = band.right is None or distance <= band.right
    return before and after and 0 <= j < sk


def check_blocks(found: BlockRange, visible: list[list[bool]], tile_n: int, sk: int) -> None:
    """`visible` has the rows of one tile. Blocks end with the last key; a ragged one is never whole."""
    num_blocks = -(-sk // tile_n)
    spans = [range(n * tile_n, min((n + 1) * tile_n, sk)) for n in range(num_blocks)]
    touched = [n for n, keys in enumerate(spans) if any(row[j] for row in visible for j in keys)]
    whole = [
        n
        for n, keys in enumerate(spans)
        if len(keys) == tile_n and all(row[j] for row in visible for j in keys)
    ]
    assert 0 <= found.begin <= found.full_begin <= found.full_end <= found.end
    # Exactly the blocks with a visible key: none missed, none in vain, no hole between them.
    assert list(range(found.begin, found.end)) == touched
    assert list(range(found.full_begin, found.full_end)) == whole
    check_walks(found, touched, whole)


def check_walks(found: BlockRange, touched: list[int], whole: list[int]) -> None:
    """Both ways pass every block once, and know which of them need no mask."""
    for ascends, blocks in ((True, touched), (False, touched[::-1])):
        walk = found.walk(ascends)
        assert [walk.block(i) for i in range(walk.num)] == blocks
        unmasked = {walk.block(i) for i in range(walk.whole_begin, walk.whole_end)}
        assert unmasked == set(whole)
        if blocks:
            assert walk.begins_cut() == (blocks[0] not in whole)


@pytest.mark.parametrize("left", SIDES)
@pytest.mark.parametrize("right", SIDES)
def test_bounds_and_blocks_are_exact(left: int | None, right: int | None) -> None:
    band = Band(left, right)
    for sq, sk in itertools.product(range(1, 9), range(9)):
        visible = [[sees(band, i, j, sq, sk) for j in range(sk)] for i in range(sq)]
        for i, row in enumerate(visible):
            lo, hi = band.lo(i, sq, sk), band.hi(i, sq, sk)
            assert [lo <= j < hi for j in range(sk)] == row
            assert lo >= 0
            assert 0 <= hi <= sk
        for tile_m, tile_n in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 5, 8)):
            for m_block in range(-(-sq // tile_m)):
                rows = visible[m_block * tile_m : (m_block + 1) * tile_m]
                check_blocks(band.blocks(m_block, tile_m, tile_n, sq, sk), rows, tile_n, sk)


@pytest.mark.parametrize(
    ("causal", "window", "expected"),
    [
        (False, (None, None), Band(None, None)),
        (True, (None, None), Band(None, 0)),
        (False, (4, 2), Band(4, 2)),
        (True, (4, 2), Band(4, 0)),
        (True, (4, None), Band(4, 0)),
    ],
)
def test_of(causal: bool, window: tuple[int | None, int | None], expected: Band) -> None:
    assert Band.of(causal, window) == expected


def test_causal_is_aligned_to_the_bottom_right() -> None:
    # The last query sees the last key, whatever the lengths.
    assert [Band.of(True, (None, None)).hi(i, 2, 5) for i in range(2)] == [4, 5]
    assert [Band.of(True, (None, None)).hi(i, 5, 2) for i in range(5)] == [0, 0, 0, 1, 2]


# One traced program per tile size runs all cases: (m_block, sq, sk, left, right) in, and out come six numbers
# for each of the four ways in which the sides can be present.
PRESENCE = ((False, False), (False, True), (True, False), (True, True))


def traced_cases(tile_m: int) -> list[tuple[int, int, int, int, int]]:
    lengths = (1, 4, 13, 29)
    return [
        (m_block, sq, sk, left, right)
        for sq, sk in itertools.product(lengths, (0, *lengths))
        for left, right in ((0, 0), (3, 0), (0, 5), (7, 2), (40, 40))
        for m_block in range(-(-sq // tile_m))
    ]


def traced_results(cases: torch.Tensor, tile_m: int, tile_n: int) -> torch.Tensor:
    """(len(cases), 4, 6): lo and hi of the tile's first row, then its block range, from traced Int32s."""
    cutlass = pytest.importorskip("cutlass")
    cute = pytest.importorskip("cutlass.cute")
    from cutlass.cute.runtime import from_dlpack

    def one_case(given, out, presence: int) -> None:  # type: ignore[no-untyped-def]
        m_block, sq, sk, left, right = given
        has_left, has_right = PRESENCE[presence]
        band = Band(left if has_left else None, right if has_right else None)
        found = band.blocks(m_block, tile_m, tile_n, sq, sk)
        row = m_block * tile_m
        bounds = (band.lo(row, sq, sk), band.hi(row, sq, sk))
        for column, value in enumerate((*bounds, found.begin, found.full_begin, found.full_end, found.end)):
            out[6 * presence + column] = cutlass.Int32(value)

    # Annotations are values, not strings, to the DSL: this function takes its types from the arguments.
    @cute.jit
    def program(cases, out):  # type: ignore[no-untyped-def]
        for c in range(cases.shape[0]):
            given = [cases[c, column] for column in range(5)]
            for presence in cutlass.range_constexpr(4):
                one_case(given, out[c, None], presence)

    results = torch.full((len(cases), 24), -1, dtype=torch.int32)
    program(from_dlpack(cases), from_dlpack(results))
    return results.view(len(cases), 4, 6)


@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 8), (8, 3)])
def test_traced_integers_agree_with_python(tile_m: int, tile_n: int) -> None:
    cases = traced_cases(tile_m)
    results = traced_results(torch.tensor(cases, dtype=torch.int32), tile_m, tile_n)
    for (m_block, sq, sk, left, right), found in zip(cases, results.tolist(), strict=True):
        for (has_left, has_right), numbers in zip(PRESENCE, found, strict=True):
            band = Band(left if has_left else None, right if has_right else None)
            row = m_block * tile_m
            blocks = band.blocks(m_block, tile_m, tile_n, sq, sk)
            bounds = [band.lo(row, sq, sk), band.hi(row, sq, sk)]
            assert numbers == [*bounds, blocks.begin, blocks.full_begin, blocks.full_end, blocks.end]
