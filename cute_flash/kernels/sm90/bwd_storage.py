"""Configuration, parameters, K/V tiles and shared memory of the Hopper backward."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_flash.device.gradients.bias_bwd import BwdBiasPipeline
from cute_flash.device.gradients.score_bwd import BwdScoreParams
from cute_flash.device.memory.smem import allocate_stages
from cute_flash.device.memory.tma import TmaTiles, VarlenTmaTiles
from cute_flash.device.scheduling.block_iterator import BlockIterator
from cute_flash.device.scheduling.block_sparse import BwdBlockIndex, BwdBlockIndices
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, Pipeline
from cute_flash.device.scheduling.published_tiles import PublishedTiles
from cute_flash.device.scheduling.semaphore import DQSemaphore
from cute_flash.device.scheduling.seqlen import NUM_VALUES, SeqlenInfo
from cute_flash.device.scheduling.tile_scheduler import (
    PersistentTileScheduler,
    StaticTileScheduler,
    TileCoord,
    VarlenTileList,
)
from cute_flash.device.scores.band import Band
from cute_flash.device.scores.position import ScoreBlock
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.kernels.common.kernel import starts_last_tiles
from cute_flash.kernels.common.params import bwd_score_params
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90, BwdTileSm90Wide
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.band import BlockRange, ceil_div
from cute_flash.spec.problem import Static

NUM_WARPGROUPS = 2
MMA_THREADS = NUM_WARPGROUPS * WARPGROUP_THREADS
DS_STAGES = 2
# Warps that add dQ with deterministic gradients; each takes every other block. Each has its own barriers in the dq
# pipeline, because a wait can only distinguish two successive phases of a barrier.
DETERMINISTIC_ADDERS = 2


@dataclass(frozen=True)
class Config:
    """Compile-time properties of a kernel, and its tiles in shared memory."""

    static: Static
    tile: BwdTileSm90 | BwdTileSm90Wide

    @property
    def dtype(self):
        return CUTE_DTYPES[self.static.dtype]

    @property
    def num_tile_values(self) -> int:
        """The number of integers of a published tile: n_block, head and sequence."""
        return 2 + (NUM_VALUES if self.static.varlen else 1)

    @property
    def q(self) -> SmemTile:
        """An m_block of Q or dO."""
        return SmemTile(self.tile.tile_m, self.tile.cta_head_dim, variant=self.tile.smem_variant)

    @property
    def k(self) -> SmemTile:
        """K or V of a tile."""
        return SmemTile(self.tile.tile_n, self.tile.cta_head_dim, variant=self.tile.smem_variant)

    @property
    def ds(self) -> SmemTile:
        """dS or P: keys by queries, or queries by keys if `stores_ds`."""
        rows, cols = self.tile.tile_n, self.tile.tile_m
        return SmemTile(cols, rows) if self.stores_ds else SmemTile(rows, cols)

    @property
    def bias(self) -> SmemTile | None:
        """The bias of a warpgroup's keys, queries by keys; None if TMA loads none."""
        return SmemTile(self.tile.tile_m, self.tile.tile_n // NUM_WARPGROUPS) if self.tile.bias_stages else None

    @property
    def stores_dbias(self) -> bool:
        """Whether TMA stores the gradient of the bias."""
        return self.bias is not None and self.static.mods.dbias_tma

    @property
    def stores_ds(self) -> bool:
        """Whether TMA stores sdS as the gradient of the bias. The kernel for wide heads stores a copy of dS."""
        return self.stores_dbias and isinstance(self.tile, BwdTileSm90)

    @property
    def out(self) -> SmemTile:
        """A warpgroup's columns of dK and dV, in the kernel for wide heads."""
        return SmemTile(self.tile.tile_n, self.tile.cta_head_dim // NUM_WARPGROUPS)


class BlockVisit(NamedTuple):
    """One m_block of one query head that a K/V tile processes."""

    number: Int32  # position among the m_blocks of the head, or in the list of a block mask
    head: Int32 | None = None  # the query head; None if scores do not depend on it, or with a block mask
    index_bits: Int32 | None = None  # with a block mask, the bits of its `BwdBlockIndex`

    @property
    def index(self) -> BwdBlockIndex:
        return BwdBlockIndex(self.index_bits)

    def m_block(self, tile: "KVTile") -> Int32:
        return tile.m_block(self.number) if self.index_bits is None else self.index.m_block

    def is_partial(self) -> cutlass.Boolean | None:
        """With a block mask, whether mask_mod applies to the block."""
        return None if self.index_bits is None else self.index.is_partial


@dataclass(frozen=True)
class KVTile:
    """A K/V tile of a CTA, and the m_blocks that it visits."""

    count: Int32  # tiles of the CTA before this one
    iteration: Int32  # m_blocks of the tiles before this one
    n_block: Int32
    head_kv: Int32
    seqlen: SeqlenInfo
    blocks: BlockRange  # m_blocks that see the keys
    block_iter: BlockIterator  # over `blocks`
    shift: Int32 | None  # the tile visits m_blocks from this one on, and wraps around; None: from the first on
    num_sparse: Int32 | None = None  # with a block mask, the number of m_blocks that it lists, of all heads

    @property
    def batch(self) -> Int32:
        return self.seqlen.batch

    def m_block(self, i: Int32) -> Int32:
        """The m_block of the i-th visit of a head."""
        if self.shift is None:
            return self.block_iter.block(i)
        block = self.block_iter.block(i) + self.shift
        return cutlass.select_(block >= self.block_iter.num, block - self.block_iter.num, block)


@dataclass(frozen=True)
class BwdParams:
    """The argument of a Hopper backward kernel: the fields that narrow and wide heads share."""

    config: cutlass.Constexpr  # Config
    q: TmaTiles | VarlenTmaTiles  # (tile_m, tile_d)
    do: TmaTiles | VarlenTmaTiles
    k: TmaTiles | VarlenTmaTiles  # (tile_n, tile_d)
    v: TmaTiles | VarlenTmaTiles
    dk: TmaTiles | VarlenTmaTiles | None  # (tile_n, tile_d / 2); None: threads store dK and dV to mdK and mdV
    dv: TmaTiles | VarlenTmaTiles | None
    mLSE: cute.Tensor  # (B, H, Sq padded) in units of log2, +inf for rows without keys
    mDelta: cute.Tensor  # (B, H, Sq padded)
    mdQ_accum: cute.Tensor  # (B, H, m_blocks, elements of a tile) fp32, in register order
    dq_semaphore: DQSemaphore | None  # for deterministic gradients
    mClaims: cute.Tensor | None  # (B, H, m_blocks), of parts of mdQ_accum; None if deterministic
    mdK: cute.Tensor | None  # (B, Hkv, Sk, D), or (1, Hkv, T, D) in a varlen batch; None: TMA stores dK and dV
    mdV: cute.Tensor | None
    seqlen_q: Int32
    seqlen_k: Int32
    heads_per_kv: Int32
    scale: Float32
    band: Band
    static_scheduler: StaticTileScheduler
    scheduler: PersistentTileScheduler | None  # None: a CTA computes one tile
    tile_list: VarlenTileList | None  # of a varlen batch
    mma_s: cute.TiledMma  # S and dP, or their transposes
    mma_dkv: cute.TiledMma  # dK and dV, or their transposes
    mma_dq: cute.TiledMma
    score_params: BwdScoreParams | None  # None: no score features
    bias: TmaTiles | None  # (tile_m, keys of a warpgroup); None: there is no bias, or threads load it
    dbias: TmaTiles | None  # None: the bias has no gradient, or threads store it

    @classmethod
    def of(cls, config: Config, args: SimpleNamespace, band_q: Band, **of_kernel: Any) -> "BwdParams":
        """The parameters of a launch. In `band_q` rows are queries. `of_kernel`: fields in which the kernels differ."""
        static, tile = config.static, config.tile
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma, tile_list, semaphore = TmaTiles, None, None
        (_, heads, seqlen_q, _), (batch, heads_kv, seqlen_k, _) = args.q.shape, args.k.shape
        if static.varlen:
            tma, tile_list = VarlenTmaTiles, VarlenTileList(args.kv_tile_list, heads_kv, args.heads_per_l2_group)
        if static.deterministic:
            tile_sizes = tile.tile_m, tile.tile_n
            semaphore = DQSemaphore(args.dq_progress, band_q, seqlen_q, seqlen_k, *tile_sizes, parts=2 * tile.cluster)
        stores_rows = isinstance(tile, BwdTileSm90)
        num_n_blocks = cute.ceil_div(seqlen_k, tile.tile_n)
        return cls(
            config=config,
            q=tma.of(load, args.q, config.q),
            do=tma.of(load, args.dout_cast, config.q),
            k=tma.of(load, args.k, config.k),
            v=tma.of(load, args.v, config.k),
            dk=None if stores_rows else tma.of(store, args.dk, config.out),
            dv=None if stores_rows else tma.of(store, args.dv, config.out),
            mLSE=args.lse_log2,
            mDelta=args.delta,
            mdQ_accum=args.dq_accum,
            dq_semaphore=semaphore,
            mClaims=None if static.deterministic else args.dq_progress,
            mdK=args.dk if stores_rows else None,
            mdV=args.dv if stores_rows else None,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_per_kv=heads // heads_kv,
            scale=args.scale,
            static_scheduler=StaticTileScheduler(
                num_n_blocks, heads_kv, batch, args.heads_per_l2_group, starts_last_tiles(static)
            ),
            tile_list=tile_list,
            score_params=bwd_score_params(static, tile, args),
            bias=None if config.bias is None else TmaTiles.of(load, args.bias, config.bias),
            dbias=TmaTiles.of(store, args.dbias, config.bias) if config.stores_dbias else None,
            **of_kernel,
        )

    @property
    def cta_rank(self) -> Int32 | int:
        """The index of this CTA's columns of the head dim: its rank in the cluster."""
        return cute.arch.block_idx_in_cluster() if self.config.tile.cluster > 1 else 0

    def tile_coord(self, index: Int32) -> TileCoord:
        return (self.tile_list or self.static_scheduler).tile_coord(index)

    def seqlen_info(self, coord: TileCoord) -> SeqlenInfo:
        return SeqlenInfo.of_values(coord.seqlen_values, self.seqlen_q, self.seqlen_k)

    # ---- the m_blocks that a K/V tile visits

    @property
    def block_indices(self) -> BwdBlockIndices | None:
        """The index lists of a block mask; None without one."""
        mods = None if self.score_params is None else self.score_params.mods
        return None if mods is None else mods.block_indices

    def num_m_blocks(self, tile: KVTile) -> Int32:
        """The number of m_blocks that a tile visits in all heads that share its keys."""
        return tile.block_iter.num * self.heads_per_kv if tile.num_sparse is None else tile.num_sparse

    def block_index(self, tile: KVTile, i: Int32) -> BwdBlockIndex:
        """The i-th m_block that a block mask lists for a tile."""
        return BwdBlockIndex(self.block_indices.read(tile.seqlen.batch, tile.head_kv, tile.n_block, i))

    def first_visit(self, tile: KVTile, needs_head: bool) -> BlockVisit:
        """The first visit of a tile. `needs_head`: scores depend on the head."""
        if self.config.static.block_sparse:
            # Reading the first entry is safe even if the list is empty: its memory is allocated.
            return BlockVisit(Int32(0), index_bits=self.block_index(tile, Int32(0)).bits)
        return BlockVisit(Int32(0), tile.head_kv * self.heads_per_kv if needs_head else None)

    def query_head(self, tile: KVTile, visit: BlockVisit) -> Int32:
        """The head of a visit."""
        if visit.index_bits is None:
            return visit.head
        return tile.head_kv * self.heads_per_kv + visit.index.head


@dataclass(frozen=True)
class Params(BwdParams):
    """The argument of the kernel. `band` is `Band.of_keys`."""

    loads_bias_with_q = False  # the bias has its own warp

    def tile_scheduler(self) -> PersistentTileScheduler:
        """The scheduler of this launch.

        The kernel calls it for every tile. The length of a tile list is then read again, which saves a register.
        """
        if self.tile_list is None:
            return self.scheduler
        return self.tile_list.scheduler(self.scheduler.tile_counter, self.scheduler.is_dynamic)

    def tile(self, count: Int32, iteration: Int32, coord: TileCoord) -> KVTile:
        tile_n, tile_m = self.config.tile.tile_n, self.config.tile.tile_m
        n_block, head_kv, seqlen = coord.block, coord.head, self.seqlen_info(coord)
        blocks = self.band.blocks(n_block, tile_n, tile_m, seqlen.k_len, seqlen.q_len)
        # Without a mask each tile starts at a different m_block, so that few tiles add to one m_block at a time. A
        # semaphore serialises the additions, so the start does not matter.
        shift, num_sparse = None, None
        if self.block_indices is not None:
            num_sparse = self.block_indices.count(seqlen.batch, head_kv, n_block)
        elif self.band.left is None and self.band.right is None and self.dq_semaphore is None:
            tiles = self.static_scheduler.num_blocks if self.tile_list is None else ceil_div(seqlen.k_len, tile_n)
            shift = n_block * blocks.end // tiles
        block_iter = BlockIterator.of(blocks, ascends=True)
        return KVTile(count, iteration, n_block, head_kv, seqlen, blocks, block_iter, shift, num_sparse)

    @property
    def num_adders(self) -> int:
        """The number of warps that add dQ.

        With a semaphore there are two: one adds while the other waits until its additions are complete.
        """
        return 1 if self.dq_semaphore is None else DETERMINISTIC_ADDERS

    @property
    def num_tile_readers(self) -> int:
        """The number of producer warps that read published tiles: to add dQ, load the bias or store its gradient."""
        return self.num_adders + (self.bias is not None) + (self.dbias is not None)


def allocate_bias(smem: SmemAllocator, config: Config, is_transposed: bool) -> BwdBiasPipeline | None:
    """Shared memory for a bias; None: TMA loads none. `is_transposed`: rows of the accumulators are keys."""
    if config.bias is None:
        return None
    dtype, stages = CUTE_DTYPES[config.static.mods.bias_dtype], config.tile.bias_stages
    keeps_gradient = config.stores_dbias and not config.stores_ds
    return BwdBiasPipeline.allocate(smem, dtype, config.bias, NUM_WARPGROUPS, stages, keeps_gradient, is_transposed)


@dataclass(frozen=True)
class SharedStorage:
    """The shared memory: tiles, barriers, and the coordinates of tiles that the producer publishes."""

    sK: cute.Tensor  # (tile_n, tile_d)
    sV: cute.Tensor
    sQ: cute.Tensor  # (tile_m, tile_d, stage)
    sdO: cute.Tensor
    sdS: cute.Tensor  # (tile_n, tile_m, stage), or (tile_m, tile_n, stage) if `Config.stores_ds`
    sLSE: cute.Tensor  # (tile_m, stage)
    sDelta: cute.Tensor
    sdQ: cute.Tensor  # (4, thread, register / 4, warpgroup) fp32
    tiles: PublishedTiles  # n_block, head, sequence...; valid after k.full
    k: Pipeline  # empty: the last product has read K, and all warps have read the published tile
    v: Pipeline
    q: Pipeline  # with LSE
    do: Pipeline  # with Δ
    dq: Pipeline  # per warpgroup: memory for one block, barriers for DETERMINISTIC_ADDERS blocks
    ds: Pipeline  # full: both warpgroups have written dS; empty: both have read it, and TMA has stored it
    bias: BwdBiasPipeline | None  # None: TMA loads no bias

    @staticmethod
    def allocate(config: Config) -> "SharedStorage":
        smem, tile = SmemAllocator(), config.tile
        allocate = partial(allocate_stages, smem, config.dtype)
        sK, sV = allocate(config.k, 1)[None, None, 0], allocate(config.k, 1)[None, None, 0]
        sQ, sdO = allocate(config.q, tile.stages), allocate(config.q, tile.stages)
        sdS = allocate(config.ds, DS_STAGES)
        rows = cute.make_layout((tile.tile_m, tile.stages))
        sLSE, sDelta = smem.allocate_tensor(Float32, rows, 128), smem.allocate_tensor(Float32, rows, 128)
        registers = tile.tile_m * tile.head_dim // MMA_THREADS
        layout = cute.make_layout((4, WARPGROUP_THREADS, registers // 4, NUM_WARPGROUPS))
        sdQ = smem.allocate_tensor(Float32, layout, 128)
        bias = allocate_bias(smem, config, is_transposed=True)
        tiles = PublishedTiles.allocate(smem, config.num_tile_values)
        dq_stages = NUM_WARPGROUPS * DETERMINISTIC_ADDERS
        stages = (1, 1, tile.stages, tile.stages, dq_stages, DS_STAGES)
        k, v, q, do, dq, ds = [Pipeline.allocate(smem, number) for number in stages]
        return SharedStorage(sK, sV, sQ, sdO, sdS, sLSE, sDelta, sdQ, tiles, k, v, q, do, dq, ds, bias)

    @cute.jit
    def init_barriers(self, num_tile_readers: cutlass.Constexpr, stores_ds: cutlass.Constexpr):
        """Called by one thread, before a fence and a CTA barrier."""
        # An MMA warp releases K with one arrival, a producer warp that reads tiles with one arrival per thread.
        self.k.init(1, 4 * NUM_WARPGROUPS + 32 * num_tile_readers)
        self.v.init(1, 4 * NUM_WARPGROUPS)
        self.q.init(1, MMA_THREADS)
        self.do.init(1, MMA_THREADS)
        self.dq.init(WARPGROUP_THREADS, 1)
        self.ds.init(MMA_THREADS, 4 * NUM_WARPGROUPS + stores_ds)
        if cutlass.const_expr(self.bias is not None):
            self.bias.init_barriers()

    @cute.jit
    def store_dbias(self, tma: TmaTiles, iteration: Int32, block: ScoreBlock):
        """Store dS of a block as the gradient of the bias, then release it. Called by one warp."""
        self.ds.wait_full(iteration)
        sdS = self.sdS[None, None, self.ds.stage(iteration)]
        for w in cutlass.range_constexpr(NUM_WARPGROUPS):
            row, column = self.bias.stages.coord(block, w)
            with cute.arch.elect_one():
                part = cute.local_tile(sdS, (tma.rows, tma.cols), (0, w))
                tma.store(part, row, block.head, block.batch, column)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.ds.release(iteration)

    def read_tile(self, count: Int32) -> TileCoord:
        """The published tile. Called after k.full."""
        n_block, head_kv, *seqlen_values = (self.tiles.read(i, count) for i in range(self.tiles.num))
        return TileCoord(n_block, head_kv, tuple(seqlen_values))
