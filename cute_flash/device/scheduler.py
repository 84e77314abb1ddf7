"""Order of the output tiles in the grid.

Blocks are launched in order, so the order is the schedule. Heads are cut into sections whose K and V fit in
L2 together; within a section the row tiles of all its heads run side by side, and with a right bound the long
ones (late rows, which see more keys) come first, so that the short ones fill the last wave.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class TileOrder:
    num_m_blocks: Int32
    heads: Int32
    batch: Int32
    section: Int32  # query heads per section
    longest_first: cutlass.Constexpr

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
        # All threads agree, which division hides: said again, for addresses to live in uniform registers.
        uniform = cute.arch.make_warp_uniform
        return uniform(m_block), uniform(head - batch * self.heads), uniform(batch)

    def rounds(self, num_tiles: Int32):
        """How many tiles a persistent block is offered."""
        return cute.ceil_div(num_tiles, cute.arch.grid_dim()[0])

    @cute.jit
    def persistent(self, i: Int32):
        """The tile of a persistent block in round i; there is none where it lies past the last.

        Every other round runs backwards: who got the longest tile of one gets the shortest of the next.
        """
        width, block = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        if cutlass.const_expr(self.longest_first):
            block = width - 1 - block if i % 2 == 1 else block
        return i * width + block
