"""Tiles of packed (1, H, T, D) tensors moved by the tensor memory accelerator, with the ends of sequences.

The copy engine knows the bounds of a tensor, not those of the sequences in it. So the descriptor says that
every sequence ends where the rows do: there are WRAP rows, of which a sequence of `length` rows takes the
last, and two more dimensions move the address back to it, through the 2^64 bytes that addresses wrap around:

    dimension   row                     y                 w
    size        WRAP                    MANY              MANY
    stride      r                       r                 2^34 - r                (elements of 2 bytes)
    at          WRAP - length + row     begin + length    WRAP

    address = first + (WRAP - length + row + begin + length - WRAP) r + WRAP 2^34 = first + (begin + row) r

as WRAP 2^34 elements are 2^65 bytes. Rows past the end of the sequence are past those of the tensor:
zero-filled on the way in and dropped on the way out, as columns past D are.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_flash.device.smem import byte_swizzle, to_cute
from cute_flash.smem.tile import SmemTile

WRAP = 1 << 30
MANY = 0x7FFF0000
WRAP_STRIDE = 1 << 34


@dataclass(frozen=True)
class RaggedTiles:
    """As `TmaTiles`; in the place of a batch index, where the sequence lies: (begin, length)."""

    atom: cute.CopyAtom
    coords: cute.Tensor  # (row, D, H, y, w) -> coordinates of the copy engine
    rows: cutlass.Constexpr
    cols: cutlass.Constexpr

    @staticmethod
    def of(op, mX: cute.Tensor, tile: SmemTile) -> "RaggedTiles":
        """Inside a `@cute.jit` function on the host: builds the descriptor."""
        _, heads, _, width = mX.shape
        _, by_head, by_row, by_column = mX.stride
        back = cute.assume(WRAP_STRIDE - Int64(by_row), divby=8)
        layout = cute.make_layout(
            (Int32(WRAP), width, heads, Int32(MANY), Int32(MANY)),
            stride=(by_row, by_column, by_head, by_row, back),
        )
        ragged = cute.make_tensor(mX.iterator, layout)
        smem = cute.make_composed_layout(byte_swizzle(tile), 0, to_cute(tile.layout.layout))
        info = cpasync.make_tiled_tma_atom(op, ragged, smem, (tile.rows, tile.cols))
        return RaggedTiles(info.atom, info.tma_tensor, tile.rows, tile.cols)

    def _partition(self, sX: cute.Tensor, head: Int32, where: tuple, column: Int32 | int = 0):
        """(bytes of a tile, stage...) in shared memory; (bytes of a tile, tile of rows) in global memory."""
        begin, length = where
        of_head = self.coords[None, None, head, begin + length, Int32(WRAP)]
        from_begin = cute.domain_offset((WRAP - length, 0), of_head)
        gX = cute.local_tile(from_begin, (self.rows, self.cols), (None, column))
        return cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )

    @cute.jit
    def load(self, sX: cute.Tensor, block: Int32, head: Int32, where: tuple, barrier: cute.Pointer):
        """Start the copy of one tile of rows into sX (rows, cols); its bytes are counted on the barrier."""
        tXsX, tXgX = self._partition(sX, head, where)
        cute.copy(self.atom, tXgX[None, block], tXsX, tma_bar_ptr=barrier)

    @cute.jit
    def store(self, sX: cute.Tensor, block: Int32, head: Int32, where: tuple, column: Int32 | int = 0):
        """Start the copy of sX (rows, cols) to one tile of rows, the `column`-th of those side by side."""
        tXsX, tXgX = self._partition(sX, head, where, column)
        cute.copy(self.atom, tXsX, tXgX[None, block])
