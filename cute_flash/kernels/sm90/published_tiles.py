"""Tiles that the producer warp of a persistent kernel publishes to the other warps."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

NO_TILE = -1
# Two even with one stage of the operand that comes with a tile: the next tile is published before all have read this
# one.
SLOTS = 2


@dataclass(frozen=True)
class PublishedTiles:
    """The integers of a tile, in shared memory: its block, or NO_TILE after the last tile; its head; others.

    `count` is the number of tiles before a tile.
    """

    slots: cute.Tensor  # (integer, slot)
    num: cutlass.Constexpr  # integers of a tile

    @staticmethod
    def allocate(smem: SmemAllocator, num: int) -> "PublishedTiles":
        layout = cute.make_layout((-(-num // 4) * 4, SLOTS))
        return PublishedTiles(smem.allocate_tensor(Int32, layout, 16), num)

    @cute.jit
    def write(self, count: Int32, values: tuple):
        """Write a tile; the arrival at the `full` barrier of its operand, which follows, publishes it."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(values)):
                self.slots[i, count % SLOTS] = values[i]

    @cute.jit
    def write_end(self, count: Int32):
        self.write(count, (Int32(NO_TILE), *(Int32(0) for _ in range(self.num - 1))))

    def read(self, i: int, count: Int32) -> Int32:
        """An integer of a tile, after the `full` barrier."""
        return cute.arch.make_warp_uniform(self.slots[i, count % SLOTS])
