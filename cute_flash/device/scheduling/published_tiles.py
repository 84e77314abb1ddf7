"""Coordinates of tiles that the producer warp of a persistent kernel publishes to the other warps."""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

NO_TILE = -1
# A tile is published together with its Q (in the backward, K). There are two slots even if that operand has one stage,
# because some warps read a tile again after the next one is published.
SLOTS = 2


@dataclass(frozen=True)
class PublishedTiles:
    """The integers of a tile in shared memory: its block (NO_TILE after the last tile), its head, its sequence.

    The argument `count` is the number of tiles before a tile.
    """

    slots: cute.Tensor  # (integer, slot)
    num: cutlass.Constexpr  # integers of a tile

    @staticmethod
    def allocate(smem: SmemAllocator, num: int) -> "PublishedTiles":
        layout = cute.make_layout((-(-num // 4) * 4, SLOTS))
        return PublishedTiles(smem.allocate_tensor(Int32, layout, 16), num)

    @cute.jit
    def write(self, count: Int32, values: Sequence[Int32]):
        """Write a tile. The caller's arrival at the `full` barrier of the tile's operand then publishes it."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(values)):
                self.slots[i, count % SLOTS] = values[i]

    @cute.jit
    def write_end(self, count: Int32):
        self.write(count, (Int32(NO_TILE), *(Int32(0) for _ in range(self.num - 1))))

    def read(self, i: int, count: Int32) -> Int32:
        """The i-th integer of a tile. Called after a wait for the `full` barrier."""
        return cute.arch.make_warp_uniform(self.slots[i, count % SLOTS])
