"""MMA operands in shared memory, read by ldmatrix at addresses that cost one XOR.

A thread's 16 bytes of a 16x16 sub-tile lie at row r, chunk c ^ (r mod 8) (the swizzle). Going 16 columns to
the right flips bits of c only: the address is XORed with a constant. Going to other rows of sub-tiles, to the
next atom of columns or to another stage adds a multiple of the swizzle's period: an immediate. Left to the
compiler, every ldmatrix of a column step would compute its swizzle anew.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from layouts.smem import SmemTile

STEP = 16  # rows and columns of one ldmatrix.x4


@dataclass(frozen=True)
class Operand:
    copy: cute.TiledCopy
    address: Int32  # of this thread's 16 bytes in the first sub-tile of the first stage, swizzled
    tile: SmemTile
    row_step: int  # rows from one of this warp's sub-tiles to the next
    fragment: cute.Tensor
    view: cute.Tensor  # the fragment as ldmatrix fills it: (registers, m or n, k)
    is_transposed: bool

    def load(self, column_step: int, stage: Int32) -> None:
        """Fill the fragments of all sub-tiles of rows at one step of 16 columns."""
        tile, dtype = self.tile, self.fragment.element_type
        slot = (None, column_step, None) if self.is_transposed else (None, None, column_step)
        target = self.view[slot]
        atom, inside = divmod(column_step * STEP, tile.atom_cols)
        address = (self.address + stage * tile.bytes) ^ (inside * tile.element_bytes)
        pointer = cute.make_ptr(dtype, address, cutlass.AddressSpace.smem, assumed_align=16)
        layout = cute.make_layout(
            ((8, 1), cute.size(target, mode=[1])), stride=((1, 0), self.row_step * tile.atom_cols)
        )
        cute.copy(self.copy, cute.make_tensor(pointer + atom * tile.rows * tile.atom_cols, layout), target)


def operand(
    copy: cute.TiledCopy,
    thread: Int32,
    sX: cute.Tensor,
    tile: SmemTile,
    row_step: int,
    fragment: cute.Tensor,
    is_transposed: bool = False,
) -> Operand:
    """The operand in sX (rows, cols, stage), or (cols, rows, stage) if `is_transposed`."""
    thr_copy = copy.get_slice(thread)
    address = swizzled(Int32(thr_copy.partition_S(sX).iterator.toint()), tile)
    return Operand(copy, address, tile, row_step, fragment, thr_copy.retile(fragment), is_transposed)


def swizzled(address: Int32, tile: SmemTile) -> Int32:
    """Apply the tile's swizzle to a byte address; tiles start at multiples of its period."""
    swizzle = tile.swizzle
    base = swizzle.base + tile.element_bytes.bit_length() - 1
    mask = ((1 << swizzle.bits) - 1) << base
    return address ^ ((address >> swizzle.shift) & mask)
