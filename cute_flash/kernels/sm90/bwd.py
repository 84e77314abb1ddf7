"""Warp-specialised backward attention with TMA and wgmma, for Hopper and head dims up to 128.

For each K/V tile, over the query heads that share it and their m_blocks i, in persistent CTAs:

    S^T  = K Qi^T                       keys are rows: P^T and dS^T stay in registers as operands
    P^T  = exp(scale S^T - LSE)         0 outside the band
    dP^T = V dOi^T
    dS^T = P^T (dP^T - Δ),  Δ = rowsum(dO O) - dLSE
    dV  += P^T dOi
    dK  += dS^T Qi                      times scale at the end
    dQi += dS K                         fp32 additions in global memory, times scale in postprocess

| warpgroup | warps | role                                                     |
|-----------|-------|----------------------------------------------------------|
| 0         | 0     | load K, V, Q, dO, LSE and Δ by TMA                       |
| 0         | 1     | add dQ to global memory by bulk reductions; the first    |
|           |       | CTA of an m_block stores it (`device/gradients/dq_claims.py`)      |
| 0         | 2     | if deterministic: the same, alternating with warp 1;     |
|           |       | or store the gradient of a bias by TMA, and its zeros    |
| 0         | 3     | load a bias by TMA                                       |
| 1, 2      | all   | MMA: 64 keys of the tile and half of dQ each             |

| shared memory | elements                    | lifetime                                             |
|---------------|-----------------------------|------------------------------------------------------|
| sK, sV        | tile_n x tile_d             | the tile                                             |
| sQ, sdO       | stages x tile_m x tile_d    | one block, until dK and dV, one block later          |
| sdS           | 2 x tile_n x tile_m         | one block, until dQ, two blocks later; TMA stores    |
|               |                             | it as the gradient of a bias                         |
| sdQ           | tile_m x tile_d, fp32       | one block, in register order                         |
| sLSE, sDelta  | stages x tile_m, fp32       | one m_block                                          |
| bias          | stages x tile_m x tile_n    | one m_block                                          |
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from cute_flash.device.gradients.mods_bwd import AnyScores
from cute_flash.device.gradients.score_bwd import GradientBlock, PlainScores, compute_probs
from cute_flash.device.memory.copies import row_tile
from cute_flash.device.memory.epilogue import store_rows
from cute_flash.device.memory.stmatrix import store_transposed
from cute_flash.device.memory.views import as_mn, as_operand_a, transposed
from cute_flash.device.mma.wgmma import convert, make_mma, start_gemm
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, WarpgroupOrder
from cute_flash.device.scheduling.published_tiles import NO_TILE
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.device.scheduling.tile_scheduler import PersistentTileScheduler
from cute_flash.device.scores.mask import Mask, column_offset
from cute_flash.kernels.common.kernel import Grid, Kernel
from cute_flash.kernels.sm90 import bwd_producer as producer
from cute_flash.kernels.sm90.bwd_storage import NUM_WARPGROUPS, BlockVisit, Config, KVTile, Params, SharedStorage
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.spec.features import MODS
from cute_flash.spec.problem import Static

# Named barrier 0 is the CTA barrier.
FIRST_ORDER_BARRIER = 1
STORE_DBIAS_WARP, LOAD_BIAS_WARP = 2, 3
# Registers per thread of the producer warpgroup, and of the MMA warpgroups.
REGISTERS = 24, 240


class Operands(NamedTuple):
    """Operands A of dV and dK, in registers."""

    P: cute.Tensor  # P^T
    dS: cute.Tensor  # dS^T


@dataclass(frozen=True)
class MmaState:
    """The state that an MMA warpgroup keeps from tile to tile."""

    wg: Int32
    thread: Int32
    storage: SharedStorage
    rK: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K), of the warpgroup's keys
    rV: cute.Tensor
    rQ: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, stage)
    rdO: cute.Tensor
    rQt: cute.Tensor
    rdOt: cute.Tensor
    rdSt: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, stage); the warpgroup's rows of dQ
    rKt: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K); the warpgroup's columns of dQ
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    tScS: cute.Tensor  # (key, query) of every element of S^T
    order: WarpgroupOrder
    dalibi: cute.Tensor | None  # (1), of the current head


class BwdSm90(Kernel):
    """The backward kernel. CTAs are persistent: each computes K/V tiles one after the other."""

    def __init__(self, static: Static, tile: BwdTileSm90):
        super().__init__(static, tile)
        self.config = Config(static, tile)
        # One warp has one role, and dropout bits are computed before the bias of a block is known.
        assert not (static.deterministic and self.config.stores_dbias) and not (tile.early_dropout and tile.bias_stages)
        self.has_score_params = bool(static.features) or static.has_mods
        self.has_alibi, self.has_dropout = "alibi" in static.features, "dropout" in static.features
        # A bias and user mods leave no registers for the LSE, which is then read from shared memory. Unlike
        # `static.has_mods`, this is false for a block mask without them.
        self.has_mods_or_bias = any(name in MODS for name in static.features)
        self.early_lse = tile.early_lse and not self.has_mods_or_bias
        self.early_scores = self.has_score_params and tile.early_dropout
        # With a semaphore every tile has its own CTA, so that a tile that others wait for has started.
        tiles_differ = static.is_bounded or static.varlen or static.block_sparse
        self.is_dynamic = tiles_differ and not static.deterministic

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        tile, config, args = self.tile, self.config, self.read_operands(operands)
        band, MN, K = self.band(args), OperandMajorMode.MN, OperandMajorMode.K
        batch, heads_kv, seqlen_k, _ = args.k.shape
        num_tiles = cute.ceil_div(seqlen_k, tile.tile_n) * heads_kv * batch
        params = Params.of(
            config,
            args,
            band,
            band=band.of_keys,
            scheduler=PersistentTileScheduler(num_tiles, args.tile_counter, self.is_dynamic),
            mma_s=make_mma(self.dtype, tile.tile_m, False, K, K),
            mma_dkv=make_mma(self.dtype, tile.head_dim, True, K, MN),
            mma_dq=make_mma(self.dtype, tile.dq_part[1], False, K if config.stores_ds else MN, MN),
        )
        options = {"min_blocks_per_mp": 1, "use_pdl": True}
        self.launch(self.symbol("bwd_sm90"), params, Grid(args.num_ctas), tile.num_threads, stream, **options)

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        storage = SharedStorage.allocate(self.config)
        if warp_index == 0:
            with cute.arch.elect_one():
                storage.init_barriers(p.num_tile_readers, self.config.stores_ds)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Wait for the end of the preprocess kernel. Allow the postprocess kernel to be launched; it waits for this one.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        producer_registers, mma_registers = REGISTERS
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp_index == 0:
                producer.load(p, storage)
            if warp_index > 0 and warp_index <= p.num_adders:
                producer.add_dq(p, storage, warp_index - 1)
            if cutlass.const_expr(p.dbias is not None):
                if warp_index == STORE_DBIAS_WARP:
                    producer.store_dbias(p, storage, partial(producer.for_each_block, p, storage))
            if cutlass.const_expr(p.bias is not None):
                if warp_index == LOAD_BIAS_WARP:
                    producer.load_bias(p, storage)
        else:
            cute.arch.setmaxregister_increase(mma_registers)
            self.mma(p, storage, warp_index // 4 - 1, thread % WARPGROUP_THREADS)

    def _part(self, sX: cute.Tensor, size: int, wg: Int32) -> cute.Tensor:
        """The warpgroup's `size` entries of the first mode, or all entries if the mode has only `size`."""
        if cute.size(sX, mode=[0]) == size:
            return sX
        rest = (None,) * (cute.rank(sX) - 1)
        return cute.logical_divide(sX, (size, *rest))[((None, wg), *rest)]

    def _state(self, p: Params, storage: SharedStorage, wg: Int32, thread: Int32) -> MmaState:
        tile = self.tile
        s, dkv, dq = p.mma_s.get_slice(0), p.mma_dkv.get_slice(0), p.mma_dq.get_slice(0)
        rows = (WARPGROUP_ROWS, tile.head_dim)
        acc_dK = cute.make_rmem_tensor(dkv.partition_shape_C(rows), Float32)
        coords = cute.make_identity_tensor((WARPGROUP_ROWS, tile.tile_m))
        sdSt = storage.sdS if self.config.stores_ds else transposed(storage.sdS)
        return MmaState(
            wg=wg,
            thread=thread,
            storage=storage,
            rK=s.make_fragment_A(s.partition_A(cute.local_tile(storage.sK, rows, (wg, 0)))),
            rV=s.make_fragment_A(s.partition_A(cute.local_tile(storage.sV, rows, (wg, 0)))),
            rQ=s.make_fragment_B(s.partition_B(storage.sQ)),
            rdO=s.make_fragment_B(s.partition_B(storage.sdO)),
            rQt=dkv.make_fragment_B(dkv.partition_B(transposed(storage.sQ))),
            rdOt=dkv.make_fragment_B(dkv.partition_B(transposed(storage.sdO))),
            rdSt=dq.make_fragment_A(dq.partition_A(self._part(sdSt, tile.dq_part[0], wg))),
            rKt=dq.make_fragment_B(dq.partition_B(self._part(transposed(storage.sK), tile.dq_part[1], wg))),
            acc_dK=acc_dK,
            acc_dV=cute.make_fragment_like(acc_dK),
            tScS=p.mma_s.get_slice(thread).partition_C(coords),
            order=WarpgroupOrder(FIRST_ORDER_BARRIER, NUM_WARPGROUPS, wg),
            dalibi=cute.make_rmem_tensor(1, Float32) if self.has_alibi else None,
        )

    def dv_scale(self, p: Params) -> Float32:
        """The factor of dV. It includes the scale of dropout, by which P is not multiplied."""
        return p.score_params.dropout_scale if self.has_dropout else Float32(1.0)

    @cute.jit
    def mma(self, p: Params, storage: SharedStorage, wg: Int32, thread: Int32):
        """The role of an MMA warpgroup."""
        state = self._state(p, storage, wg, thread)
        state.order.start()
        count, iteration = Int32(0), Int32(0)  # tiles and m_blocks so far
        storage.k.wait_full(count)
        coord = storage.read_tile(count)
        while coord.block != NO_TILE:
            tile = p.tile(count, iteration, coord)
            self.process_tile(p, state, tile)
            iteration += p.num_m_blocks(tile)
            count += 1
            storage.k.wait_full(count)
            coord = storage.read_tile(count)

    @cute.jit
    def process_tile(self, p: Params, state: MmaState, tile: KVTile):
        """Compute dK and dV of a K/V tile, and its part of dQ."""
        storage, begin = state.storage, tile.iteration
        first_row = tile.n_block * self.tile.tile_n + state.wg * WARPGROUP_ROWS
        mask = Mask(p.band, tile.seqlen.k_len, tile.seqlen.q_len, first_row, state.tScS)
        state.acc_dK.fill(0.0)
        state.acc_dV.fill(0.0)
        if cutlass.const_expr(state.dalibi is not None):
            state.dalibi.fill(0.0)
        shape = p.mma_s.get_slice(0).partition_shape_C((WARPGROUP_ROWS, self.tile.tile_m))
        operands = Operands(*(cute.make_rmem_tensor(shape, self.dtype) for _ in range(2)))
        total = p.num_m_blocks(tile)
        storage.v.wait_full(tile.count)
        # The number of a block within its head is incremented, because computing it from the iteration takes a slow
        # division.
        visit = p.first_visit(tile, self.has_score_params)
        if total > 0:
            visit = self.process_block(p, state, tile, mask, operands, begin, visit, 0)
        if total > 1:
            visit = self.process_block(p, state, tile, mask, operands, begin + 1, visit, 1)
        for iteration in cutlass.range(begin + 2, begin + total, unroll=1):
            visit = self.process_block(p, state, tile, mask, operands, iteration, visit, 2)
        storage.v.release(tile.count)
        if total > 0:
            last = begin + total - 1
            self.start_dv_dk(p, state, operands, last)
            self.stage_ds(p, state, operands.dS, last)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(storage.ds.full_barrier(last))
            if total > 1:
                self.last_dq(p, state, last - 1)
            self.last_dq(p, state, last)
            storage.do.release_per_thread(last)
            storage.q.release_per_thread(last)
        cute.arch.sync_warp()
        storage.k.release(tile.count)
        self.store_gradient(p.mdV, self.static.width_v, state.acc_dV, tile, state, p, self.dv_scale(p))
        self.store_gradient(p.mdK, self.static.head_dim, state.acc_dK, tile, state, p, p.scale)

    @cute.jit
    def process_block(
        self,
        p: Params,
        state: MmaState,
        tile: KVTile,
        mask: Mask,
        operands: Operands,
        iteration: Int32,
        visit: BlockVisit,
        blocks_before: cutlass.Constexpr,
    ):
        """Compute P^T and dS^T of an m_block. One warpgroup issues products while the other computes exponentials.

        dV and dK follow one block late, and dQ two blocks late, so that no warpgroup waits for the dS of the other.

        Args:
            operands: P^T and dS^T of the previous block on entry. On return they hold this block's.
            blocks_before: the number of blocks of the tile before this one; 2 stands for 2 or more.

        Returns:
            The next visit.
        """
        storage, (rP, rdS), scores = state.storage, operands, None
        stage, (k_steps, v_steps) = storage.q.stage(iteration), self.static.k_steps
        acc_S, acc_dP = (cute.make_fragment_like(rP, Float32) for _ in range(2))
        state.order.wait()
        # dV += P^T dO and dK += dS^T Q of the previous block;  dQ = dS K of the block before it
        acc_dQ = self.start_earlier_products(p, state, operands, iteration, blocks_before)
        if cutlass.const_expr(self.early_scores):
            # Dropout bits are computed while products run, and before S and dP take registers.
            scores = self.scores(p, tile, mask, visit)
        self.release_earlier(storage, iteration, blocks_before)
        # S^T = K Q^T, while dQ and dS of earlier blocks are moved to shared memory
        storage.q.wait_full(iteration)
        start_gemm(p.mma_s, acc_S, state.rK, state.rQ[None, None, None, stage], False, k_steps)
        self.stage_earlier(p, state, acc_dQ, rdS, iteration, blocks_before)
        # dP^T = V dO^T
        storage.do.wait_full(iteration)
        start_gemm(p.mma_s, acc_dP, state.rV, state.rdO[None, None, None, stage], False, v_steps)
        state.order.arrive()
        self.publish_earlier(state, iteration, blocks_before)
        # P^T = exp(scale S^T - LSE), with score features and masks
        if cutlass.const_expr(not self.early_scores):
            scores = self.with_bias(state, self.scores(p, tile, mask, visit), iteration)
        rLSE = self.lse(state, stage) if cutlass.const_expr(self.early_lse) else None
        warpgroup.wait_group(1)
        if cutlass.const_expr(not self.early_lse):
            rLSE = self.lse(state, stage)
        compute_probs(scores, acc_S, rP, rLSE, partial(self.apply_mask, tile, mask, scores, acc_S, visit))
        # dS^T = P^T (dP^T - Δ)
        warpgroup.wait_group(0)
        sums = scores.differentiate(GradientBlock(acc_S, acc_dP, *self.statistics(state, stage), state.dalibi))
        convert(acc_S, rdS)
        scores.finish_bias(rdS)
        scores.finish(sums)
        return self.next_visit(p, state, tile, visit)

    @cute.jit
    def start_earlier_products(
        self, p: Params, state: MmaState, operands: Operands, iteration: Int32, blocks_before: cutlass.Constexpr
    ):
        """Start dV and dK of the previous block, and dQ of the block before it; return dQ's accumulator, or None."""
        acc_dQ = None
        if cutlass.const_expr(blocks_before > 0):
            self.start_dv_dk(p, state, operands, iteration - 1)
        if cutlass.const_expr(blocks_before > 1):
            acc_dQ = self.start_dq(p, state, iteration - 2)
        return acc_dQ

    @cute.jit
    def release_earlier(self, storage: SharedStorage, iteration: Int32, blocks_before: cutlass.Constexpr):
        """Wait for dV and dK of the previous block, and release its dO and Q."""
        if cutlass.const_expr(blocks_before > 0):
            warpgroup.wait_group(blocks_before - 1)
            storage.do.release_per_thread(iteration - 1)
            storage.q.release_per_thread(iteration - 1)

    @cute.jit
    def stage_earlier(
        self,
        p: Params,
        state: MmaState,
        acc_dQ: cute.Tensor | None,
        rdS: cute.Tensor,
        iteration: Int32,
        blocks_before: cutlass.Constexpr,
    ):
        """Write dS of the previous block to shared memory, and dQ of the block before the previous one.

        dQ comes first: when its products are complete, the buffer of dS that they read is free.
        """
        if cutlass.const_expr(blocks_before > 1):
            warpgroup.wait_group(1)
            state.storage.ds.release(iteration - 2)
            self.stage_dq(state, acc_dQ, iteration - 2)
        if cutlass.const_expr(blocks_before > 0):
            self.stage_ds(p, state, rdS, iteration - 1)

    @cute.jit
    def publish_earlier(self, state: MmaState, iteration: Int32, blocks_before: cutlass.Constexpr):
        """Signal that dQ and dS of `stage_earlier` are in shared memory.

        The fence follows the products of the block, so that they do not wait until the stores of dS are visible.
        """
        if cutlass.const_expr(blocks_before > 0):
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(state.storage.ds.full_barrier(iteration - 1))
        if cutlass.const_expr(blocks_before > 1):
            self.publish_dq(state, iteration - 2)

    def scores(self, p: Params, tile: KVTile, mask: Mask, visit: BlockVisit) -> AnyScores:
        """The scores of a block."""
        if not self.has_score_params:
            return PlainScores(p.scale, is_transposed=True)
        m_block, head = visit.m_block(tile), p.query_head(tile, visit)
        return p.score_params.block(mask, head, tile.batch, m_block * self.tile.tile_m, is_transposed=True)

    def with_bias(self, state: MmaState, scores: AnyScores, iteration: Int32) -> AnyScores:
        """The same scores. Their bias has arrived in shared memory, or its loads have started."""
        if state.storage.bias is not None:
            scores = replace(scores, bias=state.storage.bias.block(scores.bias, state.wg, state.thread, iteration))
            scores.bias.wait()
        else:
            scores.prefetch()
        return scores

    def next_visit(self, p: Params, state: MmaState, tile: KVTile, visit: BlockVisit) -> BlockVisit:
        """The next visit. After the last block of a head, store the gradient of its ALiBi slope."""
        if self.static.block_sparse:
            return self.next_sparse_visit(p, state, tile, visit)
        return self.next_band_visit(p, state, tile, visit)

    @cute.jit
    def next_sparse_visit(self, p: Params, state: MmaState, tile: KVTile, visit: BlockVisit):
        i, index = visit.number + 1, visit.index
        if cutlass.const_expr(p.score_params.alibi_slopes is not None):
            if index.is_last:
                self.store_dalibi(p, state, tile, tile.head_kv * p.heads_per_kv + index.head)
        return BlockVisit(i, index_bits=p.block_index(tile, cutlass.min(i, tile.num_sparse - 1)).bits)

    @cute.jit
    def store_dalibi(self, p: Params, state: MmaState, tile: KVTile, head: Int32):
        """Store this warp's part of the gradient of a head's ALiBi slope."""
        seqlen = self.reread_seqlen(p, state, tile)
        block = seqlen.padded_k_block(tile.n_block, self.tile.tile_n)
        part = (block * NUM_WARPGROUPS + state.wg) * 4 + state.thread // 32
        p.score_params.store_dalibi(state.dalibi, head, seqlen, part)

    @cute.jit
    def next_band_visit(self, p: Params, state: MmaState, tile: KVTile, visit: BlockVisit):
        is_last, head = visit.number + 1 == tile.block_iter.num, None
        i = cutlass.select_(is_last, Int32(0), visit.number + 1)
        if cutlass.const_expr(self.has_score_params):
            if cutlass.const_expr(p.score_params.alibi_slopes is not None):
                if is_last:
                    self.store_dalibi(p, state, tile, visit.head)
            head = visit.head + Int32(is_last)
        return BlockVisit(i, head)

    @cute.jit
    def start_dv_dk(self, p: Params, state: MmaState, operands: Operands, iteration: Int32):
        """Start dV += P^T dO and dK += dS^T Q of the block of `iteration`."""
        stage = state.storage.q.stage(iteration)
        rP, rdS = (as_operand_a(operand) for operand in operands)
        start_gemm(p.mma_dkv, state.acc_dV, rP, state.rdOt[None, None, None, stage], True)
        start_gemm(p.mma_dkv, state.acc_dK, rdS, state.rQt[None, None, None, stage], True)

    @cute.jit
    def start_dq(self, p: Params, state: MmaState, iteration: Int32):
        """Wait until dS of both warpgroups is in shared memory, start dQ = dS K, and return its accumulator."""
        pipeline = state.storage.ds
        pipeline.wait_full(iteration)
        shape = p.mma_dq.get_slice(0).partition_shape_C(self.tile.dq_part)
        acc_dQ = cute.make_rmem_tensor(shape, Float32)
        start_gemm(p.mma_dq, acc_dQ, state.rdSt[None, None, None, pipeline.stage(iteration)], state.rKt, False)
        return acc_dQ

    @cute.jit
    def last_dq(self, p: Params, state: MmaState, iteration: Int32):
        """Compute dQ of a block, and publish it, without overlap. The last two blocks of a tile need this."""
        acc_dQ = self.start_dq(p, state, iteration)
        warpgroup.wait_group(0)
        state.storage.ds.release(iteration)
        self.stage_dq(state, acc_dQ, iteration)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.publish_dq(state, iteration)

    def column_statistic(self, state: MmaState, sX: cute.Tensor, stage: Int32) -> cute.Tensor:
        """LSE or Δ of this thread's columns, which are queries: a view of shared memory."""
        coords = as_mn(state.tScS)
        columns = cute.make_layout((2, cute.size(coords, mode=[1]) // 2), stride=(1, 8))
        return cute.make_tensor(sX[None, stage].iterator + coords[0, 0][1], columns)

    @cute.jit
    def load_column_statistic(self, state: MmaState, sX: cute.Tensor, stage: Int32) -> cute.Tensor:
        """LSE or Δ of this thread's columns, which are queries, loaded to registers."""
        coords = as_mn(state.tScS)
        rows = cute.domain_offset((coords[0, 0][1],), sX[None, stage])
        rX = cute.make_rmem_tensor(cute.size(coords, mode=[1]), Float32)
        for c in cutlass.range_constexpr(cute.size(rX)):
            rX[c] = rows[column_offset(c)]
        return rX

    def lse(self, state: MmaState, stage: Int32) -> cute.Tensor:
        """The LSE of this thread's columns: in registers, or in shared memory if a bias or mods leave no registers."""
        read = self.column_statistic if self.has_mods_or_bias else self.load_column_statistic
        return read(state, state.storage.sLSE, stage)

    def statistics(self, state: MmaState, stage: Int32) -> tuple[cute.Tensor | None, cute.Tensor]:
        """LSE and Δ of this thread's columns for `differentiate`. Without score features, it needs Δ only."""
        storage = state.storage
        if not self.has_score_params:
            return None, self.load_column_statistic(state, storage.sDelta, stage)
        return tuple(self.column_statistic(state, sX, stage) for sX in (storage.sLSE, storage.sDelta))

    @cute.jit
    def apply_mask(self, tile: KVTile, mask: Mask, scores: AnyScores, acc_S: cute.Tensor, visit: BlockVisit):
        """Mask scores outside the band, keys and queries past the end, and scores where mask_mod is false."""
        blocks, m_block = tile.blocks, visit.m_block(tile)
        is_tail = mask.first_row + WARPGROUP_ROWS > mask.seqlen_q
        if m_block < blocks.full_begin or m_block >= blocks.full_end or is_tail:
            scores.apply_band(acc_S, mask, m_block * self.tile.tile_m)
        scores.apply_mask(acc_S, visit.is_partial())

    @cute.jit
    def stage_ds(self, p: Params, state: MmaState, rdS: cute.Tensor, iteration: Int32):
        """Write dS to shared memory, for both warpgroups. The caller's fence and arrival publish it."""
        pipeline = state.storage.ds
        pipeline.wait_empty(iteration)
        stage = state.storage.sdS[None, None, pipeline.stage(iteration)]
        if cutlass.const_expr(self.config.stores_ds):
            store_transposed(rdS, stage.iterator + state.wg * (WARPGROUP_ROWS * self.tile.tile_m), state.thread)
        else:
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
            copy = cute.make_tiled_copy_C(atom, p.mma_s).get_slice(state.thread)
            sdS = cute.local_tile(stage, (WARPGROUP_ROWS, self.tile.tile_m), (state.wg, 0))
            cute.copy(atom, copy.retile(rdS), copy.partition_D(sdS))

    @cute.jit
    def stage_dq(self, state: MmaState, acc_dQ: cute.Tensor, iteration: Int32):
        """Write this warpgroup's part of dQ to shared memory, in register order."""
        state.storage.dq.wait_released((iteration - 1) * NUM_WARPGROUPS + state.wg)
        sdQ = state.storage.sdQ[None, state.thread, None, state.wg]
        cute.autovec_copy(cute.make_tensor(acc_dQ.iterator, cute.make_layout(sdQ.shape)), sdQ)

    @cute.jit
    def publish_dq(self, state: MmaState, iteration: Int32):
        """Signal the adder warp that dQ is in shared memory. Called after a fence."""
        cute.arch.mbarrier_arrive(state.storage.dq.full_barrier(iteration * NUM_WARPGROUPS + state.wg))

    def reread_seqlen(self, p: Params, state: MmaState, tile: KVTile) -> SeqlenInfo:
        """The sequence of a tile. In a varlen batch it is read again, which saves registers."""
        return tile.seqlen if p.tile_list is None else p.seqlen_info(state.storage.read_tile(tile.count))

    @cute.jit
    def store_gradient(
        self,
        mX: cute.Tensor,
        width: cutlass.Constexpr,
        acc: cute.Tensor,
        tile: KVTile,
        state: MmaState,
        p: Params,
        factor: Float32,
    ):
        """Store dK or dV times `factor`, for rows that exist and the first `width` columns."""
        first_row = tile.n_block * self.tile.tile_n + state.wg * WARPGROUP_ROWS
        acc.store(acc.load() * factor)
        rX = cute.make_fragment_like(acc, self.dtype)
        convert(acc, rX)
        head_dim = self.tile.head_dim
        seqlen = self.reread_seqlen(p, state, tile)
        gX = row_tile(seqlen.slice_head(mX, tile.head_kv), seqlen.k_row(first_row), WARPGROUP_ROWS, head_dim)
        coords = cute.make_identity_tensor((WARPGROUP_ROWS, head_dim))
        tXcX = p.mma_dkv.get_slice(rederived(state.thread)).partition_C(coords)
        packed = cute.make_tensor(cute.recast_tensor(rX, Int32).iterator, cute.make_layout((2, head_dim // 8)))
        store_rows(packed, gX, as_mn(tXcX), width, seqlen.k_len - first_row)
