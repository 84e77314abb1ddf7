"""The band against its definition, key by key; `tests/device/test_band.py` tests it on traced integers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from cute_flash.spec.band import Band, BlockRange

SIDES = (None, 0, 1, 2, 3, 7)
CHUNKS = (None, 1, 3, 5)


def sees(band: Band, i: int, j: int, sq: int, sk: int) -> bool:
    """The definition: key j is at most `left` before and `right` after row i's own key, i + Sk - Sq, in its chunk."""
    own = i + sk - sq
    before = band.left is None or own - j <= band.left
    after = band.right is None or j - own <= band.right
    in_chunk = band.chunk is None or math.floor(j / band.chunk) == math.floor(own / band.chunk)
    return before and after and in_chunk and 0 <= j < sk


def check_blocks(found: BlockRange, visible: list[list[bool]], tile_n: int, sk: int) -> None:
    """Check the blocks of one tile. `visible` has its rows. A last block with fewer keys is never full."""
    num_blocks = -(-sk // tile_n)
    blocks = [range(n * tile_n, min((n + 1) * tile_n, sk)) for n in range(num_blocks)]
    touched = [n for n, keys in enumerate(blocks) if any(row[j] for row in visible for j in keys)]
    full = [n for n, keys in enumerate(blocks) if len(keys) == tile_n and all(row[j] for row in visible for j in keys)]
    assert 0 <= found.begin <= found.full_begin <= found.full_end <= found.end
    # Exactly the blocks with a visible key, without gaps.
    assert list(range(found.begin, found.end)) == touched
    assert list(range(found.full_begin, found.full_end)) == full
    assert [n for n in range(num_blocks) if not found.is_masked(n)] == full


def check_band(band: Band, visible: list[list[bool]], sk: int) -> None:
    """Check the bounds of all rows, and the blocks of tiles. `visible` has a row of `sk` columns for each row."""
    sq = len(visible)
    for i, row in enumerate(visible):
        lo, hi = band.lo(i, sq, sk), band.hi(i, sq, sk)
        assert [lo <= j < hi for j in range(sk)] == row
        assert lo >= 0
        assert 0 <= hi <= sk
        # Counted from another column, as the mask of a kernel does.
        for first in (1, 4):
            from_first = range(max(band.lo(i, sq, sk - first, first), 0), band.hi(i, sq, sk - first, first))
            assert [j - first in from_first for j in range(first, sk)] == row[first:]
    for tile_m, tile_n in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 5, 8)):
        for m_block in range(-(-sq // tile_m)):
            rows = visible[m_block * tile_m : (m_block + 1) * tile_m]
            check_blocks(band.blocks(m_block, tile_m, tile_n, sq, sk), rows, tile_n, sk)


@pytest.mark.slow
@pytest.mark.parametrize("left", SIDES)
@pytest.mark.parametrize("right", SIDES)
def test_bounds_and_blocks_are_exact(left: int | None, right: int | None) -> None:
    for chunk, sq, sk in itertools.product(CHUNKS, range(1, 9), range(9)):
        if chunk is not None and (sq % 3 != 1 or sk % 4 > 1):
            continue  # for speed
        band = Band(left, right, chunk)
        visible = [[sees(band, i, j, sq, sk) for j in range(sk)] for i in range(sq)]
        check_band(band, visible, sk)
        if sk:
            check_band(band.of_keys, [list(column) for column in zip(*visible, strict=True)], sq)


def test_narrow_bands_and_queries_without_keys() -> None:
    assert Band(1000, 1000).is_narrow and Band(None, None, 2048).is_narrow and Band(5000, 0, 2048).is_narrow
    assert not Band(None, 1000).is_narrow and not Band(None, 0, 8192).is_narrow and not Band(2000, 2000).is_narrow
    for left, right, chunk in itertools.product((None, 1), (None, 0, 2), (None, 3)):
        band, (sq, sk) = Band(left, right, chunk), (9, 4)
        reach = band.reach_of_first_key
        blind = [i for i in range(sq) if not any(sees(band, i, j, sq, sk) for j in range(sk))]
        assert blind == [i for i in range(sq) if reach is not None and i + sk - sq + reach < 0]


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
    assert Band.of(causal, window, 5) == replace(expected, chunk=5)
    assert str(Band.of(causal, window, 5)) == f"{expected}, chunks of 5 keys"


def test_causal_is_aligned_to_the_bottom_right() -> None:
    # The last query sees the last key, for any lengths.
    assert [Band.of(True, (None, None)).hi(i, 2, 5) for i in range(2)] == [4, 5]
    assert [Band.of(True, (None, None)).hi(i, 5, 2) for i in range(5)] == [0, 0, 0, 1, 2]
