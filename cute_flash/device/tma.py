"""Tiles of (B, H, S, D) tensors moved by the tensor memory accelerator.

Rows past S and columns past D are zero-filled on the way in and dropped on the way out.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cute_flash.device.smem import byte_swizzle, to_cute
from cute_flash.smem.tile import SmemTile


@dataclass(frozen=True)
class TmaTiles:
    atom: cute.CopyAtom
    coords: cute.Tensor  # (S, D, H, B) -> coordinates of the copy engine
    rows: cutlass.Constexpr
    cols: cutlass.Constexpr

    @staticmethod
    def of(op, mX: cute.Tensor, tile: SmemTile) -> "TmaTiles":
        """Inside a `@cute.jit` function on the host: builds the descriptor."""
        by_rows = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[2, 3, 1, 0]))
        smem = cute.make_composed_layout(byte_swizzle(tile), 0, to_cute(tile.layout.layout))
        info = cpasync.make_tiled_tma_atom(op, by_rows, smem, (tile.rows, tile.cols))
        return TmaTiles(info.atom, info.tma_tensor, tile.rows, tile.cols)

    def _partition(self, sX: cute.Tensor, head: Int32, batch: Int32, column: Int32 | int = 0):
        """(bytes of a tile, stage...) in shared memory; (bytes of a tile, tile of rows) in global memory."""
        gX = cute.local_tile(self.coords[None, None, head, batch], (self.rows, self.cols), (None, column))
        return cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )

    @cute.jit
    def load(
        self,
        sX: cute.Tensor,
        block: Int32,
        head: Int32,
        batch: Int32,
        barrier: cute.Pointer,
        column: Int32 | int = 0,
    ):
        """Start the copy of one tile of rows into sX (rows, cols), the `column`-th of those side by side; its
        bytes are counted on the barrier.
        """
        tXsX, tXgX = self._partition(sX, head, batch, column)
        cute.copy(self.atom, tXgX[None, block], tXsX, tma_bar_ptr=barrier)

    @cute.jit
    def store(self, sX: cute.Tensor, block: Int32, head: Int32, batch: Int32, column: Int32 | int = 0):
        """Start the copy of sX (rows, cols) to one tile of rows, the `column`-th of those side by side."""
        tXsX, tXgX = self._partition(sX, head, batch, column)
        cute.copy(self.atom, tXsX, tXgX[None, block])
