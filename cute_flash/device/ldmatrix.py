"""MMA operands in shared memory, read by ldmatrix at addresses that cost one XOR; accumulators on their way
there.

A thread's 16 bytes of a 16x16 sub-tile lie at row r, chunk c ^ (r mod 8) (the swizzle). Going 16 columns to
the right flips bits of c only: the address is XORed with a constant. Going to other rows of sub-tiles, to the
next atom of columns or to another stage adds a multiple of the swizzle's period: an immediate. Left to the
compiler, every ldmatrix of a column step would compute its swizzle anew. In tiles without a swizzle, made for
study, columns add up like rows.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.ptx import rederived
from cute_flash.smem.tile import SmemTile

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
    column_stride: int = STEP  # columns from one of this warp's sub-tiles to the next
    offset: int = 0  # elements to the tile that is meant

    def shifted(self, tiles: int) -> "Operand":
        """The same of the tile so many further: at the same addresses, with another immediate."""
        return replace(self, offset=self.offset + tiles * self.tile.cosize)

    def rederived(self) -> "Operand":
        """The same, for addresses of column steps that are not worth a register from block to block."""
        return replace(self, address=rederived(self.address))

    def load(self, column_step: int, stage: Int32) -> None:
        """Fill the fragments of all sub-tiles of rows at one step of columns."""
        slot = (None, column_step, None) if self.is_transposed else (None, None, column_step)
        target = self.view[slot]
        layout = cute.make_layout(
            ((8, 1), cute.size(target, mode=[1])), stride=((1, 0), self.row_step * self.tile.row_stride)
        )
        cute.copy(self.copy, cute.make_tensor(self._pointer(column_step, stage), layout), target)

    def load_k(self, k: int, stage: Int32) -> None:
        """Fill the fragments of one k-step: of all columns at a step of rows, if rows are summed over."""
        if not self.is_transposed:
            self.load(k, stage)
            return
        offset = k * self.row_step * self.tile.row_stride
        for column_step in range(cute.size(self.view, mode=[1])):
            source = cute.make_tensor(
                self._pointer(column_step, stage) + offset, cute.make_layout(((8, 1),), stride=((1, 0),))
            )
            cute.copy(self.copy, source, self.view[None, column_step, k])

    def _pointer(self, column_step: int, stage: Int32) -> cute.Pointer:
        """This thread's 16 bytes in the first sub-tile of rows at a step of columns."""
        tile, dtype = self.tile, self.fragment.element_type
        flipped, added = tile.column(column_step * self.column_stride)
        address = (self.address + stage * tile.bytes) ^ (flipped * tile.element_bytes)
        pointer = cute.make_ptr(dtype, address, cutlass.AddressSpace.smem, assumed_align=16)
        return pointer + (added + self.offset)


def operand(
    copy: cute.TiledCopy,
    thread: Int32,
    sX: cute.Tensor,
    tile: SmemTile,
    row_step: int,
    fragment: cute.Tensor,
    is_transposed: bool = False,
    column_stride: int = STEP,
) -> Operand:
    """The operand in sX (rows, cols, stage), or (cols, rows, stage) if `is_transposed`."""
    thr_copy = copy.get_slice(thread)
    address = swizzled(Int32(thr_copy.partition_S(sX).iterator.toint()), tile)
    view = _by_instruction(thr_copy.retile(fragment))
    return Operand(copy, address, tile, row_step, fragment, view, is_transposed, column_stride)


def _by_instruction(view: cute.Tensor) -> cute.Tensor:
    """((registers, loads), 1, k) -> ((registers, 1), loads, k), where one tile of the copy takes several
    loads because a warp's sub-tiles lie side by side in it.
    """
    (registers, loads), tiles, steps = view.layout.shape
    if cute.size(loads) == 1:
        return view
    assert cute.size(tiles) == 1, "the sub-tiles of a warp lie side by side, and yet elsewhere"
    (register_stride, load_stride), _, step_stride = view.layout.stride
    layout = cute.make_layout(((registers, 1), loads, steps), stride=((register_stride, 0), load_stride, step_stride))
    return cute.make_tensor(view.iterator, layout)


def swizzled(address: Int32, tile: SmemTile) -> Int32:
    """Apply the tile's swizzle to a byte address; tiles start at multiples of its period."""
    swizzle = tile.swizzle
    if swizzle is None:
        return address
    base = swizzle.base + tile.element_bytes.bit_length() - 1
    mask = ((1 << swizzle.bits) - 1) << base
    return address ^ ((address >> swizzle.shift) & mask)


@dataclass(frozen=True)
class Landing:
    """Where a thread's accumulators of a tile go as pairs of 16-bit elements.

    Eight rows of four threads each write whole chunks, and the swizzle puts those of different rows into
    different banks. Columns of a warp lie side by side: from one n8 tile to the next it is a chunk.
    """

    address: Int32  # of this thread's first pair, swizzled
    tile: SmemTile
    row_step: int  # rows from one of this warp's m16 tiles to the next
    offset: int = 0  # elements to the tile that is meant

    def shifted(self, tiles: int) -> "Landing":
        return replace(self, offset=self.offset + tiles * self.tile.cosize)

    @staticmethod
    def of(tiled_mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, tile: SmemTile, row_step: int):
        first = tiled_mma.get_slice(thread).partition_C(sX).iterator
        return Landing(swizzled(Int32(first.toint()), tile), tile, row_step)

    def store(self, fragment: cute.Tensor) -> None:
        """`fragment`: ((2, 2), MMA_M, MMA_N), compact."""
        tile, (_, tiles_m, tiles_n) = self.tile, fragment.shape
        first = rederived(self.address)
        pairs = cute.recast_tensor(fragment, Int32)
        # In pairs: rows 8 apart in an m16 tile, then the m16 tiles.
        rows = cute.make_layout((2, tiles_m), stride=(4 * tile.row_stride, self.row_step * tile.row_stride // 2))
        for n in range(tiles_n):
            flipped, added = tile.column(n * tile.chunk_cols)
            pointer = cute.make_ptr(
                Int32, first ^ (flipped * tile.element_bytes), cutlass.AddressSpace.smem, assumed_align=4
            )
            target = cute.make_tensor(pointer + (added + self.offset) // 2, rows)
            for i in range(2 * tiles_m):
                target[i] = pairs[2 * tiles_m * n + i]
