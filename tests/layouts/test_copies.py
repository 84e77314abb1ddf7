from __future__ import annotations

import pytest

from layouts.copies import cp_async_wavefronts, fill_wavefronts
from layouts.smem import SmemTile


@pytest.mark.parametrize(
    ("head_dim", "keys", "variant", "of_q", "of_k"),
    [
        (128, 48, "swizzled", 256, 96),
        (128, 48, "plain", 256, 96),
        (128, 48, "padded", 672, 252),
        (96, 64, "swizzled", 384, 192),
        (96, 64, "plain", 384, 192),
        (96, 64, "padded", 720, 360),
    ],
)
def test_what_an_h200_counts(head_dim: int, keys: int, variant: str, of_q: int, of_k: int) -> None:
    """16 heads, 2048 queries and keys: 256 tiles of 128 rows, each against all keys."""
    found = [fill_wavefronts(SmemTile(rows, head_dim, variant=variant), 128) for rows in (128, keys)]
    assert found == [of_q, of_k]
    counted = {
        (128, "swizzled"): 2179072,
        (128, "plain"): 2179072,
        (128, "padded"): 5693440,
        (96, "swizzled"): 3244032,
        (96, "padded"): 6082560,
    }
    if (head_dim, variant) not in counted:
        return
    blocks = -(-2048 // keys)
    # Rows of the last block beyond the end: two to an instruction, which then takes 4 wavefronts.
    beyond = (blocks * keys - 2048) // 2 * head_dim // 128
    spared = 2 * beyond * (of_k / (keys // 2) - 4) if beyond else 0
    assert 256 * (of_q + 2 * blocks * of_k - spared) == counted[head_dim, variant]


def test_lines_and_sectors() -> None:
    line = [(16 * chunk, 16 * chunk) for chunk in range(8)]
    assert cp_async_wavefronts(line) == 1
    # Chunks change places within their sectors, and sectors within the line: a swizzle.
    assert cp_async_wavefronts([(source, target ^ 48) for source, target in line]) == 1
    # Moved by a sector: two lines. By half of one: and every sector lies in two.
    assert cp_async_wavefronts([(source, target + 32) for source, target in line]) == 2
    assert cp_async_wavefronts([(source, target + 16) for source, target in line]) == 3
    assert cp_async_wavefronts([(source, target + 48) for source, target in line]) == 4
    with pytest.raises(ValueError, match="multiples of 16"):
        cp_async_wavefronts([(0, 8)])
