"""A semaphore per tile of global memory: CTAs add to the tile one after the other, in a fixed order.

A tile's semaphore counts the CTAs that have added to it, from 0. A CTA waits until the count is its rank, adds, and
increments it, so the result does not depend on which CTA is faster. A CTA must come after those that it waits for
in the grid: else it could keep them from running.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.band import Band
from cute_flash.device.ptx import instruction
from cute_flash.device.seqlen import SeqlenInfo


@dataclass(frozen=True)
class DQSemaphore:
    """The order of additions to dQ: K/V tiles add to an m_block from the last tile down to the first.

    The grid runs down as well, so the tile that is waited for has begun, and no CTA waits forever. With a mask, a
    K/V tile visits m_blocks upwards from the diagonal, so that no two tiles are due at the same block at once.
    Without a mask all tiles start at the first m_block; as the grid interleaves several heads, the tiles of one head
    start at different times anyway.
    """

    mSemaphore: cute.Tensor  # (B, H, m_block)
    band: Band  # of queries over keys
    seqlen_q: Int32  # of every sequence, unless the batch is varlen
    seqlen_k: Int32
    tile_m: cutlass.Constexpr
    tile_n: cutlass.Constexpr
    by_tma: cutlass.Constexpr = True  # TMA adds, whose accesses need proxy fences

    def rank(self, n_block: Int32, m_block: Int32, seqlen: SeqlenInfo | None = None) -> Int32:
        """How many K/V tiles add to the m_block before this one; `seqlen`: in a varlen batch."""
        lengths = (self.seqlen_q, self.seqlen_k) if seqlen is None else (seqlen.q_len, seqlen.k_len)
        blocks = self.band.blocks(m_block, self.tile_m, self.tile_n, *lengths)
        return blocks.end - 1 - n_block

    def _address(self, coord: tuple):
        head, batch, m_block = coord
        return cute.domain_offset((batch, head, m_block), self.mSemaphore).iterator.toint()

    @cute.jit
    def wait(self, coord: tuple, rank: Int32):
        """One thread waits until `rank` tiles have added; their sums are visible then."""
        address = self._address(coord)
        count = Int32(-1)
        while count != rank:
            count = instruction("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", Int32, address)
        if cutlass.const_expr(self.by_tma):
            cute.arch.inline_ptx("fence.proxy.async.global;")

    @cute.jit
    def arrive(self, coord: tuple, rank: Int32):
        """The thread whose additions are complete increments the count or, after a barrier, one for its CTA."""
        if cutlass.const_expr(self.by_tma):
            cute.arch.inline_ptx("fence.proxy.async.global;")
        arguments = [self._address(coord), rank + 1]
        cute.arch.inline_ptx("st.release.gpu.global.s32 [{$r0}], {$r1};", read_only_args=arguments)
