"""Warp-specialised forward attention with TMA and wgmma, for Hopper.

For each tile of query rows, over K/V blocks j in the order of `Params.block_iterator`:

    S  = Q Kj^T                          wgmma, both operands in shared memory; fp32 accumulators
    S  = -inf outside the band           only in masked blocks
    m' = max(m, rowmax S);  P = exp(scale (S - m'))
    l  = l exp(scale (m - m')) + rowsum P
    O  = O exp(scale (m - m')) + P Vj    P stays in registers: its accumulator layout is the operand layout
    out = O / l,  LSE = scale m + log l

Score features (`ScoreParams`): softcap, ALiBi, a bias and score_mod change S before the mask, mask_mod masks further
scores, dropout changes P after its row sums are taken, and a sink changes l and the LSE at the end. With a block mask,
a tile visits the K/V blocks that the mask lists, full blocks first.

A warpgroup issues Q Kj^T and then P V of block j - 1. P V runs while the warpgroup computes the softmax of block j.
With `ping_pong` the warpgroups alternate in issuing products, so that the softmax of one overlaps with the products of
another. P V of more than 256 columns takes several instructions per k-step.

| warpgroup | warps | role                                                                                  |
|-----------|-------|---------------------------------------------------------------------------------------|
| 0         | 0     | load Q and K by TMA, as far ahead as the pipelines allow, across tiles                |
| 0         | 1     | load V in the same way                                                                |
| 0         | 2     | with two stages of Q: store output tiles by TMA                                       |
| 0         | 3     | load the bias by TMA, if its strides allow TMA                                        |
| 1 ...     | all   | MMA: 64 rows of the tile each                                                         |
| the last  | all   | with dropout: dropout producer, which computes masks of P for the next blocks         |

| shared memory       | elements                       | lifetime                                            |
|---------------------|--------------------------------|-----------------------------------------------------|
| sQ                  | q_stages x tile_m x tile_d     | one tile; with two stages O is stored through it    |
| sK, sV              | stages x tile_n x tile_d       | one block each                                      |
| dropout masks, bias | their stages x tile_m x tile_n | one block; only with dropout, and with a TMA bias   |
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from cute_flash.device.memory.copies import row_tile
from cute_flash.device.memory.epilogue import DirectStore, store_lse, update_max_logit
from cute_flash.device.memory.tma import TmaTiles, VarlenTmaTiles
from cute_flash.device.memory.views import as_mn, as_operand_a
from cute_flash.device.mma.wgmma import convert, make_mma, start_gemm
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduling.block_iterator import OutwardBlockIterator
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, WarpgroupOrder
from cute_flash.device.scheduling.published_tiles import NO_TILE
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.device.scheduling.tile_scheduler import PersistentTileScheduler, StaticTileScheduler, VarlenTileList
from cute_flash.device.scores.alibi_step import AlibiStep, row_word, write_columns
from cute_flash.device.scores.dropout_mask import DropoutMaskPipeline, NoDropoutMasks
from cute_flash.device.scores.mask import Mask
from cute_flash.device.softmax.exact import ExactMax
from cute_flash.device.softmax.exp2 import ProbBlock
from cute_flash.device.softmax.softmax import EXACT_KEYS, Softmax
from cute_flash.device.softmax.speculative import SpeculativeMax
from cute_flash.kernels.common.kernel import Grid, Kernel
from cute_flash.kernels.common.params import ScoreParams
from cute_flash.kernels.sm90 import fwd_producer as producer
from cute_flash.kernels.sm90.fwd_scores import (
    MAYBE,
    KvBlock,
    MmaState,
    MmaTile,
    kv_block,
    score_tile,
    transform_first,
    transform_further,
)
from cute_flash.kernels.sm90.fwd_storage import Config, Params, SharedStorage
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.planning.tiles.fwd_sm90 import MAX_INSTRUCTION_COLUMNS, FwdTileSm90
from cute_flash.spec.problem import Static

LOAD_QK_WARP, LOAD_V_WARP, STORE_WARP, LOAD_BIAS_WARP = range(4)
# Named barrier 0 is the CTA barrier.
FIRST_ORDER_BARRIER = 1


class FwdSm90(Kernel):
    """The forward kernel. CTAs are persistent: each computes tiles of queries one after the other."""

    def __init__(self, static: Static, tile: FwdTileSm90):
        super().__init__(static, tile)
        self.config = Config(static, tile)

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        tile, static, config, args = self.tile, self.static, self.config, self.read_operands(operands)
        score_params = ScoreParams.of(static, args)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        batch, heads, num_rows, _ = args.q.shape
        tma, tile_list = TmaTiles, None
        if cutlass.const_expr(static.varlen):
            tma, tile_list = VarlenTmaTiles, VarlenTileList(args.q_tile_list, heads, args.heads_per_l2_group)
        num_m_blocks = cute.ceil_div(num_rows, tile.tile_m)
        batch_is_inner, K = score_params.batch_shares_bias(), OperandMajorMode.K
        params = Params(
            config=config,
            q=tma.of(load, args.q, tile.operand_smem("Q")),
            k=tma.of(load, args.k, tile.operand_smem("K")),
            v=tma.of(load, args.v, tile.operand_smem("V")),
            o=None if static.out_fp32 else tma.of(store, args.out, tile.operand_smem("O")),
            bias=tma.of(load, args.bias, config.bias) if tile.bias_stages else None,
            mO=args.out,
            mLSE=args.lse,
            num_rows=num_rows,
            seqlen_q=args.seqlen_q,
            seqlen_k=args.k.shape[2],
            heads_per_kv=heads // args.k.shape[1],
            scale_log2=score_params.softmax_scale(args.scale),
            band=self.band(args),
            static_scheduler=StaticTileScheduler(
                num_m_blocks, heads, batch, args.heads_per_l2_group, static.has_right, batch_is_inner
            ),
            scheduler=PersistentTileScheduler(num_m_blocks * heads * batch, args.tile_counter, config.is_dynamic),
            tile_list=tile_list,
            mma_qk=make_mma(self.dtype, tile.tile_n, False, K, K),
            mma_pv=make_mma(self.dtype, tile.columns_pv, True, K, OperandMajorMode.MN),
            mma_alibi=make_mma(self.dtype, tile.tile_n, True, K, K) if config.has_alibi_step else None,
            score_params=score_params,
        )
        options = {"min_blocks_per_mp": 1, "use_pdl": static.varlen}
        self.launch(self.symbol("fwd_sm90"), params, Grid(args.num_ctas), tile.num_threads, stream, **options)

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        storage = SharedStorage.allocate(self.config)
        if warp_index == 0:
            with cute.arch.elect_one():
                storage.init_barriers()
        if cutlass.const_expr(storage.sColumns is not None):
            write_columns(storage.sColumns, thread, self.tile.num_threads)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cutlass.const_expr(self.static.varlen):
            # Wait for the scheduler kernel, which writes the tile list.
            cute.arch.griddepcontrol_wait()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.tile.registers[0])
            if warp_index == LOAD_QK_WARP:
                producer.load_qk(p, storage)
            if warp_index == LOAD_V_WARP:
                producer.load_v(p, storage)
            if cutlass.const_expr(self.tile.q_stages > 1):
                if warp_index == STORE_WARP:
                    producer.store_output(p, storage)
            if cutlass.const_expr(self.tile.bias_stages > 0):
                if warp_index == LOAD_BIAS_WARP:
                    producer.load_bias(p, storage)
        else:
            if cutlass.const_expr(self.tile.dropout_producer):
                if warp_index >= 4 * (1 + self.tile.num_warpgroups):
                    producer.produce_dropout_masks(p, storage, warp_index % 4, thread % 32)
                else:
                    self.mma(p, storage, warp_index, thread)
            else:
                self.mma(p, storage, warp_index, thread)

    @cute.jit
    def mma(self, p: Params, storage: SharedStorage, warp_index: Int32, thread: Int32):
        """The role of an MMA warpgroup."""
        cute.arch.setmaxregister_increase(self.tile.registers[1])
        warpgroup_index, thread = warp_index // 4 - 1, thread % WARPGROUP_THREADS
        state = self._state(p, storage, warpgroup_index, thread)
        state.order.start()
        count, iteration = Int32(0), Int32(0)  # tiles and K/V blocks so far
        has_begun = cutlass.Boolean(False)  # the tile's first block was computed together with the previous tile's last
        storage.q.wait_full(count)
        m_block = storage.m_block(count)
        while m_block != NO_TILE:
            tile = self._tile(p, state, m_block, count, iteration)
            if not has_begun:
                state.acc_O.fill(0.0)
                state.softmax.restart()
                if tile.has_blocks():
                    self.first_block(state, tile)
            self.further_blocks(state, tile)
            if cutlass.const_expr(self.config.skips_blocks):
                self.skip_blocks(state, tile)

            # With one stage of Q the next Q has just been requested: finish this tile before waiting for it.
            if cutlass.const_expr(self.tile.q_stages == 1):
                self.last_block(p, state, tile)
            iteration += tile.num_blocks
            count += 1
            storage.q.wait_full(count)
            m_block = storage.m_block(count)
            if cutlass.const_expr(self.tile.q_stages > 1 and not self.config.overlaps_tiles):
                self.last_block(p, state, tile)
            elif cutlass.const_expr(self.tile.q_stages > 1):
                following = self._tile(p, state, m_block, count, iteration)
                has_begun = m_block != NO_TILE and tile.has_blocks() and following.has_blocks()
                if has_begun:
                    self.last_and_first_block(p, state, tile, following)
                else:
                    self.last_block(p, state, tile)
        # The store warp waits for an output before it reads a tile; this arrival lets it read NO_TILE.
        if cutlass.const_expr(self.tile.q_stages > 1):
            cute.arch.mbarrier_arrive(storage.output_barrier(warpgroup_index, count))

    def _tile(self, p: Params, state: MmaState, m_block: Int32, count: Int32, iteration: Int32) -> MmaTile:
        first_row = m_block * self.tile.tile_m + state.warpgroup * WARPGROUP_ROWS
        head, seqlen = state.storage.head(count), p.seqlen_info(state.storage.seqlen_values(count))
        lengths = p.seqlen_q_of(seqlen), seqlen.k_len
        mask = Mask(p.band, *lengths, first_row, state.tScS, self.static.pack_gqa)
        block_iter = p.block_iterator(m_block, head, seqlen, state.storage.block_counts(count))
        num_with_skipped = None
        if self.config.skips_blocks:
            num_with_skipped = block_iter.num
            block_iter = p.warpgroup_blocks(m_block, state.warpgroup, seqlen)
        score_params = p.score_params.for_head(head, seqlen.batch)
        alibi_word = None
        if state.alibi_step is not None:
            score = score_params.score
            alibi_word = row_word(score.alibi.slope_log2, score.scale_log2, state.thread, self.dtype)
        return MmaTile(count, iteration, head, seqlen, mask, block_iter, score_params, alibi_word, num_with_skipped)

    def _seqlen_at_end(self, p: Params, state: MmaState, tile: MmaTile) -> SeqlenInfo:
        """The sequence of a tile. In a varlen batch it is read again at the end of the tile, which saves registers."""
        return tile.seqlen if p.tile_list is None else p.seqlen_info(state.storage.seqlen_values(tile.count))

    def _state(self, p: Params, storage: SharedStorage, warpgroup_index: Int32, thread: Int32) -> MmaState:
        tile = self.tile
        qk, pv = p.mma_qk.get_slice(0), p.mma_pv.get_slice(0)
        sQ = storage.sQ[None, None, (warpgroup_index, None)]
        sVt = cute.make_tensor(storage.sV.iterator, cute.select(storage.sV.layout, mode=[1, 0, 2]))
        acc_O = cute.make_rmem_tensor(pv.partition_shape_C((WARPGROUP_ROWS, tile.width_v)), Float32)
        rQ = qk.make_fragment_A(qk.partition_A(sQ))
        coords = cute.make_identity_tensor((WARPGROUP_ROWS, tile.tile_n))
        tracks_max_score = p.score_params.max_logit is not None
        is_exact = self.static.batch_invariant
        softmax = Softmax.start(as_mn(acc_O), p.scale_log2, tracks_max_score, is_exact)
        return MmaState(
            warpgroup=warpgroup_index,
            thread=thread,
            storage=storage,
            mma_qk=p.mma_qk,
            mma_pv=p.mma_pv,
            rQ=rQ,
            rK=qk.make_fragment_B(qk.partition_B(storage.sK)),
            rV=pv.make_fragment_B(pv.partition_B(sVt)),
            rP=cute.make_rmem_tensor(self._shape_S(p.mma_qk), self.dtype),
            acc_O=acc_O,
            softmax=softmax,
            lse=cute.make_fragment_like(softmax.row_max),
            inverse=cute.make_fragment_like(softmax.row_max),
            order=WarpgroupOrder(FIRST_ORDER_BARRIER, tile.num_warpgroups if tile.ping_pong else 1, warpgroup_index),
            tScS=p.mma_qk.get_slice(thread).partition_C(coords),
            max_logit=cute.make_rmem_tensor(1, Float32) if tracks_max_score else None,
            alibi_step=None if storage.sColumns is None else AlibiStep.of(p.mma_alibi, storage.sColumns),
        )

    def _shape_S(self, mma_qk: cute.TiledMma):
        return mma_qk.get_slice(0).partition_shape_C((WARPGROUP_ROWS, self.tile.tile_n))

    @cute.jit
    def first_block(self, state: MmaState, tile: MmaTile):
        """The first block of a tile: S = Q K^T;  m = rowmax S;  P = exp(scale (S - m));  l = rowsum P."""
        state.storage.k.wait_full(tile.iteration)
        n_block = state.storage.first_n_block(tile.block_iter, tile.iteration)
        block = kv_block(state, tile, tile.iteration, n_block, False)
        state.order.wait()
        acc_S = self.start_qk(state, tile.count, tile.iteration)
        state.order.arrive()
        warpgroup.wait_group(0)
        state.storage.release_k(tile.iteration)
        if tile.block_iter.num == 1:
            self.release_q(state, tile)
        self.first_softmax(state, tile, acc_S, block)
        self.first_round(state, tile, acc_S)

    @cute.jit
    def first_softmax(self, state: MmaState, tile: MmaTile, acc_S: cute.Tensor, block: KvBlock):
        """S of a tile's first block -> P, with the row max and the row sums."""
        softmax = state.softmax
        # S: scale, softcap, ALiBi, bias, score_mod, masks
        transform_first(self.config, tile, acc_S, block)
        # m = rowmax S
        block_max = cute.make_fragment_like(softmax.row_max)
        softmax.block_max(as_mn(acc_S), block_max)
        softmax.raise_max(block_max)
        # P = exp(scale (S - m));  l = rowsum P
        softmax.exponentiate(as_mn(acc_S))

    @cute.jit
    def first_round(self, state: MmaState, tile: MmaTile, acc_P: cute.Tensor):
        """Convert P of a tile's first block to the dtype of q, and apply dropout."""
        self.dropout_masks(state).wait(state.warpgroup, tile.iteration)
        self.round(state, acc_P, range(self.config.steps), tile.iteration)
        self.release_dropout_masks(state, tile.iteration)

    @cute.jit
    def round(self, state: MmaState, acc_P: cute.Tensor, steps: cutlass.Constexpr, iteration: Int32):
        """Convert P to the dtype of q, and apply dropout. The row sums have already been taken."""
        convert(acc_P, state.rP, steps)
        packed = cute.recast_tensor(state.rP, Int32)
        self.dropout_masks(state).apply(packed, steps, state.warpgroup, state.thread, iteration)

    @cute.jit
    def release_dropout_masks(self, state: MmaState, iteration: Int32):
        """Release the dropout masks of a block, after `round` of all k-steps."""
        self.dropout_masks(state).release(cute.recast_tensor(state.rP, Int32), state.warpgroup, iteration)

    def dropout_masks(self, state: MmaState) -> DropoutMaskPipeline | NoDropoutMasks:
        return state.storage.dropout_masks if self.tile.dropout_producer else NoDropoutMasks()

    @cute.jit
    def further_blocks(self, state: MmaState, tile: MmaTile):
        """Process the blocks after the first: masked ones, full ones, masked ones."""
        block_iter, static = tile.block_iter, self.static
        may_speculate = self.config.may_speculate
        speculates = self.tile.speculative_max and may_speculate
        # Softcap has two methods of tanh, which double the loop body, so masked and full blocks share one loop. In
        # outward order (ALiBi) they share one too, because a masked block may come anywhere in the order.
        is_capped = self.config.has_softcap and static.is_bounded
        if cutlass.const_expr((self.config.has_alibi and isinstance(block_iter, OutwardBlockIterator)) or is_capped):
            for iteration in cutlass.range(tile.iteration + 1, tile.iteration + block_iter.num, unroll=1):
                self.further_block(state, tile, iteration, MAYBE, speculates)
        else:
            full_begin = tile.iteration + cutlass.max(block_iter.full_begin, 1)
            full_end = tile.iteration + cutlass.max(block_iter.full_end, 1)
            starts_masked, ends_masked = self.config.masked_loops
            if cutlass.const_expr(starts_masked):
                for iteration in cutlass.range(tile.iteration + 1, full_begin, unroll=1):
                    self.further_block(state, tile, iteration, True, False)
            for iteration in cutlass.range(full_begin, full_end, unroll=1):
                self.further_block(state, tile, iteration, False, speculates)
            if cutlass.const_expr(ends_masked):
                for iteration in cutlass.range(full_end, tile.iteration + block_iter.num, unroll=1):
                    self.further_block(state, tile, iteration, True, self.tile.speculative_max_masked and may_speculate)

    @cute.jit
    def further_block(
        self, state: MmaState, tile: MmaTile, iteration: Int32, masked: cutlass.Constexpr, speculates: cutlass.Constexpr
    ):
        """Process a block after the first: its S and P, and P V of the previous block.

        `masked`: True, False or MAYBE. `speculates`: compute P with the old row max (`device/softmax/speculative.py`).
        """
        # `RowExp2` adds the rest of ALiBi.
        assert state.alibi_step is None or speculates
        storage, softmax, i = state.storage, state.softmax, iteration - tile.iteration
        # S = Q K^T;  O += P V of the previous block
        acc_S, block = self.start_qk_and_pv(state, tile, iteration, masked)
        warpgroup.wait_group(1)
        storage.release_k(iteration)
        # S: scale, softcap, ALiBi, bias, score_mod, masks, unless `exp2` fuses them with the exponentials
        exp2 = transform_further(self.config, softmax, tile, acc_S, block, i, masked, speculates)

        # m' = max(m, rowmax S), unless m is speculative
        probs = ProbBlock.of(acc_S, softmax)
        row_max = SpeculativeMax(softmax) if speculates else ExactMax(softmax, self.keys_seen(i))
        grew = row_max.raise_before_exp2(probs, exp2)

        # P = exp(scale (S - m')): the first k-steps before the wait for P V of the previous block
        early, late = range(self.config.early_steps), range(self.config.early_steps, self.config.steps)
        exp2.exponentiate(softmax, probs, early, row_max.maybe_empty)
        self.look_ahead(state, tile, iteration + 1, probs.block_sum)
        self.dropout_masks(state).wait(state.warpgroup, iteration)
        warpgroup.wait_group(0)
        storage.v.release(iteration - 1)
        self.round(state, probs.acc_P, early, iteration)
        exp2.exponentiate(softmax, probs, late, row_max.maybe_empty)
        self.round(state, probs.acc_P, late, iteration)

        # With a speculative m: m' and P again, if m was too small
        round_again = partial(self.round, state, probs.acc_P, range(self.config.steps), iteration)
        row_max.correct_after_exp2(probs, exp2, as_mn(state.acc_O), round_again)
        exp2.release()
        self.release_dropout_masks(state, iteration)
        # l = l alpha + rowsum P;  O = O alpha
        softmax.add_sums(probs.block_sum)
        if grew:
            softmax.scale_rows(as_mn(state.acc_O), softmax.alpha)

    @cute.jit
    def skip_blocks(self, state: MmaState, tile: MmaTile):
        """Release the blocks of a tile in which this warpgroup's rows see no key, and pass on its turns.

        V of the last own block may still be in use; it has another stage (`Config.skips_blocks`).
        """
        storage = state.storage
        first, end = tile.iteration + tile.block_iter.num, tile.iteration + tile.num_blocks
        for iteration in cutlass.range(first, end, unroll=1):
            storage.k.wait_full(iteration)
            state.order.wait()
            state.order.arrive()
            storage.release_k(iteration)
            storage.v.wait_full(iteration)
            storage.v.release(iteration)

    @cute.jit
    def start_qk_and_pv(self, state: MmaState, tile: MmaTile, iteration: Int32, masked: cutlass.Constexpr):
        """Start S = Q K^T of a block and O += P V of the previous one; return (accumulator of S, `KvBlock`)."""
        storage, i, block, word = state.storage, iteration - tile.iteration, None, None
        storage.k.wait_full(iteration)
        if cutlass.const_expr(tile.score_params.mods is not None):
            n_block = storage.n_block(tile.block_iter, iteration, i)
            block = kv_block(state, tile, iteration, n_block, masked is False)
        if cutlass.const_expr(state.alibi_step is not None):
            block = kv_block(state, tile, iteration, tile.block_iter.block(i), False)
            word = tile.score_params.score.alibi.step_word(tile.alibi_word, score_tile(self.config, tile, block))
        state.order.wait()
        acc_S = self.start_qk(state, tile.count, iteration, word)
        storage.v.wait_full(iteration - 1)
        self.start_pv(state, iteration - 1)
        state.order.arrive()
        if cutlass.const_expr(block is None):
            block = kv_block(state, tile, iteration, tile.block_iter.block(i), False)
        return acc_S, block

    def keys_seen(self, blocks_seen: Int32) -> Int32:
        """The `keys_seen` of `ExactMax` for a block after the first.

        If two blocks together have more than EXACT_KEYS keys, m is exact in the first block only: the result is then
        the constant EXACT_KEYS.
        """
        tile_n = self.tile.tile_n
        return Int32(EXACT_KEYS) if 2 * tile_n > EXACT_KEYS else blocks_seen * tile_n

    @cute.jit
    def look_ahead(self, state: MmaState, tile: MmaTile, following: Int32, block_sum: cute.Tensor):
        """Wait for K of the next block. After the last block, release Q if it has one stage.

        The branch depends on the sums of the early exponentials. This keeps ptxas from moving the following wait for
        P V before them. The branch is always taken, except for NaN; a later wait then covers K. If the sums were
        compared with a constant, ptxas could prove that the branch is always taken.
        """
        if cute.arch.vote_any_sync(block_sum[0] + block_sum[1] >= -state.softmax.scale_log2):
            if following < tile.iteration + tile.block_iter.num:
                state.storage.k.wait_full(following)
        if cutlass.const_expr(self.tile.q_stages == 1):
            if following == tile.iteration + tile.block_iter.num:
                self.release_q(state, tile)

    @cute.jit
    def last_block(self, p: Params, state: MmaState, tile: MmaTile):
        """O += P V of the tile's last block; then store the output and the LSE."""
        if tile.has_blocks():
            last = tile.iteration + tile.block_iter.num - 1
            state.storage.v.wait_full(last)
            self.start_pv(state, last)
            warpgroup.wait_group(0)
            state.storage.v.release(last)
        else:
            self.release_q(state, tile)
        self.finish_statistics(state, tile)
        self.store_lse(p, state, tile)
        if cutlass.const_expr(self.tile.q_stages > 1):
            self.hand_over_output(p, state, tile)
        else:
            self.store_from_registers(p, state, tile)

    @cute.jit
    def last_and_first_block(self, p: Params, state: MmaState, tile: MmaTile, following: MmaTile):
        """`last_block` of a tile together with the first block of the following tile, whose softmax overlaps P V."""
        storage = state.storage
        last = tile.iteration + tile.block_iter.num - 1
        storage.k.wait_full(following.iteration)
        n_block = storage.first_n_block(following.block_iter, following.iteration)
        block = kv_block(state, following, following.iteration, n_block, False)
        state.order.wait()
        acc_S = self.start_qk(state, following.count, following.iteration)
        storage.v.wait_full(last)
        self.start_pv(state, last)
        state.order.arrive()
        self.finish_statistics(state, tile)
        state.softmax.restart()
        warpgroup.wait_group(1)
        storage.release_k(following.iteration)
        self.first_softmax(state, following, acc_S, block)
        # The branches of `store_lse` keep ptxas from moving the wait before the exponentials.
        self.store_lse(p, state, tile)
        warpgroup.wait_group(0)
        storage.v.release(last)
        self.hand_over_output(p, state, tile)
        state.acc_O.fill(0.0)
        self.first_round(state, following, acc_S)

    @cute.jit
    def finish_statistics(self, state: MmaState, tile: MmaTile):
        """Compute the LSE, 1 / l and max_logit of a tile. The softmax statistics are then free for the next tile."""
        score_params = tile.score_params
        state.softmax.compute_lse(state.lse, state.inverse, score_params.sink, score_params.dropout_scale)
        if cutlass.const_expr(state.max_logit is not None):
            rows_left = tile.seqlen.q_len - tile.mask.first_row
            state.max_logit[0] = state.softmax.max_logit(state.tScS, rows_left)

    @cute.jit
    def store_lse(self, p: Params, state: MmaState, tile: MmaTile):
        first_row, seqlen = tile.mask.first_row, self._seqlen_at_end(p, state, tile)
        gLSE = cute.domain_offset((seqlen.q_row(first_row),), seqlen.slice_head(p.mLSE, tile.head))
        store_lse(state.lse, gLSE, state.tScS, state.thread, seqlen.q_len - first_row)
        if cutlass.const_expr(state.max_logit is not None):
            update_max_logit(p.score_params.max_logit, tile.head, state.max_logit[0])

    @cute.jit
    def release_q(self, state: MmaState, tile: MmaTile):
        """Release Q after its last use. With two stages, the store warp releases it, after the output is stored."""
        if cutlass.const_expr(self.tile.q_stages == 1):
            state.storage.release_q(tile.count)

    @cute.jit
    def output(self, state: MmaState) -> cute.Tensor:
        """O / l, converted to the dtype of q."""
        state.softmax.scale_rows(as_mn(state.acc_O), state.inverse)
        rO = cute.make_fragment_like(state.acc_O, self.dtype)
        convert(state.acc_O, rO, range(self.tile.width_v // 16))
        return rO

    def thread_at_end(self, state: MmaState) -> Int32:
        """The thread index; with score features or a wide output `rederived`.

        No address of the output then stays in registers over a tile.
        """
        has_room = self.static.base_cost == 0 and self.tile.width_v <= MAX_INSTRUCTION_COLUMNS
        return state.thread if has_room else rederived(state.thread)

    @cute.jit
    def store_from_registers(self, p: Params, state: MmaState, tile: MmaTile):
        """Store O / l to global memory directly from registers."""
        first_row, seqlen = tile.mask.first_row, self._seqlen_at_end(p, state, tile)
        gO = seqlen.slice_head(p.mO, tile.head)
        gO = row_tile(gO, seqlen.q_row(first_row), WARPGROUP_ROWS, self.tile.width_v)
        if cutlass.const_expr(self.static.out_fp32):
            state.softmax.scale_rows(as_mn(state.acc_O), state.inverse)
            thread, rows_left = self.thread_at_end(state), seqlen.q_len - first_row
            DirectStore(state.mma_pv, thread, rows_left, self.static.width_v).floats(state.acc_O, gO)
        else:
            rO = self.output(state)
            thread, rows_left = self.thread_at_end(state), seqlen.q_len - first_row
            DirectStore(state.mma_pv, thread, rows_left, self.static.width_v).rounded(rO, gO)

    @cute.jit
    def hand_over_output(self, p: Params, state: MmaState, tile: MmaTile):
        """Write O / l to the stage of Q, from which the store warp stores it.

        An fp32 output does not fit there. It is stored from registers, and the store warp only releases the stage.
        """
        if cutlass.const_expr(self.static.out_fp32):
            self.store_from_registers(p, state, tile)
        else:
            self.stage_output(state, tile)
        cute.arch.mbarrier_arrive(state.storage.output_barrier(state.warpgroup, tile.count))

    @cute.jit
    def stage_output(self, state: MmaState, tile: MmaTile):
        """Write O / l to the warpgroup's stage of Q with stmatrix, and make it visible to TMA."""
        rO = self.output(state)
        sO = state.storage.output_stage(state.warpgroup, tile.count)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, state.mma_pv).get_slice(self.thread_at_end(state))
        cute.copy(atom, copy.retile(rO), copy.partition_D(sO))
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def start_qk(self, state: MmaState, count: Int32, iteration: Int32, alibi_word: Int32 | None = None):
        """Start S = Q K^T, with the k-step of ALiBi if there is an operand for it. Return the accumulator of S."""
        rQ = state.rQ[None, None, None, state.storage.q.stage(count)]
        rK = state.rK[None, None, None, state.storage.k.stage(iteration)]
        # A new tensor for every block, so that the compiler does not keep its values for the next block.
        acc_S = cute.make_rmem_tensor(self._shape_S(state.mma_qk), Float32)
        start_extra_step = None
        if cutlass.const_expr(alibi_word is not None):
            start_extra_step = partial(state.alibi_step.start, acc_S, state.alibi_step.operand(alibi_word))
        start_gemm(state.mma_qk, acc_S, rQ, rK, False, start_extra_step=start_extra_step)
        return acc_S

    @cute.jit
    def start_pv(self, state: MmaState, iteration: Int32):
        """Start O += P V."""
        rV = state.rV[None, None, None, state.storage.v.stage(iteration)]
        start_gemm(state.mma_pv, state.acc_O, as_operand_a(state.rP), rV, True)
