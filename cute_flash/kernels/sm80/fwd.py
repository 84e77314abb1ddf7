"""Forward attention with mma.sync, ldmatrix and cp.async: Ampere, Ada, and any later GPU.

For each tile of query rows, over blocks j of keys from the last visible one to the first (FlashAttention-2):

    S  = Q Kj^T                          fp32 accumulators, tile_m x tile_n
    S  = -inf outside the band           only in blocks that the band cuts
    m' = max(m, rowmax S);  P = exp(scale (S - m'))
    l  = l exp(scale (m - m')) + rowsum P
    O  = O exp(scale (m - m')) + P Vj    P stays in registers: its accumulator layout is the operand layout
    out = O / l,  LSE = scale m + log l

Where they are asked for, softcap, ALiBi, a bias and a user's functions change S before the mask or hide more
of it, dropout changes P after its sums were taken, and a sink l and the LSE at the end (`extras`). A block
map names the blocks of keys, the full ones first.

| warps      | rows                                                                    |
|------------|-------------------------------------------------------------------------|
| all, alike | tile_m / num_warps each (16 or 32); every warp reads all of K and V     |

| shared memory | elements                  | life                                         |
|---------------|---------------------------|----------------------------------------------|
| sQ            | tile_m x tile_d           | whole tile; O passes through it at the end   |
| sK, sV        | stages x tile_n x tile_d  | one block each                               |

Values of another width than keys share a tile as wide as both: what either lacks is filled with zeros.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_flash.device.band import Band
from cute_flash.device.block_iterator import BlockSparseIterator
from cute_flash.device.copies import RowTiles, async_row_copy, plain_row_copy, row_tile
from cute_flash.device.epilogue import Epilogue, raise_max_logit, store_floats, store_lse
from cute_flash.device.mask import Mask
from cute_flash.device.philox import TilePlace
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduler import TileOrder
from cute_flash.device.sequence import Sequence, WorkList, unpacked
from cute_flash.device.softmax import Softmax
from cute_flash.device.views import as_mn, as_operand_a
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.kernels.common.params import ScoreParams
from cute_flash.kernels.sm80.fwd_storage import Main, Params, allocate, gemm, gemm_rs, operands
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.planning.varlen import TILE_LIST_HEADER
from cute_flash.spec.problem import Static


class FwdSm80:
    def __init__(self, static: Static, tile: FwdTileSm80):
        self.static = static
        self.tile = tile
        self.dtype = CUTE_DTYPES[static.dtype]

    @property
    def name(self) -> str:
        """The symbol a profiler shows. It also steers ptxas: names with "cutlass" in them are compiled
        differently.
        """
        t, s = self.tile, self.static
        mask = ("l" if s.has_left else "") + ("r" if s.has_right else "") or "full"
        study = "" if t.layout == "swizzled" else f"_{t.layout}"
        tags = "".join(f"_{name}" for name in s.tags)
        return f"cute_flash_fwd_sm80_d{s.widths}_{s.dtype}_{mask}_{t.tile_m}x{t.tile_n}{tags}{study}"

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        heads_per_l2_group: Int32,
        softcap: Float32 | None,
        alibi_slopes: cute.Tensor | None,
        sinks: cute.Tensor | None,
        dropout_threshold: Int32 | None,
        dropout_scale: Float32 | None,
        rng: cute.Tensor | None,
        max_logit: cute.Tensor | None,
        bias: cute.Tensor | None,
        captures: list | None,
        scalars: list | None,
        block_indices: list | None,
        q_tile_list: cute.Tensor | None,
        stream: CUstream,
    ):
        tile, static = self.tile, self.static
        score_params = ScoreParams.of(
            static, scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            dropout_threshold=dropout_threshold, dropout_scale=dropout_scale, rng=rng, max_logit=max_logit,
            bias=bias, captures=captures, scalars=scalars, block_indices=block_indices,
        )  # fmt: skip
        row_elements = tile.smem(tile.tile_m).copy_cols
        if cutlass.const_expr(static.varlen):
            q, k, v, out, lse = (unpacked(x) for x in (q, k, v, out, lse))
        batch, heads, seqlen_q, _ = q.shape
        num_m_blocks = cute.ceil_div(seqlen_q, tile.tile_m)
        if cutlass.const_expr(static.varlen):
            num_m_blocks = q_tile_list.shape[0] - TILE_LIST_HEADER
        order, work = None, None
        if cutlass.const_expr(static.varlen):
            work = WorkList(q_tile_list, heads, heads_per_l2_group)
        else:
            order = TileOrder(num_m_blocks, heads, batch, heads_per_l2_group, static.has_right)
        params = Params(
            mQ=q,
            mK=k,
            mV=v,
            mO=out,
            mLSE=lse,
            scale_log2=score_params.softmax_scale(scale),
            band=Band(window_left if static.has_left else None, window_right if static.has_right else None),
            order=order,
            work=work,
            copy_in=async_row_copy(tile.num_threads, row_elements, self.dtype),
            copy_out=plain_row_copy(tile.num_threads, row_elements, self.dtype),
            tiled_mma=self._tiled_mma(),
            score_params=score_params,
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        grid = (num_m_blocks * heads * batch, 1, 1)
        self.kernel(params).launch(grid=grid, block=(tile.num_threads, 1, 1), stream=stream)

    def _tiled_mma(self) -> cute.TiledMma:
        """Warps stacked along the rows; two n8 tiles at a time, so that one ldmatrix.x4 feeds both."""
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        warps = self.tile.num_warps
        return cute.make_tiled_mma(op, (warps, 1, 1), permutation_mnk=(warps * 16, 16, 16))

    @cute.kernel
    def kernel(self, p: Params):
        index, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.static.varlen):
            # As many blocks as there may be tiles.
            if index < p.work.num_tiles():
                self.one_tile(p, *self.tile_of(p, index))
        else:
            self.one_tile(p, *self.tile_of(p, index))

    @cute.jit
    def tile_of(self, p: Params, index: Int32):
        """Block of queries, head and sequence."""
        if cutlass.const_expr(self.static.varlen):
            m_block, head, numbers = p.work.read(index)
            return m_block, head, Sequence.told(numbers)
        m_block, head, batch = p.order.decode(index)
        return m_block, head, Sequence(batch, p.mQ.shape[2], p.mK.shape[2])

    @cute.jit
    def one_tile(self, p: Params, m_block: Int32, head: Int32, span: Sequence):
        tile = self.tile
        thread, _, _ = cute.arch.thread_idx()
        seqlen_q, seqlen_k = span.q_len, span.k_len
        head_kv = head // (p.mQ.shape[1] // p.mK.shape[1])
        rows_left = seqlen_q - m_block * tile.tile_m

        first_row = span.q_row(m_block * tile.tile_m)
        gQ = row_tile(span.of(p.mQ, head), first_row, tile.tile_m, tile.head_dim)
        gK = span.of_keys(p.mK, head_kv)
        gV = span.of_keys(p.mV, head_kv)
        sQ, sK, sV = allocate(tile, self.dtype)

        thr_mma = p.tiled_mma.get_slice(thread)
        acc_O = cute.make_rmem_tensor(thr_mma.partition_shape_C((tile.tile_m, tile.head_dim)), Float32)
        acc_O.fill(0.0)
        tScS = self.coordinates(p.tiled_mma, thread)
        wants_largest, is_exact = p.score_params.max_logit is not None, self.static.batch_invariant
        softmax = Softmax.start(as_mn(acc_O), p.scale_log2, wants_largest, is_exact)
        load_q = RowTiles(p.copy_in, thread, tile.tile_m, tile.head_dim, self.static.head_dim)
        load_k = replace(load_q, tile_rows=tile.tile_n)
        main = Main(
            load_k, replace(load_k, head_dim=self.static.width_v),
            gK, gV, sK, sV,
            *operands(tile, p.tiled_mma, thread, sQ, sK, sV),
            p.tiled_mma, acc_O, softmax,
            Mask(p.band, seqlen_q, seqlen_k, m_block * tile.tile_m, tScS),
            p.band.blocks(m_block, tile.tile_m, tile.tile_n, seqlen_q, seqlen_k),
            p.score_params.of_head(head, span.batch), p.score_params.dropout(),
            span.batch * p.mQ.shape[1] + head,
            self.block_iterator(p, m_block, head, span),
        )  # fmt: skip

        # A tile that sees no key loads nothing: a late copy of Q would land on the output passing through sQ.
        if self.has_blocks(main):
            load_q.load(gQ, sQ[None, None, 0], rows_left, True)
            self.main_loop(main)

        if cutlass.const_expr(self.static.base_cost > 0):
            # Beside other work no register is left to keep these over the loop.
            thread = rederived(thread)
            m_block, head, span = self.tile_of(p, rederived(cute.arch.block_idx()[0]))
            rows_left, first_row = span.q_len - m_block * tile.tile_m, span.q_row(m_block * tile.tile_m)
            tScS = self.coordinates(p.tiled_mma, thread)
        gO = row_tile(span.of(p.mO, head), first_row, tile.tile_m, tile.head_dim)
        gLSE = cute.domain_offset((first_row,), span.of(p.mLSE, head))
        lse = cute.make_rmem_tensor(cute.size(softmax.row_max), Float32)
        softmax.finish(as_mn(acc_O), lse, main.head.sink, main.head.dropout_scale)
        store_lse(lse, gLSE, tScS, thread, rows_left)
        if cutlass.const_expr(p.score_params.max_logit is not None):
            raise_max_logit(p.score_params.max_logit, head, softmax.largest_of(tScS, rows_left))
        if cutlass.const_expr(self.static.out_fp32):
            store_floats(acc_O, gO, p.tiled_mma, (thread, rows_left), self.static.width_v)
        else:
            store_rows = RowTiles(p.copy_out, thread, tile.tile_m, tile.head_dim, self.static.width_v)
            Epilogue(p.tiled_mma, store_rows, thread, rows_left).store(acc_O, sQ[None, None, 0], gO)

    def block_iterator(self, p: Params, m_block: Int32, head: Int32, span: Sequence) -> BlockSparseIterator | None:
        if p.score_params.block_indices is None:
            return None
        rows, keys = self.static.mods.block_mask_tile
        place = span.batch, head, m_block // (rows // self.tile.tile_m)
        return BlockSparseIterator(
            p.score_params.block_indices,
            place,
            p.score_params.block_indices.counts(*place),
            keys // self.tile.tile_n,
        )

    def has_blocks(self, main: Main):
        return main.blocks.begin < main.blocks.end if main.block_iter is None else main.block_iter.num > 0

    def coordinates(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.Tensor:
        """(row, column) within the tile of every element of S."""
        whole = cute.make_identity_tensor((self.tile.tile_m, self.tile.tile_n))
        return tiled_mma.get_slice(thread).partition_C(whole)

    @cute.jit
    def main_loop(self, main: Main):
        """Blocks from the last to the first: cut by the right bound or the tail, whole, cut on the left; or
        those of lists.
        """
        if cutlass.const_expr(main.block_iter is None):
            self.band_loop(main)
        else:
            self.listed_loop(main)

    @cute.jit
    def keep_q(self, main: Main):
        """Wait for Q, and the first block; what of Q stays in registers."""
        if cutlass.const_expr(self.tile.q_steps > 0):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            for k in cutlass.range_constexpr(self.tile.q_steps):
                main.q.load(k, 0)

    @cute.jit
    def listed_loop(self, main: Main):
        block_iter = main.block_iter
        n_block = block_iter.first
        self.load_block(main, n_block, Int32(0), True)
        cute.arch.cp_async_commit_group()
        self.keep_q(main)
        for i in cutlass.range(block_iter.full_end, unroll=1):
            following = block_iter.block(cutlass.min(i + 1, block_iter.num - 1))
            self.one_block(main, n_block, False, (i, following))
            n_block = following
        for i in cutlass.range(block_iter.full_end, block_iter.num, unroll=1):
            following = block_iter.block(cutlass.min(i + 1, block_iter.num - 1))
            self.one_block(main, n_block, True, (i, following))
            n_block = following

    @cute.jit
    def band_loop(self, main: Main):
        blocks = main.blocks
        self.load_block(main, blocks.end - 1, blocks.end - 1, True)
        cute.arch.cp_async_commit_group()
        self.keep_q(main)
        for i in cutlass.range(blocks.end - blocks.full_end, unroll=1):
            self.one_block(main, blocks.end - 1 - i, True)
        for i in cutlass.range(blocks.full_end - blocks.full_begin, unroll=1):
            self.one_block(main, blocks.full_end - 1 - i, False)
        if cutlass.const_expr(self.static.has_left):
            for i in cutlass.range(blocks.full_begin - blocks.begin, unroll=1):
                self.one_block(main, blocks.full_begin - 1 - i, True)

    def stage_of(self, fill):
        return fill % 2 if self.tile.stages == 2 else 0

    @cute.jit
    def load_block(self, main: Main, n_block: Int32, fill: Int32, is_last: cutlass.Constexpr):
        """Start the copies of key block `n_block`: K, and V too where it has a buffer to wait in."""
        self.load_tile(main, (main.load_k, main.gK, main.sK), n_block, fill, is_last)
        if cutlass.const_expr(self.tile.stages == 2):
            self.load_values(main, n_block, fill, is_last)

    @cute.jit
    def load_values(self, main: Main, n_block: Int32, fill: Int32, is_last: cutlass.Constexpr):
        self.load_tile(main, (main.load_v, main.gV, main.sV), n_block, fill, is_last)

    @cute.jit
    def load_tile(self, main: Main, what: tuple, n_block: Int32, fill: Int32, is_last: cutlass.Constexpr):
        loader, gX, sX = what
        first = n_block * self.tile.tile_n
        tile = row_tile(gX, first, self.tile.tile_n, self.tile.head_dim)
        if cutlass.const_expr(self.static.base_cost > 0):
            # Beside other work no register is left to keep its addresses over the loop.
            loader = replace(loader, thread=rederived(loader.thread))
        loader.load(tile, sX[None, None, self.stage_of(fill)], main.mask.seqlen_k - first, is_last)

    @cute.jit
    def one_block(self, main: Main, n_block: Int32, masked: cutlass.Constexpr, listed: tuple | None = None):
        """`listed`: how many blocks were before this one, and which follows, if any does."""
        tile, written = self.tile, main.head.mods
        # Blocks before it, or a number that has the same remainder.
        fill = n_block if listed is None else listed[0]
        stage = self.stage_of(fill)
        acc_S = cute.make_rmem_tensor(
            main.tiled_mma.get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n)), Float32
        )
        acc_S.fill(0.0)

        # K(n) (two stages: V(n) too) has landed, and every warp is done with the buffers of the block before.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if cutlass.const_expr(tile.stages == 1):
            self.load_values(main, n_block, fill, masked or listed is not None)
            cute.arch.cp_async_commit_group()
        bias = None
        if cutlass.const_expr(written is not None):
            bias = written.load_bias(main.mask, n_block * tile.tile_n, not masked, by_warp=True)

        # S = Q K^T
        gemm(main.tiled_mma, acc_S, (main.q, main.k), stage, tile.q_steps)

        if cutlass.const_expr(tile.stages == 1):
            # V(n) has landed, and every warp is done with K(n).
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
        if cutlass.const_expr(listed is None):
            if n_block > main.blocks.begin:
                self.load_block(main, n_block - 1, n_block - 1, False)
        else:
            if fill + 1 < main.block_iter.num:
                self.load_block(main, listed[1], fill + 1, True)
        cute.arch.cp_async_commit_group()

        if cutlass.const_expr(main.head.score is not None):
            # A window's bounds take the registers that the polynomial of a softcap needs; whether all scores
            # are near 0 is asked of a warp's rows together.
            is_window = self.static.has_left and self.static.has_right
            looks_near = not (masked or is_window or self.static.batch_invariant)
            main.head.score.apply(as_mn(acc_S), main.mask, n_block * tile.tile_n, looks_near)
        if cutlass.const_expr(written is not None):
            written.transform(as_mn(acc_S), main.mask, n_block * tile.tile_n, bias)
        self.hide(main, acc_S, n_block, masked)
        blocks_seen = main.blocks.end - 1 - n_block if listed is None else fill
        keys_seen = blocks_seen * tile.tile_n
        main.softmax.step(as_mn(acc_S), as_mn(main.acc_O), keys_seen)
        rP = cute.make_fragment_like(acc_S, self.dtype)
        rP.store(acc_S.load().to(self.dtype))
        if cutlass.const_expr(main.dropout is not None):
            place = TilePlace(main.sequence, main.mask.first_row, n_block * tile.tile_n, main.mask.tScS)
            masks, packed = main.dropout.draw(as_operand_a(rP), place), cute.recast_tensor(rP, Int32)
            for i in cutlass.range_constexpr(cute.size(packed)):
                packed[i] = packed[i] & masks[i]

        # O += P V
        gemm_rs(main.tiled_mma, main.acc_O, as_operand_a(rP), main.v, stage)

    @cute.jit
    def hide(self, main: Main, acc_S: cute.Tensor, n_block: Int32, masked: cutlass.Constexpr):
        """-inf outside the band, and where mask_mod says so. Full blocks of a map are whole to it alone."""
        first_column = n_block * self.tile.tile_n
        if cutlass.const_expr(masked):
            main.mask.apply(as_mn(acc_S), first_column)
        elif cutlass.const_expr(main.block_iter is not None and self.static.is_bounded):
            if main.blocks.is_masked(n_block):
                main.mask.apply(as_mn(acc_S), first_column)
        if cutlass.const_expr(main.head.mods is not None and (masked or main.block_iter is None)):
            main.head.mods.hide(as_mn(acc_S), main.mask, first_column)
