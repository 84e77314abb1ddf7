"""The base class of the mma.sync kernels: one CTA computes one tile."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.device.scheduling.tile_scheduler import StaticTileScheduler, VarlenTileList
from cute_flash.kernels.common.kernel import Grid, Kernel
from cute_flash.planning.varlen import TILE_LIST_HEADER


class Tiles(NamedTuple):
    """The tiles of a launch."""

    order: StaticTileScheduler | VarlenTileList
    grid: Grid


class TileKernel(Kernel):
    """A forward or a backward kernel. `Params.tiles` gives the tile of a CTA."""

    def tiles(
        self, args: SimpleNamespace, mX: cute.Tensor, rows: int, tile_list: cute.Tensor | None, longest_first: bool
    ) -> Tiles:
        """Tiles of `rows` rows of mX (B, H, S, D), or those of the tile list of a varlen batch."""
        batch, heads, seqlen, _ = mX.shape
        if self.static.varlen:
            num_blocks = tile_list.shape[0] - TILE_LIST_HEADER
            order = VarlenTileList(tile_list, heads, args.heads_per_l2_group)
        else:
            num_blocks = cute.ceil_div(seqlen, rows)
            order = StaticTileScheduler(num_blocks, heads, batch, args.heads_per_l2_group, longest_first)
        return Tiles(order, Grid(num_blocks * heads * batch))

    @cute.kernel
    def kernel(self, p: Any):
        index, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.static.varlen):
            # The grid has the size of the longest possible tile list.
            if index < p.tiles.num_tiles():
                self.process_tile(p, *self.tile_coord(p, index))
        else:
            self.process_tile(p, *self.tile_coord(p, index))

    def tile_coord(self, p: Any, index: Int32) -> tuple[Int32, Int32, SeqlenInfo]:
        """(m_block or n_block, head, sequence) of a tile."""
        block, head, values = p.tiles.tile_coord(index)
        lengths = () if self.static.varlen else (p.mQ.shape[2], p.mK.shape[2])
        return block, head, SeqlenInfo.of_values(values, *lengths)
