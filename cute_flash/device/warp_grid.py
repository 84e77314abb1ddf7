"""Warps in a grid over the tile of an mma.sync product, and the operands that each of them reads."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_flash.device.ldmatrix import STEP, FragmentStore, MmaOperand, swizzled
from cute_flash.device.views import transposed
from cute_flash.smem.tile import SmemTile


@dataclass(frozen=True)
class WarpGrid:
    """`along` warps share the rows of the product, and `num_warps / along` its columns.

    Rows are dealt to warps in steps of 16: the m16 tiles of a warp are 16 * along apart. Columns are dealt in runs.
    """

    dtype: type
    num_warps: int
    along: int
    run: int = STEP  # contiguous columns of a warp

    @property
    def across(self) -> int:
        return self.num_warps // self.along

    def mma(self) -> cute.TiledMma:
        """For a `@cute.jit` function. One ldmatrix.x4 feeds two n8 tiles."""
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        columns = STEP
        if self.across > 1:
            columns = cute.make_layout((8, self.across, self.run // 8), stride=(1, self.run, 8))
        permutation = (STEP * self.along, columns, STEP)
        return cute.make_tiled_mma(op, (self.along, self.across, 1), permutation_mnk=permutation)

    def a(self, mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, tile: SmemTile, is_transposed=False) -> MmaOperand:
        """Rows of the product are rows of sX (rows, cols, stage), or its columns if `is_transposed`."""
        thr_mma, sX = mma.get_slice(thread), transposed(sX) if is_transposed else sX
        fragment = thr_mma.make_fragment_A(thr_mma.partition_A(sX[None, None, 0]))
        copy = cute.make_tiled_copy_A(self._ldmatrix(is_transposed), mma)
        return MmaOperand.of(copy, thread, sX, tile, STEP * self.along, fragment, is_transposed)

    def b(self, mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, tile: SmemTile, is_transposed=False) -> MmaOperand:
        """Columns of the product are rows of sX (rows, cols, stage), or its columns if `is_transposed`."""
        thr_mma, sX = mma.get_slice(thread), transposed(sX) if is_transposed else sX
        fragment = thr_mma.make_fragment_B(thr_mma.partition_B(sX[None, None, 0]))
        copy = cute.make_tiled_copy_B(self._ldmatrix(is_transposed), mma)
        # Within a run the next 16 columns follow; runs of 16 are dealt to all warps.
        step = STEP if self.run > STEP else STEP * self.across
        return MmaOperand.of(copy, thread, sX, tile, step, fragment, is_transposed)

    def store(self, mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, tile: SmemTile) -> FragmentStore:
        """The store of accumulators to sX (rows, cols, stage); a warp holds one run of its columns."""
        first = mma.get_slice(thread).partition_C(sX[None, None, 0]).iterator
        return FragmentStore(swizzled(Int32(first.toint()), tile), tile, STEP * self.along)

    def _ldmatrix(self, is_transposed: bool) -> cute.CopyAtom:
        return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(is_transposed, 4), self.dtype)
