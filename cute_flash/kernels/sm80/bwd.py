"""Backward attention with mma.sync, ldmatrix and cp.async, for Ampere, Ada and later GPUs.

For each K/V tile, over the query heads that share it and their m_blocks i:

    S^T  = K Qi^T                       keys are rows
    P^T  = exp(scale S^T - LSE)         0 outside the band
    dP^T = V dOi^T
    dS^T = P^T (dP^T - Δ),  Δ = rowsum(dO O) - dLSE
    dV  += P^T dOi
    dK  += dS^T Qi                      times scale at the end
    dQi += dS K                         fp32 atomic additions in global memory, times scale in postprocess

The warps form a grid over the tile of each product (`BwdTileSm80`). In the large tiles for plain attention half of them
compute dK and the others dV, with the same code and different addresses: a warp then has a larger tile of one gradient,
and reads less shared memory per MMA. In the other tiles every warp has a part of both. If all warps are along the keys,
a warp's P^T and dS^T are operands of its dV and dK directly from registers. Tiles of wide heads have few scores: half
of the warps then compute S and the others dP, which they pass to the first half in fp32.

| shared memory | elements                     | lifetime                                       |
|---------------|------------------------------|------------------------------------------------|
| sKV           | 2 x tile_n x tile_d          | the tile; dK and dV are stored through it      |
| sQdO          | 2 x stages x tile_m x tile_d | one m_block                                    |
| sdSP          | 2 x tile_n x tile_m          | one block; only dS if P stays in registers;    |
|               |                              | with `splits_s` first dP in fp32               |
| sRows         | 2 x stages x tile_m, fp32    | LSE and Δ of one m_block                       |
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cute_flash.device.gradients.mods_bwd import AnyScores
from cute_flash.device.gradients.score_bwd import GradientBlock, PlainScores, compute_probs
from cute_flash.device.memory.copies import RowTiles, async_row_copy, plain_row_copy, row_tile
from cute_flash.device.memory.epilogue import DirectStore, Epilogue
from cute_flash.device.memory.ldmatrix import MmaOperand
from cute_flash.device.memory.views import as_mn
from cute_flash.device.mma import split_fp32
from cute_flash.device.mma.split_fp32 import Pieces
from cute_flash.device.mma.warp_grid import WarpGrid
from cute_flash.device.ptx import rederived, select_if
from cute_flash.device.scheduling.block_sparse import BwdBlockIndex
from cute_flash.device.scheduling.semaphore import DQSemaphore
from cute_flash.device.scheduling.seqlen import HeadBlock, SeqlenInfo
from cute_flash.device.scores.mask import Mask
from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.kernels.common.kernel import starts_last_tiles
from cute_flash.kernels.common.params import bwd_score_params
from cute_flash.kernels.sm80.bwd_storage import Factors, GradientKV, MainloopState, Params, SharedStorage, dq_grid
from cute_flash.kernels.sm80.kernel import TileKernel
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.band import FAR, BlockRange
from cute_flash.spec.problem import Static

FLOATS = 4  # in one 16-byte copy


class BwdSm80(TileKernel):
    """The backward kernel. One CTA computes dK and dV of one K/V tile, and adds its part of dQ."""

    def __init__(self, static: Static, tile: BwdTileSm80):
        super().__init__(static, tile)
        self.widths = static.head_dim, static.width_v  # of Q and K; of V and dO
        # fp32 calls load fp16 pieces (`device.mma.split_fp32`), whose rows are padded to the width of the tile.
        self.loaded_widths = (tile.row_cols, tile.row_cols) if static.is_fp32 else self.widths
        self.has_alibi, self.has_dropout = "alibi" in static.features, "dropout" in static.features
        self.q_tile = SmemTile(tile.tile_m, tile.row_cols)
        self.k_tile = SmemTile(tile.tile_n, tile.row_cols)
        self.s_tile = SmemTile(tile.tile_n, tile.tile_m)
        # The queries of a warp are contiguous; the mask relies on it.
        self.s_grid = WarpGrid(self.dtype, tile.warps_per_score, tile.warps_s, tile.queries_per_warp)
        self.kv_grid = WarpGrid(self.dtype, tile.warps_per_gradient, tile.warps_kv)
        self.q_grid = dq_grid(tile, self.dtype)

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        tile, static, args = self.tile, self.static, self.read_operands(operands)
        score_params = bwd_score_params(static, tile, args)
        tiles, grid = self.tiles(args, args.k, tile.tile_n, args.kv_tile_list, starts_last_tiles(static))
        band, semaphore = self.band(args), None
        if cutlass.const_expr(static.deterministic):
            # Replace a missing right bound by one that masks nothing: without a right bound, the kernel would need one
            # more register than a thread has.
            band = band if band.has_right else replace(band, right=Int32(FAR))
            lengths = args.q.shape[2], args.k.shape[2]
            semaphore = DQSemaphore(args.dq_progress, band, *lengths, tile.tile_m, tile.tile_n, by_tma=False)
        params = Params(
            mQ=args.q,
            mK=args.k,
            mV=args.v,
            mdO=args.dout_cast,
            mLSE=args.lse_log2,
            mDelta=args.delta,
            mdQ_accum=args.dq_accum,
            mdK=args.dk,
            mdV=args.dv,
            scale=args.scale,
            scale_log2=args.scale * LOG2_E,
            band=band.of_keys,
            dq_semaphore=semaphore,
            tiles=tiles,
            copy_in=async_row_copy(tile.num_threads, tile.copy_cols, self.dtype),
            copy_out=plain_row_copy(tile.num_threads, tile.copy_cols, self.dtype),
            mma_s=self.s_grid.mma(),
            mma_kv=self.kv_grid.mma(),
            mma_q=self.q_grid.mma(),
            score_params=score_params,
            norms=args.norms if static.is_fp32 else None,
        )
        self.launch(self.symbol("bwd_sm80"), params, grid, tile.num_threads, stream)

    @cute.jit
    def process_tile(self, p: Params, n_block: Int32, head_kv: Int32, seqlen: SeqlenInfo):
        tile, batch = self.tile, seqlen.batch
        thread, _, _ = cute.arch.thread_idx()
        seqlen_q, seqlen_k = seqlen.q_len, seqlen.k_len
        first_row = n_block * tile.tile_n
        storage = SharedStorage.allocate(tile, self.dtype, self.k_tile, self.q_tile, self.s_tile)
        state = self._state(p, storage, seqlen, thread, first_row)
        for gradient in state.gradients:
            gradient.acc.fill(0.0)
        if cutlass.const_expr(state.dalibi is not None):
            state.dalibi.fill(0.0)

        # If no query sees the keys, nothing is loaded: a late copy would overwrite the gradients in sKV.
        blocks = p.band.blocks(n_block, tile.tile_n, tile.tile_m, seqlen_k, seqlen_q)
        has_blocks = blocks.begin < blocks.end
        if cutlass.const_expr(self.static.block_sparse):
            has_blocks = p.score_params.mods.block_indices.count(batch, head_kv, n_block) > 0
        if has_blocks:
            for i, mX in enumerate((p.mK, p.mV)):
                rows = RowTiles(p.copy_in, thread, tile.tile_n, tile.row_cols, self.loaded_widths[i])
                gX = row_tile(seqlen.slice_head(mX, head_kv), seqlen.k_row(first_row), tile.tile_n, tile.row_cols)
                rows.load(gX, storage.sKV[None, None, i], seqlen_k - first_row, True)
            if cutlass.const_expr(self.static.block_sparse):
                self.block_sparse_mainloop(p, state, blocks, HeadBlock(batch, head_kv, n_block))
            else:
                self.band_mainloop(p, state, blocks, head_kv, batch)

        self.store_gradients(p, state, head_kv, seqlen_k - first_row)

    def store_gradients(self, p: Params, state: MainloopState, head_kv: Int32, rows_left: Int32) -> None:
        """Scale dK and dV, and store them. `rows_left`: rows of the tile that exist."""
        accs, sKV = [gradient.acc for gradient in state.gradients], state.storage.sKV
        dv_scale = p.score_params.dropout_scale if self.has_dropout else None
        if self.tile.splits_kv:
            self.store_halves(p, state, head_kv, rows_left, dv_scale)
            return
        for acc, scale in zip(accs, (p.scale, dv_scale), strict=True):
            if scale is not None:
                acc.store(acc.load() * scale)
        for i, acc in enumerate(accs):
            gX = self.gradient_tile(p, state, head_kv, i)
            if self.static.is_fp32:
                DirectStore(p.mma_kv, state.thread, rows_left, self.widths[i]).floats(acc, gX)
            else:
                self.epilogue(p, state, rows_left, i).store(acc, sKV[None, None, i], gX)

    def store_halves(
        self, p: Params, state: MainloopState, head_kv: Int32, rows_left: Int32, dv_scale: Float32 | None
    ) -> None:
        """`store_gradients` if half of the warps have dK, and the others dV."""
        (gradient,), sKV, is_dv = state.gradients, state.storage.sKV, self.half(state.thread)
        scale = select_if(is_dv == 0, p.scale, Float32(1.0) if dv_scale is None else dv_scale)
        gradient.acc.store(gradient.acc.load() * scale)
        # The gradients reuse the memory of K and V: wait until every warp has read them.
        cute.arch.sync_threads()
        half = replace(self.epilogue(p, state, rows_left, 0), thread=self.kv_thread(state.thread))
        half.to_smem(gradient.acc, sKV[None, None, is_dv])
        cute.arch.sync_threads()
        for i in range(2):
            gX = self.gradient_tile(p, state, head_kv, i)
            self.epilogue(p, state, rows_left, i).to_global(sKV[None, None, i], gX)

    def gradient_tile(self, p: Params, state: MainloopState, head_kv: Int32, i: int) -> cute.Tensor:
        """The tile of dK (i = 0) or dV (1) in global memory."""
        seqlen, mX = state.seqlen, (p.mdK, p.mdV)[i]
        first = seqlen.k_row(state.first_row)
        return row_tile(seqlen.slice_head(mX, head_kv), first, self.tile.tile_n, self.tile.head_dim)

    def epilogue(self, p: Params, state: MainloopState, rows_left: Int32, i: int) -> Epilogue:
        """The epilogue of dK (i = 0) or dV (1)."""
        rows = RowTiles(p.copy_out, state.thread, self.tile.tile_n, self.tile.head_dim, self.widths[i])
        return Epilogue(p.mma_kv, rows, state.thread, rows_left)

    def half(self, thread: Int32) -> Int32:
        """0 in the first half of the warps, which computes S (`splits_s`) and dK (`splits_kv`), 1 in the other."""
        return thread // (self.tile.num_threads // 2)

    def kv_thread(self, thread: Int32) -> Int32:
        """The index of this thread in the grid of dK or dV."""
        return thread % (32 * self.tile.warps_per_gradient) if self.tile.splits_kv else thread

    def s_thread(self, thread: Int32) -> Int32:
        """The index of this thread in the grid of S or dP."""
        return thread % (32 * self.tile.warps_per_score) if self.tile.splits_s else thread

    def gradients(self, p: Params, ds: MmaOperand, q_t: MmaOperand, thread: Int32) -> tuple[GradientKV, ...]:
        """dK and dV; with `splits_kv`, the one that this thread computes. `ds`, `q_t`: the operands of dK."""
        tile = self.tile
        shape = p.mma_kv.get_slice(thread).partition_shape_C((tile.tile_n, tile.head_dim))
        # P and dO come `pieces` and `stages` tiles after dS and Q.
        if tile.splits_kv:
            is_dv = self.half(thread)
            operands = [(ds.moved(is_dv * tile.pieces), q_t.moved(is_dv * tile.stages))]
        else:
            operands = [(ds, q_t), (ds.shifted(tile.pieces), q_t.shifted(tile.stages))]
        return tuple(GradientKV(cute.make_rmem_tensor(shape, Float32), a, b) for a, b in operands)

    def _state(
        self, p: Params, storage: SharedStorage, seqlen: SeqlenInfo, thread: Int32, first_row: Int32
    ) -> MainloopState:
        tile = self.tile
        # Tiles of one shape are contiguous: the operands of V, dO and P are those of K, Q and dS plus an offset.
        k = self.s_grid.a(p.mma_s, self.s_thread(thread), storage.sKV, self.k_tile)
        q = self.s_grid.b(p.mma_s, self.s_thread(thread), storage.sQdO, self.q_tile)
        if tile.splits_s:
            is_dp = self.half(thread)
            k, q = k.moved(is_dp), q.moved(is_dp * tile.stages)
        ds = self.kv_grid.a(p.mma_kv, self.kv_thread(thread), storage.sdSP, self.s_tile)
        q_t = self.kv_grid.b(p.mma_kv, self.kv_thread(thread), storage.sQdO, self.q_tile, is_transposed=True)
        store_ds = self.s_grid.store(p.mma_s, self.s_thread(thread), storage.sdSP, self.s_tile)
        return MainloopState(
            thread=thread,
            storage=storage,
            seqlen=seqlen,
            first_row=first_row,
            k=k,
            q=q,
            v=k.shifted(1),
            do=q.shifted(tile.stages),
            ds_t=self.q_grid.a(p.mma_q, thread, storage.sdSP, self.s_tile, is_transposed=True),
            k_t=self.q_grid.b(p.mma_q, thread, storage.sKV, self.k_tile, is_transposed=True),
            store_p=store_ds.shifted(tile.pieces),
            store_ds=store_ds,
            gradients=self.gradients(p, ds, q_t, thread),
            dalibi=cute.make_rmem_tensor(1, Float32) if self.has_alibi else None,
        )

    @cute.jit
    def band_mainloop(self, p: Params, state: MainloopState, blocks: BlockRange, head_kv: Int32, batch: Int32):
        """Process the m_blocks that see the keys, of all heads that share them."""
        heads_per_kv = p.mQ.shape[1] // p.mK.shape[1]
        # The number of blocks left, including the current one. Its parity selects the stage.
        left = (blocks.end - blocks.begin) * heads_per_kv
        m_block, head = Int32(blocks.begin), head_kv * heads_per_kv
        self.load_block(p, state, HeadBlock(batch, head, m_block), self.stage(left))
        cute.arch.cp_async_commit_group()
        # Keys past the end must not contribute to dQ, so all blocks of the last tile are masked.
        is_tail = state.first_row + self.tile.tile_n > state.seqlen.k_len
        full_end = Int32(0) if is_tail else Int32(blocks.full_end)
        while left > 0:
            is_masked = m_block < blocks.full_begin or m_block >= full_end
            is_last_of_head = m_block + 1 == blocks.end
            next_block = blocks.begin if is_last_of_head else m_block + 1
            next_head = head + 1 if is_last_of_head else head
            following = HeadBlock(batch, next_head, next_block)
            self.process_block(p, state, HeadBlock(batch, head, m_block), left, is_masked, following)
            self.finish_head(p, state, head, is_last_of_head)
            m_block, head, left = next_block, next_head, left - 1

    @cute.jit
    def finish_head(self, p: Params, state: MainloopState, head: Int32, is_last_of_head: cutlass.Boolean):
        """After the last m_block of a head, store the gradient of its ALiBi slope."""
        if cutlass.const_expr(state.dalibi is not None):
            if is_last_of_head:
                n_block = state.first_row // self.tile.tile_n
                block = state.seqlen.padded_k_block(n_block, self.tile.tile_n)
                part = block * self.tile.num_warps + state.thread // 32
                p.score_params.store_dalibi(state.dalibi, head, state.seqlen, part)

    @cute.jit
    def block_sparse_mainloop(self, p: Params, state: MainloopState, blocks: BlockRange, kv_tile: HeadBlock):
        """Process the m_blocks of a block mask."""
        indices, batch = p.score_params.mods.block_indices, kv_tile.batch
        first_head = kv_tile.head * (p.mQ.shape[1] // p.mK.shape[1])
        num = indices.count(*kv_tile)
        left, bits = num, indices.read(*kv_tile, Int32(0))
        first = BwdBlockIndex(bits)
        self.load_block(p, state, HeadBlock(batch, first_head + first.head, first.m_block), self.stage(left))
        cute.arch.cp_async_commit_group()
        is_tail = state.first_row + self.tile.tile_n > state.seqlen.k_len
        full_end = Int32(0) if is_tail else Int32(blocks.full_end)
        while left > 0:
            index = BwdBlockIndex(bits)
            next_bits = indices.read(*kv_tile, cutlass.min(num - left + 1, num - 1))
            next_index = BwdBlockIndex(next_bits)
            m_block, head = index.m_block, first_head + index.head
            is_masked = m_block < blocks.full_begin or m_block >= full_end
            following = HeadBlock(batch, first_head + next_index.head, next_index.m_block)
            block = HeadBlock(batch, head, m_block)
            self.process_block(p, state, block, left, is_masked, following, index.is_partial)
            self.finish_head(p, state, head, index.is_last)
            left, bits = left - 1, next_bits

    @cute.jit
    def load_block(self, p: Params, state: MainloopState, block: HeadBlock, stage: Int32):
        """Start to load Q, dO and the row statistics of an m_block."""
        _batch, head, m_block = block
        tile, storage, seqlen, thread = self.tile, state.storage, state.seqlen, rederived(state.thread)
        first = m_block * tile.tile_m
        for i, mX in enumerate((p.mQ, p.mdO)):
            loader = RowTiles(p.copy_in, thread, tile.tile_m, tile.row_cols, self.loaded_widths[i])
            gX = row_tile(seqlen.slice_head(mX, head), seqlen.q_row(first), tile.tile_m, tile.row_cols)
            sX = storage.sQdO[None, None, stage + i * tile.stages]
            loader.load(gX, sX, seqlen.q_len - first, True)
        op = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(op, Float32, num_bits_per_copy=32 * FLOATS)
        if thread < tile.tile_m // FLOATS:
            for i, mY in enumerate((p.mLSE, p.mDelta)):
                row = seqlen.padded_q_block(m_block, tile.tile_m) * tile.tile_m + thread * FLOATS
                source = (seqlen.slice_head(mY, head).iterator + row).align(16)
                sY = storage.sRows[None, stage + i * tile.stages]
                target = (sY.iterator + thread * FLOATS).align(16)
                four = cute.make_layout(FLOATS)
                cute.copy(atom, cute.make_tensor(source, four), cute.make_tensor(target, four))

    @cute.jit
    def load_following(self, p: Params, state: MainloopState, following: HeadBlock, left: Int32):
        if left > 1:
            self.load_block(p, state, following, self.stage(left - 1))
        cute.arch.cp_async_commit_group()

    def stage(self, left: Int32) -> Int32 | int:
        return left & 1 if self.tile.stages == 2 else 0

    @cute.jit
    def process_block(
        self,
        p: Params,
        state: MainloopState,
        block: HeadBlock,
        left: Int32,
        is_masked: cutlass.Boolean,
        following: HeadBlock,
        is_partial: cutlass.Boolean | None = None,
    ):
        """Compute the gradients of one m_block.

        Args:
            block: the m_block.
            left: number of blocks left, including this one.
            is_masked: whether the band masks the block.
            following: the next m_block.
            is_partial: with a block mask, whether the block needs mask_mod.
        """
        _batch, head, m_block = block
        tile, stage = self.tile, self.stage(left)
        acc_S, acc_dP = (self.accumulator(p.mma_s, tile.tile_n, tile.tile_m) for _ in range(2))

        # Wait until this block has landed, and every warp is done with the other stage, and with P and dS of the
        # previous block.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if cutlass.const_expr(tile.stages == 2):
            self.load_following(p, state, following, left)

        scores, factors = self.scores(p, state, block), Factors.read(p, state.seqlen, head)
        scores.prefetch()
        # S^T = K Q^T;  P^T = exp(scale S^T - LSE)
        apply_mask = partial(self.apply_mask, p, state, scores, acc_S, m_block, is_masked, is_partial)
        if cutlass.const_expr(tile.splits_s):
            # The operands of the second half of the warps are those of dP^T.
            self.score_gemm(p.mma_s, acc_S, state.k, state.q, stage, factors.s, self.longer_steps)
            self.combine_halves(p, state, scores, acc_S, acc_dP, stage, apply_mask)
        else:
            k_steps, v_steps = self.static.k_steps
            self.score_gemm(p.mma_s, acc_S, state.k, state.q, stage, factors.s, k_steps)
            rP = self.probs(p, state, scores, acc_S, stage, apply_mask)
            # dV += P^T dO, at once if P stays in registers
            p_pieces = self.p_pieces(rP)
            if cutlass.const_expr(tile.p_in_registers):
                dK, dV = state.gradients
                self.add_gemm(p.mma_kv, dV.acc, p_pieces.as_operand_a(), dV.b, stage, factors.dv)
            else:
                for i, piece in enumerate(p_pieces.present()):
                    state.store_p.shifted(i).store(piece)

            # dP^T = V dO^T;  dS^T = P^T (dP^T - Δ)
            self.score_gemm(p.mma_s, acc_dP, state.v, state.do, stage, factors.dp, v_steps)
            sums = self.differentiate(p, state, scores, acc_S, acc_dP, stage)
            ds_pieces = self.ds_pieces(acc_S, factors.ds)
            for i, piece in enumerate(ds_pieces.present()):
                state.store_ds.shifted(i).store(piece)
            scores.finish(sums)

        # dK += dS^T Q, and dV += P^T dO if P is in shared memory
        if cutlass.const_expr(tile.p_in_registers):
            self.add_gemm(p.mma_kv, dK.acc, ds_pieces.as_operand_a(), dK.b, stage, factors.dk)
            cute.arch.sync_threads()
        else:
            cute.arch.sync_threads()
            # With `splits_kv`, a warp has one of the two. fp32 calls, which have factors, do not split.
            for x, factor in zip(reversed(state.gradients), (factors.dv, factors.dk), strict=False):
                self.add_gemm(p.mma_kv, x.acc, self.tiles_in_smem(x.a), x.b, stage, factor)
        if cutlass.const_expr(tile.stages == 1):
            if cutlass.const_expr(not tile.p_in_registers):
                # Wait until every warp is done with Q and dO.
                cute.arch.sync_threads()
            self.load_following(p, state, following, left)

        # dQ += dS K
        acc_dQ = self.accumulator(p.mma_q, tile.tile_m, tile.head_dim)
        self.add_gemm(p.mma_q, acc_dQ, self.tiles_in_smem(state.ds_t), state.k_t, 0, factors.dq)
        self.add_dq(p, state, acc_dQ, m_block, head)

    @cute.jit
    def combine_halves(
        self,
        p: Params,
        state: MainloopState,
        scores: AnyScores,
        acc: cute.Tensor,
        acc_dP: cute.Tensor,
        stage: Int32 | int,
        apply_mask: Callable[[], None],
    ):
        """Compute and store P and dS with `splits_s`.

        The second half of the warps passes dP to the first half in fp32, in the memory of P and dS, which has the same
        size.

        Args:
            acc: S in the first half, dP in the second.
            acc_dP: the registers for dP in the first half.
        """
        thread, half_threads = rederived(state.thread), 32 * self.tile.warps_per_score
        # A thread of the first half has the same elements as one of the second half. Its 16-byte vectors are next to
        # those of its neighbours.
        address = Int32(state.storage.sdSP.iterator.toint()) + thread % half_threads * 16
        first = cute.make_ptr(Float32, address, cutlass.AddressSpace.smem, assumed_align=16)
        vectors = cute.make_layout((FLOATS, cute.size(acc) // FLOATS), stride=(1, FLOATS * half_threads))
        shared = cute.make_tensor(first, vectors)
        if self.half(thread) == 1:
            cute.autovec_copy(cute.make_tensor(acc.iterator, cute.make_layout(vectors.shape)), shared)
        cute.arch.sync_threads()
        if self.half(thread) == 0:
            cute.autovec_copy(shared, cute.make_tensor(acc_dP.iterator, cute.make_layout(vectors.shape)))
        # P and dS are stored where dP was.
        cute.arch.sync_threads()
        if self.half(thread) == 0:
            rP = self.probs(p, state, scores, acc, stage, apply_mask)
            state.store_p.store(rP)
            sums = self.differentiate(p, state, scores, acc, acc_dP, stage)
            state.store_ds.store(self.ds_pieces(acc, None).high)
            scores.finish(sums)

    def probs(
        self,
        p: Params,
        state: MainloopState,
        scores: AnyScores,
        acc_S: cute.Tensor,
        stage: Int32 | int,
        apply_mask: Callable[[], None],
    ) -> cute.Tensor:
        """P of a block, for dV. The registers of S keep the values for `differentiate`."""
        rP = cute.make_fragment_like(acc_S, Float32 if self.static.is_fp32 else self.dtype)
        compute_probs(scores, acc_S, rP, partial(self.column_statistic, p, state, stage), apply_mask)
        return rP

    def differentiate(
        self,
        p: Params,
        state: MainloopState,
        scores: AnyScores,
        acc_S: cute.Tensor,
        acc_dP: cute.Tensor,
        stage: Int32 | int,
    ) -> Any:
        """Replace the registers of S by dS; return the sums of gradients for `scores.finish`."""
        delta = self.column_statistic(p, state, stage + self.tile.stages)
        lse = self.column_statistic(p, state, stage) if scores.keeps_score else None
        return scores.differentiate(GradientBlock(acc_S, acc_dP, lse, delta, state.dalibi))

    @property
    def longer_steps(self) -> range | None:
        """The k-steps of the wider one of S and dP; the other one has columns of zeros there."""
        k_steps, v_steps = self.static.k_steps
        return None if k_steps is None else max(k_steps, v_steps, key=len)

    def p_pieces(self, rP: cute.Tensor) -> Pieces:
        """P as the operand of dV."""
        return split_fp32.split(rP, Float32(split_fp32.PROB_SCALE)) if self.static.is_fp32 else Pieces(rP)

    def ds_pieces(self, acc_dS: cute.Tensor, factor: Float32 | None) -> Pieces:
        """dS as the operand of dK and dQ."""
        if factor is not None:
            return split_fp32.split(acc_dS, factor)
        rdS = cute.make_fragment_like(acc_dS, self.dtype)
        rdS.store(acc_dS.load().to(self.dtype))
        return Pieces(rdS)

    def tiles_in_smem(self, high: MmaOperand) -> Pieces:
        """P or dS in shared memory. The tile of the low piece follows that of the high piece."""
        return Pieces(high, high.shifted(1)) if self.static.is_fp32 else Pieces(high)

    @cute.jit
    def add_dq(self, p: Params, state: MainloopState, acc_dQ: cute.Tensor, m_block: Int32, head: Int32):
        """Add dQ of a block to the sums in global memory; in the order of the K/V tiles if `deterministic`."""
        tile = self.tile
        if cutlass.const_expr(self.static.deterministic):
            self.wait_semaphore(p, state, m_block, head)
        gdQ = state.seqlen.slice_head(p.mdQ_accum, head)[state.seqlen.padded_q_block(m_block, tile.tile_m), None]
        for i in cutlass.range_constexpr(cute.size(acc_dQ)):
            # A warp adds to 128 contiguous bytes.
            target = gdQ.iterator + (i * tile.num_threads + state.thread)
            cute.arch.atomic_add(target, acc_dQ[i], sem="relaxed", scope="gpu")
        if cutlass.const_expr(self.static.deterministic):
            self.arrive_semaphore(p, state, m_block, head)

    @cute.jit
    def wait_semaphore(self, p: Params, state: MainloopState, m_block: Int32, head: Int32):
        """Wait until the K/V tiles that precede this one have added to dQ of the m_block."""
        if rederived(state.thread) == 0:
            p.dq_semaphore.wait(*self.semaphore_rank(p, state, m_block, head))
        cute.arch.sync_threads()

    @cute.jit
    def arrive_semaphore(self, p: Params, state: MainloopState, m_block: Int32, head: Int32):
        """Arrive with one thread, after a barrier that makes the additions of all threads visible to it."""
        cute.arch.sync_threads()
        if rederived(state.thread) == 0:
            p.dq_semaphore.arrive(*self.semaphore_rank(p, state, m_block, head))

    def semaphore_rank(self, p: Params, state: MainloopState, m_block: Int32, head: Int32) -> tuple[HeadBlock, Int32]:
        """The block of the semaphore, and the rank of this tile.

        Both are computed again for each wait and arrival (`rederived`), so that neither occupies registers in between.
        """
        seqlen, m_block = state.seqlen, rederived(m_block)
        head = rederived(head)
        padded = seqlen.padded_q_block(m_block, self.tile.tile_m)
        block = HeadBlock(0 if seqlen.is_varlen else seqlen.batch, head, padded)
        n_block = rederived(state.first_row) // self.tile.tile_n
        if self.static.block_sparse:
            return block, p.score_params.mods.block_indices.rank(seqlen.batch, head, m_block, n_block)
        return block, p.dq_semaphore.rank(n_block, m_block, seqlen if seqlen.is_varlen else None)

    def accumulator(self, mma: cute.TiledMma, rows: int, columns: int) -> cute.Tensor:
        acc = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((rows, columns)), Float32)
        acc.fill(0.0)
        return acc

    def mask(self, p: Params, state: MainloopState) -> Mask:
        lengths = state.seqlen.k_len, state.seqlen.q_len
        return Mask(p.band, *lengths, rederived(state.first_row), self.coordinates(p, state))

    @cute.jit
    def apply_mask(
        self,
        p: Params,
        state: MainloopState,
        scores: AnyScores,
        acc_S: cute.Tensor,
        m_block: Int32,
        is_masked: cutlass.Boolean,
        is_partial: cutlass.Boolean | None,
    ):
        """Mask scores outside the band, keys and queries past the end, and scores where mask_mod is false."""
        if is_masked:
            scores.apply_band(acc_S, self.mask(p, state), m_block * self.tile.tile_m)
        scores.apply_mask(acc_S, is_partial)

    def scores(self, p: Params, state: MainloopState, block: HeadBlock) -> AnyScores:
        """The scores of an m_block."""
        if p.score_params is None:
            return PlainScores(p.scale_log2, is_transposed=True, by_vectors=True)
        batch, head, m_block = block
        first_query, row_step = m_block * self.tile.tile_m, 16 * self.tile.warps_s
        return p.score_params.block(self.mask(p, state), head, batch, first_query, True, row_step)

    def coordinates(self, p: Params, state: MainloopState) -> cute.Tensor:
        """(key, query) within the tile of every element of S^T."""
        coords = cute.make_identity_tensor((self.tile.tile_n, self.tile.tile_m))
        return p.mma_s.get_slice(self.s_thread(rederived(state.thread))).partition_C(coords)

    def column_statistic(self, p: Params, state: MainloopState, stage: Int32 | int) -> cute.Tensor:
        """LSE or Δ of this thread's columns of S^T, which are queries.

        `stage`: index in `sRows`, where the stages of Δ follow those of the LSE.
        """
        columns = as_mn(self.coordinates(p, state))
        pairs = cute.make_layout((2, cute.size(columns, mode=[1]) // 2), stride=(1, 8))
        first = (state.storage.sRows[None, stage].iterator + columns[0, 0][1]).align(8)
        values = cute.make_rmem_tensor(pairs.shape, Float32)
        cute.autovec_copy(cute.make_tensor(first, pairs), values)
        return cute.group_modes(values, 0, 2)

    def score_gemm(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        a: MmaOperand,
        b: MmaOperand,
        stage: Int32 | int,
        factor: Float32 | None,
        steps: range,
    ) -> None:
        """S^T or dP^T: acc = A B; in fp32 calls acc = factor A B, from fp16 pieces. `acc` is 0 before the call."""
        if factor is None:
            self.gemm(mma, acc, a, b, stage, steps)
        else:
            split_fp32.gemm_ss(mma, acc, a, b, stage, self.tile.head_dim // 16)
            acc.store(acc.load() * factor)

    def add_gemm(
        self, mma: cute.TiledMma, acc: cute.Tensor, a: Pieces, b: MmaOperand, stage: Int32 | int, factor: Float32 | None
    ) -> None:
        """acc += A B, or acc += factor A B for fp32 pieces."""
        if factor is None:
            self.gemm(mma, acc, a.high, b, stage)
            return
        sums = cute.make_fragment_like(acc)
        sums.fill(0.0)
        split_fp32.gemm_pieces(mma, sums, a, b, stage)
        acc.store(acc.load() + sums.load() * factor)

    def gemm(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        a: MmaOperand | cute.Tensor,
        b: MmaOperand,
        stage: Int32 | int,
        steps: range | None = None,
    ) -> None:
        """acc += A B, with A in registers or in shared memory, and B in stage `stage` of shared memory.

        `steps`: range of k-steps; None: all. Loads come right before their use; ptxas hoists them as far as registers
        allow.
        """
        a = a.rederived() if isinstance(a, MmaOperand) else a
        b = b.rederived()
        rA = a.fragment if isinstance(a, MmaOperand) else a
        for k in range(cute.size(b.fragment, mode=[2])) if steps is None else steps:
            if isinstance(a, MmaOperand):
                a.load_k(k, 0)
            b.load_k(k, stage)
            cute.gemm(mma, acc, rA[None, None, k], b.fragment[None, None, k], acc)
