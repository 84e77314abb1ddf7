"""The mask of attention as a band.

Query row `i` sees the keys `lo(i) <= j < hi(i)`, aligned to the bottom right:

    lo(i) = max(0,  i + Sk - Sq - left)          left  = None: no lower bound
    hi(i) = min(Sk, i + Sk - Sq + right + 1)     right = None: no upper bound but Sk

Causal attention is `right = 0`, a sliding window bounds both sides, and the ragged tail of the last key block
is the `min(Sk, ...)`. Both bounds grow with `i`, so the key blocks that a tile of rows must visit, and those
among them that need no masking, are four divisions. Every function runs on Python ints and on traced DSL
integers alike: the kernels and the CPU tests share this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# A Python int on the host, a traced Int32 inside a kernel.
Index = Any
# A right bound that hides nothing: more than any row can look ahead.
FAR = 1 << 29


def _min(a: Index, b: Index) -> Index:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import cutlass

    return cutlass.min(a, b)


def _max(a: Index, b: Index) -> Index:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    import cutlass

    return cutlass.max(a, b)


def ceil_div(a: Index, b: int) -> Index:
    return (a + b - 1) // b


@dataclass(frozen=True)
class BlockRange:
    """Key blocks of a tile of rows: `[begin, end)` are visited, `[full_begin, full_end)` without a mask."""

    begin: Index
    full_begin: Index
    full_end: Index
    end: Index

    def cuts(self, block: Index):
        """Whether a block needs a mask, or is hidden."""
        return (block < self.full_begin) | (block >= self.full_end)

    def walk(self, ascends: bool) -> Walk:
        """The blocks in ascending or descending order."""
        num, before, after = self.end - self.begin, self.full_begin - self.begin, self.end - self.full_end
        if ascends:
            return Walk(self.begin, 1, before, num - after, num)
        return Walk(self.end - 1, -1, after, num - before, num)

    def walk_outward(self, start: Index) -> OutwardWalk:
        """From a block down to the first, then from the one after it up to the last."""
        start = _max(_min(start, self.end - 1), self.begin)
        return OutwardWalk(start, self)


@dataclass(frozen=True)
class Walk:
    """A way through the key blocks of a tile: of `num` blocks `[whole_begin, whole_end)` need no mask."""

    first: Index
    step: int
    whole_begin: Index
    whole_end: Index
    num: Index

    def block(self, i: Index) -> Index:
        """The key block that is the i-th on the way."""
        return self.first + self.step * i

    def is_cut(self, i: Index):
        """Whether the i-th block needs a mask."""
        return (i < self.whole_begin) | (i >= self.whole_end)

    def begins_cut(self):
        return (self.whole_begin > 0) | (self.whole_end == 0)


@dataclass(frozen=True)
class OutwardWalk:
    """A way that begins where scores are often the largest, at the keys next to the queries."""

    first: Index
    blocks: BlockRange

    @property
    def num(self) -> Index:
        return self.blocks.end - self.blocks.begin

    @property
    def whole_begin(self) -> Index:
        """As in `Walk`, of an unbounded band: only the end of the keys cuts a block, the last on the way
        unless it is the first.
        """
        return 0

    @property
    def whole_end(self) -> Index:
        is_first = self.first >= self.blocks.full_end
        if isinstance(is_first, bool):
            return self.num if is_first else self.num - (self.blocks.end - self.blocks.full_end)
        import cutlass

        return cutlass.select_(is_first, self.num, self.num - (self.blocks.end - self.blocks.full_end))

    def block(self, i: Index) -> Index:
        """The key block that is the i-th on the way."""
        down, up = self.first - i, self.blocks.begin + i
        if isinstance(down, int):
            return down if down >= self.blocks.begin else up
        import cutlass

        return cutlass.select_(down >= self.blocks.begin, down, up)

    def is_cut(self, i: Index):
        """Whether the i-th block needs a mask."""
        block = self.block(i)
        return (block < self.blocks.full_begin) | (block >= self.blocks.full_end)

    def begins_cut(self):
        return (self.first < self.blocks.full_begin) | (self.first >= self.blocks.full_end)


# Windows of fewer keys make short tiles of long sequences.
NARROW = 2048


def is_narrow(left: int | None, right: int | None) -> bool:
    return left is not None and right is not None and left + right < NARROW


@dataclass(frozen=True)
class Band:
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
        sides = ("all" if side is None else str(side) for side in (self.left, self.right))
        return "window of {} keys before and {} after".format(*sides)

    def lo(self, i: Index, sq: Index, sk: Index) -> Index:
        """First visible key of row `i` (may lie beyond the last key: the row is then empty)."""
        return 0 if self.left is None else _max(0, i + sk - sq - self.left)

    def hi(self, i: Index, sq: Index, sk: Index) -> Index:
        """One past the last visible key of row `i` (never negative)."""
        return sk if self.right is None else _max(0, _min(sk, i + sk - sq + self.right + 1))

    def blocks(self, m_block: Index, tile_m: int, tile_n: int, sq: Index, sk: Index) -> BlockRange:
        """Which key blocks of `tile_n` keys the rows of tile `m_block` see, and which of them whole."""
        first = m_block * tile_m
        last = _min(first + tile_m, sq) - 1
        begin = self.lo(first, sq, sk) // tile_n
        end = _max(begin, ceil_div(self.hi(last, sq, sk), tile_n))
        # Known to be 0 without a left bound, also to a kernel's compiler.
        full_begin = begin if self.left is None else _min(ceil_div(self.lo(last, sq, sk), tile_n), end)
        full_end = _max(full_begin, _min(self.hi(first, sq, sk) // tile_n, end))
        return BlockRange(begin, full_begin, full_end, end)


def diagonal_block(m_block: Index, tile_m: int, tile_n: int, sq: Index, sk: Index) -> Index:
    """The key block at which the last row of a tile stands; the first one, if that is before all keys."""
    last = _min((m_block + 1) * tile_m, sq) - 1
    return _max(last + sk - sq, 0) // tile_n
