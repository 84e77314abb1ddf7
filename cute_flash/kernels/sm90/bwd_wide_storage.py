"""What the warps of the wide Hopper backward share: arguments, and shared memory with its barriers."""

from dataclasses import dataclass, replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.band import Band
from cute_flash.device.pipeline import WARPGROUP_THREADS, Pipeline
from cute_flash.device.block_iterator import BlockIterator
from cute_flash.device.tile_scheduler import StaticTileScheduler
from cute_flash.device.seqlen import SeqlenInfo
from cute_flash.device.smem import allocate_stages
from cute_flash.device.tma import TmaTiles
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.kernels.sm90.bwd_storage import BOTH, NUM_WARPGROUPS, Tile
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90Wide
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.problem import Static


@dataclass(frozen=True)
class Config:
    """Compile-time facts: what a kernel is built for, and the tiles in shared memory that follow from it."""

    static: Static
    tile: BwdTileSm90Wide

    @property
    def dtype(self):
        return CUTE_DTYPES[self.static.dtype]

    @property
    def q(self) -> SmemTile:
        return SmemTile(self.tile.tile_m, self.tile.head_dim)

    @property
    def k(self) -> SmemTile:
        return SmemTile(self.tile.tile_n, self.tile.head_dim)

    @property
    def ds(self) -> SmemTile:
        return SmemTile(self.tile.tile_n, self.tile.tile_m)

    @property
    def out(self) -> SmemTile:
        """A warpgroup's part of dK and dV."""
        return SmemTile(self.tile.tile_n, self.tile.head_dim // NUM_WARPGROUPS)


@dataclass(frozen=True)
class Params:
    config: cutlass.Constexpr  # Config
    q: TmaTiles  # (tile_m, tile_d)
    do: TmaTiles
    k: TmaTiles  # (tile_n, tile_d)
    v: TmaTiles
    dk: TmaTiles  # (tile_n, tile_d / 2)
    dv: TmaTiles
    mLSE: cute.Tensor  # (B, H, Sq padded) in units of log2, +inf for rows without keys
    mD: cute.Tensor  # (B, H, Sq padded)
    mdQ: cute.Tensor  # (B, H, m_block, elements of a tile) fp32, in the order of the accumulators
    seqlen_q: Int32
    seqlen_k: Int32
    heads_per_kv: Int32
    scale: Float32
    band: Band  # of queries over keys
    order: StaticTileScheduler
    mma_s: cute.TiledMma  # Q K^T and dO V^T, a warpgroup's keys
    mma_dkv: cute.TiledMma  # dO^T P and Q^T dS
    mma_dq: cute.TiledMma  # dS K, half of a warpgroup's part

    @cute.jit
    def tile(self):
        """The one of this thread block."""
        tile_n, tile_m = self.config.tile.tile_n, self.config.tile.tile_m
        coord = self.order.tile_coord(cute.arch.block_idx()[0])
        of_keys = Band(self.band.right, self.band.left)
        blocks = of_keys.blocks(coord[0], tile_n, tile_m, self.seqlen_k, self.seqlen_q)
        block_iter = BlockIterator.of(blocks, ascends=True)
        # Keys past the end must not reach dQ: all blocks of the last keys are cut.
        is_tail = (coord[0] + 1) * tile_n > self.seqlen_k
        block_iter = replace(block_iter, full_end=Int32(0) if is_tail else block_iter.full_end)
        seqlen = SeqlenInfo(coord[2], self.seqlen_q, self.seqlen_k)
        return Tile(Int32(0), Int32(0), coord[0], coord[1], seqlen, blocks, block_iter, None)

    def first_sums(self, tile: Tile) -> Int32:
        """Of all blocks of sums of dQ, the number of the first one that a tile adds to."""
        _, heads, blocks, _ = self.mdQ.shape
        return (tile.batch * heads + tile.head_kv * self.heads_per_kv) * blocks + tile.block_iter.first


@dataclass(frozen=True)
class SharedStorage:
    sK: cute.Tensor  # (tile_n, tile_d); dK leaves through it
    sV: cute.Tensor  # likewise dV
    sQ: cute.Tensor  # (tile_m, tile_d, stage)
    sdO: cute.Tensor
    sP: cute.Tensor  # (tile_n, tile_m)
    sdS: cute.Tensor
    sdQ: cute.Tensor  # (4, thread, piece, warpgroup) fp32
    sLSE: cute.Tensor  # (tile_m, stage)
    sD: cute.Tensor
    k: Pipeline
    v: Pipeline
    q: Pipeline  # with LSE
    do: Pipeline  # with D
    dq: Pipeline  # a stage for each warpgroup

    @staticmethod
    def allocate(config: Config) -> "SharedStorage":
        smem, tile = SmemAllocator(), config.tile
        allocate = partial(allocate_stages, smem, config.dtype)

        def allocate_rows(stages: int) -> cute.Tensor:
            return smem.allocate_tensor(Float32, cute.make_layout((tile.tile_m, stages)), 128)

        sK, sV = allocate(config.k, 1)[None, None, 0], allocate(config.k, 1)[None, None, 0]
        sQ, sdO = allocate(config.q, tile.q_stages), allocate(config.q, tile.do_stages)
        sP, sdS = allocate(config.ds, 1)[None, None, 0], allocate(config.ds, 1)[None, None, 0]
        order = cute.make_layout((4, WARPGROUP_THREADS, tile.dq_pieces, NUM_WARPGROUPS))
        sdQ = smem.allocate_tensor(Float32, order, 128)
        sLSE, sD = allocate_rows(tile.q_stages), allocate_rows(tile.do_stages)
        stages = (1, 1, tile.q_stages, tile.do_stages, NUM_WARPGROUPS)
        pipelines = [Pipeline.allocate(smem, number) for number in stages]
        return SharedStorage(sK, sV, sQ, sdO, sP, sdS, sdQ, sLSE, sD, *pipelines)

    @cute.jit
    def init_barriers(self):
        """By one thread, before a fence and a barrier of all."""
        for pipeline in (self.k, self.v, self.q):
            pipeline.init(1, 4 * NUM_WARPGROUPS)
        # D is read as numbers, by every thread, shortly before.
        self.do.init(1, BOTH)
        self.dq.init(WARPGROUP_THREADS, 1)
