"""Warp-specialised backward attention with TMA and wgmma, for Hopper and head dims above 128.

For each K/V tile, over the query heads that share it and their m_blocks i:

    S    = Qi K^T                       queries are rows; a warpgroup has half of the keys
    P    = exp(scale S - LSE)           0 outside the band
    dP   = dOi V^T
    dS   = P (dP - Δ),  Δ = rowsum(dO O) - dLSE
    dV^T += dOi^T P                     P and dS pass through shared memory, transposed;
    dK^T += Qi^T dS                     a warpgroup has half of the rows; dK is scaled at the end
    dQi  += dS K                        half of the columns; fp32 additions in global memory

Wide dK and dV leave few registers, so dQ is computed in two halves, one after the other in the same registers. For a
block, a warpgroup issues the following products. 0 and 1 are the halves of dV, dQ and dK; ' marks the next block:

    dQ0 dK0   S' dK1 dQ1   dV0' dP' dV1'

While dK1 and dQ1 run, it computes the exponentials. While dV1' runs, it computes and stores dS', and waits for dS' of
the other warpgroup. dQ0 and dQ1 complete at equal intervals, so that the additions to global memory keep up.

| warpgroup | warps | role                                                           |
|-----------|-------|----------------------------------------------------------------|
| 0         | 0     | load K, V, Q, dO, LSE, Δ and a bias by TMA                     |
| 0         | 1, 2  | adder warps: each adds one warpgroup's dQ to global memory by  |
|           |       | bulk reductions, or stores it (`device/gradients/dq_claims.py`)          |
| 0         | 1 - 3 | if deterministic: adder warps, which take the halves of dQ in  |
|           |       | turn, each half in the order of a semaphore                    |
| 0         | 3     | store the gradient of a bias by TMA, and its zeros             |
| 1, 2      | all   | MMA: half of the keys, half of the columns of the gradients    |

| shared memory | elements                    | lifetime                                    |
|---------------|-----------------------------|---------------------------------------------|
| sK, sV        | tile_n x tile_d             | the tile; dK and dV are stored through them |
| sQ            | 2 x tile_m x tile_d         | S to dK1, which spans two blocks            |
| sdO           | tile_m x tile_d             | dV0 to dV1                                  |
| sP            | tile_n x tile_m             | exponentials to dV1                         |
| sdS           | tile_n x tile_m             | dS to dQ1                                   |
| sdQ           | dQ0 or dQ1, or 7/8 of it    | a half at a time; see `stage_dq`            |
| sLSE, sDelta  | stages x tile_m, fp32       | one m_block                                 |
| bias          | 2 x tile_m x tile_n         | one m_block; then its gradient, until it    |
|               |                             | is stored                                   |

There are two tile sizes (`planning.tiles.bwd_sm90`). Plain calls have as many keys per tile as registers and shared
memory allow. Calls with score features, varlen and deterministic calls have fewer keys. This leaves registers for the
features and for the lengths of varlen sequences, and shared memory for a complete half of dQ. Then the adder warps do
all additions, and a semaphore can order them.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_flash.device.gradients.bias_bwd import publish_gradient
from cute_flash.device.gradients.mods_bwd import AnyScores, ModScores
from cute_flash.device.gradients.score_bwd import GradientBlock, PlainScores, compute_probs
from cute_flash.device.memory.stmatrix import store_transposed
from cute_flash.device.memory.tma import TmaTiles
from cute_flash.device.memory.views import as_mn, transposed
from cute_flash.device.mma.wgmma import convert, make_mma, start_gemm
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, WarpgroupOrder
from cute_flash.device.scheduling.seqlen import HeadBlock, SeqlenInfo
from cute_flash.device.scores.mask import Mask
from cute_flash.kernels.common.kernel import Grid, Kernel
from cute_flash.kernels.sm90.bwd_producer import (
    for_each_block_of_tile,
    load_first_block,
    load_kv,
    load_other_blocks,
    sparse_rank,
    store_dbias,
)
from cute_flash.kernels.sm90.bwd_storage import MMA_THREADS, NUM_WARPGROUPS, BlockVisit, Config, KVTile
from cute_flash.kernels.sm90.bwd_wide_storage import DETERMINISTIC_ADDERS, Params, SharedStorage
from cute_flash.kernels.sm90.dq import DQPart, StagedPiece, add_four, bulk_add_or_store
from cute_flash.planning.tiles.bwd_sm90 import HALVES, BwdTileSm90Wide
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.spec.band import FAR, ceil_div
from cute_flash.spec.problem import Static

# Named barriers; 0 is the CTA barrier. A name with FIRST_ is the first of two, one per warpgroup.
FIRST_READ, DS_STAGED, FIRST_OUTPUT, P_STAGED = 1, 3, 4, 6
# The least number of k-steps of S and dP; with fewer, ptxas would serialise the products.
MIN_STEPS = 8

# Descriptors or accumulators of the products that compute a warpgroup's columns of a gradient.
Products = tuple[cute.Tensor, ...]


class WideVisit(NamedTuple):
    """A visit, and the place of its dQ."""

    accum_block: Int32  # the index of the block in mdQ_accum
    visit: BlockVisit


@dataclass(frozen=True)
class MmaState:
    """The state of an MMA warpgroup."""

    wg: Int32
    thread: Int32
    storage: SharedStorage
    rQ: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, stage)
    rdO: cute.Tensor
    rK: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K), of the warpgroup's keys
    rV: cute.Tensor
    rdOt: Products  # descriptors (MMA, MMA_M, MMA_K, stage), of the warpgroup's columns
    rQt: Products
    rP: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K)
    rdS: cute.Tensor
    rdSt: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K)
    rKt: Products  # descriptors (MMA, MMA_N, MMA_K), of the warpgroup's columns
    acc_dK: Products
    acc_dV: Products
    acc_S: cute.Tensor
    acc_dP: cute.Tensor
    acc_dQ: cute.Tensor  # a half at a time; see `_temporaries`
    tScS: cute.Tensor  # (query, key) of every element of S
    read_by_other: WarpgroupOrder  # `wait` returns when the other warpgroup has read sP; in a cluster sdS
    dalibi: cute.Tensor | None  # (1), of the current head


class BwdSm90Wide(Kernel):
    """The backward kernel for wide heads. One CTA computes one K/V tile."""

    name = "bwd_sm90_wide"
    launch_options: ClassVar[dict[str, Any]] = {"min_blocks_per_mp": 1, "use_pdl": True}

    def __init__(self, static: Static, tile: BwdTileSm90Wide):
        super().__init__(static, tile)
        # Additions from registers (`add_rest`) have no fixed order.
        assert not static.deterministic or tile.dq_pieces == tile.half_pieces
        self.config = Config(static, tile)
        # One warp has one role.
        assert not (static.deterministic and self.config.stores_dbias)
        self.keys = tile.tile_n // NUM_WARPGROUPS  # of a warpgroup
        self.has_alibi, self.has_dropout = "alibi" in static.features, "dropout" in static.features
        self.steps = self.k_steps()
        self.dq_columns = tile.dq_part[1] // tile.dq_products  # of a product

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        """The operands are those of `BwdSm90`. `tile_counter` is not used: a CTA has one tile."""
        tile, config, args = self.tile, self.config, self.read_operands(operands)
        MN, K = OperandMajorMode.MN, OperandMajorMode.K
        # A missing right bound is replaced by one that masks nothing: a kernel without a bound needs too many
        # registers, and ptxas serialises its products.
        band = self.band(args)
        band = band if band.has_right else replace(band, right=Int32(FAR))
        params = Params.of(
            config,
            args,
            band,
            band=band,
            scheduler=None,
            mma_s=make_mma(self.dtype, self.keys, False, K, K),
            mma_dkv=self.make_mma_dkv(),
            mma_dq=make_mma(self.dtype, self.dq_columns, False, MN, MN),
        )
        grid = Grid(args.num_ctas)
        self.launch(self.symbol(self.name), params, grid, tile.num_threads, stream, **self.launch_options)

    def make_mma_dkv(self) -> cute.TiledMma:
        """The product of 64 columns of dK and dV, transposed."""
        return make_mma(self.dtype, self.tile.tile_n, False, OperandMajorMode.MN, OperandMajorMode.K)

    def k_steps(self) -> tuple[range | None, range | None]:
        """The k-steps of S and dP, whose widths may differ; None: all."""
        return tuple(None if x is None else range(max(len(x), MIN_STEPS)) for x in self.static.k_steps)

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        storage = SharedStorage.allocate(self.config)
        if warp_index == 0:
            with cute.arch.elect_one():
                storage.init_barriers()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Wait for the end of the preprocess kernel. Allow the postprocess kernel to be launched; it waits for this one.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.static.varlen):
            if p.tile_exists():
                self.run_role(p, storage, warp_index, thread)
        else:
            self.run_role(p, storage, warp_index, thread)

    @cute.jit
    def run_role(self, p: Params, storage: SharedStorage, warp_index: Int32, thread: Int32):
        producer_registers, mma_registers = self.tile.registers
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp_index == 0:
                self.load(p, storage)
            elif warp_index <= (DETERMINISTIC_ADDERS if self.static.deterministic else NUM_WARPGROUPS):
                self.add_dq(p, storage, warp_index - 1)
            elif cutlass.const_expr(p.dbias is not None):
                self.store_dbias(p, storage)
        else:
            cute.arch.setmaxregister_increase(mma_registers)
            self.mma(p, storage, warp_index // 4 - 1, thread % WARPGROUP_THREADS)

    @cute.jit
    def load(self, p: Params, storage: SharedStorage):
        """Load K, the first m_block, V, and the other m_blocks."""
        tile, iteration = p.tile(), Int32(0)
        load_kv(p, p.k, storage.k, storage.sK, tile)
        total = p.num_m_blocks(tile)
        load_first_block(p, storage, tile, iteration, total)
        load_kv(p, p.v, storage.v, storage.sV, tile)
        load_other_blocks(p, storage, tile, iteration, total)

    @cute.jit
    def add_dq(self, p: Params, storage: SharedStorage, adder: Int32):
        """Add dQ to global memory. `adder`: the index of this adder warp.

        Without a semaphore, each MMA warpgroup has its own adder warp, so that neither waits for the part of the other.
        With a semaphore, the adder warps take the halves of all blocks in turn; see `add_in_order`.
        """
        tile, iteration = p.tile(), Int32(0)
        # Two adder warps claim parts of one m_block: all K/V tiles must visit m_blocks in the same order (`DQClaim`).
        assert tile.shift is None
        if cutlass.const_expr(p.block_indices is None):
            accum_block = p.first_accum_block(tile)
            for g in cutlass.range(p.heads_per_kv, unroll=1):
                for i in cutlass.range(tile.block_iter.num, unroll=1):
                    self.add_block(p, storage, tile, adder, accum_block + i, iteration + i, g, i)
                iteration += tile.block_iter.num
                accum_block += p.mdQ_accum.shape[2]
        else:
            for i in cutlass.range(p.num_m_blocks(tile), unroll=1):
                self.add_block(p, storage, tile, adder, None, i, Int32(0), i)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def store_dbias(self, p: Params, storage: SharedStorage):
        """Store the gradient of the bias of every m_block."""
        store_dbias(p, storage, partial(for_each_block_of_tile, p, p.tile(), Int32(0)))
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def add_block(
        self,
        p: Params,
        storage: SharedStorage,
        tile: KVTile,
        adder: Int32,
        accum_block: Int32 | None,
        iteration: Int32,
        g: Int32,
        i: Int32,
    ):
        """Add this adder warp's part of the i-th m_block of the g-th head.

        The part is both halves of one warpgroup, or the halves whose turn it is. With a block mask, g is 0, i is the
        number of the m_block in the list, and `accum_block`, its index in mdQ_accum, is None.
        """
        if cutlass.const_expr(p.dq_semaphore is None):
            if cutlass.const_expr(p.block_indices is not None):
                accum_block = p.sparse_accum_block(tile, p.block_index(tile, i))
            self.add_halves(p, storage, tile.seqlen, adder, accum_block, iteration)
        else:
            for half in cutlass.range(HALVES, unroll=1):
                staged = HALVES * iteration + half
                if staged % DETERMINISTIC_ADDERS == adder:
                    self.add_in_order(p, storage, tile, half, accum_block, staged, g, i)

    @cute.jit
    def add_halves(
        self, p: Params, storage: SharedStorage, seqlen: SeqlenInfo, wg: Int32, accum_block: Int32, iteration: Int32
    ):
        """Add both halves of a warpgroup's dQ of an m_block."""
        uses_claims = seqlen.q_len <= self.tile.max_queries_claimed
        part, num_parts = self.dq_part(p, wg), NUM_WARPGROUPS * self.tile.cluster
        dq = DQPart(p.mdQ_accum, p.mClaims, accum_block, part, num_parts, uses_claims)
        source, first = storage.sdQ[None, None, None, wg].iterator, HALVES * iteration
        halves = tuple(StagedPiece(source, (first + half) * NUM_WARPGROUPS + wg) for half in range(HALVES))
        dq.add_or_store(halves, 4 * 4 * WARPGROUP_THREADS * self.tile.dq_pieces, storage.dq)

    @cute.jit
    def add_in_order(
        self,
        p: Params,
        storage: SharedStorage,
        tile: KVTile,
        half: Int32,
        accum_block: Int32 | None,
        staged: Int32,
        g: Int32,
        i: Int32,
    ):
        """Add one half of both warpgroups' dQ of an m_block, after all K/V tiles of lower rank have added theirs.

        The tile of rank 0 stores it. Each half has its own semaphore, so a K/V tile can add the first half of a block
        before the previous K/V tile has added the second. While this warp waits until its additions are complete, other
        adder warps add the next halves.

        `staged`: the number of halves before this one in the K/V tile. Other arguments are those of `add_block`.
        """
        coord, rank = self.semaphore_rank(p, tile, g, i)
        if cutlass.const_expr(p.block_indices is not None):
            accum_block = (coord.batch * p.mdQ_accum.shape[1] + coord.head) * p.mdQ_accum.shape[2] + coord.block
        with cute.arch.elect_one():
            p.dq_semaphore.wait(coord, rank, self.semaphore_part(p, half))
        cute.arch.sync_warp()
        elements = self.tile.tile_m * self.tile.head_dim
        first = p.mdQ_accum.iterator + Int64(accum_block) * elements
        for wg in cutlass.range_constexpr(NUM_WARPGROUPS):
            storage.dq.wait_full(NUM_WARPGROUPS * staged + wg)
            with cute.arch.elect_one():
                part = self.dq_part(p, wg)
                columns = self.tile.dq_part[1] // HALVES
                target = first + (HALVES * part + half) * (self.tile.tile_m * columns)
                # Columns past the head dim are 0. A half that has only such columns is not added.
                if half < ceil_div(self.static.head_dim, columns) - HALVES * part:
                    source = storage.sdQ[None, None, None, wg].iterator
                    num_bytes = 4 * 4 * WARPGROUP_THREADS * self.tile.dq_pieces
                    bulk_add_or_store(target, source, num_bytes, rank)
                cute.arch.cp_async_bulk_commit_group()
        for wg in cutlass.range_constexpr(NUM_WARPGROUPS):
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(NUM_WARPGROUPS - 1 - wg, read=True)
            storage.dq.release(NUM_WARPGROUPS * staged + wg)
        if cutlass.const_expr(p.block_indices is None):
            # Compute them again, because there are no registers to keep them. With a block mask they are kept, because
            # they come from memory.
            coord, rank = self.semaphore_rank(p, tile, g, i)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)
            p.dq_semaphore.arrive(coord, rank, self.semaphore_part(p, half))
        cute.arch.sync_warp()

    def semaphore_rank(self, p: Params, tile: KVTile, g: Int32, i: Int32) -> tuple[HeadBlock, Int32]:
        """The coordinate of the semaphore of an m_block, and the rank of this tile; `g`, `i`: as in `add_block`."""
        if p.block_indices is not None:
            return sparse_rank(p, tile, rederived(i))
        seqlen, m_block = replace(tile.seqlen, batch=rederived(tile.batch)), tile.block_iter.block(rederived(i))
        index = seqlen.padded_q_block(m_block, self.tile.tile_m)
        coord = HeadBlock(0 if seqlen.is_varlen else seqlen.batch, tile.head_kv * p.heads_per_kv + g, index)
        return coord, p.dq_semaphore.rank(tile.n_block, m_block, seqlen if seqlen.is_varlen else None)

    def semaphore_part(self, p: Params, half: Int32) -> Int32:
        """The part of the semaphore of an m_block for one half of this CTA's columns."""
        return half + HALVES * p.cta_rank if self.tile.cluster > 1 else half

    def dq_part(self, p: Params, wg: Int32 | int) -> Int32 | int:
        """The index of a warpgroup's columns among those of all warpgroups, also of the other CTA of a cluster."""
        return wg + NUM_WARPGROUPS * p.cta_rank if self.tile.cluster > 1 else wg

    @property
    def needs_head(self) -> bool:
        """Whether the scores of a block depend on its head."""
        return self.has_alibi or self.has_dropout or self.static.has_mods

    def dv_scale(self, p: Params) -> Float32:
        """The factor of dV. It includes the scale of dropout, by which P is not multiplied."""
        return p.score_params.dropout_scale if self.has_dropout else Float32(1.0)

    def columns(self, sX: cute.Tensor, columns: int, first: Int32, number: int) -> Products:
        """`number` parts of `columns` columns of sX (rows, tile_d, ...), transposed, from part `first` on."""
        rest = (None,) * (cute.rank(sX) - 2)
        parts = [(first + i, 0, *rest) for i in range(number)]
        return tuple(cute.local_tile(transposed(sX), (columns, sX.shape[0]), part) for part in parts)

    def _operands_dkv(self, p: Params, storage: SharedStorage, wg: Int32) -> dict[str, Products | cute.Tensor]:
        """The fields of `MmaState` for dK and dV: two products of 64 columns each, which are rows."""
        dkv = p.mma_dkv.get_slice(0)

        def columns_a(sX: cute.Tensor) -> Products:
            parts = self.columns(sX, WARPGROUP_ROWS, HALVES * wg, HALVES)
            return tuple(dkv.make_fragment_A(dkv.partition_A(sY)) for sY in parts)

        def accumulators() -> Products:
            shape = dkv.partition_shape_C((WARPGROUP_ROWS, self.tile.tile_n))
            return tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(HALVES))

        return dict(
            rdOt=columns_a(storage.sdO),
            rQt=columns_a(storage.sQ),
            rP=dkv.make_fragment_B(dkv.partition_B(storage.sP)),
            rdS=dkv.make_fragment_B(dkv.partition_B(storage.sdS)),
            acc_dK=accumulators(),
            acc_dV=accumulators(),
        )

    def _state(self, p: Params, storage: SharedStorage, wg: Int32, thread: Int32) -> MmaState:
        tile, s, dq = self.tile, p.mma_s.get_slice(0), p.mma_dq.get_slice(0)

        def keys(sX: cute.Tensor) -> cute.Tensor:
            """The rows of this warpgroup's keys in sX (tile_n, tile_d)."""
            return cute.local_tile(sX, (self.keys, tile.cta_head_dim), (wg, 0))

        sKt = self.columns(storage.sK, self.dq_columns, tile.dq_products * wg, tile.dq_products)
        acc_S, acc_dP, acc_dQ = self._temporaries(p)
        return MmaState(
            wg=wg,
            thread=thread,
            storage=storage,
            rQ=s.make_fragment_A(s.partition_A(storage.sQ)),
            rdO=s.make_fragment_A(s.partition_A(storage.sdO)),
            rK=s.make_fragment_B(s.partition_B(keys(storage.sK))),
            rV=s.make_fragment_B(s.partition_B(keys(storage.sV))),
            rdSt=dq.make_fragment_A(dq.partition_A(transposed(storage.sdS))),
            rKt=tuple(dq.make_fragment_B(dq.partition_B(sY)) for sY in sKt),
            **self._operands_dkv(p, storage, wg),
            acc_S=acc_S,
            acc_dP=acc_dP,
            acc_dQ=acc_dQ,
            tScS=self._coords(p, thread),
            read_by_other=WarpgroupOrder(FIRST_READ, NUM_WARPGROUPS, wg),
            dalibi=cute.make_rmem_tensor(1, Float32) if self.has_alibi else None,
        )

    def _temporaries(self, p: Params) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Accumulators of S, dP and dQ. With the larger tile, dP and dQ share registers.

        The compiler does not share them by itself: it keeps both over the loop, although every block overwrites them,
        and spills.
        """
        s, dq = p.mma_s.get_slice(0), p.mma_dq.get_slice(0)
        scores = cute.make_layout(s.partition_shape_C((self.tile.tile_m, self.keys)))
        product = cute.make_layout(dq.partition_shape_C((self.tile.tile_m, self.dq_columns)))
        acc_S, acc_dQ = cute.make_rmem_tensor(scores, Float32), cute.make_rmem_tensor(product, Float32)
        if self.tile.separates_dp:
            return acc_S, cute.make_rmem_tensor(scores, Float32), acc_dQ
        return acc_S, cute.make_tensor(acc_dQ.iterator, scores), acc_dQ

    @cute.jit
    def mma(self, p: Params, storage: SharedStorage, wg: Int32, thread: Int32):
        """The role of an MMA warpgroup: compute its part of the K/V tile's dK and dV, and of dQ."""
        state, tile = self._state(p, storage, wg, thread), p.tile()
        for acc in (*state.acc_dK, *state.acc_dV):
            acc.fill(0.0)
        if cutlass.const_expr(state.dalibi is not None):
            state.dalibi.fill(0.0)
        total = p.num_m_blocks(tile)
        storage.k.wait_full(0)
        storage.v.wait_full(0)
        if total > 0:
            self.first_scores(p, state, tile)
            wide = WideVisit(self.first_accum_block(p, tile), p.first_visit(tile, self.needs_head))
            for iteration in cutlass.range(total - 1, unroll=1):
                wide = self.process_block(p, state, tile, iteration, wide)
            self.last_block(p, state, total - 1, wide.accum_block)
        self.store_gradients(p, state, tile)

    def first_accum_block(self, p: Params, tile: KVTile) -> Int32:
        """The index of the first block in mdQ_accum."""
        if self.static.block_sparse:
            return p.sparse_accum_block(tile, p.block_index(tile, Int32(0)))
        return p.first_accum_block(tile)

    @cute.jit
    def first_scores(self, p: Params, state: MmaState, tile: KVTile):
        """Compute P and dS of the first block, and start its dV."""
        visit = p.first_visit(tile, self.needs_head)
        scores = self.block_scores(p, state, tile, Int32(0), visit)
        self.start_s(p, state, Int32(0))
        self.start_dp(p, state, Int32(0))
        warpgroup.wait_group(1)
        rLSE = self.load_row_statistic(state, state.storage.sLSE[None, 0])
        probs = self.make_p(p, state, tile, scores, rLSE, visit)
        self.stage_transposed(state, probs, state.storage.sP)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.start_early_dv(p, state, Int32(0))
        # wait for dP
        rDelta = self.load_row_statistic(state, state.storage.sDelta[None, 0])
        warpgroup.wait_group(HALVES)
        self.make_ds(p, state, tile, scores, rDelta, Int32(0), visit)

    @cute.jit
    def start_early_dv(self, p: Params, state: MmaState, iteration: Int32):
        """Start dV when P of both warpgroups is in shared memory. They compute dS while it runs."""
        cute.arch.barrier(barrier_id=P_STAGED, number_of_threads=MMA_THREADS)
        for half in cutlass.range_constexpr(HALVES):
            self.start_dv(p, state, iteration, half)

    @cute.jit
    def process_block(self, p: Params, state: MmaState, tile: KVTile, iteration: Int32, wide: WideVisit):
        """Compute the gradients of a block from its P and dS, and P and dS of the next block.

        The products, in the order in which the tensor cores run them:

            dV1 (started in the previous block) dQ0 dK0 | S' dK1 dQ1 | dV0' dP' dV1'

        The halves of dQ complete at equal intervals, and the wait for room for dQ1 in shared memory overlaps with dV0'.

        Both warpgroups arrive at `read_by_other` after dV, so sP is free after a wait for it. Both arrive at the
        barrier P_STAGED after dQ1, the last reader of sdS, so the single stage of sdS is free after that barrier.

        Returns the next visit.
        """
        storage = state.storage
        # dQ = dS K and dK += dS^T Q of the block
        self.start_dq(p, state, 0)
        self.start_dk(p, state, iteration, 0)
        # wait for dV
        warpgroup.wait_group(2)
        storage.do.release_per_thread(iteration)
        state.read_by_other.arrive()
        if cutlass.const_expr(p.score_params is not None):
            # Dropout bits are computed while products run, and before S takes registers.
            following = self.next_visit(p, tile, wide)
            scores = self.block_scores(p, state, tile, iteration + 1, following.visit)
        # wait for dQ0, and move it to shared memory while dK0 runs
        warpgroup.wait_group(1)
        rest = self.stage_dq(state, iteration, 0)
        # S = Q K^T of the next block
        self.start_s(p, state, iteration + 1)
        self.start_dk(p, state, iteration, 1)
        self.start_dq(p, state, 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.add_rest(p, state, rest, wide.accum_block, 0)
        self.publish_dq(state, iteration, 0)
        if cutlass.const_expr(p.score_params is None):
            following = self.next_visit(p, tile, wide)
            scores = self.block_scores(p, state, tile, iteration + 1, following.visit)
        # P = exp(scale S - LSE) of the next block: wait for S; compute exponentials while dK1 and dQ1 run
        rLSE = self.load_row_statistic(state, storage.sLSE[None, storage.q.stage(iteration + 1)])
        warpgroup.wait_group(2)
        probs = self.make_p(p, state, tile, scores, rLSE, following.visit)
        state.read_by_other.wait()
        self.stage_transposed(state, probs, storage.sP)
        cute.arch.fence_proxy("async.shared", space="cta")
        # wait for dK1 and dQ1, whose registers dP reuses; move dQ1 to shared memory while dV0 runs
        warpgroup.wait_group(0)
        storage.q.release(iteration)
        cute.arch.barrier(barrier_id=P_STAGED, number_of_threads=MMA_THREADS)
        # dV += P^T dO and dP = dO V^T of the next block; dV0 reads dO before dP does
        storage.do.wait_full(iteration + 1)
        self.start_dv(p, state, iteration + 1, 0)
        rest = self.stage_dq(state, iteration, 1)
        self.start_dp(p, state, iteration + 1)
        self.start_dv(p, state, iteration + 1, 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.add_rest(p, state, rest, wide.accum_block, 1)
        self.publish_dq(state, iteration, 1)
        # dS = P (dP - Δ) of the next block: wait for dP, and load Δ while it runs
        rDelta = self.load_row_statistic(state, storage.sDelta[None, storage.do.stage(iteration + 1)])
        warpgroup.wait_group(1)
        self.make_ds(p, state, tile, scores, rDelta, iteration + 1, following.visit)
        return following

    @cute.jit
    def next_visit(self, p: Params, tile: KVTile, wide: WideVisit):
        """The next visit. After the last block of a list it is the same block."""
        accum_block, i, head = wide.accum_block + 1, wide.visit.number + 1, wide.visit.head
        following = None
        if cutlass.const_expr(self.static.block_sparse):
            index = p.block_index(tile, cutlass.min(i, tile.num_sparse - 1))
            following = WideVisit(p.sparse_accum_block(tile, index), BlockVisit(i, index_bits=index.bits))
        else:
            if i == tile.block_iter.num:
                accum_block, i = accum_block + (p.mdQ_accum.shape[2] - tile.block_iter.num), Int32(0)
                head = None if cutlass.const_expr(head is None) else head + 1
            following = WideVisit(accum_block, BlockVisit(i, head))
        return following

    @cute.jit
    def last_block(self, p: Params, state: MmaState, iteration: Int32, accum_block: Int32):
        """Compute the gradients of the tile's last block. `accum_block`: its index in mdQ_accum."""
        self.start_dq(p, state, 0)
        for half in cutlass.range_constexpr(HALVES):
            self.start_dk(p, state, iteration, half)
        warpgroup.wait_group(HALVES)
        rest = self.stage_dq(state, iteration, 0)
        self.start_dq(p, state, 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.publish_dq(state, iteration, 0)
        self.add_rest(p, state, rest, accum_block, 0)
        warpgroup.wait_group(0)
        rest = self.stage_dq(state, iteration, 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.publish_dq(state, iteration, 1)
        self.add_rest(p, state, rest, accum_block, 1)

    @cute.jit
    def start_s(self, p: Params, state: MmaState, iteration: Int32):
        """Start S = Q K^T."""
        pipeline = state.storage.q
        pipeline.wait_full(iteration)
        rQ = state.rQ[None, None, None, pipeline.stage(iteration)]
        start_gemm(p.mma_s, state.acc_S, rQ, state.rK, False, self.steps[0])

    @cute.jit
    def start_dp(self, p: Params, state: MmaState, iteration: Int32):
        """Start dP = dO V^T."""
        pipeline = state.storage.do
        pipeline.wait_full(iteration)
        rdO = state.rdO[None, None, None, pipeline.stage(iteration)]
        start_gemm(p.mma_s, state.acc_dP, rdO, state.rV, False, self.steps[1])

    @cute.jit
    def start_dv(self, p: Params, state: MmaState, iteration: Int32, half: cutlass.Constexpr):
        """Start a half of dV^T += dO^T P."""
        rdOt = state.rdOt[half][None, None, None, state.storage.do.stage(iteration)]
        start_gemm(p.mma_dkv, state.acc_dV[half], rdOt, state.rP, True)

    @cute.jit
    def start_dk(self, p: Params, state: MmaState, iteration: Int32, half: cutlass.Constexpr):
        """Start a half of dK^T += Q^T dS."""
        rQt = state.rQt[half][None, None, None, state.storage.q.stage(iteration)]
        start_gemm(p.mma_dkv, state.acc_dK[half], rQt, state.rdS, True)

    @cute.jit
    def start_dq(self, p: Params, state: MmaState, half: cutlass.Constexpr):
        """Start a half of dQ = dS K."""
        start_gemm(p.mma_dq, state.acc_dQ, state.rdSt, state.rKt[half], False)

    def dq_iteration(self, state: MmaState, iteration: Int32, half: int) -> Int32:
        """The iteration of a half in the dq pipeline, in which the warpgroups alternate."""
        return (HALVES * iteration + half) * NUM_WARPGROUPS + state.wg

    @cute.jit
    def stage_dq(self, state: MmaState, iteration: Int32, half: cutlass.Constexpr):
        """Write a half of dQ to shared memory in register order, for the adder warp.

        If there is no room for the last four registers, they are returned, for `add_rest`. After a fence, `publish_dq`
        publishes the others.
        """
        staged = self.dq_iteration(state, iteration, half)
        if cutlass.const_expr(self.static.deterministic):
            # There are several barriers, but memory for one half: wait until the previous half has been read.
            state.storage.dq.wait_released(staged - NUM_WARPGROUPS)
        else:
            state.storage.dq.wait_empty(staged)
        sdQ, pieces = state.storage.sdQ[None, state.thread, None, state.wg], self.tile.dq_pieces
        first = 4 * pieces * half if self.tile.dq_products == 1 else 0
        cute.autovec_copy(cute.make_tensor(state.acc_dQ.iterator + first, cute.make_layout((4, pieces))), sdQ)
        rest = None
        if cutlass.const_expr(pieces < self.tile.half_pieces):
            rest = cute.make_rmem_tensor(4, Float32)
            for j in cutlass.range_constexpr(4):
                rest[j] = cute.arch.inline_ptx(
                    "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[state.acc_dQ[4 * pieces + j]]
                )
        return rest

    @cute.jit
    def add_rest(
        self, p: Params, state: MmaState, rest: cute.Tensor | None, accum_block: Int32, half: cutlass.Constexpr
    ):
        """Add the last four registers to global memory, after the fence, because a fence waits for prior additions."""
        if cutlass.const_expr(rest is not None):
            elements = self.tile.tile_m * self.tile.head_dim
            first = p.mdQ_accum.iterator + Int64(accum_block) * elements
            add_four(first, rest, HALVES * state.wg + half, self.tile.dq_pieces, state.thread)

    @cute.jit
    def publish_dq(self, state: MmaState, iteration: Int32, half: cutlass.Constexpr):
        """Signal the adder warp that a half of dQ is in shared memory. Called after a fence."""
        cute.arch.mbarrier_arrive(state.storage.dq.full_barrier(self.dq_iteration(state, iteration, half)))

    def block_scores(self, p: Params, state: MmaState, tile: KVTile, iteration: Int32, visit: BlockVisit) -> AnyScores:
        """The scores of a block."""
        if p.score_params is None:
            return PlainScores(p.scale, is_transposed=False)
        m_block, head = visit.m_block(tile), p.query_head(tile, visit) if self.needs_head else Int32(0)
        mask, first_key = self.mask(p, state, tile, m_block)
        scores = p.score_params.block(mask, head, tile.batch, first_key, is_transposed=False)
        if state.storage.bias is not None:
            bias = state.storage.bias.block(scores.bias, state.wg, state.thread, iteration)
            return replace(scores, bias=bias)
        scores.prefetch()
        return scores

    def mask(self, p: Params, state: MmaState, tile: KVTile, m_block: Int32) -> tuple[Mask, Int32]:
        """The mask of an m_block, and the first key of this warpgroup."""
        first_query = m_block * self.tile.tile_m
        first_key = tile.n_block * self.tile.tile_n + state.wg * self.keys
        coords = self._coords(p, rederived(state.thread))
        return Mask(p.band, tile.seqlen.q_len, tile.seqlen.k_len, first_query, coords), first_key

    @cute.jit
    def make_p(
        self, p: Params, state: MmaState, tile: KVTile, scores: AnyScores, rLSE: cute.Tensor, visit: BlockVisit
    ) -> cute.Tensor:
        """S -> P = exp(scale S - LSE).

        P replaces S, and is returned. With score features, P in 16 bits is returned, and the registers of S keep the
        values for `make_ds`.
        """
        if cutlass.const_expr(state.storage.bias is not None):
            scores.bias.wait()
        is_plain = p.score_params is None
        rP = None if is_plain else cute.make_fragment_like(state.acc_S, self.dtype)
        compute_probs(scores, state.acc_S, rP, rLSE, partial(self.apply_mask, p, state, tile, scores, visit))
        return state.acc_S if is_plain else rP

    @cute.jit
    def apply_mask(self, p: Params, state: MmaState, tile: KVTile, scores: AnyScores, visit: BlockVisit):
        """Mask scores outside the band, keys past the end, and scores where mask_mod is false.

        With mods, queries past the end are masked too.
        """
        if cutlass.const_expr(not self.static.has_mods):
            if tile.block_iter.is_masked(visit.number):
                mask, first_key = self.mask(p, state, tile, visit.m_block(tile))
                scores.apply_band(state.acc_S, mask, first_key)
        else:
            self.apply_band_and_mod(p, state, tile, scores, visit)

    @cute.jit
    def apply_band_and_mod(self, p: Params, state: MmaState, tile: KVTile, scores: ModScores, visit: BlockVisit):
        """`apply_mask` with a bias, user mods or a block mask: apply the band, then mask_mod."""
        m_block = visit.m_block(tile)
        is_tail = (tile.n_block + 1) * self.tile.tile_n > tile.seqlen.k_len
        if m_block < tile.blocks.full_begin or m_block >= tile.blocks.full_end or is_tail:
            mask, first_key = self.mask(p, state, tile, m_block)
            scores.apply_band(state.acc_S, mask, first_key)
        scores.apply_mask(state.acc_S, visit.is_partial())

    def _coords(self, p: Params, thread: Int32) -> cute.Tensor:
        """(query, key) of every element of S in this thread."""
        coords = cute.make_identity_tensor((self.tile.tile_m, self.keys))
        return p.mma_s.get_slice(thread).partition_C(coords)

    @cute.jit
    def make_ds(
        self,
        p: Params,
        state: MmaState,
        tile: KVTile,
        scores: AnyScores,
        rDelta: cute.Tensor,
        iteration: Int32,
        visit: BlockVisit,
    ):
        """Compute dS = P (dP - Δ) and write it to shared memory. Both warpgroups wait until both have written."""
        storage = state.storage
        sLSE = None
        if cutlass.const_expr(p.score_params is not None):
            sLSE = self.row_statistic(state, storage.sLSE[None, storage.q.stage(iteration)])
        sums = scores.differentiate(GradientBlock(state.acc_S, state.acc_dP, sLSE, rDelta, state.dalibi))
        rdS = cute.make_fragment_like(state.acc_S, self.dtype)
        convert(state.acc_S, rdS)
        self.stage_transposed(state, rdS, storage.sdS)
        scores.finish_bias(rdS)
        cute.arch.fence_proxy("async.shared", space="cta")
        publish_gradient(storage.bias, state.wg, iteration)
        cute.arch.barrier(barrier_id=DS_STAGED, number_of_threads=MMA_THREADS)
        scores.finish(sums)
        if cutlass.const_expr(state.dalibi is not None):
            if self.is_last_of_head(tile, visit):
                self.store_dalibi(p, state, tile, p.query_head(tile, visit))

    def is_last_of_head(self, tile: KVTile, visit: BlockVisit) -> cutlass.Boolean:
        """Whether a block is the last one of its head in this tile."""
        if self.static.block_sparse:
            return visit.index.is_last
        return visit.number + 1 == tile.block_iter.num

    @cute.jit
    def store_dalibi(self, p: Params, state: MmaState, tile: KVTile, head: Int32):
        """Store this warp's part of the gradient of a head's ALiBi slope."""
        block = tile.seqlen.padded_k_block(tile.n_block, self.tile.tile_n)
        part = (block * NUM_WARPGROUPS + state.wg) * 4 + state.thread // 32
        p.score_params.store_dalibi(state.dalibi, head, tile.seqlen, part)

    def row_statistic(self, state: MmaState, sX: cute.Tensor) -> cute.Tensor:
        """LSE or Δ of this thread's rows: a view of shared memory. Rows are 8 apart."""
        coords = as_mn(state.tScS)
        layout = cute.make_layout(cute.size(coords, mode=[0]), stride=8)
        return cute.make_tensor(sX.iterator + coords[0, 0][0], layout)

    @cute.jit
    def load_row_statistic(self, state: MmaState, sX: cute.Tensor) -> cute.Tensor:
        """LSE or Δ of this thread's rows."""
        coords = as_mn(state.tScS)
        rX = cute.make_rmem_tensor(cute.size(coords, mode=[0]), Float32)
        for r in cutlass.range_constexpr(cute.size(rX)):
            rX[r] = sX[coords[r, 0][0]]
        return rX

    @cute.jit
    def stage_transposed(self, state: MmaState, source: cute.Tensor, sX: cute.Tensor):
        """Write P or dS, transposed, to the rows of this warpgroup's keys in sX (tile_n, tile_m).

        `source`: fp32, or already in 16 bits.
        """
        rX = source
        if cutlass.const_expr(source.element_type is Float32):
            rX = cute.make_fragment_like(source, self.dtype)
            convert(source, rX)
        first = sX.iterator + state.wg * (self.keys * self.tile.tile_m)
        store_transposed(rX, first, state.thread)

    @cute.jit
    def store_gradients(self, p: Params, state: MmaState, tile: KVTile):
        """Store dV and dK through sV and sK.

        This is safe: after P and dS of the last block, no warpgroup reads V, and each reads only its own columns of K.
        """
        storage = state.storage
        if cutlass.const_expr(self.static.varlen):
            # Compute the tile again instead of keeping it in registers during the main loop.
            tile = p.tile()
        self.stage_output(state, state.acc_dV, storage.sV, self.dv_scale(p))
        self.stage_output(state, state.acc_dK, storage.sK, p.scale)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=FIRST_OUTPUT + state.wg, number_of_threads=WARPGROUP_THREADS)
        if cute.arch.make_warp_uniform(state.thread // 32) == 0:
            with cute.arch.elect_one():
                part = self.dq_part(p, state.wg)
                self.store_columns(p.dv, storage.sV, self.static.width_v, tile, state.wg, part)
                self.store_columns(p.dk, storage.sK, self.static.head_dim, tile, state.wg, part)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_columns(
        self, tma: TmaTiles, sX: cute.Tensor, width: cutlass.Constexpr, tile: KVTile, wg: Int32, part: Int32
    ):
        """Store a warpgroup's columns of dK or dV, if they exist. `part`: their index among those of all warpgroups.

        If dK or dV is only one TMA tile wide, a store of the columns of another part would overwrite those of part 0.
        """
        sY = cute.local_tile(sX, (tma.rows, tma.cols), (0, wg))
        if cutlass.const_expr(width > tma.cols):
            tma.store(sY, tile.n_block, tile.head_kv, tile.seqlen.k_tma_coord, part)
        else:
            if part == 0:
                tma.store(sY, tile.n_block, tile.head_kv, tile.seqlen.k_tma_coord)

    @cute.jit
    def stage_output(self, state: MmaState, accs: Products, sX: cute.Tensor, factor: Float32):
        """Write a warpgroup's columns of dK or dV, times `factor`, to sX (tile_n, tile_d)."""
        for half in cutlass.range_constexpr(HALVES):
            acc = accs[half]
            acc.store(acc.load() * factor)
            rX = cute.make_fragment_like(acc, self.dtype)
            convert(acc, rX)
            column = (HALVES * state.wg + half) * WARPGROUP_ROWS
            store_transposed(rX, sX.iterator + column * self.tile.tile_n, state.thread)
