"""Configuration, parameters and shared memory of the Hopper forward.

`Config` and `Params` are also those of the forward for wide heads (`fwd_wide.py`), whose tile is a `FwdTileSm90Wide`.
"""

from dataclasses import dataclass, replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.smem import affine_layout, allocate_stages
from cute_flash.device.memory.tma import TmaTiles, VarlenTmaTiles
from cute_flash.device.scheduling.block_iterator import BlockIterator, OutwardBlockIterator
from cute_flash.device.scheduling.block_sparse import AnyBlockIterator, BlockCounts, BlockSparseIterator
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, Pipeline
from cute_flash.device.scheduling.published_tiles import PublishedTiles
from cute_flash.device.scheduling.seqlen import NUM_VALUES, HeadBlock, SeqlenInfo, SeqlenValues
from cute_flash.device.scheduling.tile_scheduler import (
    PersistentTileScheduler,
    StaticTileScheduler,
    TileCoord,
    VarlenTileList,
)
from cute_flash.device.scores.alibi_step import allocate_columns
from cute_flash.device.scores.band import Band, select
from cute_flash.device.scores.bias import BiasPipeline
from cute_flash.device.scores.dropout_mask import WARPS, DropoutMaskPipeline
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.kernels.common.params import ScoreParams
from cute_flash.planning.tiles.common import COST_DROPOUT, WARPGROUP_ROWS
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.band import BlockRange
from cute_flash.spec.features import formulas_of
from cute_flash.spec.problem import Static

# A tile height that covers all queries of a head.
ALL_ROWS = 1 << 20


@dataclass(frozen=True)
class Config:
    """Compile-time properties of a kernel, derived from its `Static` and its tile."""

    static: Static
    tile: FwdTileSm90

    @property
    def dtype(self):
        return CUTE_DTYPES[self.static.dtype]

    @property
    def has_softcap(self) -> bool:
        return "softcap" in self.static.features

    @property
    def has_alibi(self) -> bool:
        return "alibi" in self.static.features

    @property
    def num_tile_values(self) -> int:
        """The number of integers of a published tile: m_block, head, sequence, and with a block mask two counts."""
        return self.seqlen_end + (2 if self.static.block_sparse else 0)

    @property
    def seqlen_end(self) -> int:
        """The number of integers before the counts of a block mask: m_block, head and sequence."""
        return 2 + (NUM_VALUES if self.static.varlen else 1)

    @property
    def overlaps_tiles(self) -> bool:
        """Whether, with two stages of Q, the next tile's first block overlaps with this tile's last block.

        The overlap needs the most registers, so a block mask disables it, and so does a bias or a user mod if the
        features of the call need more registers than dropout alone.
        """
        static = self.static
        return not (static.has_mods and (static.block_sparse or static.feature_cost > COST_DROPOUT))

    @property
    def starts_near(self) -> bool:
        """Whether a tile starts with the keys nearest to its queries.

        With a bias or a score_mod the nearest keys often have the largest scores. ALiBi, block masks and
        `batch_invariant` have their own order.
        """
        static = self.static
        has_own_order = self.has_alibi or static.block_sparse or static.batch_invariant
        return ("bias" in static.features or "score_mod" in static.features) and not has_own_order

    @property
    def masked_loops(self) -> tuple[bool, bool]:
        """Whether tiles may have masked blocks (a) between the first block and the full ones, (b) after the full ones.

        With a bound on one side, the masked blocks come last, unless tiles start with the nearest keys.
        """
        static = self.static
        if self.starts_near:
            return static.has_right, static.has_left or not static.has_right
        return static.has_left and static.has_right and not static.block_sparse, (
            self.static.is_bounded or static.block_sparse
        )

    @property
    def skips_blocks(self) -> bool:
        """Whether a warpgroup skips the last blocks of a tile if its own rows see none of their keys.

        The blocks that it visits are then the first ones of the tile. With a left bound they would not be, and other
        orders of blocks and score features were not tried. V of the last own block is released after V of the skipped
        ones, so they need other stages. Without a right bound a warpgroup skips all blocks or none.
        """
        static, tile = self.static, self.tile
        has_own_order = self.has_alibi or static.has_left or static.block_sparse or static.pack_gqa
        has_stages = not static.has_right or tile.most_skipped < tile.stages
        return tile.skips_blocks and has_stages and not (has_own_order or static.has_mods or tile.dropout_producer)

    @property
    def is_dynamic(self) -> bool:
        """Whether a dense batch has a dynamic tile scheduler, because its tiles differ in length.

        Varlen batches always have one (`Params.tile_scheduler`).
        """
        return self.static.is_bounded or self.static.block_sparse

    @property
    def steps(self) -> int:
        """k-steps of P V."""
        return self.tile.tile_n // 16

    @property
    def early_steps(self) -> int:
        """k-steps of P that are computed before the wait for P V of the previous block."""
        if self.is_crowded:
            return self.steps
        return 1 if self.tile.num_warpgroups == 3 else self.steps // 3

    @property
    def is_crowded(self) -> bool:
        """Whether at least two of three groups of features compete for registers.

        The groups: a dropout producer; a bias, user mods or a block mask; formulas such as softcap or ALiBi.
        """
        has_formula = bool(formulas_of(self.static.features))
        return self.tile.dropout_producer + self.static.has_mods + has_formula > 1

    @property
    def may_speculate(self) -> bool:
        """Whether the row max may be speculative, which keeps both S and P in registers.

        There are enough registers if the output is narrow, or if only a part of P is computed before the wait for P V
        (`early_steps`). max_logit needs the maximum of every block, and `batch_invariant` needs an exact row max.
        """
        has_room = self.tile.width_v <= 64 or not self.is_crowded
        static = self.static
        return has_room and not ("return_max_logit" in static.features or static.batch_invariant)

    @property
    def fuses_exp2(self) -> bool:
        """Whether there is a fused score-to-exp2 pass (`device/softmax/fused_exp2.py`).

        There is none for several formulas, such as softcap and ALiBi. With three warpgroups there are enough registers
        for ALiBi only.
        """
        if self.static.has_mods:
            return not self.is_crowded and self.static.mods.fuses_with_exp2
        has_one = len(formulas_of(self.static.features)) == 1
        return has_one and (self.has_alibi or self.tile.num_warpgroups < 3)

    @property
    def has_alibi_step(self) -> bool:
        """Whether tensor cores add the terms of ALiBi after the first block of a tile (`device/scores/alibi_step.py`).

        Only the fused pass adds the rest. Tiles without a speculative row max have none; with the k-step they were 4 %
        slower if causal. At D = 64 the masks of a dropout producer leave no shared memory for the columns; other tiles
        with dropout were not tried.
        """
        is_fused = self.fuses_exp2 and self.tile.speculative_max and self.may_speculate
        return self.has_alibi and is_fused and not (self.static.has_mods or self.tile.dropout_producer)

    @property
    def bias(self) -> SmemTile:
        """The bias tile of one warpgroup."""
        return SmemTile(WARPGROUP_ROWS, self.tile.tile_n, variant=self.tile.layout)


@dataclass(frozen=True)
class Params:
    """The argument of the kernel. Tiles come from `static_scheduler` and `scheduler`, or from a varlen `tile_list`."""

    config: cutlass.Constexpr  # Config
    q: TmaTiles | VarlenTmaTiles  # (64, tile_d)
    # Tiles of a block, (tile_n, tile_d) and (tile_n, tile_dv). In the kernel for wide heads: parts of pieces, which one
    # CTA loads to both CTAs of a cluster (`fwd_wide_storage.py`).
    k: TmaTiles | VarlenTmaTiles
    v: TmaTiles | VarlenTmaTiles
    o: TmaTiles | VarlenTmaTiles | None  # None: the output is stored from registers
    bias: TmaTiles | None  # (64, tile_n); None: threads load it, or there is none
    mO: cute.Tensor  # (B, H, Sq, D), or (1, H, T, D) in a varlen batch
    mLSE: cute.Tensor  # (B, H, Sq)
    num_rows: Int32  # queries of a head; with pack_gqa, of all heads in a group
    seqlen_q: Int32  # queries of a head
    seqlen_k: Int32
    heads_per_kv: Int32
    scale_log2: Float32
    band: Band
    static_scheduler: StaticTileScheduler
    scheduler: PersistentTileScheduler
    tile_list: VarlenTileList | None  # of a varlen batch
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    mma_alibi: cute.TiledMma | None  # None: no k-step of ALiBi
    score_params: ScoreParams

    def seqlen_info(self, values: SeqlenValues) -> SeqlenInfo:
        """The sequence of a published tile."""
        return SeqlenInfo.of_values(values, self.num_rows, self.seqlen_k)

    def seqlen_q_of(self, seqlen: SeqlenInfo) -> Int32:
        """The number of queries of one head. With pack_gqa, `q_len` counts those of several heads."""
        return self.seqlen_q if self.tile_list is None else seqlen.q_len

    def tile_scheduler(self) -> PersistentTileScheduler:
        """The scheduler of this launch: `scheduler`, or a dynamic one over the tile list.

        The kernel calls it for every tile. The length of a tile list is then read again, which saves a register.
        """
        scheduler = self.scheduler
        if self.tile_list is None:
            return scheduler
        return self.tile_list.scheduler(scheduler.tile_counter, True, scheduler.ctas_per_tile)

    def tile_coord(self, index: Int32) -> TileCoord:
        return (self.tile_list or self.static_scheduler).tile_coord(index)

    def block_counts(self, m_block: Int32, head: Int32, seqlen: SeqlenInfo) -> BlockCounts | None:
        """The numbers of full and partial blocks of a tile; None without a block mask."""
        indices = self.score_params.block_indices
        return None if indices is None else indices.counts(self._block_mask_coord(m_block, head, seqlen))

    def _block_mask_coord(self, m_block: Int32, head: Int32, seqlen: SeqlenInfo) -> HeadBlock:
        m_blocks = self.config.static.mods.block_mask_tile[0] // self.config.tile.tile_m
        return HeadBlock(seqlen.batch, head, m_block // m_blocks)

    def block_iterator(
        self, m_block: Int32, head: Int32, seqlen: SeqlenInfo, counts: BlockCounts | None
    ) -> AnyBlockIterator:
        """The K/V blocks of a tile, in the order in which the tile visits them.

        With a right bound, the blocks that it masks come last: rows see few keys in them, and already have a good
        maximum. Without a right bound, the block with the last key, which may need a mask, comes first, so that the
        loop over full blocks needs no mask; the blocks that a left bound masks come last. With ALiBi scores fall with
        the distance, and with a bias or a score_mod they often do. The nearest keys then come first; otherwise the
        maximum would grow with every block. That order depends on the tile's rows, so `batch_invariant` disables it. A
        block mask has its own order.
        """
        config, indices = self.config, self.score_params.block_indices
        if indices is not None:
            parts = config.static.mods.block_mask_tile[1] // config.tile.tile_n
            blocks = self._blocks(m_block, seqlen) if config.static.is_bounded else None
            queries = self._block_mask_coord(m_block, head, seqlen)
            return BlockSparseIterator(indices, queries, counts, parts, blocks)
        blocks, static, tile = self._blocks(m_block, seqlen), config.static, config.tile
        if config.starts_near and config.static.is_bounded:
            return BlockIterator.of(blocks, False)
        is_outward = config.starts_near or config.has_alibi
        if not is_outward or static.batch_invariant:
            return BlockIterator.of(blocks, static.has_right)
        lengths = self.seqlen_q_of(seqlen), seqlen.k_len
        return OutwardBlockIterator.of(blocks, self.band.diagonal_block(m_block, tile.tile_m, tile.tile_n, *lengths))

    def warpgroup_blocks(self, m_block: Int32, warpgroup: Int32, seqlen: SeqlenInfo) -> BlockIterator:
        """The blocks of a tile in which the rows of one warpgroup see keys (`Config.skips_blocks`).

        They come first among the blocks of the tile, and have the same order. There are none if no row exists.
        """
        tile, lengths = self.config.tile, (self.seqlen_q_of(seqlen), seqlen.k_len)
        block_64 = m_block * tile.num_warpgroups + warpgroup
        blocks = self.band.blocks(block_64, WARPGROUP_ROWS, tile.tile_n, *lengths)
        found = BlockIterator.of(blocks, self.config.static.has_right)
        has_rows = block_64 * WARPGROUP_ROWS < lengths[0]
        counts = {name: getattr(found, name) for name in ("num", "full_begin", "full_end")}
        return replace(found, **{name: select(has_rows, count, 0) for name, count in counts.items()})

    def _blocks(self, m_block: Int32, seqlen: SeqlenInfo) -> BlockRange:
        tile, lengths = self.config.tile, (self.seqlen_q_of(seqlen), seqlen.k_len)
        if self.config.static.pack_gqa:
            # A tile has rows of several heads, so its rows may have any query position.
            return self.band.blocks(Int32(0), ALL_ROWS, tile.tile_n, *lengths)
        return self.band.blocks(m_block, tile.tile_m, tile.tile_n, *lengths)


@dataclass(frozen=True)
class SharedStorage:
    """The shared memory: tiles, barriers, and the coordinates of tiles that the producer publishes."""

    config: cutlass.Constexpr  # Config
    sQ: cute.Tensor  # (64, tile_d, (warpgroup, q stage))
    sK: cute.Tensor  # (tile_n, tile_d, stage)
    sV: cute.Tensor
    dropout_masks: DropoutMaskPipeline | None
    bias: BiasPipeline | None  # None: no bias, or threads load it
    q: Pipeline  # empty: Q has been read, an output in the stage is stored, and all warps have read the published tile
    k: Pipeline
    v: Pipeline
    o_full: cute.Pointer  # (warpgroup, q stage): the warpgroup's output is in the stage
    tiles: PublishedTiles  # m_block, head, sequence...; valid after q.full
    n_blocks: cute.Tensor | None = None  # with a block mask, the n_block of each stage of K; valid after k.full
    sColumns: cute.Tensor | None = None  # (tile_n, 32): operand B of the k-step of ALiBi in its first 16 columns

    @staticmethod
    def allocate(config: Config) -> "SharedStorage":
        smem, tile = SmemAllocator(), config.tile
        allocate = partial(allocate_stages, smem, config.dtype)
        sQ = allocate(tile.operand_smem("Q"), tile.num_warpgroups * tile.q_stages)
        sQ = cute.logical_divide(sQ, (None, None, tile.num_warpgroups))
        sK, sV = (allocate(tile.operand_smem(name), tile.stages) for name in "KV")
        dropout_masks = None
        if tile.dropout_producer:
            dropout_masks = DropoutMaskPipeline.allocate(smem, tile.num_warpgroups, config.steps, tile.dropout_stages)
        bias = None
        if tile.bias_stages:
            dtype = CUTE_DTYPES[config.static.mods.bias_dtype]
            bias = BiasPipeline.allocate(smem, dtype, config.bias, tile.num_warpgroups, tile.bias_stages)
        sColumns = allocate_columns(smem, config.dtype, tile.tile_n) if config.has_alibi_step else None
        q, k, v = [Pipeline.allocate(smem, stages) for stages in (tile.q_stages, tile.stages, tile.stages)]
        o_full = smem.allocate_array(cutlass.Int64, tile.num_warpgroups * tile.q_stages, byte_alignment=8)
        tiles = PublishedTiles.allocate(smem, config.num_tile_values, tile.q_stages)
        n_blocks = None
        if config.static.block_sparse:
            n_blocks = smem.allocate_tensor(Int32, cute.make_layout(tile.stages), 16)
        tensors, barriers = (sQ, sK, sV, dropout_masks, bias), (q, k, v, o_full)
        return SharedStorage(config, *tensors, *barriers, tiles, n_blocks, sColumns)

    @cute.jit
    def init_barriers(self):
        """Called by one thread, before a fence and a CTA barrier."""
        tile = self.config.tile
        mma_warps = 4 * tile.num_warpgroups
        # Warps that release Q: the V warp, the store warp (or all MMA warps with one stage of Q), the dropout producer,
        # and the bias warp.
        others = (WARPS if tile.dropout_producer else 0) + (1 if tile.bias_stages else 0)
        self.q.init(1, (2 if tile.q_stages > 1 else 1 + mma_warps) + others)
        self.k.init(1, mma_warps if self.n_blocks is None else 32 * mma_warps)
        self.v.init(1, mma_warps)
        for i in cutlass.range_constexpr(tile.num_warpgroups * tile.q_stages):
            cute.arch.mbarrier_init(self.o_full + i, WARPGROUP_THREADS)
        if cutlass.const_expr(self.dropout_masks is not None):
            self.dropout_masks.init_barriers()
        if cutlass.const_expr(self.bias is not None):
            self.bias.init_barriers()

    # ---- the published tile of each stage of Q. `count` is the number of tiles that the CTA computed before it.

    @cute.jit
    def m_block(self, count: Int32) -> Int32:
        """After q.full: the m_block of the tile, or NO_TILE."""
        return self.tiles.read(0, count)

    @cute.jit
    def head(self, count: Int32):
        return self.tiles.read(1, count)

    def seqlen_values(self, count: Int32) -> SeqlenValues:
        return tuple(self.tiles.read(i, count) for i in range(2, self.config.seqlen_end))

    def block_counts(self, count: Int32) -> BlockCounts | None:
        """The numbers of full and partial blocks of the tile; None without a block mask."""
        places = range(self.config.seqlen_end, self.config.num_tile_values)
        return BlockCounts(*(self.tiles.read(i, count) for i in places)) if places else None

    # ---- with a block mask, the n_block of each stage of K

    @cute.jit
    def publish_block(self, iteration: Int32, n_block: Int32):
        """After k.empty, write the n_block of a stage of K; the arrival at k.full publishes it."""
        if cutlass.const_expr(self.n_blocks is not None):
            with cute.arch.elect_one():
                self.n_blocks[self.k.stage(iteration)] = n_block

    def n_block(self, block_iter: AnyBlockIterator, iteration: Int32, i: Int32) -> Int32:
        """After k.full: the i-th n_block of a tile."""
        return block_iter.block(i) if self.n_blocks is None else self.n_blocks[self.k.stage(iteration)]

    def first_n_block(self, block_iter: AnyBlockIterator, iteration: Int32) -> Int32:
        return block_iter.first if self.n_blocks is None else self.n_blocks[self.k.stage(iteration)]

    # ---- Q and the output

    @cute.jit
    def release_q(self, count: Int32):
        """Called by a warp when it is done with a stage of Q and with its published tile."""
        cute.arch.sync_warp()
        self.q.release(count)

    @cute.jit
    def release_k(self, iteration: Int32):
        """Release a stage of K. With a block mask every thread arrives, because every thread has read the n_block."""
        if cutlass.const_expr(self.n_blocks is None):
            self.k.release(iteration)
        else:
            self.k.release_per_thread(iteration)

    def output_stage(self, warpgroup: Int32, count: Int32) -> cute.Tensor:
        """The output (64, tile_dv) of a warpgroup, in the memory of its stage of Q."""
        sQ = self.sQ[None, None, (warpgroup, self.q.stage(count))]
        return cute.make_tensor(sQ.iterator, affine_layout(self.config.tile.operand_smem("O")))

    def output_barrier(self, warpgroup: Int32, count: Int32) -> cute.Pointer:
        return self.o_full + self.q.stage(count) * self.config.tile.num_warpgroups + warpgroup
