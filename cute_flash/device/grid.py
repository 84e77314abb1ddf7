"""Warps in a grid over the tile of a product of mma.sync, and the operands each of them reads."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_flash.device.ldmatrix import STEP, Landing, Operand, operand
from cute_flash.device.views import transposed
from cute_flash.smem.tile import SmemTile


@dataclass(frozen=True)
class WarpGrid:
    """`along` of the warps are stacked along the rows of the product, the others lie side by side.

    Rows go around in steps of 16: a warp's m16 tiles lie 16 * along apart. Columns go around in runs.
    """

    dtype: type
    num_warps: int
    along: int
    run: int = STEP  # columns of a warp that lie side by side

    @property
    def across(self) -> int:
        return self.num_warps // self.along

    def mma(self) -> cute.TiledMma:
        """Inside a `@cute.jit` function. Two n8 tiles at a time, so that one ldmatrix.x4 feeds both."""
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        columns = STEP
        if self.across > 1:
            columns = cute.make_layout((8, self.across, self.run // 8), stride=(1, self.run, 8))
        shape = (self.along, self.across, 1)
        return cute.make_tiled_mma(op, shape, permutation_mnk=(STEP * self.along, columns, STEP))

    def a(self, mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, tile: SmemTile, turned=False) -> Operand:
        """Rows of the product are rows of sX (rows, cols, stage); turned, they are its columns."""
        thr_mma, sX = mma.get_slice(thread), transposed(sX) if turned else sX
        fragment = thr_mma.make_fragment_A(thr_mma.partition_A(sX[None, None, 0]))
        copy = cute.make_tiled_copy_A(self._ldmatrix(turned), mma)
        rows, columns = (STEP, STEP * self.along) if turned else (STEP * self.along, STEP)
        return operand(copy, thread, sX, tile, rows, fragment, turned, columns)

    def b(self, mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, tile: SmemTile, turned=False) -> Operand:
        """Columns of the product are rows of sX (rows, cols, stage); turned, they are its columns."""
        thr_mma, sX = mma.get_slice(thread), transposed(sX) if turned else sX
        fragment = thr_mma.make_fragment_B(thr_mma.partition_B(sX[None, None, 0]))
        copy = cute.make_tiled_copy_B(self._ldmatrix(turned), mma)
        # In a run the next 16 columns are the neighbours; runs of 16 go around all warps.
        step = STEP if self.run > STEP else STEP * self.across
        rows, columns = (STEP, step) if turned else (step, STEP)
        return operand(copy, thread, sX, tile, rows, fragment, turned, columns)

    def landing(self, mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, tile: SmemTile) -> Landing:
        """Where the accumulators go in sX (rows, cols, stage), whose columns a warp holds in one run."""
        return Landing.of(mma, thread, sX[None, None, 0], tile, STEP * self.along)

    def _ldmatrix(self, is_transposed: bool) -> cute.CopyAtom:
        return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(is_transposed, 4), self.dtype)
