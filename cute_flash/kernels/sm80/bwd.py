"""Backward attention with mma.sync, ldmatrix and cp.async: Ampere, Ada, and any later GPU.

For each tile of keys, over the query heads that share them and blocks i of queries:

    S^T  = K Qi^T                       keys are rows
    P^T  = exp(scale S^T - LSE)         0 outside the band
    dP^T = V dOi^T
    dS^T = P^T (dP^T - D),  D = rowsum(dO O) - dLSE
    dV  += P^T dOi
    dK  += dS^T Qi                      times scale at the end
    dQi += dS K                         fp32 additions in global memory, times scale at the end

| warps      | part of each product                                                              |
|------------|-----------------------------------------------------------------------------------|
| all, alike | a grid of warps over its tile, see `BwdTileSm80`; all along the keys: P^T and dS^T of |
|            | a warp are operands of its dV and dK where they are, in registers                 |

| shared memory | elements                 | life                                             |
|---------------|--------------------------|--------------------------------------------------|
| sKV           | 2 x tile_n x tile_d      | whole tile; dK and dV pass through at the end    |
| sQdO          | 2 stages x tile_m x tile_d | one block of queries                           |
| sdSP          | 2 x tile_n x tile_m      | one block; dS alone where P stays in registers   |
| sRows         | 2 stages x tile_m, fp32  | LSE and D of one block of queries                |
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cute_flash.device.band import Band
from cute_flash.device.copies import RowTiles, async_row_copy, plain_row_copy, row_tile
from cute_flash.device.entry_list import Entry
from cute_flash.device.epilogue import Epilogue
from cute_flash.device.grid import WarpGrid
from cute_flash.device.ldmatrix import Operand
from cute_flash.device.mask import Mask
from cute_flash.device.mods_bwd import WrittenScores
from cute_flash.device.ordered import Order
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduler import TileOrder
from cute_flash.device.score_bwd import BlockScores
from cute_flash.device.sequence import Sequence, WorkList, unpacked
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.views import as_mn, as_operand_a
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.kernels.common.params import bwd_score_params
from cute_flash.kernels.sm80.bwd_storage import Main, Params, Shared
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.varlen import TILE_LIST_HEADER
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.band import FAR, BlockRange
from cute_flash.spec.problem import Static

FLOATS = 4  # in 16 bytes


def dq_grid(tile: BwdTileSm80, dtype) -> WarpGrid:
    """The one whose accumulators are the order of dQ in global memory."""
    return WarpGrid(dtype, tile.num_warps, tile.warps_q)


class BwdSm80:
    def __init__(self, static: Static, tile: BwdTileSm80):
        self.static, self.tile, self.dtype = static, tile, CUTE_DTYPES[static.dtype]
        self.widths = static.head_dim, static.width_v  # of Q and K; of V and dO
        self.is_written, self.is_listed = static.has_mods, static.block_sparse
        self.has_alibi, self.has_dropout = "alibi" in static.features, "dropout" in static.features
        self.q_tile = SmemTile(tile.tile_m, tile.head_dim)
        self.k_tile = SmemTile(tile.tile_n, tile.head_dim)
        self.s_tile = SmemTile(tile.tile_n, tile.tile_m)
        # A warp's queries lie side by side: the mask counts on it.
        queries = tile.tile_m * tile.warps_s // tile.num_warps
        self.s_grid = WarpGrid(self.dtype, tile.num_warps, tile.warps_s, queries)
        self.kv_grid = WarpGrid(self.dtype, tile.num_warps, tile.warps_kv)
        self.q_grid = dq_grid(tile, self.dtype)

    @property
    def name(self) -> str:
        t, s = self.tile, self.static
        mask = ("l" if s.has_left else "") + ("r" if s.has_right else "") or "full"
        tags = "".join(f"_{name}" for name in s.tags)
        return f"cute_flash_bwd_sm80_d{s.widths}_{s.dtype}_{mask}_{t.tile_m}x{t.tile_n}{tags}"

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout_cast: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_accum: cute.Tensor,
        dq_semaphore: cute.Tensor | None,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        heads_per_l2_group: Int32,
        softcap: Float32 | None,
        alibi_slopes: cute.Tensor | None,
        dalibi_partial: cute.Tensor | None,
        dropout_threshold: Int32 | None,
        dropout_scale: Float32 | None,
        rng: cute.Tensor | None,
        bias: cute.Tensor | None,
        dbias: cute.Tensor | None,
        captures: list | None,
        scalars: list | None,
        dcaptures: list | None,
        block_indices: list | None,
        kv_tile_list: cute.Tensor | None,
        stream: CUstream,
    ):
        tile, static = self.tile, self.static
        score_params = bwd_score_params(
            static, tile, q.shape[1], scale, softcap=softcap, alibi_slopes=alibi_slopes,
            dalibi_partial=dalibi_partial, dropout_threshold=dropout_threshold, dropout_scale=dropout_scale,
            rng=rng, bias=bias, dbias=dbias, captures=captures, scalars=scalars, dcaptures=dcaptures,
            block_indices=block_indices,
        )  # fmt: skip
        if cutlass.const_expr(static.varlen):
            q, k, v, dout_cast, dk, dv = (unpacked(x) for x in (q, k, v, dout_cast, dk, dv))
        batch, heads_kv, seqlen_k, _ = k.shape
        num_n_blocks = cute.ceil_div(seqlen_k, tile.tile_n)
        # The longest tiles first; with a semaphore the last, as a tile that is waited for must have begun.
        descends = static.has_left or static.deterministic
        order, work = None, None
        if cutlass.const_expr(static.varlen):
            num_n_blocks = kv_tile_list.shape[0] - TILE_LIST_HEADER
            work = WorkList(kv_tile_list, heads_kv, heads_per_l2_group)
        else:
            order = TileOrder(num_n_blocks, heads_kv, batch, heads_per_l2_group, descends)
        band = Band(window_left if static.has_left else None, window_right if static.has_right else None)
        turns = None
        if cutlass.const_expr(static.deterministic):
            # A right bound that hides nothing: without one, ptxas is short of a register.
            band = Band(band.left, Int32(FAR) if band.right is None else band.right)
            turns = Order(dq_semaphore, band, q.shape[2], seqlen_k, tile.tile_m, tile.tile_n, by_engine=False)
        row_elements = self.k_tile.copy_cols
        params = Params(
            mQ=q,
            mK=k,
            mV=v,
            mdO=dout_cast,
            mLSE=lse_log2,
            mD=delta,
            mdQ=dq_accum,
            mdK=dk,
            mdV=dv,
            scale=scale,
            scale_log2=scale * LOG2_E,
            band=Band(band.right, band.left),
            turns=turns,
            order=order,
            work=work,
            copy_in=async_row_copy(tile.num_threads, row_elements, self.dtype),
            copy_out=plain_row_copy(tile.num_threads, row_elements, self.dtype),
            mma_s=self.s_grid.mma(),
            mma_kv=self.kv_grid.mma(),
            mma_q=self.q_grid.mma(),
            terms=score_params,
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        grid = (num_n_blocks * heads_kv * batch, 1, 1)
        self.kernel(params).launch(grid=grid, block=(tile.num_threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, p: Params):
        index, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.static.varlen):
            if index < p.work.num_tiles():
                n_block, head_kv, numbers = p.work.read(index)
                self.one_tile(p, n_block, head_kv, Sequence.told(numbers))
        else:
            n_block, head_kv, batch = p.order.decode(index)
            self.one_tile(p, n_block, head_kv, Sequence(batch, p.mQ.shape[2], p.mK.shape[2]))

    @cute.jit
    def one_tile(self, p: Params, n_block: Int32, head_kv: Int32, span: Sequence):
        tile, batch = self.tile, span.batch
        thread, _, _ = cute.arch.thread_idx()
        seqlen_q, seqlen_k = span.q_len, span.k_len
        first_row = n_block * tile.tile_n
        shared = Shared.allocate(tile, self.dtype, self.k_tile, self.q_tile, self.s_tile)
        main = self._main(p, shared, span, thread, first_row)
        main.acc_dK.fill(0.0)
        main.acc_dV.fill(0.0)
        if cutlass.const_expr(main.dslope is not None):
            main.dslope.fill(0.0)

        # Keys that no query sees load nothing: a late copy would land on what passes through sKV.
        blocks = p.band.blocks(n_block, tile.tile_n, tile.tile_m, seqlen_k, seqlen_q)
        has_blocks = blocks.begin < blocks.end
        if cutlass.const_expr(self.is_listed):
            has_blocks = p.terms.written.lists.num(batch, head_kv, n_block) > 0
        if has_blocks:
            for i, mX in enumerate((p.mK, p.mV)):
                rows = RowTiles(p.copy_in, thread, tile.tile_n, tile.head_dim, self.widths[i])
                gX = row_tile(span.of(mX, head_kv), span.k_row(first_row), tile.tile_n, tile.head_dim)
                rows.load(gX, shared.sKV[None, None, i], seqlen_k - first_row, True)
            if cutlass.const_expr(self.is_listed):
                self.over_list(p, main, blocks, (batch, head_kv, n_block))
            else:
                self.over_band(p, main, blocks, head_kv, batch)

        main.acc_dK.store(main.acc_dK.load() * p.scale)
        if cutlass.const_expr(self.has_dropout):
            main.acc_dV.store(main.acc_dV.load() * p.terms.keep_scale)
        rows_left = seqlen_k - first_row
        for i, (mX, acc) in enumerate(((p.mdK, main.acc_dK), (p.mdV, main.acc_dV))):
            rows = RowTiles(p.copy_out, thread, tile.tile_n, tile.head_dim, self.widths[i])
            gX = row_tile(span.of(mX, head_kv), span.k_row(first_row), tile.tile_n, tile.head_dim)
            Epilogue(p.mma_kv, rows, thread, rows_left).store(acc, shared.sKV[None, None, i], gX)

    def _main(self, p: Params, shared: Shared, span: Sequence, thread: Int32, first_row: Int32) -> Main:
        tile = self.tile
        # Tiles of a kind follow each other: V's operands are K's, shifted, dO's are Q's, P's are dS's.
        k = self.s_grid.a(p.mma_s, thread, shared.sKV, self.k_tile)
        q = self.s_grid.b(p.mma_s, thread, shared.sQdO, self.q_tile)
        ds = self.kv_grid.a(p.mma_kv, thread, shared.sdSP, self.s_tile)
        q_t = self.kv_grid.b(p.mma_kv, thread, shared.sQdO, self.q_tile, turned=True)
        landing = self.s_grid.landing(p.mma_s, thread, shared.sdSP, self.s_tile)
        acc_shape = p.mma_kv.get_slice(thread).partition_shape_C((tile.tile_n, tile.head_dim))
        return Main(
            thread, shared, span, first_row,
            k, q, k.shifted(1), q.shifted(tile.stages), ds.shifted(1), q_t.shifted(tile.stages), ds, q_t,
            self.q_grid.a(p.mma_q, thread, shared.sdSP, self.s_tile, turned=True),
            self.q_grid.b(p.mma_q, thread, shared.sKV, self.k_tile, turned=True),
            landing.shifted(1), landing, *(cute.make_rmem_tensor(acc_shape, Float32) for _ in range(2)),
            cute.make_rmem_tensor(1, Float32) if self.has_alibi else None,
        )  # fmt: skip

    @cute.jit
    def over_band(self, p: Params, main: Main, blocks: BlockRange, head_kv: Int32, batch: Int32):
        """Over the blocks of queries that see the keys, of all heads that share them."""
        heads_per_kv = p.mQ.shape[1] // p.mK.shape[1]
        # Blocks that are left, this one included: their number tells the stages apart.
        left = (blocks.end - blocks.begin) * heads_per_kv
        m_block, head = Int32(blocks.begin), head_kv * heads_per_kv
        self.load_block(p, main, (m_block, head, batch), self.stage_of(left))
        cute.arch.cp_async_commit_group()
        # Keys past the end must not reach dQ: all blocks of the last tile are masked.
        is_tail = main.first_row + self.tile.tile_n > main.span.k_len
        full_end = Int32(0) if is_tail else Int32(blocks.full_end)
        while left > 0:
            is_cut = m_block < blocks.full_begin or m_block >= full_end
            is_last_of_head = m_block + 1 == blocks.end
            next_block = blocks.begin if is_last_of_head else m_block + 1
            next_head = head + 1 if is_last_of_head else head
            following = (next_block, next_head, batch)
            self.one_block(p, main, (m_block, head, batch), left, is_cut, following)
            self.end_head(p, main, head, is_last_of_head)
            m_block, head, left = next_block, next_head, left - 1

    @cute.jit
    def end_head(self, p: Params, main: Main, head: Int32, is_last_of_head):
        if cutlass.const_expr(main.dslope is not None):
            if is_last_of_head:
                n_block = main.first_row // self.tile.tile_n
                block = main.span.k_block(n_block, self.tile.tile_n)
                part = block * self.tile.num_warps + main.thread // 32
                p.terms.store_dslope(main.dslope, head, main.span, part)

    @cute.jit
    def over_list(self, p: Params, main: Main, blocks: BlockRange, place: tuple):
        """Over the blocks that a block map names; `place`: of the list of this tile."""
        lists, (batch, head_kv, _n_block) = p.terms.written.lists, place
        first_head = head_kv * (p.mQ.shape[1] // p.mK.shape[1])
        num = lists.num(*place)
        left, bits = num, lists.read(*place, Int32(0))
        first = Entry(bits)
        self.load_block(p, main, (first.m_block, first_head + first.head, batch), self.stage_of(left))
        cute.arch.cp_async_commit_group()
        is_tail = main.first_row + self.tile.tile_n > main.span.k_len
        full_end = Int32(0) if is_tail else Int32(blocks.full_end)
        while left > 0:
            entry = Entry(bits)
            next_bits = lists.read(*place, cutlass.min(num - left + 1, num - 1))
            following = Entry(next_bits)
            m_block, head = entry.m_block, first_head + entry.head
            is_cut = m_block < blocks.full_begin or m_block >= full_end
            self.one_block(
                p, main, (m_block, head, batch), left, is_cut,
                (following.m_block, first_head + following.head, batch), entry.is_partial,
            )  # fmt: skip
            self.end_head(p, main, head, entry.is_last)
            left, bits = left - 1, next_bits

    @cute.jit
    def load_block(self, p: Params, main: Main, where: tuple, stage: Int32):
        """Start the copies of a block of Q and dO, and of the statistics of its rows."""
        m_block, head, _batch = where
        tile, shared, span, thread = self.tile, main.shared, main.span, rederived(main.thread)
        first = m_block * tile.tile_m
        for i, mX in enumerate((p.mQ, p.mdO)):
            loader = RowTiles(p.copy_in, thread, tile.tile_m, tile.head_dim, self.widths[i])
            gX = row_tile(span.of(mX, head), span.q_row(first), tile.tile_m, tile.head_dim)
            sX = shared.sQdO[None, None, stage + i * tile.stages]
            loader.load(gX, sX, span.q_len - first, True)
        op = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(op, Float32, num_bits_per_copy=32 * FLOATS)
        if thread < tile.tile_m // FLOATS:
            for i, mY in enumerate((p.mLSE, p.mD)):
                here = span.q_block(m_block, tile.tile_m) * tile.tile_m + thread * FLOATS
                source = (span.of(mY, head).iterator + here).align(16)
                sY = shared.sRows[None, stage + i * tile.stages]
                target = (sY.iterator + thread * FLOATS).align(16)
                four = cute.make_layout(FLOATS)
                cute.copy(atom, cute.make_tensor(source, four), cute.make_tensor(target, four))

    @cute.jit
    def load_following(self, p: Params, main: Main, following: tuple, left: Int32):
        if left > 1:
            self.load_block(p, main, following, self.stage_of(left - 1))
        cute.arch.cp_async_commit_group()

    def stage_of(self, left: Int32):
        return left & 1 if self.tile.stages == 2 else 0

    @cute.jit
    def one_block(self, p: Params, main: Main, where: tuple, left: Int32, is_cut, following: tuple, is_partial=None):
        """`is_partial`: of a block map's blocks, whether mask_mod decides in this one."""
        m_block, head, _batch = where
        tile, stage = self.tile, self.stage_of(left)
        acc_S, acc_dP = (self.accumulator(p.mma_s, (tile.tile_n, tile.tile_m)) for _ in range(2))

        # The block has landed, and every warp is done with the other stage, P and dS of the block before.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if cutlass.const_expr(tile.stages == 2):
            self.load_following(p, main, following, left)

        scores = self.scores(p, main, where)
        if cutlass.const_expr(self.is_written):
            scores.prepare()
        # S^T = K Q^T;  P^T = exp(scale S^T - LSE)
        of_keys, of_values = self.static.k_steps
        self.gemm(p.mma_s, acc_S, main.k, main.q, stage, of_keys)
        if cutlass.const_expr(scores is not None):
            scores.cap(acc_S)
        hides_weights = self.is_written and scores.hides_weights
        if cutlass.const_expr(not hides_weights):
            self.hide(p, main, scores, acc_S, m_block, is_cut, is_partial)
        lse, S_mn = self.of_columns(p, main, stage), as_mn(acc_S)
        rP = cute.make_fragment_like(acc_S, self.dtype)
        if cutlass.const_expr(scores is not None):
            scores.weigh(acc_S, rP, lse)
            if cutlass.const_expr(hides_weights):
                self.hide(p, main, scores, acc_S, m_block, is_cut, is_partial)
                scores.pack_weights(acc_S, rP)
        else:
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                S_mn[r, None].store(cute.math.exp2(S_mn[r, None].load() * p.scale_log2 - lse.load(), fastmath=True))
            rP.store(acc_S.load().to(self.dtype))
        # dV += P^T dO, at once where P is at hand
        if cutlass.const_expr(tile.p_in_registers):
            self.gemm(p.mma_kv, main.acc_dV, as_operand_a(rP), main.do_t, stage)
        else:
            main.p_landing.store(rP)

        # dP^T = V dO^T;  dS^T = P^T (dP^T - D)
        self.gemm(p.mma_s, acc_dP, main.v, main.do, stage, of_values)
        d, dP_mn = self.of_columns(p, main, stage + tile.stages), as_mn(acc_dP)
        if cutlass.const_expr(scores is not None):
            if cutlass.const_expr(scores.keeps_tangent or (self.is_written and scores.keeps_score)):
                lse = self.of_columns(p, main, stage)
            sums = scores.differentiate(acc_S, acc_dP, lse, d, main.dslope)
        else:
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                dP_mn[r, None].store(S_mn[r, None].load() * (dP_mn[r, None].load() - d.load()))
        rdS = cute.make_fragment_like(acc_dP, self.dtype)
        rdS.store((acc_dP if scores is None else acc_S).load().to(self.dtype))
        main.ds_landing.store(rdS)
        if cutlass.const_expr(self.is_written):
            sums.end()

        # dK += dS^T Q
        if cutlass.const_expr(tile.p_in_registers):
            self.gemm(p.mma_kv, main.acc_dK, as_operand_a(rdS), main.q_t, stage)
            cute.arch.sync_threads()
        else:
            cute.arch.sync_threads()
            self.gemm(p.mma_kv, main.acc_dV, main.p, main.do_t, stage)
            self.gemm(p.mma_kv, main.acc_dK, main.ds, main.q_t, stage)
        if cutlass.const_expr(tile.stages == 1):
            if cutlass.const_expr(not tile.p_in_registers):
                # Every warp is done with Q and dO.
                cute.arch.sync_threads()
            self.load_following(p, main, following, left)

        # dQ += dS K
        acc_dQ = self.accumulator(p.mma_q, (tile.tile_m, tile.head_dim))
        self.gemm(p.mma_q, acc_dQ, main.ds_t, main.k_t, 0)
        if cutlass.const_expr(self.static.deterministic):
            self.wait_turn(p, main, m_block, head)
        gdQ = main.span.of(p.mdQ, head)[main.span.q_block(m_block, tile.tile_m), None]
        for i in cutlass.range_constexpr(cute.size(acc_dQ)):
            target = gdQ.iterator + (i * tile.num_threads + main.thread)  # 128 bytes of a warp side by side
            cute.arch.atomic_add(target, acc_dQ[i], sem="relaxed", scope="gpu")
        if cutlass.const_expr(self.static.deterministic):
            self.pass_turn(p, main, m_block, head)

    @cute.jit
    def wait_turn(self, p: Params, main: Main, m_block: Int32, head: Int32):
        """Until the tiles of keys before have added theirs."""
        if rederived(main.thread) == 0:
            p.turns.wait(*self.turn(p, main, m_block, head))
        cute.arch.sync_threads()

    @cute.jit
    def pass_turn(self, p: Params, main: Main, m_block: Int32, head: Int32):
        """All threads have added: what one of them tells after a barrier includes it."""
        cute.arch.sync_threads()
        if rederived(main.thread) == 0:
            p.turns.pass_on(*self.turn(p, main, m_block, head))

    def turn(self, p: Params, main: Main, m_block: Int32, head: Int32) -> tuple:
        """Where the counter is, and how many come before. No register is left to keep them meanwhile."""
        span, m_block = main.span, rederived(m_block)
        head = rederived(head)
        where = (head, 0 if span.is_packed else span.batch, span.q_block(m_block, self.tile.tile_m))
        n_block = rederived(main.first_row) // self.tile.tile_n
        return where, p.turns.turn(n_block, m_block, span if span.is_packed else None)

    def accumulator(self, mma: cute.TiledMma, shape: tuple) -> cute.Tensor:
        acc = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C(shape), Float32)
        acc.fill(0.0)
        return acc

    def mask(self, p: Params, main: Main) -> Mask:
        lengths = main.span.k_len, main.span.q_len
        return Mask(p.band, *lengths, rederived(main.first_row), self.coordinates(p, main))

    @cute.jit
    def hide(self, p: Params, main: Main, scores, acc_S: cute.Tensor, m_block: Int32, is_cut, is_partial):
        """What the band, the ends and mask_mod hide."""
        if is_cut:
            mask, first = self.mask(p, main), m_block * self.tile.tile_m
            if cutlass.const_expr(self.is_written):
                scores.cut(acc_S, mask, first)
            else:
                mask.apply(as_mn(acc_S), first)
                mask.hide_tail(as_mn(acc_S))
        if cutlass.const_expr(self.is_written):
            scores.hide(acc_S, is_partial)

    def scores(self, p: Params, main: Main, where: tuple) -> BlockScores | WrittenScores | None:
        if p.terms is None:
            return None
        m_block, head, batch = where
        first_query, row_step = m_block * self.tile.tile_m, 16 * self.tile.warps_s
        return p.terms.block(self.mask(p, main), head, batch, first_query, True, row_step)

    def coordinates(self, p: Params, main: Main) -> cute.Tensor:
        """(key, query) within the tile of every element of S^T."""
        whole = cute.make_identity_tensor((self.tile.tile_n, self.tile.tile_m))
        return p.mma_s.get_slice(rederived(main.thread)).partition_C(whole)

    def of_columns(self, p: Params, main: Main, stage) -> cute.Tensor:
        """A statistic of the queries in this thread's columns of S^T, which `column_offset` tells of."""
        columns = as_mn(self.coordinates(p, main))
        pairs = cute.make_layout((2, cute.size(columns, mode=[1]) // 2), stride=(1, 8))
        first = (main.shared.sRows[None, stage].iterator + columns[0, 0][1]).align(8)
        values = cute.make_rmem_tensor(pairs.shape, Float32)
        cute.autovec_copy(cute.make_tensor(first, pairs), values)
        return cute.group_modes(values, 0, 2)

    def gemm(self, mma: cute.TiledMma, acc: cute.Tensor, a: Operand | cute.Tensor, b: Operand, stage, steps=None):
        """acc += A B, with A in registers or, like B, in shared memory; of what is staged only B changes.
        `steps`: a range of k-steps, where not all.

        Loads stand right before their use: ptxas hoists them as far as registers allow.
        """
        a = a.rederived() if isinstance(a, Operand) else a
        b = b.rederived()
        rA = a.fragment if isinstance(a, Operand) else a
        for k in range(cute.size(b.fragment, mode=[2])) if steps is None else steps:
            if isinstance(a, Operand):
                a.load_k(k, 0)
            b.load_k(k, stage)
            cute.gemm(mma, acc, rA[None, None, k], b.fragment[None, None, k], acc)
