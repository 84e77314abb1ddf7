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
    parts: cutlass.Constexpr = 2  # of an m_block, if tiles wait for each part separately: 2 or 4

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

    @property
    def _part_bytes(self) -> int:
        """Bytes of a part's semaphore; those of all parts take an int32."""
        return 4 // self.parts

    def _address(self, m_block: HeadBlock, part: Int32 | None) -> Int64:
        address = cute.domain_offset(tuple(m_block), self.mSemaphore).iterator.toint()
        return address if part is None else address + self._part_bytes * part

    def _state_of_part(self, count: Int32) -> Int32:
        """The bits of a part's semaphore after `count` > 0 tiles have added: odd, so that only 0 means none.

        The count is modulo 2^15, or 2^7 with four parts. This suffices: fewer tiles run at a time, so the count is less
        than this below the rank of a tile that waits. With four parts a tile takes two SMs.
        """
        return (2 * count + 1) & ((1 << 8 * self._part_bytes) - 1)

    @cute.jit
    def wait(self, m_block: HeadBlock, rank: Int32, part: Int32 | None = None):
        """Wait until `rank` tiles have added to the m_block; their sums are then visible.

        Called by one thread. `part`: of the block, if tiles wait for each part separately; see `_state_of_part`.
        """
        address, state = self._address(m_block, part), Int32(-1)
        if cutlass.const_expr(part is None):
            while state != rank:
                state = instruction("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", Int32, address)
        elif rank > 0:
            load = f"ld.acquire.gpu.global.u{8 * self._part_bytes} {{$w0}}, [{{$r0}}];"
            while state != self._state_of_part(rank):
                state = instruction(load, Int32, address)
        if cutlass.const_expr(self.by_tma):
            cute.arch.inline_ptx("fence.proxy.async.global;")

    @cute.jit
    def arrive(self, m_block: HeadBlock, rank: Int32, part: Int32 | None = None):
        """Increment the count after this CTA's additions are complete. `part`: as in `wait`.

        Called by the thread that issued them or, if several threads did, by one thread after a barrier.
        """
        if cutlass.const_expr(self.by_tma):
            cute.arch.inline_ptx("fence.proxy.async.global;")
        state, bits = rank + 1, "s32"
        if cutlass.const_expr(part is not None):
            state, bits = self._state_of_part(rank + 1), f"u{8 * self._part_bytes}"
        arguments = [self._address(m_block, part), state]
        cute.arch.inline_ptx(f"st.release.gpu.global.{bits} [{{$r0}}], {{$r1}};", read_only_args=arguments)
