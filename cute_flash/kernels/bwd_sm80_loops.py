"""The ways through the blocks of queries of a tile of keys, in the backward with mma.sync."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.entry_list import Entry
from cute_flash.kernels.bwd_sm80_shared import Main, Params
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.spec.band import BlockRange


class Loops:
    """Of a kernel that has `load_block` and `one_block`."""

    tile: BwdTileSm80

    @cute.jit
    def over_band(self, p: Params, main: Main, blocks: BlockRange, head_kv: Int32, batch: Int32):
        """Over the blocks of queries that see the keys, of all heads that share them."""
        heads_per_kv = p.mQ.shape[1] // p.mK.shape[1]
        # Blocks that are left, this one included: their number tells the stages apart.
        left = (blocks.end - blocks.begin) * heads_per_kv
        m_block, head = Int32(blocks.begin), head_kv * heads_per_kv
        self.load_block(p, main, (m_block, head, batch), self.stage_of(left))
        cute.arch.cp_async_commit_group()
        # Keys past the end must not reach dQ: all blocks of the last tile are masked.
        is_tail = main.first_row + self.tile.tile_n > main.span.k_len
        full_end = Int32(0) if is_tail else Int32(blocks.full_end)
        while left > 0:
            is_cut = m_block < blocks.full_begin or m_block >= full_end
            is_last_of_head = m_block + 1 == blocks.end
            next_block = blocks.begin if is_last_of_head else m_block + 1
            next_head = head + 1 if is_last_of_head else head
            following = (next_block, next_head, batch)
            self.one_block(p, main, (m_block, head, batch), left, is_cut, following)
            self.end_head(p, main, head, is_last_of_head)
            m_block, head, left = next_block, next_head, left - 1

    @cute.jit
    def end_head(self, p: Params, main: Main, head: Int32, is_last_of_head):
        if cutlass.const_expr(main.dslope is not None):
            if is_last_of_head:
                n_block = main.first_row // self.tile.tile_n
                block = main.span.k_block(n_block, self.tile.tile_n)
                part = block * self.tile.num_warps + main.thread // 32
                p.terms.store_dslope(main.dslope, head, main.span, part)

    @cute.jit
    def over_list(self, p: Params, main: Main, blocks: BlockRange, place: tuple):
        """Over the blocks that a block map names; `place`: of the list of this tile."""
        lists, (batch, head_kv, _n_block) = p.terms.written.lists, place
        first_head = head_kv * (p.mQ.shape[1] // p.mK.shape[1])
        num = lists.num(*place)
        left, bits = num, lists.read(*place, Int32(0))
        first = Entry(bits)
        self.load_block(p, main, (first.m_block, first_head + first.head, batch), self.stage_of(left))
        cute.arch.cp_async_commit_group()
        is_tail = main.first_row + self.tile.tile_n > main.span.k_len
        full_end = Int32(0) if is_tail else Int32(blocks.full_end)
        while left > 0:
            entry = Entry(bits)
            next_bits = lists.read(*place, cutlass.min(num - left + 1, num - 1))
            following = Entry(next_bits)
            m_block, head = entry.m_block, first_head + entry.head
            is_cut = m_block < blocks.full_begin or m_block >= full_end
            self.one_block(
                p, main, (m_block, head, batch), left, is_cut,
                (following.m_block, first_head + following.head, batch), entry.is_partial,
            )  # fmt: skip
            self.end_head(p, main, head, entry.is_last)
            left, bits = left - 1, next_bits
