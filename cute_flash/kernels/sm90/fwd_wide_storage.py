"""Shared memory of the Hopper forward for wide heads: a pipeline of pieces of K and V.

A K/V block of `tile_n` keys is loaded in pieces, because a whole block of K or V would take more than half of shared
memory. The pipeline has the pieces in the order in which the tensor cores use them:

    K of block 0 | K of block 1 | V of block 0 | K of block 2 | V of block 1 | ... | V of the last block

| piece | elements             | parts        | read by                                                  |
|-------|----------------------|--------------|----------------------------------------------------------|
| of K  | tile_n x 64 columns  | 2 x 64 keys  | both warpgroups: each half of the keys                   |
| of V  | 32 keys x tile_dv/2  | 2 x 16 keys  | one warpgroup: the one with these columns of the output  |

Both CTAs of a cluster need the same pieces, because they have neighbouring query rows of a head. The CTA of rank r
loads part r of each piece by TMA, with multicast to both. A stage is loaded again when the warps of both CTAs have
released it: each warp arrives at the `empty` barriers of both.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.multicast import CTAS
from cute_flash.device.memory.smem import affine_layout, allocate_stages
from cute_flash.device.scheduling.cluster_index import ClusterIndex
from cute_flash.device.scheduling.pipeline import Pipeline
from cute_flash.device.scheduling.published_tiles import PublishedTiles
from cute_flash.device.scheduling.seqlen import SeqlenValues
from cute_flash.kernels.sm90.fwd_storage import Config
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.planning.tiles.fwd_sm90 import PIECE_STAGES
from cute_flash.smem.tile import SmemTile

WARPGROUPS = 2  # that compute; each has half of the keys of S and half of the columns of O
WARPS = 4 * WARPGROUPS


@dataclass(frozen=True)
class PiecePipeline:
    """The pieces of K and V, and their barriers. The index of a piece counts all pieces that the CTA has loaded."""

    stages: cute.Tensor  # (element, stage)
    barriers: Pipeline

    def part(self, index: Int32, part: Int32, tile: SmemTile) -> cute.Tensor:
        """A part of a piece, for TMA."""
        offset = cute.assume(part * tile.cosize, divby=tile.cosize)
        iterator = self.stages[None, self.barriers.stage(index)].iterator + offset
        return cute.make_tensor(iterator, affine_layout(tile))

    def operand(self, tile: SmemTile, parts: int) -> cute.Tensor:
        """The stages as (rows, columns, (part, stage)). A piece has `parts` tiles, one after the other."""
        shape, stride = tile.affine
        stage = ((parts, PIECE_STAGES), (tile.cosize, cute.size(self.stages, mode=[0])))
        layout = cute.make_layout((*shape, stage[0]), stride=(*stride, stage[1]))
        return cute.make_tensor(self.stages.iterator, layout)

    @cute.jit
    def release(self, index: Int32, arrivals: cutlass.Constexpr):
        """Release a piece in both CTAs. Called by every warp that has read it.

        The `arrivals` of a CTA's warps add up to `WARPS`: 1 for a piece of K, which all read; 2 for one of V, which
        half of them read.
        """
        lane = cute.arch.lane_idx()
        if lane < CTAS:
            barrier = self.barriers.empty + self.barriers.stage(index)
            cute.arch.mbarrier_arrive(barrier, peer_cta_rank_in_cluster=lane, arrive_count=arrivals)


@dataclass(frozen=True)
class SharedStorage:
    """The shared memory: tiles, barriers, and the coordinates of tiles that the producer publishes."""

    config: cutlass.Constexpr  # Config
    sQ: cute.Tensor  # (64, tile_d)
    pieces: PiecePipeline
    sP: cute.Tensor  # (64, tile_n / 2, (warpgroup, buffer))
    sMax: cute.Tensor  # (64, warpgroup) fp32: row maxima of a block
    sSum: cute.Tensor  # (64, warpgroup) fp32: row sums of a tile
    q: Pipeline
    tiles: PublishedTiles
    index: ClusterIndex
    rank: Int32  # of this CTA in the cluster

    @staticmethod
    def allocate(config: Config) -> "SharedStorage":
        smem, tile = SmemAllocator(), config.tile
        sQ = allocate_stages(smem, config.dtype, tile.operand_smem("Q"), 1)
        k_part = tile.operand_smem("K")
        sK = allocate_stages(smem, config.dtype, k_part, CTAS * PIECE_STAGES)
        stages = cute.make_tensor(sK.iterator, cute.make_layout((CTAS * k_part.cosize, PIECE_STAGES)))
        sP = allocate_stages(smem, config.dtype, tile.smem_p_half, WARPGROUPS * tile.p_buffers)
        sP = cute.logical_divide(sP, (None, None, WARPGROUPS))
        rows = cute.make_layout((WARPGROUP_ROWS, WARPGROUPS))
        sMax, sSum = (smem.allocate_tensor(Float32, rows, 16) for _ in range(2))
        pieces = PiecePipeline(stages, Pipeline.allocate(smem, PIECE_STAGES))
        q, tiles = Pipeline.allocate(smem, 1), PublishedTiles.allocate(smem, config.num_tile_values)
        index, rank = ClusterIndex.allocate(smem), cute.arch.block_idx_in_cluster()
        return SharedStorage(config, sQ, pieces, sP, sMax, sSum, q, tiles, index, rank)

    @cute.jit
    def init_barriers(self):
        """Called by one thread, before a fence and a barrier of the cluster."""
        self.q.init(1, WARPS)
        self.pieces.barriers.init(1, CTAS * WARPS)
        self.index.pipeline.init(1, 1)

    # ---- the published tile. `count` is the number of tiles that the CTA computed before it.

    @cute.jit
    def m_block(self, count: Int32) -> Int32:
        """After q.full: the m_block of the tile, or NO_TILE."""
        return self.tiles.read(0, count)

    @cute.jit
    def head(self, count: Int32):
        return self.tiles.read(1, count)

    def seqlen_values(self, count: Int32) -> SeqlenValues:
        return tuple(self.tiles.read(i, count) for i in range(2, self.config.seqlen_end))

    @cute.jit
    def release_q(self, count: Int32):
        """Called by a warp when it is done with Q."""
        cute.arch.sync_warp()
        self.q.release(count)
