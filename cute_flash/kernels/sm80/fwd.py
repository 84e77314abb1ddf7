"""Forward attention with mma.sync, ldmatrix and cp.async, for Ampere, Ada and later GPUs.

For each tile of query rows, over K/V blocks j from the last visible one to the first (FlashAttention-2):

    S  = Q Kj^T                          fp32 accumulators, tile_m x tile_n
    S  = -inf outside the band           only in masked blocks
    m' = max(m, rowmax S);  P = exp(scale (S - m'))
    l  = l exp(scale (m - m')) + rowsum P
    O  = O exp(scale (m - m')) + P Vj    the accumulator layout of P in registers is the operand layout
    out = O / l,  LSE = scale m + log l

Score features (`ScoreParams`): softcap, ALiBi, a bias and score_mod change S before the mask, mask_mod masks further
scores, dropout changes P after its row sums are taken, and a sink changes l and the LSE at the end. With a block mask,
the K/V blocks are those that it lists, full ones first.

Warps are not specialised. In most tiles a warp has tile_m / num_warps rows (16 or 32), and reads all of K and V. With
16 rows, ldmatrix saturates shared memory. At D = 192 and 256 there are no registers for 32 rows of O, so two warps
share 32 rows: each computes S for half of the keys and O for half of the columns, and reads half of K and V
(`device/mma/row_warps.py`). Above D = 256, two or four warps share 16 or 32 rows.

| shared memory | elements                  | lifetime                                     |
|---------------|---------------------------|----------------------------------------------|
| sQ            | tile_m x tile_d           | the tile; O is stored through it at the end  |
| sK, sV        | stages x tile_n x tile_d  | one block each                               |
| sP            | tile_m x tile_n           | one block; only if warps share rows          |
| sRows         | 4 x row_warps x tile_m    | one exchange; only if warps share rows       |

If values and keys differ in width, the tile has the larger width, and the narrower operand is zero-filled.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from cute_flash.device.memory.copies import RowTiles, async_row_copy, plain_row_copy, row_tile
from cute_flash.device.memory.epilogue import DirectStore, Epilogue, store_lse, update_max_logit
from cute_flash.device.memory.views import as_mn, as_operand_a
from cute_flash.device.mma import split_fp32
from cute_flash.device.mma.split_fp32 import Pieces
from cute_flash.device.mma.warp_gemm import gemm, gemm_rs
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduling.block_sparse import BlockSparseIterator
from cute_flash.device.scheduling.seqlen import HeadBlock, SeqlenInfo
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.philox import batch_head_index
from cute_flash.device.scores.position import TilePosition
from cute_flash.device.softmax.softmax import EXACT_KEYS, Softmax
from cute_flash.device.softmax.speculative import SpeculativeMax
from cute_flash.kernels.common.params import ScoreParams
from cute_flash.kernels.sm80.fwd_storage import MainloopState, Params, SharedStorage, WarpGrids
from cute_flash.kernels.sm80.kernel import TileKernel
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80, may_speculate
from cute_flash.spec.band import BlockRange
from cute_flash.spec.problem import Static


class SparseVisit(NamedTuple):
    """A visit of the iterator of a block mask."""

    index: Int32  # number of visits before this one
    next_block: Int32  # n_block of the next visit


class FwdSm80(TileKernel):
    """The forward kernel. One CTA computes one tile of queries of one head."""

    def __init__(self, static: Static, tile: FwdTileSm80):
        super().__init__(static, tile)
        assert may_speculate(static) or not tile.speculative_max
        self.grids = WarpGrids.of(tile, self.dtype)

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        tile, static, args = self.tile, self.static, self.read_operands(operands)
        score_params = ScoreParams.of(static, args)
        row_elements = tile.smem(tile.tile_m).copy_cols
        tiles, grid = self.tiles(args, args.q, tile.tile_m, args.q_tile_list, static.has_right)
        params = Params(
            mQ=args.q,
            mK=args.k,
            mV=args.v,
            mO=args.out,
            mLSE=args.lse,
            scale_log2=score_params.softmax_scale(args.scale),
            band=self.band(args),
            tiles=tiles,
            copy_in=async_row_copy(tile.num_threads, row_elements, self.dtype),
            copy_out=plain_row_copy(tile.num_threads, row_elements, self.dtype),
            mma_s=self.grids.s.mma(),
            mma_o=self.grids.o.mma(),
            score_params=score_params,
            norms=args.norms if static.is_fp32 else None,
        )
        self.launch(self.symbol("fwd_sm80"), params, grid, tile.num_threads, stream)

    @cute.jit
    def process_tile(self, p: Params, m_block: Int32, head: Int32, seqlen: SeqlenInfo):
        tile = self.tile
        thread, _, _ = cute.arch.thread_idx()
        seqlen_q, seqlen_k = seqlen.q_len, seqlen.k_len
        head_kv = head // (p.mQ.shape[1] // p.mK.shape[1])
        rows_left = seqlen_q - m_block * tile.tile_m

        first_row = seqlen.q_row(m_block * tile.tile_m)
        gQ = row_tile(seqlen.slice_head(p.mQ, head), first_row, tile.tile_m, tile.row_cols)
        gK = seqlen.slice_keys(p.mK, head_kv)
        gV = seqlen.slice_keys(p.mV, head_kv)
        storage = SharedStorage.allocate(tile, self.dtype)

        thr_mma = p.mma_o.get_slice(thread)
        acc_O = cute.make_rmem_tensor(thr_mma.partition_shape_C((tile.tile_m, tile.head_dim)), Float32)
        acc_O.fill(0.0)
        tScS = self.coordinates(p.mma_s, thread)
        tracks_max_score, is_exact = p.score_params.max_logit is not None, self.static.batch_invariant
        softmax = Softmax.start(as_mn(acc_O), p.scale_log2, tracks_max_score, is_exact)
        softmax = replace(softmax, sums_by_block=self.static.is_fp32)
        # fp32 calls load fp16 pieces (`device.mma.split_fp32`), whose rows are padded to the width of the tile.
        head_dim, width_v = self.static.head_dim, self.static.width_v
        if cutlass.const_expr(self.static.is_fp32):
            head_dim, width_v = tile.row_cols, tile.row_cols
        load_q = RowTiles(p.copy_in, thread, tile.tile_m, tile.row_cols, head_dim)
        load_k = replace(load_q, tile_rows=tile.tile_n)
        operand_q, operand_k, operand_v = self.grids.operands(tile, p, thread, storage)
        blocks = p.band.blocks(m_block, tile.tile_m, tile.tile_n, seqlen_q, seqlen_k)
        state = MainloopState(
            load_k=load_k,
            load_v=replace(load_k, head_dim=width_v),
            gK=gK,
            gV=gV,
            sK=storage.sK,
            sV=storage.sV,
            q=operand_q,
            k=operand_k,
            v=operand_v,
            mma_s=p.mma_s,
            mma_o=p.mma_o,
            acc_O=acc_O,
            softmax=softmax,
            mask=Mask(p.band, seqlen_q, seqlen_k, m_block * tile.tile_m, tScS),
            blocks=blocks,
            score_params=p.score_params.for_head(head, seqlen.batch),
            dropout=p.score_params.dropout(),
            batch_head=batch_head_index(p.score_params.dropout_origin, seqlen.batch, head, p.mQ.shape[1]),
            block_iter=self.block_iterator(p, m_block, head, seqlen, blocks),
            row_warps=self.grids.row_warps(tile, p, thread, storage),
            score_factor=self.score_factor(p, head, head_kv, seqlen),
        )

        # A tile that sees no key must not load Q: a late copy would overwrite the output in sQ.
        if self.has_blocks(state):
            load_q.load(gQ, storage.sQ[None, None, 0], rows_left, True)
            self.mainloop(state)

        if cutlass.const_expr(self.static.base_cost > 0):
            # With score features there are no registers to keep these values during the loop: compute them again.
            thread = rederived(thread)
            m_block, head, seqlen = self.tile_coord(p, rederived(cute.arch.block_idx()[0]))
            rows_left, first_row = seqlen.q_len - m_block * tile.tile_m, seqlen.q_row(m_block * tile.tile_m)
            tScS = self.coordinates(p.mma_s, thread)
        gO = row_tile(seqlen.slice_head(p.mO, head), first_row, tile.tile_m, tile.head_dim)
        gLSE = cute.domain_offset((first_row,), seqlen.slice_head(p.mLSE, head))
        lse = cute.make_rmem_tensor(cute.size(softmax.row_max), Float32)
        if cutlass.const_expr(self.static.is_fp32):
            head_v = head // (p.mQ.shape[1] // p.mK.shape[1])
            acc_O.store(acc_O.load() * (self.factor(p, 2, head_v, seqlen) * (1 / split_fp32.PROB_SCALE)))
        if cutlass.const_expr(state.row_warps is not None):
            replace(state.row_warps, thread=thread).combine(softmax.row_sum, lambda a, b: a + b)
        softmax.finish(as_mn(acc_O), lse, state.score_params.sink, state.score_params.dropout_scale)
        if cutlass.const_expr(state.row_warps is None):
            store_lse(lse, gLSE, tScS, thread, rows_left)
        else:
            # The first of the warps that share rows stores their LSE.
            if thread < 32 * tile.warps_m:
                store_lse(lse, gLSE, tScS, thread, rows_left)
        if cutlass.const_expr(p.score_params.max_logit is not None):
            update_max_logit(p.score_params.max_logit, head, softmax.max_logit(tScS, rows_left))
        if cutlass.const_expr(self.static.out_fp32 or self.static.is_fp32):
            DirectStore(p.mma_o, thread, rows_left, self.static.width_v).floats(acc_O, gO)
        else:
            store_rows = RowTiles(p.copy_out, thread, tile.tile_m, tile.head_dim, self.static.width_v)
            Epilogue(p.mma_o, store_rows, thread, rows_left).store(acc_O, storage.sQ[None, None, 0], gO)

    def factor(self, p: Params, index: int, head: Int32, seqlen: SeqlenInfo) -> Float32:
        """The scale factor of a head's fp16 pieces of Q, K or V (`index` 0, 1, 2)."""
        return split_fp32.factor(p.norms[index, seqlen.batch, head])

    def score_factor(self, p: Params, head: Int32, head_kv: Int32, seqlen: SeqlenInfo) -> Float32 | None:
        """The factor that turns a product of fp16 pieces into Q K^T; None except in fp32 calls."""
        if not self.static.is_fp32:
            return None
        return self.factor(p, 0, head, seqlen) * self.factor(p, 1, head_kv, seqlen)

    def block_iterator(
        self, p: Params, m_block: Int32, head: Int32, seqlen: SeqlenInfo, blocks: BlockRange
    ) -> BlockSparseIterator | None:
        """The iterator of a block mask; None without one. `blocks`: the K/V blocks that the band does not hide."""
        indices = p.score_params.block_indices
        if indices is None:
            return None
        rows, keys = self.static.mods.block_mask_tile
        queries = HeadBlock(seqlen.batch, head, m_block // (rows // self.tile.tile_m))
        band_blocks = blocks if self.static.is_bounded else None
        return BlockSparseIterator(indices, queries, indices.counts(queries), keys // self.tile.tile_n, band_blocks)

    def has_blocks(self, state: MainloopState):
        return state.blocks.begin < state.blocks.end if state.block_iter is None else state.block_iter.num > 0

    def coordinates(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.Tensor:
        """(row, column) within the tile of every element of S."""
        coords = cute.make_identity_tensor((self.tile.tile_m, self.tile.tile_n))
        return tiled_mma.get_slice(thread).partition_C(coords)

    @cute.jit
    def mainloop(self, state: MainloopState):
        if cutlass.const_expr(state.block_iter is None):
            self.band_mainloop(state)
        else:
            self.block_sparse_mainloop(state)

    @cute.jit
    def load_q_fragments(self, state: MainloopState):
        """Wait for Q (and the first block), and load the part of Q that stays in registers."""
        if cutlass.const_expr(self.tile.q_steps > 0):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            for k in cutlass.range_constexpr(self.tile.q_steps):
                state.q.load(k, 0)

    @cute.jit
    def block_sparse_mainloop(self, state: MainloopState):
        """Process the blocks of a block mask: full ones, then partial ones."""
        block_iter = state.block_iter
        n_block = block_iter.first
        self.load_block(state, n_block, Int32(0), True)
        cute.arch.cp_async_commit_group()
        self.load_q_fragments(state)
        for i in cutlass.range(block_iter.full_end, unroll=1):
            following = block_iter.block(cutlass.min(i + 1, block_iter.num - 1))
            self.process_block(state, n_block, False, SparseVisit(i, following))
            n_block = following
        for i in cutlass.range(block_iter.full_end, block_iter.num, unroll=1):
            following = block_iter.block(cutlass.min(i + 1, block_iter.num - 1))
            self.process_block(state, n_block, True, SparseVisit(i, following))
            n_block = following

    @cute.jit
    def band_mainloop(self, state: MainloopState):
        """Process the blocks of the band from the last to the first: masked on the right, full, masked on the left."""
        blocks = state.blocks
        self.load_block(state, blocks.end - 1, blocks.end - 1, True)
        cute.arch.cp_async_commit_group()
        self.load_q_fragments(state)
        for i in cutlass.range(blocks.end - blocks.full_end, unroll=1):
            self.process_block(state, blocks.end - 1 - i, True)
        for i in cutlass.range(blocks.full_end - blocks.full_begin, unroll=1):
            self.process_block(state, blocks.full_end - 1 - i, False)
        if cutlass.const_expr(self.static.has_left):
            for i in cutlass.range(blocks.full_begin - blocks.begin, unroll=1):
                self.process_block(state, blocks.full_begin - 1 - i, True)

    def stage(self, iteration: Int32) -> Int32 | int:
        return iteration % 2 if self.tile.stages == 2 else 0

    @cute.jit
    def load_block(self, state: MainloopState, n_block: Int32, iteration: Int32, is_last: cutlass.Constexpr):
        """Start to load K of an n_block, and V too with two stages.

        `is_last`: the block may contain the last key, so rows past the end are checked.
        """
        self.load_tile(state, state.load_k, state.gK, state.sK, n_block, iteration, is_last)
        if cutlass.const_expr(self.tile.stages == 2):
            self.load_v(state, n_block, iteration, is_last)

    @cute.jit
    def load_v(self, state: MainloopState, n_block: Int32, iteration: Int32, is_last: cutlass.Constexpr):
        self.load_tile(state, state.load_v, state.gV, state.sV, n_block, iteration, is_last)

    @cute.jit
    def load_tile(
        self,
        state: MainloopState,
        loader: RowTiles,
        gX: cute.Tensor,
        sX: cute.Tensor,
        n_block: Int32,
        iteration: Int32,
        is_last: cutlass.Constexpr,
    ):
        first = n_block * self.tile.tile_n
        tile = row_tile(gX, first, self.tile.tile_n, self.tile.row_cols)
        if cutlass.const_expr(self.static.base_cost > 0):
            # With score features there are no registers to keep the loader's addresses during the loop.
            loader = replace(loader, thread=rederived(loader.thread))
        loader.load(tile, sX[None, None, self.stage(iteration)], state.mask.seqlen_k - first, is_last)

    @cute.jit
    def process_block(
        self, state: MainloopState, n_block: Int32, masked: cutlass.Constexpr, sparse: SparseVisit | None = None
    ):
        """Compute S, P and P V of a block, and start the loads of the next. `sparse`: None without a block mask."""
        tile, mods = self.tile, state.score_params.mods
        # The parity of `iteration` selects the stage; it alternates from block to block.
        iteration = n_block if sparse is None else sparse.index
        stage = self.stage(iteration)
        acc_S = cute.make_rmem_tensor(state.mma_s.get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n)), Float32)
        acc_S.fill(0.0)

        # Wait until K(n), and V(n) with two stages, has landed, and every warp is done with the previous block's
        # buffers.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if cutlass.const_expr(tile.stages == 1):
            self.load_v(state, n_block, iteration, masked or sparse is not None)
            cute.arch.cp_async_commit_group()
        bias = None
        if cutlass.const_expr(mods is not None):
            warp_column = 0 if state.row_warps is None else state.row_warps.first_key
            bias = mods.load_bias(state.mask, n_block * tile.tile_n, not masked, warp_column)

        # S = Q K^T
        if cutlass.const_expr(self.static.is_fp32):
            split_fp32.gemm_ss(state.mma_s, acc_S, state.q, state.k, stage, tile.head_dim // 16)
            acc_S.store(acc_S.load() * state.score_factor)
        else:
            gemm(state.mma_s, acc_S, state.q, state.k, stage, tile.q_steps)

        load_following = partial(self.load_following, state, n_block, sparse)
        if cutlass.const_expr(state.row_warps is None):
            if cutlass.const_expr(tile.stages == 1):
                # Wait until V(n) has landed, and every warp is done with K(n).
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
            load_following()

        # `looks_near` allows softcap's polynomial (`Score.apply`). A window with two bounds leaves no registers for it.
        # `batch_invariant` excludes it, because its use depends on all rows of a warp.
        is_window = self.static.has_left and self.static.has_right
        looks_near, column = not (masked or is_window or self.static.batch_invariant), n_block * tile.tile_n
        state.score_params.transform(acc_S, state.mask, column, bias, looks_near)
        state.score_params.apply_mask(acc_S, state.mask, state.block_iter, n_block, column, masked)
        blocks_seen = state.blocks.end - 1 - n_block if sparse is None else iteration
        keys_seen = blocks_seen * tile.tile_n
        if cutlass.const_expr(tile.speculative_max):
            probs = Pieces(self.speculative_probs(state, acc_S, keys_seen, load_following))
        else:
            probs = self.probs(state, acc_S, keys_seen, column, load_following)

        # O += P V
        if cutlass.const_expr(self.static.is_fp32):
            split_fp32.add_gemm_rs(state.mma_o, state.acc_O, probs, state.v, stage)
        else:
            gemm_rs(state.mma_o, state.acc_O, probs.high, state.v, stage)

    @cute.jit
    def load_following(self, state: MainloopState, n_block: Int32, sparse: SparseVisit | None):
        """Start the loads of the next block. Arguments are those of `process_block`."""
        if cutlass.const_expr(sparse is None):
            if n_block > state.blocks.begin:
                self.load_block(state, n_block - 1, n_block - 1, False)
        else:
            if sparse.index + 1 < state.block_iter.num:
                self.load_block(state, sparse.next_block, sparse.index + 1, True)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def probs(
        self,
        state: MainloopState,
        acc_S: cute.Tensor,
        keys_seen: Int32,
        column: Int32,
        load_following: Callable[[], None],
    ) -> Pieces:
        """P as operand A. Raises the row max first, if a score exceeds it.

        `keys_seen`: number of keys in the blocks before this one. `column`: first key of the block. Warps that share
        rows exchange the row maxima of the block, then P.
        """
        row_warps = state.row_warps

        def combine_max(block_max: cute.Tensor) -> None:
            # Wait until V(n) has landed, and every warp has stored its maxima and is done with K(n).
            cute.arch.cp_async_wait_group(0)
            row_warps.combine(block_max, cute.arch.fmax)
            load_following()

        combine = None if row_warps is None else combine_max
        state.softmax.step(as_mn(acc_S), as_mn(state.acc_O), keys_seen, combine)
        pieces = self.prob_pieces(acc_S)
        if cutlass.const_expr(state.dropout is not None):
            position = TilePosition(state.batch_head, state.mask.first_row, column, state.mask.tScS)
            masks = state.dropout.masks_of(as_operand_a(pieces.high), position)
            for rP in pieces.present():
                packed = cute.recast_tensor(rP, Int32)
                for i in cutlass.range_constexpr(cute.size(packed)):
                    packed[i] = packed[i] & masks[i]
        if cutlass.const_expr(row_warps is None):
            operand = pieces.as_operand_a()
        else:
            row_warps.store_p.store(pieces.high)
            cute.arch.sync_threads()
            operand = Pieces(row_warps.load_p())
        return operand

    def prob_pieces(self, acc_S: cute.Tensor) -> Pieces:
        """P rounded to the dtype of the MMA; in fp32 calls, its high and its low fp16 piece."""
        if self.static.is_fp32:
            return split_fp32.split(acc_S, Float32(split_fp32.PROB_SCALE))
        rP = cute.make_fragment_like(acc_S, self.dtype)
        rP.store(acc_S.load().to(self.dtype))
        return Pieces(rP)

    @cute.jit
    def speculative_probs(
        self, state: MainloopState, acc_S: cute.Tensor, keys_seen: Int32, load_following: Callable[[], None]
    ) -> cute.Tensor:
        """P as operand A, with a speculative row max (`device/softmax/speculative.py`), except in the first blocks.

        P of warps that share rows passes through shared memory. One barrier of the CTA orders P, V and the next copy
        of K, and carries the vote, so that all warps take the same branch after it.
        """
        softmax, row_warps, rP = state.softmax, state.row_warps, cute.make_fragment_like(acc_S, self.dtype)
        block_sum = cute.make_fragment_like(softmax.row_max)
        is_early, may_be_outgrown = keys_seen < EXACT_KEYS, cutlass.Boolean(True)
        if not is_early:
            SpeculativeMax(softmax).exponentiate_to(rP, acc_S, block_sum, maybe_empty=False)
            if cutlass.const_expr(row_warps is None):
                may_be_outgrown = SpeculativeMax(softmax).may_have_outgrown(block_sum)
            else:
                may_be_outgrown = SpeculativeMax(softmax).sums_exceed(block_sum)
                row_warps.store_p.store(rP)
        if cutlass.const_expr(row_warps is not None):
            # Wait until V(n) has landed, and every warp has stored P and is done with K(n).
            cute.arch.cp_async_wait_group(0)
            may_be_outgrown = row_warps.any(may_be_outgrown)
            load_following()
        if may_be_outgrown:
            self.correct_max(state, acc_S, rP, block_sum, keys_seen, is_early)
        softmax.add_sums(block_sum)
        return as_operand_a(rP) if row_warps is None else row_warps.load_p()

    @cute.jit
    def correct_max(
        self,
        state: MainloopState,
        acc_S: cute.Tensor,
        rP: cute.Tensor,
        block_sum: cute.Tensor,
        keys_seen: Int32,
        has_no_probs: cutlass.Boolean,
    ):
        """Compute the row max of a block. Compute P if there is none so far, or if m was too small.

        `block_sum`: the row sums of P.
        """
        softmax, row_warps = state.softmax, state.row_warps
        block_max = cute.make_fragment_like(softmax.row_max)
        softmax.block_max(as_mn(acc_S), block_max)
        if cutlass.const_expr(row_warps is not None):
            row_warps.combine(block_max, cute.arch.fmax)
        is_outgrown = SpeculativeMax(softmax).max_exceeds(block_max, keys_seen)
        if is_outgrown:
            softmax.raise_max(block_max, as_mn(state.acc_O))
        if is_outgrown | has_no_probs:
            SpeculativeMax(softmax).exponentiate_to(rP, acc_S, block_sum, maybe_empty=True)
            if cutlass.const_expr(row_warps is not None):
                row_warps.store_p.store(rP)
        if cutlass.const_expr(row_warps is not None):
            cute.arch.sync_threads()
