"""What the warps of the Hopper forward share: the arguments, shared memory with its barriers, and the tile
that each stage of Q belongs to.
"""

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.band import Band
from cute_flash.device.barriers import WARPGROUP_THREADS, Ring
from cute_flash.device.bias import BiasBlocks
from cute_flash.device.block_iterator import AnyBlockIterator, BlockIterator, BlockSparseIterator, OutwardBlockIterator
from cute_flash.device.drawn import WARPS, Drawn
from cute_flash.device.ragged import RaggedTiles
from cute_flash.device.scheduler import TileOrder, TileQueue
from cute_flash.device.sequence import NUMBERS, Sequence, WorkList
from cute_flash.device.smem import to_cute
from cute_flash.device.stages import allocate_stages
from cute_flash.device.tma import TmaTiles
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.kernels.common.params import ScoreParams
from cute_flash.planning.tiles.common import COST_DROPOUT, WARPGROUP_ROWS
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.band import BlockRange
from cute_flash.spec.problem import Static

NO_TILE = -1
# Tiles written down at a time, also beside one stage of Q: the next one is, before all have read this one.
TILE_SLOTS = 2
ALL_ROWS = 1 << 20


@dataclass(frozen=True)
class Shapes:
    """Compile-time facts: what a kernel is built for, and the tiles in shared memory that follow from it."""

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
    def tile_numbers(self) -> int:
        """That tell a tile: m_block, head, those of its sequence, and of a map how many blocks it sees."""
        return self.sequence_end + (2 if self.static.block_sparse else 0)

    @property
    def sequence_end(self) -> int:
        return 2 + (NUMBERS if self.static.varlen else 1)

    @property
    def is_bounded(self) -> bool:
        return self.static.has_left or self.static.has_right

    @property
    def overlaps_tiles(self) -> bool:
        """With two stages of Q, whether the next tile begins beside the end of this one: there functions have
        the fewest registers.
        """
        static = self.static
        return not (static.has_mods and (static.block_sparse or static.feature_cost > COST_DROPOUT))

    @property
    def begins_near(self) -> bool:
        """With the keys next to the queries, where a bias or a score_mod often has the largest scores."""
        static = self.static
        has_own = self.has_alibi or static.block_sparse or static.batch_invariant
        return ("bias" in static.features or "score_mod" in static.features) and not has_own

    @property
    def cut_loops(self) -> tuple[bool, bool]:
        """Whether tiles may have cut blocks between the first and the whole ones, and after those. Bound on
        one side only, tiles end with them, but for those that begin with the nearest keys.
        """
        static = self.static
        if self.begins_near:
            return static.has_right, static.has_left or not static.has_right
        return static.has_left and static.has_right and not static.block_sparse, (
            self.is_bounded or static.block_sparse
        )

    @property
    def draws_tiles(self) -> bool:
        """Tiles differ in length."""
        return self.is_bounded or self.static.block_sparse

    @property
    def steps(self) -> int:
        """k-steps of P V."""
        return self.tile.tile_n // 16

    @property
    def early_steps(self) -> int:
        """Those that have their exponentials before the wait for O: as many as registers and time allow."""
        if self.is_crowded:
            return self.steps
        return 1 if self.tile.num_warpgroups == 3 else self.steps // 3

    @property
    def is_crowded(self) -> bool:
        """Scores are transformed in two ways, or with the registers that those who draw leave."""
        return self.tile.dropout_producer + self.static.has_mods + (self.has_softcap or self.has_alibi) > 1

    @property
    def may_check_sums(self) -> bool:
        """Instead of maxima. That keeps S beside P, for which there is room beside narrow outputs only, or
        where the compiler may choose how much of P is made before O is complete. Where all maxima are asked
        for, sums say nothing more.
        """
        has_room = self.tile.width_v <= 64 or not self.is_crowded
        static = self.static
        return has_room and not ("return_max_logit" in static.features or static.batch_invariant)

    @property
    def has_formula(self) -> bool:
        """Whether a block's products become P by one formula (`device/exponents.py`). A slope and a cap at
        once have none, and a cap's needs more registers than three warpgroups have.
        """
        if self.static.has_mods:
            return not self.is_crowded and self.static.mods.fuses_with_exp2
        is_one = self.has_alibi != self.has_softcap
        return is_one and (self.has_alibi or self.tile.num_warpgroups < 3)

    @property
    def q(self) -> SmemTile:
        return self.tile.operand_smem("Q")

    @property
    def k(self) -> SmemTile:
        return self.tile.operand_smem("K")

    @property
    def v(self) -> SmemTile:
        return self.tile.operand_smem("V")

    @property
    def o(self) -> SmemTile:
        return self.tile.operand_smem("O")

    @property
    def bias(self) -> SmemTile:
        """Of one warpgroup."""
        return SmemTile(WARPGROUP_ROWS, self.tile.tile_n, variant=self.tile.layout)


@dataclass(frozen=True)
class Params:
    """All that the kernel reads, in one argument."""

    shapes: cutlass.Constexpr  # Shapes
    q: TmaTiles | RaggedTiles  # (64, tile_d)
    k: TmaTiles | RaggedTiles  # (tile_n, tile_d)
    v: TmaTiles | RaggedTiles
    o: TmaTiles | RaggedTiles | None  # None: from registers
    bias: TmaTiles | None  # (64, tile_n); None: read by those that need it, or not there
    mO: cute.Tensor  # (B, H, Sq, D), or packed: (1, H, T, D)
    mLSE: cute.Tensor  # (B, H, Sq)
    seqlen_q: Int32  # rows of a head, or of all heads of a group where they are packed
    positions: Int32  # rows of a head
    seqlen_k: Int32
    heads_per_kv: Int32
    scale_log2: Float32
    band: Band
    order: TileOrder
    queue: TileQueue
    work: WorkList | None  # of a packed batch
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    score_params: ScoreParams

    def sequence(self, numbers: tuple) -> Sequence:
        """From what `Shared` tells of a tile."""
        if self.work is None:
            return Sequence(*numbers, self.seqlen_q, self.seqlen_k)
        return Sequence.told(numbers)

    def positions_of(self, sequence: Sequence) -> Int32:
        """Rows of a head; its queries, unless several heads are packed."""
        return self.positions if self.work is None else sequence.q_len

    def tiles(self) -> TileQueue:
        """Asked anew for every tile: how many there are is read again, not kept in a register."""
        return self.queue if self.work is None else self.work.queue(self.queue.counter, True)

    def tile(self, index: Int32):
        """m_block, head, and the numbers of the sequence."""
        if self.work is None:
            m_block, head, batch = self.order.decode(index)
            return m_block, head, (batch,)
        return self.work.read(index)

    def counts(self, m_block: Int32, head: Int32, sequence: Sequence) -> tuple:
        """With a block map, how many of its blocks are full and partial."""
        return (
            ()
            if self.score_params.block_indices is None
            else self.score_params.block_indices.counts(*self._place(m_block, head, sequence))
        )

    def _place(self, m_block: Int32, head: Int32, sequence: Sequence) -> tuple:
        return sequence.batch, head, m_block // (self.shapes.static.mods.block_mask_tile[0] // self.shapes.tile.tile_m)

    def block_iterator(self, m_block: Int32, head: Int32, sequence: Sequence, counts: tuple) -> AnyBlockIterator:
        """The key blocks of a tile of rows, in the order of work.

        In blocks that a right bound cuts, rows see few keys: with those blocks last, every row has a maximum
        worth keeping before. Without that bound only the end of the keys cuts a block: with that one first,
        the loop needs no mask. With slopes scores fall with the distance, and with a bias or a score_mod they
        often do: the nearest keys come first, or every block on the way to them would outgrow the maximum;
        that depends on the rows of the tile, and is not for results that may not. A block map has its own
        order.
        """
        if self.score_params.block_indices is not None:
            parts = self.shapes.static.mods.block_mask_tile[1] // self.shapes.tile.tile_n
            blocks = self._blocks(m_block, sequence) if self.shapes.is_bounded else None
            return BlockSparseIterator(
                self.score_params.block_indices, self._place(m_block, head, sequence), counts, parts, blocks
            )
        blocks, static, tile = self._blocks(m_block, sequence), self.shapes.static, self.shapes.tile
        if self.shapes.begins_near and self.shapes.is_bounded:
            return BlockIterator.of(blocks, False)
        is_outward = self.shapes.begins_near or self.shapes.has_alibi
        if not is_outward or static.batch_invariant:
            return BlockIterator.of(blocks, static.has_right)
        lengths = self.positions_of(sequence), sequence.k_len
        return OutwardBlockIterator.of(blocks, self.band.diagonal_block(m_block, tile.tile_m, tile.tile_n, *lengths))

    def _blocks(self, m_block: Int32, sequence: Sequence) -> BlockRange:
        tile, lengths = self.shapes.tile, (self.positions_of(sequence), sequence.k_len)
        if self.shapes.static.pack_gqa:
            # Any position may be among the rows of a tile.
            return self.band.blocks(Int32(0), ALL_ROWS, tile.tile_n, *lengths)
        return self.band.blocks(m_block, tile.tile_m, tile.tile_n, *lengths)


@dataclass(frozen=True)
class Shared:
    shapes: cutlass.Constexpr  # Shapes
    sQ: cute.Tensor  # (64, tile_d, (warpgroup, q stage))
    sK: cute.Tensor  # (tile_n, tile_d, stage)
    sV: cute.Tensor
    drawn: Drawn | None  # what dropout keeps
    bias: BiasBlocks | None  # where the copy engine fetches it
    q: Ring  # empty: the output that left through the stage has been read, and V's warp knows the tile
    k: Ring
    v: Ring
    o_full: cute.Pointer  # (warpgroup, q stage): the output stands in the stage
    tiles: cute.Tensor  # (m_block, head, sequence...) of the last tiles; told by q.full; NO_TILE: the end
    blocks: cute.Tensor | None = None  # with a block map, which key block is in each stage; told by k.full

    @staticmethod
    def allocate(shapes: Shapes) -> "Shared":
        smem, tile = SmemAllocator(), shapes.tile
        allocate = partial(allocate_stages, smem, shapes.dtype)
        sQ = allocate(shapes.q, tile.num_warpgroups * tile.q_stages)
        sQ = cute.logical_divide(sQ, (None, None, tile.num_warpgroups))
        sK, sV = allocate(shapes.k, tile.stages), allocate(shapes.v, tile.stages)
        drawn = None
        if tile.dropout_producer:
            drawn = Drawn.allocate(smem, tile.num_warpgroups, shapes.steps, tile.dropout_stages)
        bias = None
        if tile.bias_stages:
            of = CUTE_DTYPES[shapes.static.mods.bias_dtype]
            bias = BiasBlocks.allocate(smem, of, shapes.bias, tile.num_warpgroups, tile.bias_stages)
        rings = [Ring.allocate(smem, stages) for stages in (tile.q_stages, tile.stages, tile.stages)]
        o_full = smem.allocate_array(cutlass.Int64, tile.num_warpgroups * tile.q_stages, byte_alignment=8)
        room = -(-shapes.tile_numbers // 4) * 4
        tiles = smem.allocate_tensor(Int32, cute.make_layout((room, TILE_SLOTS)), 16)
        blocks = None
        if shapes.static.block_sparse:
            blocks = smem.allocate_tensor(Int32, cute.make_layout(tile.stages), 16)
        return Shared(shapes, sQ, sK, sV, drawn, bias, *rings, o_full, tiles, blocks)

    @cute.jit
    def init_barriers(self):
        """By one thread, before a fence and a barrier of all."""
        tile = self.shapes.tile
        mma_warps = 4 * tile.num_warpgroups
        # V's warp, and the one that stores or all that multiply; those that draw; the bias's.
        others = (WARPS if tile.dropout_producer else 0) + (1 if tile.bias_stages else 0)
        self.q.init(1, (2 if tile.q_stages > 1 else 1 + mma_warps) + others)
        self.k.init(1, mma_warps)
        self.v.init(1, mma_warps)
        for i in cutlass.range_constexpr(tile.num_warpgroups * tile.q_stages):
            cute.arch.mbarrier_init(self.o_full + i, WARPGROUP_THREADS)
        if cutlass.const_expr(self.drawn is not None):
            self.drawn.init_barriers()
        if cutlass.const_expr(self.bias is not None):
            self.bias.init_barriers()

    @cute.jit
    def tell_tile(self, count: Int32, coord: tuple):
        """Write down the tile of a stage of Q; the arrival at q.full that follows tells it."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(coord)):
                self.tiles[i, count % TILE_SLOTS] = coord[i]

    @cute.jit
    def tell_block(self, fill: Int32, n_block: Int32):
        """With a block map, after k.empty: the block of a stage of K; the arrival at k.full tells it."""
        if cutlass.const_expr(self.blocks is not None):
            with cute.arch.elect_one():
                self.blocks[self.k.stage(fill)] = n_block

    def block(self, block_iter: AnyBlockIterator, fill: Int32, i: Int32) -> Int32:
        """After k.full: the i-th block on the way of a tile, in the stage of K."""
        return block_iter.block(i) if self.blocks is None else self.blocks[self.k.stage(fill)]

    def first_block(self, block_iter: AnyBlockIterator, fill: Int32) -> Int32:
        return block_iter.first if self.blocks is None else self.blocks[self.k.stage(fill)]

    @cute.jit
    def tell_end(self, count: Int32):
        self.tell_tile(count, (Int32(NO_TILE), *(Int32(0) for _ in range(self.shapes.tile_numbers - 1))))

    @cute.jit
    def m_block(self, count: Int32) -> Int32:
        """After q.full: the tile's rows, or NO_TILE."""
        return self._told(0, count)

    @cute.jit
    def head(self, count: Int32):
        return self._told(1, count)

    def sequence(self, count: Int32) -> tuple:
        """The numbers of the tile's sequence."""
        return tuple(self._told(i, count) for i in range(2, self.shapes.sequence_end))

    def counts(self, count: Int32) -> tuple:
        """With a block map, how many blocks of it the tile sees: full, partial."""
        return tuple(self._told(i, count) for i in range(self.shapes.sequence_end, self.shapes.tile_numbers))

    def _told(self, i: int, count: Int32) -> Int32:
        return cute.arch.make_warp_uniform(self.tiles[i, count % TILE_SLOTS])

    @cute.jit
    def release_q(self, count: Int32):
        """By a warp that is done with a stage of Q and has read its tile."""
        cute.arch.sync_warp()
        self.q.release(count)

    def output_stage(self, warpgroup: Int32, count: Int32) -> cute.Tensor:
        """(64, tile_dv) over the stage of Q"""
        sQ = self.sQ[None, None, (warpgroup, self.q.stage(count))]
        return cute.make_tensor(sQ.iterator, to_cute(self.shapes.o.layout.layout))

    def output_barrier(self, warpgroup: Int32, count: Int32) -> cute.Pointer:
        return self.o_full + self.q.stage(count) * self.shapes.tile.num_warpgroups + warpgroup
