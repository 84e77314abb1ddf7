"""S of a team of warps that divide the columns of Q and K: the sum of their products.

All warps add up the products in the same order, so they get the same bits, and agree on P and on the row maxima.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.planning.decode_tiles import DecodeTile

FLOATS = 4  # floats of a thread that one instruction loads or stores


@dataclass(frozen=True)
class ColumnScores:
    """The products of a team's warps in shared memory, of a block of keys and of the block before."""

    tile: cutlass.Constexpr  # DecodeTile
    team: Int32
    column_warp: Int32  # among the warps of the team
    address: Int32  # of this thread's first floats of the team's first warp

    @staticmethod
    def of(tile: DecodeTile, memory: cute.Tensor, warp: Int32, lane: Int32) -> "ColumnScores":
        """The products in `memory`, which has nothing else during the main loop."""
        team, column_warp = warp // tile.column_warps, warp % tile.column_warps
        first = Int32(memory.iterator.toint()) + team * (2 * tile.column_warps * tile.scores_bytes)
        return ColumnScores(tile, team, column_warp, first + lane * (4 * FLOATS))

    @cute.jit
    def add_up(self, acc_S: cute.Tensor, block: Int32):
        """Replace the products of this warp's columns by their sum over the team. All its warps call it."""
        tile, num = self.tile, cute.size(acc_S)
        # Warps still read the products of the last block while others write those of this one.
        first = self.address + block % 2 * (tile.column_warps * tile.scores_bytes)
        own = first + self.column_warp * tile.scores_bytes
        for i in cutlass.range_constexpr(num // FLOATS):
            for j in cutlass.range_constexpr(FLOATS):
                self.floats(own, i)[j] = acc_S[FLOATS * i + j]
        cute.arch.barrier(barrier_id=1 + self.team, number_of_threads=32 * tile.column_warps)
        part = cute.make_rmem_tensor(FLOATS, Float32)
        for i in cutlass.range_constexpr(num // FLOATS):
            for warp in cutlass.range_constexpr(tile.column_warps):
                cute.autovec_copy(self.floats(first + warp * tile.scores_bytes, i), part)
                for j in cutlass.range_constexpr(FLOATS):
                    acc_S[FLOATS * i + j] = part[j] if warp == 0 else acc_S[FLOATS * i + j] + part[j]

    def floats(self, address: Int32, index: int) -> cute.Tensor:
        """The `index`-th floats of this thread."""
        pointer = cute.make_ptr(
            Float32, address + index * (32 * 4 * FLOATS), cutlass.AddressSpace.smem, assumed_align=4 * FLOATS
        )
        return cute.make_tensor(pointer, cute.make_layout(FLOATS))
