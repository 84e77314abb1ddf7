"""The distribution of an mma.sync product over the warps of a CTA, and the operands that a warp reads."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_flash.device.memory.ldmatrix import STEP, FragmentStore, MmaOperand, swizzled
from cute_flash.device.memory.views import transposed
from cute_flash.smem.tile import SmemTile


@dataclass(frozen=True)
class WarpGrid:
    """A grid of `along` x `across` warps over the rows and columns of a product.

    m16 tiles of rows are distributed cyclically: the tiles of a warp are 16 * along rows apart. Columns are distributed
    in runs of `run` contiguous columns: 8, one n8 tile, or a multiple of 16.
    """

    dtype: type
    num_warps: int
    along: int  # warps over the rows
    run: int = STEP  # contiguous columns of a warp

    @property
    def across(self) -> int:
        return self.num_warps // self.along

    def mma(self) -> cute.TiledMma:
        """The tiled MMA. Columns come in steps of 16, because one ldmatrix.x4 loads two n8 tiles, or in runs of 8."""
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        columns = STEP
        if self.across > 1:
            columns = cute.make_layout((8, self.across, self.run // 8), stride=(1, self.run, 8))
        permutation = (STEP * self.along, columns, STEP)
        return cute.make_tiled_mma(op, (self.along, self.across, 1), permutation_mnk=permutation)

    def a(
        self, mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, tile: SmemTile, is_transposed: bool = False
    ) -> MmaOperand:
        """Operand A: rows of the product are rows of sX (rows, cols, stage), or its columns if `is_transposed`."""
        thr_mma, sX = mma.get_slice(thread), transposed(sX) if is_transposed else sX
        fragment = thr_mma.make_fragment_A(thr_mma.partition_A(sX[None, None, 0]))
        copy = cute.make_tiled_copy_A(self._ldmatrix(is_transposed), mma)
        return MmaOperand.of(copy, thread, sX, tile, STEP * self.along, fragment, is_transposed)

    def b(
        self, mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, tile: SmemTile, is_transposed: bool = False
    ) -> MmaOperand:
        """Operand B: columns of the product are rows of sX (rows, cols, stage), or its columns if `is_transposed`."""
        thr_mma, sX = mma.get_slice(thread), transposed(sX) if is_transposed else sX
        fragment = thr_mma.make_fragment_B(thr_mma.partition_B(sX[None, None, 0]))
        copy = cute.make_tiled_copy_B(self._ldmatrix(is_transposed, 2 if self.run < STEP else 4), mma)
        # The next 16 columns of a warp are adjacent in a long run. Runs of 8 or 16 go to the warps cyclically.
        step = STEP if self.run > STEP else self.run * self.across
        return MmaOperand.of(copy, thread, sX, tile, step, fragment, is_transposed)

    def store(self, mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, tile: SmemTile) -> FragmentStore:
        """The store of accumulators to sX (rows, cols, stage). All columns of a warp must be one run."""
        first = mma.get_slice(thread).partition_C(sX[None, None, 0]).iterator
        return FragmentStore(swizzled(Int32(first.toint()), tile), tile, STEP * self.along)

    def _ldmatrix(self, is_transposed: bool, matrices: int = 4) -> cute.CopyAtom:
        return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(is_transposed, matrices), self.dtype)
