"""Order of the output tiles in the grid.

Blocks are launched in order, so the order is the schedule. Heads are cut into sections whose K and V fit in
L2 together; within a section the row tiles of all its heads run side by side, and with a right bound the long
ones (late rows, which see more keys) come first, so that the short ones fill the last wave.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


@dataclass(frozen=True)
class TileOrder:
    num_m_blocks: Int32
    heads: Int32
    batch: Int32
    section: Int32  # query heads per section
    longest_first: cutlass.Constexpr
    shares_batch: cutlass.Boolean | None = None  # what batches share is read by them side by side: a bias

    @cute.jit
    def decode(self, index: Int32):
        """Linear block index -> (m_block, head, batch)."""
        section_tiles = self.section * self.num_m_blocks
        section = index // section_tiles
        rest = index - section * section_tiles
        first_head = section * self.section
        width = cutlass.min(self.section, self.heads * self.batch - first_head)
        m_block = rest // width
        head = first_head + rest - m_block * width
        if cutlass.const_expr(self.longest_first):
            m_block = self.num_m_blocks - 1 - m_block
        batch = head // self.heads
        head = head - batch * self.heads
        if cutlass.const_expr(self.shares_batch is not None):
            if self.shares_batch:
                place = batch * self.heads + head
                head = place // self.batch
                batch = place - head * self.batch
        # All threads agree, which division hides: said again, for addresses to live in uniform registers.
        uniform = cute.arch.make_warp_uniform
        return uniform(m_block), uniform(head), uniform(batch)


@dataclass(frozen=True)
class TileQueue:
    """Which tiles a persistent block works on: its own index first, then every grid-th one, or, where tiles
    differ in length, whichever is next when it is free.

    `counter` is the address of an int32 in global memory that is 0 between launches and that no other launch
    uses meanwhile. Every tile draws one number, so the last number drawn is known: who gets it writes the 0.
    """

    num_tiles: Int32
    counter: Int64
    is_shared: cutlass.Constexpr

    def _pointer(self) -> cute.Pointer:
        return cute.make_ptr(Int32, self.counter, cutlass.AddressSpace.gmem, assumed_align=4)

    def first(self) -> Int32:
        return cute.arch.block_idx()[0]

    @cute.jit
    def following(self, index: Int32) -> Int32:
        """The tile after `index`; asked by one warp."""
        following = index + cute.arch.grid_dim()[0]
        if cutlass.const_expr(self.is_shared):
            drawn = Int32(0)
            if cute.arch.lane_idx() == 0:
                drawn = cute.arch.atomic_add(self._pointer(), Int32(1), sem="relaxed", scope="gpu")
            following = cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(drawn, 0)
        return following

    @cute.jit
    def close(self, index: Int32):
        """After the first index that is no tile."""
        if cutlass.const_expr(self.is_shared):
            if cute.arch.lane_idx() == 0 and index == cute.arch.grid_dim()[0] + self.num_tiles - 1:
                cute.make_tensor(self._pointer(), cute.make_layout(1))[0] = Int32(0)
