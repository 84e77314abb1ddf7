"""Tiles in global memory that several blocks add to, one after the other, in a fixed order.

Each tile has a counter, 0 before the launch: how many blocks have added to it. A block waits for its turn,
adds, and passes the turn on: the result does not depend on who was faster. Blocks that wait must not keep
those they wait for from running: those must come before them in the grid.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.band import Band
from cute_flash.device.sequence import Sequence


@dataclass(frozen=True)
class Order:
    """Whose turn it is: for a block of queries, the tiles of keys that add to its dQ from the last one down.

    The grid runs down too: whoever is waited for has begun before, and nobody waits forever. A tile of keys
    walks up from the diagonal, where a mask has one, so that no two are due at the same block at a time.
    Without it all begin at the first block, one after the other: with several heads side by side in the grid,
    those of one head begin at different times anyway.
    """

    counters: cute.Tensor  # (B, H, m_block)
    band: Band  # of queries over keys
    seqlen_q: Int32  # of every sequence, unless they are packed
    seqlen_k: Int32
    tile_m: cutlass.Constexpr
    tile_n: cutlass.Constexpr
    by_engine: cutlass.Constexpr = True  # the copy engine adds, whose accesses need fences of their own

    def turn(self, n_block: Int32, m_block: Int32, span: Sequence | None = None) -> Int32:
        """How many tiles of keys come before this one; `span`: of a packed batch."""
        lengths = (self.seqlen_q, self.seqlen_k) if span is None else (span.q_len, span.k_len)
        blocks = self.band.blocks(m_block, self.tile_m, self.tile_n, *lengths)
        return blocks.end - 1 - n_block

    def _counter(self, where: tuple):
        head, batch, m_block = where
        return cute.domain_offset((batch, head, m_block), self.counters).iterator.toint()

    @cute.jit
    def wait(self, where: tuple, rank: Int32):
        """By one thread: until all before have added; what they wrote may then be added to."""
        address = self._counter(where)
        found = Int32(-1)
        while found != rank:
            found = cute.arch.inline_ptx(
                "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
                write_only_types=[Int32],
                read_only_args=[address],
            )
        if cutlass.const_expr(self.by_engine):
            cute.arch.inline_ptx("fence.proxy.async.global;")

    @cute.jit
    def pass_on(self, where: tuple, rank: Int32):
        """By the thread whose additions are complete, or, after a barrier, by one for all of a block."""
        if cutlass.const_expr(self.by_engine):
            cute.arch.inline_ptx("fence.proxy.async.global;")
        cute.arch.inline_ptx(
            "st.release.gpu.global.s32 [{$r0}], {$r1};", read_only_args=[self._counter(where), rank + 1]
        )
