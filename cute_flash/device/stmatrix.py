"""Transposed copies between wgmma accumulators and shared memory: columns of a product are rows of a tile.

`stmatrix.trans` and `ldmatrix.trans` copy 8 x 8 matrices. Lane 8 i + j supplies the address of column j of the i-th
matrix. An accumulator of 64 rows corresponds to a `SmemTile` of 64 columns, which is one atom wide. The first
column of the accumulator is the first row of an atom.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.smem.tile import CHUNK_BYTES, WAVEFRONT_BYTES

MATRIX = 8
MATRIX_BYTES = MATRIX * WAVEFRONT_BYTES  # bytes of the 8 rows that one n8 tile fills
_LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"  # two n8 tiles
_STMATRIX = "stmatrix.sync.aligned.m8n8.{}.trans.shared.b16 [{{$r0}}], {{ {} }};"


def lane_offset(thread):
    """Byte offset from the first row to this lane's column of the first two n8 tiles.

    The 16 rows of a warp are two 16-byte chunks of a row of the tile, permuted by the swizzle.
    """
    lane, warp = thread % 32, thread // 32
    column, half, second = lane % MATRIX, lane // MATRIX % 2, lane // (2 * MATRIX)
    chunk = (2 * warp + half) ^ column
    return second * MATRIX_BYTES + column * WAVEFRONT_BYTES + chunk * CHUNK_BYTES


@cute.jit
def store_transposed(rX: cute.Tensor, first: cute.Pointer, thread: Int32):
    """Store `rX`, a 16-bit fragment in the order of m64nN accumulators, to N rows of a tile from `first` on."""
    packed = cute.recast_tensor(rX, Int32)
    address = first.toint() + lane_offset(thread)
    tiles = cute.size(packed) // 2
    for t in cutlass.range_constexpr(0, tiles, 2):
        number = 2 * min(2, tiles - t)
        values = ", ".join(f"{{$r{1 + i}}}" for i in range(number))
        arguments = [address + MATRIX_BYTES * t, *(packed[2 * t + i] for i in range(number))]
        cute.arch.inline_ptx(_STMATRIX.format(f"x{number}", values), read_only_args=arguments)


def load_two_tiles(address: Int32, t: int) -> tuple:
    """Load the n8 tiles `t` and `t + 1` of an accumulator: two words of 16-bit pairs each.

    `address`: of the tile's first row, plus `lane_offset`. A word has two neighbouring columns; the second word of an
    n8 tile is 8 rows below the first.
    """
    return cute.arch.inline_ptx(_LDMATRIX, write_only_types=[Int32] * 4, read_only_args=[address + MATRIX_BYTES * t])
