"""Writing a tile of the output: accumulator -> shared memory -> rows of global memory, and the LSE of its
rows.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.copies import RowTiles
from cute_flash.device.softmax import THREADS_PER_ROW
from cute_flash.device.views import as_mn


@dataclass(frozen=True)
class Epilogue:
    tiled_mma: cute.TiledMma
    rows: RowTiles
    thread: Int32
    rows_left: Int32  # rows of the tile that exist

    @cute.jit
    def store(self, acc_O: cute.Tensor, sO: cute.Tensor, gO: cute.Tensor):
        """acc_O -> sO in the output's dtype -> gO in 16-byte vectors, as far as rows and columns exist."""
        dtype = sO.element_type
        # sO is where Q was: every warp must be done reading it.
        cute.arch.sync_threads()
        rO = cute.make_fragment_like(acc_O, dtype)
        rO.store(acc_O.load().to(dtype))
        to_smem = cute.make_tiled_copy_C(
            cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype), self.tiled_mma
        )
        thr_to_smem = to_smem.get_slice(self.thread)
        cute.copy(to_smem, thr_to_smem.retile(rO), thr_to_smem.partition_D(sO))
        cute.arch.sync_threads()
        thr_copy = self.rows.copy.get_slice(self.thread)
        tOsO = thr_copy.partition_S(sO)
        tOgO = thr_copy.partition_D(gO)
        tOrO = cute.make_fragment_like(tOsO)
        cute.copy(self.rows.copy, tOsO, tOrO)
        pred = self.rows.predicates(thr_copy, tOsO, self.rows_left, True)
        cute.copy(self.rows.copy, tOrO, tOgO, pred=pred)


@cute.jit
def store_lse(lse: cute.Tensor, gLSE: cute.Tensor, tScS: cute.Tensor, thread: Int32, rows_left: Int32):
    """One of the threads that share a row writes its LSE."""
    coords = as_mn(tScS)
    if thread % THREADS_PER_ROW == 0:
        for r in cutlass.range_constexpr(cute.size(lse)):
            row = coords[r, 0][0]
            if row < rows_left:
                gLSE[row] = lse[r]
