"""TMA loads and stores of tiles of (B, H, S, D) tensors.

TMA zero-fills rows past S and columns past D when it loads, and drops them when it stores. A descriptor has the bounds
of a tensor, but not those of the sequences in a varlen tensor (1, H, T, D). `VarlenTmaTiles` therefore describes a
tensor of WRAP rows in which every sequence ends at the last row: a sequence of `length` rows takes the last `length`
rows. Two more dimensions, y and w, move the address back to the real rows, because addresses wrap around at 2^64:

    dimension   row                     y                 w
    size        WRAP                    MANY              MANY
    stride      r                       r                 2^34 - r                (elements of 2 bytes)
    coordinate  WRAP - length + row     begin + length    WRAP

    address = first + (WRAP - length + row + begin + length - WRAP) r + WRAP 2^34 = first + (begin + row) r

because WRAP 2^34 elements are 2^65 bytes, which is 0 modulo 2^64. Rows past the end of the sequence are then past the
end of the tensor.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_flash.device.memory.smem import affine_layout, byte_swizzle
from cute_flash.smem.tile import SmemTile

WRAP = 1 << 30  # rows of the described tensor
MANY = 0x7FFF0000  # size of y and w: more than any coordinate
WRAP_STRIDE = 1 << 34  # elements


class VarlenRows(NamedTuple):
    """The rows of a sequence in a varlen tensor."""

    begin: Int32
    length: Int32


@dataclass(frozen=True)
class TmaTiles:
    """A TMA descriptor of a dense tensor, and its tiles of (rows, cols)."""

    atom: cute.CopyAtom
    coords: cute.Tensor  # TMA coordinates of (S, D, H, B)
    rows: cutlass.Constexpr
    cols: cutlass.Constexpr

    @classmethod
    def of(cls, op: Any, mX: cute.Tensor, tile: SmemTile) -> "TmaTiles":
        """Build the descriptor. Called on the host, in a `@cute.jit` function."""
        by_rows = cute.make_tensor(mX.iterator, cls._layout(mX))
        smem = cute.make_composed_layout(byte_swizzle(tile), 0, affine_layout(tile))
        info = cpasync.make_tiled_tma_atom(op, by_rows, smem, (tile.rows, tile.cols))
        return cls(info.atom, info.tma_tensor, tile.rows, tile.cols)

    @staticmethod
    def _layout(mX: cute.Tensor) -> cute.Layout:
        return cute.select(mX.layout, mode=[2, 3, 1, 0])

    def _head(self, head: Int32, batch: Int32 | VarlenRows) -> cute.Tensor:
        """The coordinates of (S, D)."""
        return self.coords[None, None, head, batch]

    def _partition(self, sX: cute.Tensor, head: Int32, batch: Int32 | VarlenRows, column: Int32 | int):
        """Shared memory as (tile, ...) and global memory as (tile, index of the row tile)."""
        gHead = self._head(head, batch)
        width = cute.size(gHead, mode=[1])
        if not isinstance(column, int) and isinstance(width, int) and width <= self.cols:
            # `local_tile` would ignore the index, because there is only one tile.
            gHead, column = cute.domain_offset((0, column * self.cols), gHead), 0
        gX = cute.local_tile(gHead, (self.rows, self.cols), (None, column))
        sX, gX = (cute.group_modes(x, 0, 2) for x in (sX, gX))
        return cpasync.tma_partition(self.atom, 0, cute.make_layout(1), sX, gX)

    @cute.jit
    def load(
        self,
        sX: cute.Tensor,
        block: Int32,
        head: Int32,
        batch: Int32 | VarlenRows,
        barrier: cute.Pointer,
        column: Int32 | int = 0,
    ):
        """Start to load a tile into sX (rows, cols); `barrier` counts its bytes.

        Args:
            block: index of the tile along the rows.
            batch: batch index, or the rows of the sequence in a varlen tensor.
            column: index of the tile along the columns.
        """
        tXsX, tXgX = self._partition(sX, head, batch, column)
        cute.copy(self.atom, tXgX[None, block], tXsX, tma_bar_ptr=barrier)

    @cute.jit
    def store(self, sX: cute.Tensor, block: Int32, head: Int32, batch: Int32 | VarlenRows, column: Int32 | int = 0):
        """Start to store sX (rows, cols) as a tile. Arguments are those of `load`."""
        tXsX, tXgX = self._partition(sX, head, batch, column)
        cute.copy(self.atom, tXsX, tXgX[None, block])


class VarlenTmaTiles(TmaTiles):
    """Tiles of a varlen tensor, with coordinates (row, D, H, y, w). The argument `batch` is a `VarlenRows`."""

    @staticmethod
    def _layout(mX: cute.Tensor) -> cute.Layout:
        _, heads, _, width = mX.shape
        _, by_head, by_row, by_column = mX.stride
        back = cute.assume(WRAP_STRIDE - Int64(by_row), divby=8)
        shape = (Int32(WRAP), width, heads, Int32(MANY), Int32(MANY))
        return cute.make_layout(shape, stride=(by_row, by_column, by_head, by_row, back))

    def _head(self, head: Int32, batch: VarlenRows) -> cute.Tensor:
        gHead = self.coords[None, None, head, batch.begin + batch.length, Int32(WRAP)]
        return cute.domain_offset((WRAP - batch.length, 0), gHead)
