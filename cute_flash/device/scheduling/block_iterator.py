"""The order in which a tile visits its blocks; `device.scheduling.block_sparse` has the iterator of a block mask.

An iterator visits `num` blocks; `block(i)` is the index of the i-th block. Visits i > 0 in `[full_begin, full_end)`
need no mask. `starts_masked` is true if visit 0 needs one; kernels treat the first block separately.
"""

from dataclasses import dataclass

from cutlass import Int32

from cute_flash.device.scores.band import maximum, minimum, select
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
    """Visits a start block and the blocks before it in descending order, then the blocks after it in ascending order.

    The start block is nearest to the queries, where scores are often the largest, so that the row max seldom grows
    later. `full_begin` and `full_end` are valid for unbounded bands only: there only the block with the last key may
    need a mask, and that block is visited first or last. For other bands, call `is_masked`.
    """

    first: Int32
    blocks: BlockRange
    full_begin = 0

    @staticmethod
    def of(blocks: BlockRange, start: Int32) -> "OutwardBlockIterator":
        return OutwardBlockIterator(maximum(minimum(start, blocks.end - 1), blocks.begin), blocks)

    @property
    def num(self) -> Int32:
        return self.blocks.end - self.blocks.begin

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


def share_of(total: Int32, i: Int32, shares: Int32) -> tuple[Int32, Int32]:
    """Divide range(total) into `shares` parts: (begin, end) of part i. The first parts may have one number more.

    The products are at most `total`, so they fit in 32 bits.
    """
    size = total // shares
    longer = total - size * shares
    return i * size + minimum(i, longer), (i + 1) * size + minimum(i + 1, longer)
