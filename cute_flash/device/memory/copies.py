"""Copies of row tiles between global and shared memory. cp.async zero-fills rows and columns outside the tensor."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

VECTOR_BYTES = 16


def row_copy(op: Any, num_threads: int, row_elements: int, dtype: type) -> cute.TiledCopy:
    """A tiled copy in 16-byte vectors.

    Neighbouring threads copy `row_elements` consecutive elements of a row, the next threads those of the next row.
    """
    atom = cute.make_copy_atom(op, dtype, num_bits_per_copy=VECTOR_BYTES * 8)
    vector = VECTOR_BYTES * 8 // dtype.width
    per_row = row_elements // vector
    threads = cute.make_layout((num_threads // per_row, per_row), stride=(per_row, 1))
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, vector)))


def async_row_copy(num_threads: int, row_elements: int, dtype: type) -> cute.TiledCopy:
    """Global -> shared by cp.async, cached in L2 and not in L1: a CTA reads each element once."""
    return row_copy(cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), num_threads, row_elements, dtype)


def plain_row_copy(num_threads: int, row_elements: int, dtype: type) -> cute.TiledCopy:
    """Shared -> registers -> global in 16-byte vectors."""
    return row_copy(cute.nvgpu.CopyUniversalOp(), num_threads, row_elements, dtype)


def row_tile(gX: cute.Tensor, first_row: Int32, rows: int, cols: int) -> cute.Tensor:
    """The tile of `rows` rows from `first_row` on, with a 64-bit base address and 32-bit offsets.

    The host has checked that a tile spans less than 2^31 elements. 64-bit offsets would cost a multiplication and two
    registers for every row that a thread copies.
    """
    row_stride = gX.stride[0]
    first = gX.iterator + Int64(first_row) * row_stride
    # Row strides are multiples of the vector size; the conversion to Int32 loses that fact.
    narrow_stride = cute.assume(Int32(row_stride), divby=VECTOR_BYTES * 8 // gX.element_type.width)
    return cute.make_tensor(first.align(VECTOR_BYTES), cute.make_layout((rows, cols), stride=(narrow_stride, 1)))


def row_vector(gX: cute.Tensor, row: Int32, column: Int32, elements: int, offset: Int64 | int = 0) -> cute.Tensor:
    """Consecutive elements of a row, which vectors of up to 16 bytes copy.

    `offset`: elements from gX to the first row.
    """
    pointer = gX.iterator + (offset + Int64(row) * gX.stride[0] + column)
    aligned = pointer.align(min(VECTOR_BYTES, elements * gX.element_type.width // 8))
    return cute.make_tensor(aligned, cute.make_layout(elements))


@dataclass(frozen=True)
class RowTiles:
    """This thread's share of the tiles of one (rows, head_dim) matrix.

    The tile is `tile_d` wide, and columns past `head_dim` are zero-filled. With `check_rows`, rows past the end of the
    matrix are zero-filled too; only the last tile needs that.
    """

    copy: cute.TiledCopy
    thread: Int32
    tile_rows: cutlass.Constexpr
    tile_d: cutlass.Constexpr
    head_dim: cutlass.Constexpr

    @cute.jit
    def load(self, gX: cute.Tensor, sX: cute.Tensor, rows_left: Int32, check_rows: cutlass.Constexpr):
        """Start to copy the tile gX (tile_rows, tile_d) to sX. `rows_left`: rows of the tile that exist."""
        thr_copy = self.copy.get_slice(self.thread)
        tXgX = thr_copy.partition_S(gX)
        tXsX = thr_copy.partition_D(sX)
        pred = None
        if cutlass.const_expr(check_rows or self.head_dim != self.tile_d):
            pred = self.predicates(thr_copy, tXsX, rows_left, check_rows)
        cute.copy(self.copy, tXgX, tXsX, pred=pred)

    @cute.jit
    def predicates(
        self, thr_copy: cute.ThrCopy, tXsX: cute.Tensor, rows_left: Int32, check_rows: cutlass.Constexpr
    ) -> cute.Tensor:
        """(vector, row, column): whether a 16-byte vector is inside the matrix.

        Without `check_rows`, only the column is checked, and all rows share their predicates.
        """
        tXcX = thr_copy.partition_S(cute.make_identity_tensor((self.tile_rows, self.tile_d)))
        rows, cols = cute.size(tXsX, mode=[1]), cute.size(tXsX, mode=[2])
        stride = (0, cols, 1) if check_rows else (0, 0, 1)
        pred = cute.make_rmem_tensor(cute.make_layout((tXsX.shape[0][1], rows, cols), stride=stride), cutlass.Boolean)
        for m in cutlass.range_constexpr(rows if check_rows else 1):
            for k in cutlass.range_constexpr(cols):
                row, col = tXcX[(0, 0), m, k]
                inside = col < self.head_dim
                if cutlass.const_expr(check_rows):
                    inside = inside and row < rows_left
                pred[0, m, k] = inside
        return pred


def assume_aligned(pointer: cute.Pointer, num_bytes: int) -> cute.Pointer:
    """The same pointer, known to be aligned. `pointer.align` would round the address up with three instructions."""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=num_bytes)
