"""The window mask as a band: which keys a row sees, and which K/V blocks a tile of rows visits.

Query row `i` sees the keys `lo(i) <= j < hi(i)`, aligned to the bottom right:

    lo(i) = max(0,  i + Sk - Sq - left)          left  = None: no lower bound
    hi(i) = min(Sk, i + Sk - Sq + right + 1)     right = None: no upper bound but Sk

Causal attention is `right = 0`, a sliding window bounds both sides, and `min(Sk, ...)` masks the tail of the last K/V
block. Both bounds grow with `i`, so the first and the last row of a tile determine the K/V blocks that it visits, and
the full blocks among them. `device.scores.band.Band` does the same on traced integers inside a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# A Python int on the host, a traced Int32 inside a kernel.
Index = Any
# A right bound that masks nothing: it exceeds any sequence length.
FAR = 1 << 29


def ceil_div(a: Index, b: int) -> Index:
    return (a + b - 1) // b


@dataclass(frozen=True)
class BlockRange:
    """K/V blocks of a tile of rows: `[begin, end)` are visited, `[full_begin, full_end)` need no mask."""

    begin: Index
    full_begin: Index
    full_end: Index
    end: Index

    def is_masked(self, block: Index) -> Any:
        """Whether a block needs a mask; true for blocks that are not visited."""
        return (block < self.full_begin) | (block >= self.full_end)


# Windows of fewer keys are narrow: a tile visits few K/V blocks, however long the sequence is.
NARROW = 2048


@dataclass(frozen=True)
class Band:
    """The mask of `attn(causal=..., window=...)`; None: unbounded on that side."""

    left: Index | None = None
    right: Index | None = None

    @property
    def bounds(self) -> tuple[Index | None, Index | None]:
        return self.left, self.right

    @staticmethod
    def of(causal: bool, window: tuple[int | None, int | None]) -> Band:
        """The band of `attn(causal=..., window=...)`; causal lowers the right bound to 0."""
        left, right = window
        return Band(left, 0 if causal else right)

    def __str__(self) -> str:
        if self == Band():
            return "full"
        if self == Band(None, 0):
            return "causal"
        sides = ("all" if side is None else str(side) for side in self.bounds)
        return "window of {} keys before and {} after".format(*sides)

    @staticmethod
    def minimum(a: Index, b: Index) -> Index:
        return min(a, b)

    @staticmethod
    def maximum(a: Index, b: Index) -> Index:
        return max(a, b)

    def lo(self, i: Index, sq: Index, sk: Index) -> Index:
        """First visible key of row `i`. It may lie beyond the last key: the row then sees no key."""
        return 0 if self.left is None else self.maximum(0, i + sk - sq - self.left)

    def hi(self, i: Index, sq: Index, sk: Index) -> Index:
        """One past the last visible key of row `i`; never negative."""
        return sk if self.right is None else self.maximum(0, self.minimum(sk, i + sk - sq + self.right + 1))

    def blocks(self, m_block: Index, tile_m: int, tile_n: int, sq: Index, sk: Index) -> BlockRange:
        """The K/V blocks of `tile_n` keys that the rows of tile `m_block` visit, and the full ones among them."""
        first = m_block * tile_m
        last = self.minimum(first + tile_m, sq) - 1
        begin = self.lo(first, sq, sk) // tile_n
        end = self.maximum(begin, ceil_div(self.hi(last, sq, sk), tile_n))
        # Without a left bound, `begin` is the constant 0, and so is known when a kernel is compiled.
        full_begin = begin if self.left is None else self.minimum(ceil_div(self.lo(last, sq, sk), tile_n), end)
        full_end = self.maximum(full_begin, self.minimum(self.hi(first, sq, sk) // tile_n, end))
        return BlockRange(begin, full_begin, full_end, end)
