"""Copies between wgmma accumulators in 16 bits and shared memory, by stmatrix and ldmatrix.

Transposed: columns of a product are rows of a tile. `stmatrix.trans` and `ldmatrix.trans` copy 8 x 8 matrices. Lane
8 i + j supplies the address of column j of the i-th matrix. An accumulator of 64 rows corresponds to a `SmemTile` of 64
columns, which is one atom wide. The first column of the accumulator is the first row of an atom.

Not transposed (`load_step`, `store_steps`): an accumulator of 64 rows corresponds to a `SmemTile` of 64 rows. A step is
16 columns: four 8 x 8 matrices for each warp.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.memory.ldmatrix import STEP, swizzled
from cute_flash.planning.tiles.common import WARP_ROWS
from cute_flash.smem.tile import CHUNK_BYTES, WAVEFRONT_BYTES, SmemTile

MATRIX = 8
MATRIX_BYTES = MATRIX * WAVEFRONT_BYTES  # bytes of the 8 rows that one n8 tile fills
_LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.{}shared.b16 {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}];"
_STMATRIX = "stmatrix.sync.aligned.m8n8.{}.{}shared.b16 [{{$r0}}], {{ {} }};"
_TRANS = "trans."


def lane_offset(thread: Int32 | int) -> Int32 | int:
    """Byte offset from the first row to this lane's column of the first two n8 tiles.

    A warp's 16 rows are two 16-byte chunks of a tile row, permuted by the swizzle.
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
        cute.arch.inline_ptx(_STMATRIX.format(f"x{number}", _TRANS, values), read_only_args=arguments)


def load_two_tiles(address: Int32, t: int) -> tuple:
    """Load the n8 tiles `t` and `t + 1` of an accumulator: two words of 16-bit pairs each.

    `address`: of the tile's first row, plus `lane_offset`. A word has two neighbouring columns; the second word of an
    n8 tile is 8 rows below the first.
    """
    load = _LDMATRIX.format(_TRANS)
    return cute.arch.inline_ptx(load, write_only_types=[Int32] * 4, read_only_args=[address + MATRIX_BYTES * t])


def step_offset(tile: SmemTile, thread: Int32) -> Int32:
    """Bytes from a tile to this lane's 16 bytes of the first step, before the swizzle. `thread`: in the warpgroup."""
    # Bit operations, because divisions of signed integers take more instructions.
    row, chunk = (thread >> 5) * WARP_ROWS + (thread & (WARP_ROWS - 1)), (thread >> 4) & 1
    return (row * tile.row_stride + chunk * tile.chunk_cols) * tile.element_bytes


def _step_address(first: Int32, tile: SmemTile, thread: Int32, step: int) -> Int32:
    """The address of this lane's 16 bytes of a step; `first`: the address of the tile."""
    offset, (flipped, added) = step_offset(tile, thread), tile.column(STEP * step)
    return (swizzled(first + offset, tile) ^ (flipped * tile.element_bytes)) + added * tile.element_bytes


def load_step(first: Int32, tile: SmemTile, thread: Int32, step: int) -> tuple:
    """Load the columns of a step: two words for each n8 tile, as in `load_two_tiles`."""
    address = _step_address(first, tile, thread, step)
    return cute.arch.inline_ptx(_LDMATRIX.format(""), write_only_types=[Int32] * 4, read_only_args=[address])


@cute.jit
def store_steps(
    rX: cute.Tensor, first: Int32, tile: cutlass.Constexpr, thread: Int32, first_step: cutlass.Constexpr = 0
):
    """Store `rX`, a 16-bit fragment in the order of m64nN accumulators, to N columns of a tile of 64 rows.

    `first_step`: the first of these columns, in steps.
    """
    packed = cute.recast_tensor(rX, Int32)
    values = ", ".join(f"{{$r{1 + i}}}" for i in range(4))
    for step in cutlass.range_constexpr(cute.size(packed) // 4):
        address = _step_address(first, tile, thread, first_step + step)
        arguments = [address, *(packed[4 * step + i] for i in range(4))]
        cute.arch.inline_ptx(_STMATRIX.format("x4", "", values), read_only_args=arguments)
