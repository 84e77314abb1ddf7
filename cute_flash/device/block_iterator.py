"""The order in which a kernel visits the blocks of a tile.

An iterator has `num` blocks. `block(i)` is the i-th, and those in `[full_begin, full_end)` need no mask.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.band import maximum, minimum, select
from cute_flash.spec.band import BlockRange


@dataclass(frozen=True)
class BlockIterator:
    """All blocks of a range, in ascending or descending order."""

    first: Int32
    step: int
    full_begin: Int32
    full_end: Int32
    num: Int32

    @staticmethod
    def of(blocks: BlockRange, ascends: bool) -> "BlockIterator":
        num, before, after = blocks.end - blocks.begin, blocks.full_begin - blocks.begin, blocks.end - blocks.full_end
        if ascends:
            return BlockIterator(blocks.begin, 1, before, num - after, num)
        return BlockIterator(blocks.end - 1, -1, after, num - before, num)

    def block(self, i: Int32) -> Int32:
        return self.first + self.step * i

    def is_masked(self, i: Int32):
        return (i < self.full_begin) | (i >= self.full_end)

    def starts_masked(self):
        return (self.full_begin > 0) | (self.full_end == 0)


@dataclass(frozen=True)
class OutwardBlockIterator:
    """From one block down to the first, then from the one after it up to the last.

    It starts at the keys next to the queries, where scores are often the largest.
    """

    first: Int32
    blocks: BlockRange

    @staticmethod
    def of(blocks: BlockRange, start: Int32) -> "OutwardBlockIterator":
        return OutwardBlockIterator(maximum(minimum(start, blocks.end - 1), blocks.begin), blocks)

    @property
    def num(self) -> Int32:
        return self.blocks.end - self.blocks.begin

    @property
    def full_begin(self) -> int:
        """Of an unbounded band: only the end of the keys makes a block partial, the last one unless it is the
        first.
        """
        return 0

    @property
    def full_end(self) -> Int32:
        is_first = self.first >= self.blocks.full_end
        return select(is_first, self.num, self.num - (self.blocks.end - self.blocks.full_end))

    def block(self, i: Int32) -> Int32:
        down, up = self.first - i, self.blocks.begin + i
        return select(down >= self.blocks.begin, down, up)

    def is_masked(self, i: Int32):
        return self.blocks.is_masked(self.block(i))

    def starts_masked(self):
        return self.blocks.is_masked(self.first)


@dataclass(frozen=True)
class BlockIndices:
    """The index lists of a block mask: for every block of rows, the blocks of keys, full ones and partial ones."""

    num_full: cute.Tensor  # (B, H, blocks)
    full: cute.Tensor  # (B, H, blocks, others)
    num_partial: cute.Tensor
    partial: cute.Tensor

    @cute.jit
    def counts(self, batch: Int32, head: Int32, block: Int32) -> tuple[Int32, Int32]:
        """How many blocks are full, and how many partial."""
        uniform = cute.arch.make_warp_uniform
        return uniform(self.num_full[batch, head, block]), uniform(self.num_partial[batch, head, block])

    @cute.jit
    def read(self, where: tuple, i: Int32, num_full: Int32) -> Int32:
        """The i-th block of the list at (batch, head, block)."""
        full, partial = self.full[(*where, None)].iterator, self.partial[(*where, None)].iterator
        at = full + i if i < num_full else partial + (i - num_full)
        return cute.make_tensor(at, cute.make_layout(1))[0]


@dataclass(frozen=True)
class BlockSparseIterator:
    """The key blocks that the index lists of a block mask name: full ones, then partial ones.

    A block of the mask is `parts` blocks of the kernel.
    """

    indices: BlockIndices
    where: tuple  # (batch, head, block of the mask)
    counts: tuple  # of blocks of the mask: full and partial
    parts: cutlass.Constexpr
    blocks: BlockRange | None = None  # of a band, which may mask full blocks too

    @property
    def num_full(self) -> Int32:
        return self.counts[0]

    @property
    def num(self) -> Int32:
        return (self.counts[0] + self.counts[1]) * self.parts

    @property
    def full_begin(self) -> Int32:
        return Int32(0)

    @property
    def full_end(self) -> Int32:
        return self.num_full * self.parts

    @property
    def first(self) -> Int32:
        return self.block(Int32(0))

    def block(self, i: Int32) -> Int32:
        if self.parts == 1:
            return self.indices.read(self.where, i, self.num_full)
        return self.indices.read(self.where, i // self.parts, self.num_full) * self.parts + i % self.parts

    def is_masked(self, i: Int32):
        """Whether the i-th block is partial."""
        return i >= self.full_end

    def starts_masked(self):
        return self.num_full == 0


AnyBlockIterator = BlockIterator | OutwardBlockIterator | BlockSparseIterator
