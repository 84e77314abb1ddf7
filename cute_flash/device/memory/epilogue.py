"""Stores of the results: an output tile, the LSE of its rows, the largest logit."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.memory.copies import RowTiles
from cute_flash.device.memory.views import as_mn
from cute_flash.device.softmax.softmax import THREADS_PER_ROW


@dataclass(frozen=True)
class Epilogue:
    """Stores an accumulator of mma.sync to global memory through shared memory, in 16-byte vectors."""

    tiled_mma: cute.TiledMma
    rows: RowTiles
    thread: Int32
    rows_left: Int32  # rows of the tile that exist

    @cute.jit
    def store(self, acc_O: cute.Tensor, sO: cute.Tensor, gO: cute.Tensor):
        """acc_O -> sO in the dtype of the output -> gO, for rows and columns that exist."""
        # sO reuses the memory of an operand: wait until every warp has read the operand.
        cute.arch.sync_threads()
        self.to_smem(acc_O, sO)
        cute.arch.sync_threads()
        self.to_global(sO, gO)

    def to_smem(self, acc_O: cute.Tensor, sO: cute.Tensor) -> None:
        dtype = sO.element_type
        rO = cute.make_fragment_like(acc_O, dtype)
        rO.store(acc_O.load().to(dtype))
        to_smem = cute.make_tiled_copy_C(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype), self.tiled_mma)
        thr_to_smem = to_smem.get_slice(self.thread)
        cute.copy(to_smem, thr_to_smem.retile(rO), thr_to_smem.partition_D(sO))

    def to_global(self, sO: cute.Tensor, gO: cute.Tensor) -> None:
        thr_copy = self.rows.copy.get_slice(self.thread)
        tOsO = thr_copy.partition_S(sO)
        tOgO = thr_copy.partition_D(gO)
        tOrO = cute.make_fragment_like(tOsO)
        cute.copy(self.rows.copy, tOsO, tOrO)
        pred = self.rows.predicates(thr_copy, tOsO, self.rows_left, True)
        cute.copy(self.rows.copy, tOrO, tOgO, pred=pred)


@cute.jit
def store_lse(lse: cute.Tensor, gLSE: cute.Tensor, tScS: cute.Tensor, thread: Int32, rows_left: Int32):
    """Store the LSE of the tile's first `rows_left` rows. One of the four threads of a row stores it."""
    coords = as_mn(tScS)
    if thread % THREADS_PER_ROW == 0:
        for r in cutlass.range_constexpr(cute.size(lse)):
            row = coords[r, 0][0]
            if row < rows_left:
                gLSE[row] = lse[r]


@cute.jit
def warp_max(x: Float32) -> Float32:
    """The largest x of the lanes of a warp. NaN is ignored."""
    for step in cutlass.range_constexpr(5):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1 << step))
    return x


@cute.jit
def update_max_logit(mMax: cute.Tensor, head: Int32, largest: Float32):
    """Raise mMax[head] to the largest logit of this warp, atomically. NaN is ignored."""
    largest = warp_max(largest)
    if cute.arch.lane_idx() == 0 and largest > -Float32.inf:
        cute.arch.atomic_fmax(mMax.iterator + head, largest, sem="relaxed", scope="gpu")


@dataclass(frozen=True)
class DirectStore:
    """Stores a product to global memory, directly from registers."""

    tiled_mma: cute.TiledMma
    thread: Int32
    rows_left: Int32  # rows and columns of the tile that exist
    width: cutlass.Constexpr

    def coordinates(self, gO: cute.Tensor) -> cute.Tensor:
        """(row, column) of every element of this thread."""
        return as_mn(self.tiled_mma.get_slice(self.thread).partition_C(cute.make_identity_tensor(gO.shape)))

    @cute.jit
    def floats(self, acc: cute.Tensor, gO: cute.Tensor):
        """Store accumulators in fp32: two columns at a time, so the four threads of a row fill a 32-byte sector."""
        coords = self.coordinates(gO)
        acc_mn, gO_8_bytes = as_mn(acc), cute.recast_tensor(gO, cutlass.Int64)
        both = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(cute.size(acc_mn, mode=[0])):
            for c in cutlass.range_constexpr(0, cute.size(acc_mn, mode=[1]), 2):
                row, column = coords[r, c]
                both[0], both[1] = acc_mn[r, c], acc_mn[r, c + 1]
                if row < self.rows_left and column < self.width:
                    gO_8_bytes[row, column // 2] = cute.recast_tensor(both, cutlass.Int64)[0]

    @cute.jit
    def rounded(self, rO: cute.Tensor, gO: cute.Tensor):
        """Store the 16-bit output fragment of a warpgroup."""
        # A pair of columns is one register: (2 rows, n8 tiles)
        pairs = cute.make_layout((2, gO.shape[1] // 8))
        packed = cute.make_tensor(cute.recast_tensor(rO, Int32).iterator, pairs)
        store_rows(packed, gO, self.coordinates(gO), self.width, self.rows_left)


@cute.jit
def store_rows(packed: cute.Tensor, gO: cute.Tensor, tOcO: cute.Tensor, head_dim: cutlass.Constexpr, rows_left: Int32):
    """Store 16-bit results to global memory, directly from registers. `packed`: pairs of columns, (rows, n8 tiles).

    Neighbouring lanes exchange pairs: of two n8 tiles, an even lane gets four columns of the first, an odd lane four
    columns of the second. The 8-byte stores of a row's four threads then fill a 32-byte sector.
    """
    is_odd = cute.arch.lane_idx() % 2 == 1
    gO_8_bytes = cute.recast_tensor(gO, cutlass.Int64)
    both = cute.make_rmem_tensor(2, Int32)
    for r in cutlass.range_constexpr(cute.size(packed, mode=[0])):
        row, first = tOcO[r, 0]
        # The four columns of an odd lane begin with its neighbour's pair in the next n8 tile.
        first = first + 6 if is_odd else first
        for t in cutlass.range_constexpr(0, cute.size(packed, mode=[1]), 2):
            low, high = packed[r, t], packed[r, t + 1]
            other = cute.arch.shuffle_sync_bfly(low if is_odd else high, offset=1)
            both[0], both[1] = (other if is_odd else low), (high if is_odd else other)
            column = first + 8 * t
            if row < rows_left and column < head_dim:
                gO_8_bytes[row, column // 4] = cute.recast_tensor(both, cutlass.Int64)[0]
