"""ldmatrix loads of MMA operands from swizzled shared memory, and stores of fragments to such tiles.

One XOR computes each address. In a 16x16 sub-tile, the 16 bytes of a thread are in row r at chunk c ^ (r mod 8), by the
swizzle. A step of 16 columns only flips bits of c, so the address is XORed with a constant. A step to the next
sub-tile of rows, to the next atom of columns or to another stage adds a multiple of 8 rows, after which the swizzle
repeats. The distances are immediate offsets, except that of a stage, which is added at run time. Without this, the
compiler would compute the swizzle for every ldmatrix. Tiles without a swizzle exist for comparison; their column steps
are additions.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.ptx import rederived
from cute_flash.smem.tile import SmemTile

STEP = 16  # rows and columns of one ldmatrix.x4


@dataclass(frozen=True)
class MmaOperand:
    """An operand of an mma.sync product: its addresses in shared memory and its register fragment."""

    copy: cute.TiledCopy
    address: Int32  # of this thread's 16 bytes in the first sub-tile of the first stage, swizzled
    tile: SmemTile
    row_step: int  # rows from one of this warp's sub-tiles to the next
    fragment: cute.Tensor
    view: cute.Tensor  # the fragment in the order of ldmatrix: (registers, m or n, k)
    is_transposed: bool
    column_stride: int  # columns from one of this warp's sub-tiles to the next
    offset: int = 0  # elements from the first tile

    @staticmethod
    def of(
        copy: cute.TiledCopy,
        thread: Int32,
        sX: cute.Tensor,
        tile: SmemTile,
        step: int,
        fragment: cute.Tensor,
        is_transposed: bool,
    ) -> "MmaOperand":
        """The operand in sX (rows, cols, stage), or (cols, rows, stage) if `is_transposed`.

        `step`: the distance between this warp's sub-tiles, in rows, or in columns if `is_transposed`.
        """
        thr_copy = copy.get_slice(thread)
        address = swizzled(Int32(thr_copy.partition_S(sX).iterator.toint()), tile)
        view = _by_instruction(thr_copy.retile(fragment))
        row_step, column_step = (STEP, step) if is_transposed else (step, STEP)
        return MmaOperand(copy, address, tile, row_step, fragment, view, is_transposed, column_step)

    def shifted(self, tiles: int) -> "MmaOperand":
        """The same operand `tiles` tiles further in memory; only the immediate offsets differ."""
        return replace(self, offset=self.offset + tiles * self.tile.cosize)

    def moved(self, tiles: Int32) -> "MmaOperand":
        """The same operand `tiles` tiles further in memory; the number is known at run time."""
        return replace(self, address=self.address + tiles * self.tile.bytes)

    def rederived(self) -> "MmaOperand":
        """The same operand with an opaque address, so that no derived address occupies a register across blocks."""
        return replace(self, address=rederived(self.address))

    def load(self, column_step: int, stage: Int32) -> None:
        """Load one step of columns, for all rows of this warp."""
        slot = (None, column_step, None) if self.is_transposed else (None, None, column_step)
        target = self.view[slot]
        layout = cute.make_layout(
            ((8, 1), cute.size(target, mode=[1])), stride=((1, 0), self.row_step * self.tile.row_stride)
        )
        cute.copy(self.copy, cute.make_tensor(self._pointer(column_step, stage), layout), target)

    def load_k(self, k: int, stage: Int32) -> None:
        """Load the fragments of one k-step. If `is_transposed`, that is one step of rows with all its columns."""
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
        """The address from which this thread loads a step of columns, in its warp's first sub-tile of rows."""
        tile, dtype = self.tile, self.fragment.element_type
        flipped, added = tile.column(column_step * self.column_stride)
        address = (self.address + stage * tile.bytes) ^ (flipped * tile.element_bytes)
        pointer = cute.make_ptr(dtype, address, cutlass.AddressSpace.smem, assumed_align=16)
        return pointer + (added + self.offset)


@dataclass(frozen=True)
class ShortOperand:
    """Operand B of few columns, which are rows of a tile: one ldmatrix.x4 loads two k-steps of 8 columns.

    `MmaOperand` loads one k-step of 16 columns.
    """

    address: Int32  # of this thread's 16 bytes in the first k-steps of the first stage, swizzled
    tile: SmemTile

    @staticmethod
    def of(sX: cute.Tensor, tile: SmemTile, first_row: Int32, lane: Int32) -> "ShortOperand":
        """The operand in the rows of sX from `first_row` on, a multiple of 8."""
        offset = (first_row + lane % 8) * tile.row_stride + lane // 8 * tile.chunk_cols
        return ShortOperand(swizzled(Int32(sX.iterator.toint()) + offset * tile.element_bytes, tile), tile)

    def load(self, step: int, first_row: int, stage: Int32) -> tuple:
        """The registers of the k-steps `step` and `step + 1` of 8 rows: two of the first, then two of the second."""
        flipped, added = self.tile.column(step * STEP)
        address = (self.address + stage * self.tile.bytes) ^ (flipped * self.tile.element_bytes)
        address = address + (added + first_row * self.tile.row_stride) * self.tile.element_bytes
        text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"
        return cute.arch.inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[address])


def _by_instruction(view: cute.Tensor) -> cute.Tensor:
    """((registers, loads), 1, k) -> ((registers, 1), loads, k): one ldmatrix per entry of the second mode.

    If the sub-tiles of a warp are neighbours, one tile of the copy contains several loads.
    """
    (registers, loads), tiles, steps = view.layout.shape
    if cute.size(loads) == 1:
        return view
    assert cute.size(tiles) == 1, "the sub-tiles of a warp must be neighbours"
    (register_stride, load_stride), _, step_stride = view.layout.stride
    layout = cute.make_layout(((registers, 1), loads, steps), stride=((register_stride, 0), load_stride, step_stride))
    return cute.make_tensor(view.iterator, layout)


def swizzled(address: Int32, tile: SmemTile) -> Int32:
    """Apply the tile's swizzle to a byte address. Tiles are aligned, so this swizzles the offset in the tile."""
    swizzle = tile.swizzle
    if swizzle is None:
        return address
    base = swizzle.base + tile.element_bytes.bit_length() - 1
    mask = ((1 << swizzle.bits) - 1) << base
    return address ^ ((address >> swizzle.shift) & mask)


@dataclass(frozen=True)
class FragmentStore:
    """Stores the accumulators of a thread to a tile in shared memory as pairs of 16-bit elements.

    The four threads of a row write one 16-byte chunk, and the swizzle puts the chunks of a warp's eight rows into
    different banks. The columns of a warp are contiguous, so the next n8 tile is the next chunk.
    """

    address: Int32  # of this thread's first pair, swizzled
    tile: SmemTile
    row_step: int  # rows from one of this warp's m16 tiles to the next
    offset: int = 0  # elements from the first tile

    def shifted(self, tiles: int) -> "FragmentStore":
        """The same store `tiles` tiles further in memory."""
        return replace(self, offset=self.offset + tiles * self.tile.cosize)

    def store(self, fragment: cute.Tensor) -> None:
        """Store `fragment`, ((2, 2), MMA_M, MMA_N) and compact."""
        tile, (_, tiles_m, tiles_n) = self.tile, fragment.shape
        first = rederived(self.address)
        pairs = cute.recast_tensor(fragment, Int32)
        # Strides in units of pairs: rows 8 apart in an m16 tile, then the m16 tiles.
        rows = cute.make_layout((2, tiles_m), stride=(4 * tile.row_stride, self.row_step * tile.row_stride // 2))
        for n in range(tiles_n):
            flipped, added = tile.column(n * tile.chunk_cols)
            pointer = cute.make_ptr(
                Int32, first ^ (flipped * tile.element_bytes), cutlass.AddressSpace.smem, assumed_align=4
            )
            target = cute.make_tensor(pointer + (added + self.offset) // 2, rows)
            for i in range(2 * tiles_m):
                target[i] = pairs[2 * tiles_m * n + i]
