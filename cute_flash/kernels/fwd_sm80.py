"""Forward attention with mma.sync, ldmatrix and cp.async: Ampere, Ada, and any later GPU.

For each tile of query rows, over blocks j of keys from the last visible one to the first (FlashAttention-2):

    S  = Q Kj^T                          fp32 accumulators, tile_m x tile_n
    S  = -inf outside the band           only in blocks that the band cuts
    m' = max(m, rowmax S);  P = exp(scale (S - m'))
    l  = l exp(scale (m - m')) + rowsum P
    O  = O exp(scale (m - m')) + P Vj    P stays in registers: its accumulator layout is the operand layout
    out = O / l,  LSE = scale m + log l

Where they are asked for, softcap and ALiBi change S before the mask, dropout P after its sums were taken, and
a sink l and the LSE at the end (`extras`).

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
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cute_flash.band import Band
from cute_flash.device.copies import RowTiles, async_row_copy, plain_row_copy, row_tile
from cute_flash.device.epilogue import Epilogue, raise_max_logit, store_floats, store_lse
from cute_flash.device.ldmatrix import Operand, operand
from cute_flash.device.mask import Mask
from cute_flash.device.philox import Place
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduler import TileOrder
from cute_flash.device.sequence import Sequence, WorkList, unpacked
from cute_flash.device.softmax import LOG2_E, Softmax
from cute_flash.device.views import as_mn, as_operand_a
from cute_flash.kernels.arguments import DTYPES, fake_tensors
from cute_flash.kernels.extras import NO_EXTRAS, Extras
from cute_flash.kernels.fwd_sm80_shared import Main, Params
from cute_flash.problem import Static
from cute_flash.tiles import SMEM_ALIGN, FwdTile
from cute_flash.work import HEADER
from layouts.smem import SmemTile, byte_swizzle, to_cute


class FwdSm80:
    def __init__(self, static: Static, tile: FwdTile):
        self.static = static
        self.tile = tile
        self.dtype = DTYPES[static.dtype]

    @property
    def name(self) -> str:
        """The symbol a profiler shows. It also steers ptxas: names with "cutlass" in them are compiled
        differently.
        """
        t, s = self.tile, self.static
        mask = ("l" if s.has_left else "") + ("r" if s.has_right else "") or "full"
        study = "" if t.layout == "swizzled" else f"_{t.layout}"
        features = "".join(f"_{name}" for name in s.features.names)
        return f"cute_flash_fwd_sm80_d{s.widths}_{s.dtype}_{mask}_{t.tile_m}x{t.tile_n}{features}{study}"

    def fake_arguments(self) -> tuple:
        scalars = (Float32(1.0), Int32(0), Int32(0), Int32(1))
        return (*fake_tensors(self.static), *scalars, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        section: Int32,
        stream: CUstream,
    ):
        bounds = window_left, window_right
        self.launch((mQ, mK, mV, mO, mLSE), scale * LOG2_E, bounds, section, NO_EXTRAS, None, stream)

    @cute.jit
    def launch(
        self,
        tensors: tuple,
        scale_log2: Float32,
        bounds: tuple,
        section: Int32,
        extras: Extras,
        mItems: cute.Tensor | None,
        stream: CUstream,
    ):
        """`mItems`: the list of tiles, of a packed batch."""
        mQ, mK, mV, mO, mLSE = tensors
        window_left, window_right = bounds
        tile = self.tile
        row_elements = tile.smem(tile.tile_m).copy_cols
        is_packed = self.static.features.varlen
        if cutlass.const_expr(is_packed):
            mQ, mK, mV, mO, mLSE = (unpacked(mX) for mX in (mQ, mK, mV, mO, mLSE))
        batch, heads, seqlen_q, _ = mQ.shape
        num_m_blocks = cute.ceil_div(seqlen_q, tile.tile_m)
        if cutlass.const_expr(is_packed):
            num_m_blocks = mItems.shape[0] - HEADER
        band = Band(
            window_left if self.static.has_left else None, window_right if self.static.has_right else None
        )
        params = Params(
            mQ, mK, mV, mO, mLSE, scale_log2, band,
            None if is_packed else TileOrder(num_m_blocks, heads, batch, section, self.static.has_right),
            WorkList(mItems, heads, section) if is_packed else None,
            async_row_copy(tile.num_threads, row_elements, self.dtype),
            plain_row_copy(tile.num_threads, row_elements, self.dtype),
            self._tiled_mma(), extras,
        )  # fmt: skip
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
        if cutlass.const_expr(self.static.features.varlen):
            # As many blocks as there may be tiles.
            if index < p.work.num_tiles():
                self.one_tile(p, *self.tile_of(p, index))
        else:
            self.one_tile(p, *self.tile_of(p, index))

    @cute.jit
    def tile_of(self, p: Params, index: Int32):
        """Block of queries, head and sequence."""
        if cutlass.const_expr(self.static.features.varlen):
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
        sQ, sK, sV = self._allocate()

        thr_mma = p.tiled_mma.get_slice(thread)
        acc_O = cute.make_rmem_tensor(thr_mma.partition_shape_C((tile.tile_m, tile.head_dim)), Float32)
        acc_O.fill(0.0)
        tScS = self.coordinates(p.tiled_mma, thread)
        softmax = Softmax.start(as_mn(acc_O), p.scale_log2, p.extras.max_logit is not None)
        load_q = RowTiles(p.copy_in, thread, tile.tile_m, tile.head_dim, self.static.head_dim)
        load_k = replace(load_q, tile_rows=tile.tile_n)
        main = Main(
            load_k, replace(load_k, head_dim=self.static.width_v),
            gK, gV, sK, sV,
            *self._operands(p.tiled_mma, thread, sQ, sK, sV),
            p.tiled_mma, acc_O, softmax,
            Mask(p.band, seqlen_q, seqlen_k, m_block * tile.tile_m, tScS),
            p.band.blocks(m_block, tile.tile_m, tile.tile_n, seqlen_q, seqlen_k),
            p.extras.of_head(head, span.batch), p.extras.dropout(), span.batch * p.mQ.shape[1] + head,
        )  # fmt: skip

        # A tile that sees no key loads nothing: a late copy of Q would land on the output passing through sQ.
        if main.blocks.begin < main.blocks.end:
            load_q.load(gQ, sQ[None, None, 0], rows_left, True)
            self.main_loop(main)

        if cutlass.const_expr(self.static.features.weight > 0):
            # Beside other work no register is left to keep these over the loop.
            thread = rederived(thread)
            m_block, head, span = self.tile_of(p, rederived(cute.arch.block_idx()[0]))
            rows_left, first_row = span.q_len - m_block * tile.tile_m, span.q_row(m_block * tile.tile_m)
            tScS = self.coordinates(p.tiled_mma, thread)
        gO = row_tile(span.of(p.mO, head), first_row, tile.tile_m, tile.head_dim)
        gLSE = cute.domain_offset((first_row,), span.of(p.mLSE, head))
        lse = cute.make_rmem_tensor(cute.size(softmax.row_max), Float32)
        softmax.finish(as_mn(acc_O), lse, main.head.sink, main.head.keep_scale)
        store_lse(lse, gLSE, tScS, thread, rows_left)
        if cutlass.const_expr(p.extras.max_logit is not None):
            raise_max_logit(p.extras.max_logit, head, softmax.largest_of(tScS, rows_left))
        if cutlass.const_expr(self.static.features.out_dtype):
            store_floats(acc_O, gO, p.tiled_mma, (thread, rows_left), self.static.width_v)
        else:
            store_rows = RowTiles(p.copy_out, thread, tile.tile_m, tile.head_dim, self.static.width_v)
            Epilogue(p.tiled_mma, store_rows, thread, rows_left).store(acc_O, sQ[None, None, 0], gO)

    def coordinates(self, tiled_mma: cute.TiledMma, thread: Int32) -> cute.Tensor:
        """(row, column) within the tile of every element of S."""
        whole = cute.make_identity_tensor((self.tile.tile_m, self.tile.tile_n))
        return tiled_mma.get_slice(thread).partition_C(whole)

    def _allocate(self):
        """sQ (tile_m, tile_d, 1); sK, sV (tile_n, tile_d, stage)."""
        smem = SmemAllocator()

        def allocate(tile: SmemTile, stages: int) -> cute.Tensor:
            # The swizzle rides on the pointer, in bytes; the layout over it stays affine.
            affine = to_cute(tile.affine(stages))
            return smem.allocate_tensor(self.dtype, affine, SMEM_ALIGN, swizzle=byte_swizzle(tile))

        q_tile, kv_tile = self.tile.smem(self.tile.tile_m), self.tile.smem(self.tile.tile_n)
        return allocate(q_tile, 1), allocate(kv_tile, self.tile.stages), allocate(kv_tile, self.tile.stages)

    def _operands(self, tiled_mma, thread, sQ, sK, sV):
        """Q, K and V^T as MMA operands; V's rows are keys, and ldmatrix.trans makes them columns."""
        thr_mma = tiled_mma.get_slice(thread)
        plain = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        trans = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), self.dtype)
        copy_Q = cute.make_tiled_copy_A(plain, tiled_mma)
        copy_K = cute.make_tiled_copy_B(plain, tiled_mma)
        copy_V = cute.make_tiled_copy_B(trans, tiled_mma)

        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        rQ = thr_mma.make_fragment_A(thr_mma.partition_A(sQ[None, None, 0]))
        rK = thr_mma.make_fragment_B(thr_mma.partition_B(sK[None, None, 0]))
        rV = thr_mma.make_fragment_B(thr_mma.partition_B(sVt[None, None, 0]))
        q_tile, kv_tile = self.tile.smem(self.tile.tile_m), self.tile.smem(self.tile.tile_n)
        return (
            operand(copy_Q, thread, sQ, q_tile, 16 * self.tile.num_warps, rQ),
            operand(copy_K, thread, sK, kv_tile, 16, rK),
            operand(copy_V, thread, sVt, kv_tile, 16, rV, is_transposed=True),
        )

    @cute.jit
    def main_loop(self, main: Main):
        """Blocks from the last to the first: cut by the right bound or the tail, whole, cut on the left."""
        blocks = main.blocks
        self.load_block(main, blocks.end - 1, True)
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(self.tile.q_steps > 0):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            for k in cutlass.range_constexpr(self.tile.q_steps):
                main.q.load(k, 0)
        for i in cutlass.range(blocks.end - blocks.full_end, unroll=1):
            self.one_block(main, blocks.end - 1 - i, True)
        for i in cutlass.range(blocks.full_end - blocks.full_begin, unroll=1):
            self.one_block(main, blocks.full_end - 1 - i, False)
        if cutlass.const_expr(self.static.has_left):
            for i in cutlass.range(blocks.full_begin - blocks.begin, unroll=1):
                self.one_block(main, blocks.full_begin - 1 - i, True)

    def stage_of(self, n_block):
        return n_block % 2 if self.tile.stages == 2 else 0

    @cute.jit
    def load_block(self, main: Main, n_block: Int32, is_last: cutlass.Constexpr):
        """Start the copies of key block `n_block`: K, and V too where it has a buffer to wait in."""
        self.load_tile(main, (main.load_k, main.gK, main.sK), n_block, is_last)
        if cutlass.const_expr(self.tile.stages == 2):
            self.load_values(main, n_block, is_last)

    @cute.jit
    def load_values(self, main: Main, n_block: Int32, is_last: cutlass.Constexpr):
        self.load_tile(main, (main.load_v, main.gV, main.sV), n_block, is_last)

    @cute.jit
    def load_tile(self, main: Main, what: tuple, n_block: Int32, is_last: cutlass.Constexpr):
        loader, gX, sX = what
        first = n_block * self.tile.tile_n
        tile = row_tile(gX, first, self.tile.tile_n, self.tile.head_dim)
        if cutlass.const_expr(self.static.features.weight > 0):
            # Beside other work no register is left to keep its addresses over the loop.
            loader = replace(loader, thread=rederived(loader.thread))
        loader.load(tile, sX[None, None, self.stage_of(n_block)], main.mask.seqlen_k - first, is_last)

    @cute.jit
    def one_block(self, main: Main, n_block: Int32, masked: cutlass.Constexpr):
        tile = self.tile
        stage = self.stage_of(n_block)
        acc_S = cute.make_rmem_tensor(
            main.tiled_mma.get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n)), Float32
        )
        acc_S.fill(0.0)

        # K(n) (two stages: V(n) too) has landed, and every warp is done with the buffers of the block before.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if cutlass.const_expr(tile.stages == 1):
            self.load_values(main, n_block, masked)
            cute.arch.cp_async_commit_group()

        # S = Q K^T
        self.gemm(main.tiled_mma, acc_S, main.q, main.k, stage)

        if cutlass.const_expr(tile.stages == 1):
            # V(n) has landed, and every warp is done with K(n).
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
        if n_block > main.blocks.begin:
            self.load_block(main, n_block - 1, False)
        cute.arch.cp_async_commit_group()

        if cutlass.const_expr(main.head.score is not None):
            # A window's bounds take the registers that the polynomial of a softcap needs.
            looks_near = not (masked or (self.static.has_left and self.static.has_right))
            main.head.score.apply(as_mn(acc_S), main.mask, n_block * tile.tile_n, looks_near)
        if cutlass.const_expr(masked):
            main.mask.apply(as_mn(acc_S), n_block * tile.tile_n)
        keys_seen = (main.blocks.end - 1 - n_block) * tile.tile_n
        main.softmax.step(as_mn(acc_S), as_mn(main.acc_O), keys_seen)
        rP = cute.make_fragment_like(acc_S, self.dtype)
        rP.store(acc_S.load().to(self.dtype))
        if cutlass.const_expr(main.dropout is not None):
            place = Place(main.sequence, main.mask.first_row, n_block * tile.tile_n, main.mask.tScS)
            masks, packed = main.dropout.draw(as_operand_a(rP), place), cute.recast_tensor(rP, Int32)
            for i in cutlass.range_constexpr(cute.size(packed)):
                packed[i] = packed[i] & masks[i]

        # O += P V
        self.gemm_rs(main.tiled_mma, main.acc_O, as_operand_a(rP), main.v, stage)

    @cute.jit
    def gemm(self, tiled_mma: cute.TiledMma, acc: cute.Tensor, a: Operand, b: Operand, stage: Int32):
        """acc += A B with B from shared memory, and A too but for the first steps that stay in registers.

        Loads stand right before their use: ptxas hoists them over earlier MMAs as far as registers allow,
        and an explicit double buffer only takes that choice away.
        """
        for k in cutlass.range_constexpr(cute.size(b.fragment, mode=[2])):
            if cutlass.const_expr(k >= self.tile.q_steps):
                a.load(k, 0)
            b.load(k, stage)
            cute.gemm(tiled_mma, acc, a.fragment[None, None, k], b.fragment[None, None, k], acc)

    @cute.jit
    def gemm_rs(self, tiled_mma: cute.TiledMma, acc: cute.Tensor, rA: cute.Tensor, b: Operand, stage: Int32):
        """acc += A B with A in registers, a few n-tiles of B at a time and all k-steps of them.

        All k-steps of an n-tile lie a multiple of the swizzle's period apart: one address and immediate
        offsets. Two n-tiles at a time are what the tile table was measured with.
        """
        group = 2
        # One ldmatrix.x4 fills the operands of two n8 tiles.
        acc_groups = cute.logical_divide(acc, (None, None, 2 * group))
        b_groups = cute.logical_divide(b.fragment, (None, 2 * group, None))
        for n in cutlass.range_constexpr(cute.size(b.view, mode=[1]) // group):
            for i in cutlass.range_constexpr(group):
                b.load(n * group + i, stage)
            acc_n = acc_groups[None, None, (None, n)]
            for k in cutlass.range_constexpr(cute.size(b.fragment, mode=[2])):
                cute.gemm(tiled_mma, acc_n, rA[None, None, k], b_groups[None, (None, n), k], acc_n)
