"""What the warps of the Hopper backward share: arguments, shared memory with its barriers, the tile."""

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.band import Band
from cute_flash.device.pipeline import WARPGROUP_THREADS, Pipeline
from cute_flash.device.block_iterator import BlockIterator
from cute_flash.device.block_sparse import BwdBlockIndex, BwdBlockIndices
from cute_flash.device.semaphore import DQSemaphore
from cute_flash.device.tma import VarlenTmaTiles
from cute_flash.device.tile_scheduler import StaticTileScheduler, PersistentTileScheduler
from cute_flash.device.score_bwd import BwdScoreParams
from cute_flash.device.seqlen import NUMBERS, SeqlenInfo, VarlenTileList
from cute_flash.device.smem import allocate_stages
from cute_flash.device.tma import TmaTiles
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.band import BlockRange, ceil_div
from cute_flash.spec.problem import Static

NUM_WARPGROUPS = 2
BOTH = NUM_WARPGROUPS * WARPGROUP_THREADS
DS_STAGES = 2
NO_TILE = -1
# Tiles written down at a time: the next one is, while outputs of this one are still on their way.
TILE_SLOTS = 2
# Warps that add dQ in turn, a block each: a warp waits for one phase of a barrier, not for the next but one.
DETERMINISTIC_ADDERS = 2


@dataclass(frozen=True)
class Config:
    """Compile-time facts: what a kernel is built for, and the tiles in shared memory that follow from it."""

    static: Static
    tile: BwdTileSm90

    @property
    def dtype(self):
        return CUTE_DTYPES[self.static.dtype]

    @property
    def tile_numbers(self) -> int:
        """That tell a tile: n_block, head, and those of its sequence."""
        return 2 + (NUMBERS if self.static.varlen else 1)

    @property
    def q(self) -> SmemTile:
        return SmemTile(self.tile.tile_m, self.tile.head_dim)

    @property
    def k(self) -> SmemTile:
        return SmemTile(self.tile.tile_n, self.tile.head_dim)

    @property
    def ds(self) -> SmemTile:
        return SmemTile(self.tile.tile_n, self.tile.tile_m)


@dataclass(frozen=True)
class Params:
    config: cutlass.Constexpr  # Config
    q: TmaTiles | VarlenTmaTiles  # (tile_m, tile_d)
    do: TmaTiles | VarlenTmaTiles
    k: TmaTiles | VarlenTmaTiles  # (tile_n, tile_d)
    v: TmaTiles | VarlenTmaTiles
    mLSE: cute.Tensor  # (B, H, Sq padded) in units of log2, +inf for rows without keys
    mD: cute.Tensor  # (B, H, Sq padded)
    mdQ: cute.Tensor  # (B, H, m_block, elements of a tile) fp32, in the order of the accumulators
    dq_semaphore: DQSemaphore | None  # where tiles of keys add in order
    mdK: cute.Tensor  # (B, Hkv, Sk, D), or packed: (1, Hkv, T, D)
    mdV: cute.Tensor
    seqlen_q: Int32
    seqlen_k: Int32
    heads_per_kv: Int32
    scale: Float32
    band: Band  # of keys over queries: left and right change places
    order: StaticTileScheduler
    queue: PersistentTileScheduler
    tile_list: VarlenTileList | None  # of a packed batch
    mma_s: cute.TiledMma  # K Q^T and V dO^T
    mma_dkv: cute.TiledMma  # P^T dO and dS^T Q
    mma_dq: cute.TiledMma  # dS K, a warpgroup's part
    terms: BwdScoreParams | None  # of scores that are more than products

    def tiles(self) -> PersistentTileScheduler:
        """Asked anew for every tile: how many there are is read again, not kept in a register."""
        return self.queue if self.tile_list is None else self.tile_list.queue(self.queue.counter, self.queue.is_dynamic)

    def coord(self, index: Int32) -> tuple:
        """(n_block, head, the numbers of the sequence...)"""
        if self.tile_list is None:
            return self.order.tile_coord(index)
        n_block, head, numbers = self.tile_list.read(index)
        return n_block, head, *numbers

    def seqlen(self, coord: tuple) -> SeqlenInfo:
        if self.tile_list is None:
            return SeqlenInfo(coord[2], self.seqlen_q, self.seqlen_k)
        return SeqlenInfo.of_values(coord[2:])

    @property
    def lists(self) -> BwdBlockIndices | None:
        """Of a block map."""
        written = None if self.terms is None else self.terms.written
        return None if written is None else written.lists

    def tile(self, count: Int32, fill: Int32, coord: tuple) -> "Tile":
        tile_n, tile_m = self.config.tile.tile_n, self.config.tile.tile_m
        seqlen = self.seqlen(coord)
        blocks = self.band.blocks(coord[0], tile_n, tile_m, seqlen.k_len, seqlen.q_len)
        # Without a mask every tile begins elsewhere, for few to add to the same block at a time; but not in
        # order, where the turns come one after the other.
        shift, num_listed = None, None
        if self.lists is not None:
            num_listed = self.lists.num(seqlen.batch, coord[1], coord[0])
        elif self.band.left is None and self.band.right is None and self.dq_semaphore is None:
            tiles = self.order.num_m_blocks if self.tile_list is None else ceil_div(seqlen.k_len, tile_n)
            shift = coord[0] * blocks.end // tiles
        block_iter = BlockIterator.of(blocks, ascends=True)
        return Tile(count, fill, coord[0], coord[1], seqlen, blocks, block_iter, shift, num_listed)

    def num_blocks(self, tile: "Tile") -> Int32:
        """Blocks of queries of a tile, of all heads that share its keys."""
        return tile.block_iter.num * self.heads_per_kv if tile.num_listed is None else tile.num_listed

    def entry(self, tile: "Tile", i: Int32) -> BwdBlockIndex:
        """The i-th of a tile's list."""
        return BwdBlockIndex(self.lists.read(tile.seqlen.batch, tile.head_kv, tile.n_block, i))

    @property
    def num_adders(self) -> int:
        """Warps that add dQ: in order they wait for each other's turns and for additions to be complete."""
        return 1 if self.dq_semaphore is None else DETERMINISTIC_ADDERS


@dataclass(frozen=True)
class SharedStorage:
    sK: cute.Tensor  # (tile_n, tile_d)
    sV: cute.Tensor
    sQ: cute.Tensor  # (tile_m, tile_d, stage)
    sdO: cute.Tensor
    sdS: cute.Tensor  # (tile_n, tile_m, stage)
    sLSE: cute.Tensor  # (tile_m, stage)
    sD: cute.Tensor
    sdQ: cute.Tensor  # (4, thread, register / 4, warpgroup) fp32
    config: cutlass.Constexpr  # Config
    tiles: cute.Tensor  # (n_block, head, sequence...; slot)
    k: Pipeline  # with the tile it is of; empty: multiplied for the last time, and the tile read by all
    v: Pipeline
    q: Pipeline  # with LSE
    do: Pipeline  # with D
    dq: Pipeline  # of each warpgroup; memory for one block, barriers for as many as there are adders
    ds: Pipeline  # full: both warpgroups have written; empty: both have read

    @staticmethod
    def allocate(config: Config) -> "SharedStorage":
        smem, tile = SmemAllocator(), config.tile
        allocate = partial(allocate_stages, smem, config.dtype)
        sK, sV = allocate(config.k, 1)[None, None, 0], allocate(config.k, 1)[None, None, 0]
        sQ, sdO = allocate(config.q, tile.stages), allocate(config.q, tile.stages)
        sdS = allocate(config.ds, DS_STAGES)
        rows = cute.make_layout((tile.tile_m, tile.stages))
        sLSE, sD = smem.allocate_tensor(Float32, rows, 128), smem.allocate_tensor(Float32, rows, 128)
        per_thread = tile.tile_m * tile.head_dim // BOTH
        order = cute.make_layout((4, WARPGROUP_THREADS, per_thread // 4, NUM_WARPGROUPS))
        sdQ = smem.allocate_tensor(Float32, order, 128)
        room = -(-config.tile_numbers // 4) * 4
        tiles = smem.allocate_tensor(Int32, cute.make_layout((room, TILE_SLOTS)), 16)
        parts = NUM_WARPGROUPS * DETERMINISTIC_ADDERS
        stages = (1, 1, tile.stages, tile.stages, parts, DS_STAGES)
        pipelines = [Pipeline.allocate(smem, number) for number in stages]
        return SharedStorage(sK, sV, sQ, sdO, sdS, sLSE, sD, sdQ, config, tiles, *pipelines)

    @cute.jit
    def init_barriers(self, num_adders: cutlass.Constexpr):
        """By one thread, before a fence and a barrier of all."""
        # A warp that multiplies arrives once; of one that adds dQ, which has read the tile, every thread.
        self.k.init(1, 4 * NUM_WARPGROUPS + 32 * num_adders)
        self.v.init(1, 4 * NUM_WARPGROUPS)
        self.q.init(1, BOTH)
        self.do.init(1, BOTH)
        self.dq.init(WARPGROUP_THREADS, 1)
        self.ds.init(BOTH, 4 * NUM_WARPGROUPS)

    @cute.jit
    def publish_tile(self, count: Int32, coord: tuple):
        """Write down the tile whose K comes next; the arrival at k.full that follows tells it."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(coord)):
                self.tiles[i, count % TILE_SLOTS] = coord[i]

    @cute.jit
    def publish_end(self, count: Int32):
        self.publish_tile(count, (Int32(NO_TILE), *(Int32(0) for _ in range(self.config.tile_numbers - 1))))

    def read_tile(self, count: Int32) -> tuple:
        """After k.full: (n_block, head, sequence...); n_block is NO_TILE after the last."""
        uniform = cute.arch.make_warp_uniform
        return tuple(uniform(self.tiles[i, count % TILE_SLOTS]) for i in range(self.config.tile_numbers))


@dataclass(frozen=True)
class Tile:
    """The keys that a thread block works on."""

    count: Int32  # tiles before this one
    fill: Int32  # blocks of queries before this tile's
    n_block: Int32
    head_kv: Int32
    seqlen: SeqlenInfo
    blocks: BlockRange  # of queries that see them
    block_iter: BlockIterator  # over those
    shift: Int32 | None  # of the block_iter's beginning
    num_listed: Int32 | None = None  # blocks of all heads that a block map names, in the place of a block_iter

    @property
    def batch(self) -> Int32:
        return self.seqlen.batch

    def block(self, i: Int32) -> Int32:
        """The block of queries that is the i-th on the way."""
        if self.shift is None:
            return self.block_iter.block(i)
        block = self.block_iter.block(i) + self.shift
        return cutlass.select_(block >= self.block_iter.num, block - self.block_iter.num, block)
