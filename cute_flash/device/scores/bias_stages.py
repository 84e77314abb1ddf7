"""Tiles of a bias in shared memory, which TMA loads: the stages that the forward and the backward have in common."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.smem import allocate_stages
from cute_flash.device.memory.tma import TmaTiles
from cute_flash.device.scheduling.pipeline import Pipeline
from cute_flash.device.scores.position import ScoreBlock
from cute_flash.smem.tile import SmemTile


@dataclass(frozen=True)
class BiasStages:
    """The stages of all warpgroups. Rows are queries and columns are keys.

    Each warpgroup has its own pipeline, so none waits for another to release a stage. An iteration is the number of
    blocks before a block, as in the pipelines of Q, K and V.
    """

    sBias: cute.Tensor  # (rows, columns, (warpgroup, stage))
    barriers: Pipeline  # of all warpgroups; `pipeline` selects those of one
    tile: cutlass.Constexpr  # SmemTile of a warpgroup
    num_warpgroups: cutlass.Constexpr
    num: cutlass.Constexpr  # stages of a warpgroup
    splits_rows: cutlass.Constexpr  # whether the warpgroups of a block have different queries; else different keys

    @staticmethod
    def allocate(
        smem: SmemAllocator, dtype: type, tile: SmemTile, num_warpgroups: int, num: int, splits_rows: bool
    ) -> "BiasStages":
        sBias = allocate_stages(smem, dtype, tile, num_warpgroups * num)
        sBias = cute.logical_divide(sBias, (None, None, num_warpgroups))
        barriers = Pipeline.allocate(smem, num_warpgroups * num)
        return BiasStages(sBias, barriers, tile, num_warpgroups, num, splits_rows)

    def pipeline(self, warpgroup: Int32 | int) -> Pipeline:
        return self.barriers.part(warpgroup, self.num)

    def stage(self, warpgroup: Int32 | int, iteration: Int32) -> cute.Tensor:
        """The tile of a warpgroup in an iteration."""
        return self.sBias[None, None, (warpgroup, self.pipeline(warpgroup).stage(iteration))]

    def offset(self, warpgroup: Int32, iteration: Int32) -> Int32:
        """Bytes from the first stage of the first warpgroup to the tile of a warpgroup in an iteration."""
        return (self.pipeline(warpgroup).stage(iteration) * self.num_warpgroups + warpgroup) * self.tile.bytes

    def coord(self, block: ScoreBlock, warpgroup: int) -> tuple[Int32, Int32]:
        """(row, column) of a warpgroup's tile of a block, in tiles."""
        if self.splits_rows:
            return block.m_block * self.num_warpgroups + warpgroup, block.n_block
        return block.m_block, block.n_block * self.num_warpgroups + warpgroup

    @cute.jit
    def load(self, tma: TmaTiles, iteration: Int32, block: ScoreBlock):
        """Start to load a block for all warpgroups. Called by one warp."""
        for w in cutlass.range_constexpr(self.num_warpgroups):
            pipeline, (row, column) = self.pipeline(w), self.coord(block, w)
            pipeline.wait_empty(iteration)
            pipeline.expect_bytes(iteration, self.tile.bytes)
            sX = self.stage(w, iteration)
            tma.load(sX, row, block.head, block.batch, pipeline.full_barrier(iteration), column)
