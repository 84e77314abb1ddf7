"""Coordinates of tiles that the producer warp of a persistent kernel publishes to the other warps."""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

NO_TILE = -1
# A tile is published together with its Q (in the backward, K). There is a slot for each stage of that operand, and at
# least two, because some warps read a tile again after the next one is published.
MIN_SLOTS = 2


@dataclass(frozen=True)
class PublishedTiles:
    """The integers of a tile in shared memory: its block (NO_TILE after the last tile), its head, its sequence.

    The argument `count` is the number of tiles before a tile.
    """

    slots: cute.Tensor  # (integer, slot)
    num: cutlass.Constexpr  # integers of a tile
    num_slots: cutlass.Constexpr = MIN_SLOTS

    @staticmethod
    def allocate(smem: SmemAllocator, num: int, stages: int = 1) -> "PublishedTiles":
        """`stages`: of the operand that is published with a tile."""
        num_slots = max(MIN_SLOTS, stages)
        layout = cute.make_layout((-(-num // 4) * 4, num_slots))
        return PublishedTiles(smem.allocate_tensor(Int32, layout, 16), num, num_slots)

    @cute.jit
    def write(self, count: Int32, values: Sequence[Int32]):
        """Write a tile. The caller's arrival at the `full` barrier of the tile's operand then publishes it."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(values)):
                self.slots[i, count % self.num_slots] = values[i]

    @cute.jit
    def write_end(self, count: Int32):
        self.write(count, (Int32(NO_TILE), *(Int32(0) for _ in range(self.num - 1))))

    def read(self, i: int, count: Int32) -> Int32:
        """The i-th integer of a tile. Called after a wait for the `full` barrier."""
        return cute.arch.make_warp_uniform(self.slots[i, count % self.num_slots])
