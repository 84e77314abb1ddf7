"""The mask of `causal`, `window` and `attention_chunk` as a band: the keys of a row, and the K/V blocks of a tile.

Query row `i` has the position `p = i + Sk - Sq` among the keys, so the last query is aligned with the last key (bottom
right). It sees the keys `lo(i) <= j < hi(i)`:

    lo(i) = max(0,  p - left,      c)             left  = None: no lower bound
    hi(i) = min(Sk, p + right + 1, c + chunk)     right = None: no upper bound but Sk
    c     = p - p mod chunk                       chunk = None: neither bound has its last term

Causal attention is `right = 0`, a sliding window bounds both sides, and `min(Sk, ...)` masks the tail of the last K/V
block. With a chunk, a query sees only keys of its own chunk; a query before the first key sees none. Both bounds grow
with `i`, so the first and the last row of a tile determine the K/V blocks that it visits, and the full blocks among
them. `device.scores.band.Band` does the same on traced integers inside a kernel.

With keys as rows and queries as columns (`Band.of_keys`), the bounds are swapped. The row is then the key whose chunk
counts: `c = p - i mod chunk`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

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
    """The mask of `attn(causal=..., window=..., attention_chunk=...)`; None: unbounded on that side, or no chunks."""

    left: Index | None = None
    right: Index | None = None
    chunk: Index | None = None
    rows_are_keys: bool = False

    @property
    def bounds(self) -> tuple[Index | None, Index | None]:
        return self.left, self.right

    def as_dict(self) -> dict[str, Index | None]:
        """The numbers of the mask, for JSON."""
        return {"left": self.left, "right": self.right, "chunk": self.chunk}

    @property
    def has_left(self) -> bool:
        """Whether a row may see no key of the first K/V blocks."""
        return self.left is not None or self.chunk is not None

    @property
    def has_right(self) -> bool:
        """Whether a row may see no key of the last K/V blocks."""
        return self.right is not None or self.chunk is not None

    @property
    def is_narrow(self) -> bool:
        """Whether a row sees at most about `NARROW` keys, however long the sequence is."""
        has_narrow_window = self.left is not None and self.right is not None and self.left + self.right < NARROW
        return has_narrow_window or (self.chunk is not None and self.chunk <= NARROW)

    @property
    def reach_of_first_key(self) -> Index | None:
        """How far before key 0 a query can be and still see a key; None: any distance."""
        return self.right if self.chunk is None else 0

    @property
    def of_keys(self) -> Self:
        """The same mask with keys as rows and queries as columns."""
        return replace(self, left=self.right, right=self.left, rows_are_keys=not self.rows_are_keys)

    @staticmethod
    def of(causal: bool, window: tuple[int | None, int | None], chunk: int | None = None) -> Band:
        """The band of `attn(causal=..., window=..., attention_chunk=...)`; causal lowers the right bound to 0."""
        left, right = window
        return Band(left, 0 if causal else right, chunk)

    def __str__(self) -> str:
        if self.chunk is not None:
            return f"{replace(self, chunk=None)}, chunks of {self.chunk} keys"
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

    @staticmethod
    def modulo(a: Index, b: Index) -> Index:
        """The remainder of the division rounded down, which is not negative for a positive `b`."""
        return a % b

    def lo(self, i: Index, sq: Index, sk: Index, first: Index = 0) -> Index:
        """First visible key of row `i`. It may lie beyond the last key: the row then sees no key.

        `first`: the key from which this result and `sk` are counted.
        """
        if self.chunk is None:
            return 0 if self.left is None else self.maximum(0, i + sk - sq - self.left)
        begin = self.chunk_begin(i, sq, sk, first)
        return self.maximum(0, begin if self.left is None else self.maximum(begin, i + sk - sq - self.left))

    def hi(self, i: Index, sq: Index, sk: Index, first: Index = 0) -> Index:
        """One past the last visible key of row `i`; never negative. `first`: as for `lo`."""
        if self.chunk is None:
            return sk if self.right is None else self.maximum(0, self.minimum(sk, i + sk - sq + self.right + 1))
        end = self.minimum(sk, self.chunk_begin(i, sq, sk, first) + self.chunk)
        return self.maximum(0, end if self.right is None else self.minimum(end, i + sk - sq + self.right + 1))

    def chunk_begin(self, i: Index, sq: Index, sk: Index, first: Index = 0) -> Index:
        """The first key of the chunk of row `i`. It may be negative. `first`: as for `lo`."""
        position = i + sk - sq
        return position - self.modulo(i if self.rows_are_keys else position + first, self.chunk)

    def longest_row(self, sq: Index, sk: Index) -> Index:
        """A row of the last complete chunk that sees the most columns, for causal masks too. It may not exist."""
        if self.rows_are_keys:
            return (sq // self.chunk - 1) * self.chunk
        return sk // self.chunk * self.chunk - 1 + sq - sk

    def blocks(self, m_block: Index, tile_m: int, tile_n: int, sq: Index, sk: Index) -> BlockRange:
        """The K/V blocks of `tile_n` keys that the rows of tile `m_block` visit, and the full ones among them."""
        first = m_block * tile_m
        last = self.minimum(first + tile_m, sq) - 1
        begin = self.lo(first, sq, sk) // tile_n
        end = self.maximum(begin, ceil_div(self.hi(last, sq, sk), tile_n))
        # Without a left bound, `begin` is the constant 0, and so is known when a kernel is compiled.
        full_begin = begin if not self.has_left else self.minimum(ceil_div(self.lo(last, sq, sk), tile_n), end)
        full_end = self.maximum(full_begin, self.minimum(self.hi(first, sq, sk) // tile_n, end))
        return BlockRange(begin, full_begin, full_end, end)
