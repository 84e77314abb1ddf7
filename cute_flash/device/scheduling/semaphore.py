"""A semaphore per tile in global memory: CTAs add to the tile one after the other, in a fixed order.

The first CTA, of rank 0, may store instead: the tile then needs no zeros.
The semaphore counts the CTAs that have added to its tile. A CTA waits until the count equals its rank, adds, and
increments the count, so the result does not depend on the speed of the CTAs. A CTA must come later in the grid than the
CTAs that it waits for. Otherwise it could occupy the SM that they need, and the kernel would deadlock.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_flash.device.ptx import instruction
from cute_flash.device.scheduling.seqlen import HeadBlock, SeqlenInfo
from cute_flash.device.scores.band import Band, minimum


@dataclass(frozen=True)
class DQSemaphore:
    """The order of additions to dQ: the last K/V tile adds to an m_block first, the first tile last.

    The grid starts the last tiles first too, so a tile that others wait for has always started. Tiles reach the same
    m_block at different times, which shortens the waits. A K/V tile visits m_blocks in ascending order. With a right
    bound (causal) it begins at the diagonal. Without one all tiles begin with the first m_block, but the grid
    interleaves several heads, so the tiles of one head start at different times.
    """

    mSemaphore: cute.Tensor  # (B, H, m_block)
    band: Band  # rows are queries, columns are keys
    seqlen_q: Int32  # not used in a varlen batch
    seqlen_k: Int32
    tile_m: cutlass.Constexpr
    tile_n: cutlass.Constexpr
    by_tma: cutlass.Constexpr = True  # bulk copies do the additions, which needs proxy fences

    def rank(self, n_block: Int32, m_block: Int32, seqlen: SeqlenInfo | None = None) -> Int32:
        """The number of K/V tiles that add to the m_block before this tile. `seqlen`: of a varlen batch."""
        lengths = (self.seqlen_q, self.seqlen_k) if seqlen is None else (seqlen.q_len, seqlen.k_len)
        if self.band.chunk is not None:
            return self.last_block_in_chunk(m_block, *lengths) - n_block
        blocks = self.band.blocks(m_block, self.tile_m, self.tile_n, *lengths)
        return blocks.end - 1 - n_block

    def last_block_in_chunk(self, m_block: Int32, seqlen_q: Int32, seqlen_k: Int32) -> Int32:
        """The last K/V block that the m_block visits, in fewer registers than `Band.blocks`; adder warps have few.

        The m_block visits at least one block, so the position of its last row is not negative.
        """
        chunk = self.band.chunk
        position = minimum((m_block + 1) * self.tile_m - 1 + seqlen_k - seqlen_q, seqlen_k - 1)
        last_key = minimum(position + self.band.right, seqlen_k - 1)
        last_of_chunk = Int32(Uint32(position) // Uint32(chunk)) * chunk + chunk - 1
        return minimum(last_key, last_of_chunk) // self.tile_n

    def _address(self, m_block: HeadBlock, half: Int32 | None) -> Int64:
        address = cute.domain_offset(tuple(m_block), self.mSemaphore).iterator.toint()
        return address if half is None else address + 2 * half

    def _state_of_half(self, count: Int32) -> Int32:
        """The 16 bits of a half's semaphore after `count` > 0 tiles have added: odd, so that only 0 means none.

        The count is modulo 2^15. This suffices: fewer than 2^15 tiles run at a time, so the count is less than 2^15
        below the rank of a tile that waits.
        """
        return (2 * count + 1) & 0xFFFF

    @cute.jit
    def wait(self, m_block: HeadBlock, rank: Int32, half: Int32 | None = None):
        """Wait until `rank` tiles have added to the m_block; their sums are then visible.

        Called by one thread. `half`: 0 or 1 if tiles wait for each half of the block separately; see `_state_of_half`.
        """
        address, state = self._address(m_block, half), Int32(-1)
        if cutlass.const_expr(half is None):
            while state != rank:
                state = instruction("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", Int32, address)
        elif rank > 0:
            while state != self._state_of_half(rank):
                state = instruction("ld.acquire.gpu.global.u16 {$w0}, [{$r0}];", Int32, address)
        if cutlass.const_expr(self.by_tma):
            cute.arch.inline_ptx("fence.proxy.async.global;")

    @cute.jit
    def arrive(self, m_block: HeadBlock, rank: Int32, half: Int32 | None = None):
        """Increment the count after this CTA's additions are complete. `half`: as in `wait`.

        Called by the thread that issued them or, if several threads did, by one thread after a barrier.
        """
        if cutlass.const_expr(self.by_tma):
            cute.arch.inline_ptx("fence.proxy.async.global;")
        state, bits = (rank + 1, "s32") if half is None else (self._state_of_half(rank + 1), "u16")
        arguments = [self._address(m_block, half), state]
        cute.arch.inline_ptx(f"st.release.gpu.global.{bits} [{{$r0}}], {{$r1}};", read_only_args=arguments)
