"""Backward attention with TMA, wgmma and specialised warps: Hopper.

For each tile of keys, over the query heads that share them and blocks i of queries:

    S^T  = K Qi^T                       keys are rows: P^T and dS^T stay in registers as operands
    P^T  = exp(scale S^T - LSE)         0 outside the band
    dP^T = V dOi^T
    dS^T = P^T (dP^T - D),  D = rowsum(dO O) - dLSE
    dV  += P^T dOi
    dK  += dS^T Qi                      times scale at the end
    dQi += dS K                         fp32 additions in global memory, times scale at the end

| warpgroup | warps | role                                           |
|-----------|-------|------------------------------------------------|
| 0         | 0     | load: TMA of K and V once, of Q, dO, LSE and D |
| 0         | 1     | dQ: bulk additions to global memory            |
| 1, 2      | all   | mma: 64 keys of the tile and half of dQ each   |

| shared memory | elements                    | life                                        |
|---------------|-----------------------------|---------------------------------------------|
| sK, sV        | tile_n x tile_d             | whole tile                                  |
| sQ, sdO       | stages x tile_m x tile_d    | one block of queries                        |
| sdS           | 2 x tile_n x tile_m         | one block: the halves of both warpgroups    |
| sdQ           | tile_m x tile_d, fp32       | one block, in the order of the accumulators |
| sLSE, sD      | stages x tile_m, fp32       | one block of queries                        |
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_flash.band import Band
from cute_flash.device.barriers import WARPGROUP_THREADS, Turns
from cute_flash.device.copies import row_tile
from cute_flash.device.epilogue import store_rows
from cute_flash.device.mask import Mask, column_offset
from cute_flash.device.ordered import Order, Walk
from cute_flash.device.scheduler import TileOrder
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.tma import TmaTiles
from cute_flash.device.views import as_mn, as_operand_a
from cute_flash.device.wgmma import convert, make_mma, start_gemm
from cute_flash.kernels import bwd_sm90_copies as copies
from cute_flash.kernels.bwd_dq import add_sums, store_dq
from cute_flash.kernels.bwd_sm90_shared import NUM_WARPGROUPS, Params, Shapes, Shared, Tile
from cute_flash.problem import Static
from cute_flash.tiles import WARPGROUP_ROWS
from cute_flash.tiles_bwd import BwdTileSm90

# Named barrier 0 is the one of all threads.
FIRST_TURN = 1


@dataclass(frozen=True)
class Main:
    """What a warpgroup works with."""

    wg: Int32
    thread: Int32
    shared: Shared
    rK: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K), its own keys
    rV: cute.Tensor
    rQ: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, stage)
    rdO: cute.Tensor
    rQt: cute.Tensor
    rdOt: cute.Tensor
    rdSt: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, stage), its own rows or all
    rKt: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K), all columns or its own
    acc_S: cute.Tensor
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    tScS: cute.Tensor  # (key, query) of every element of S^T
    turns: Turns


def transposed(sX: cute.Tensor) -> cute.Tensor:
    modes = [1, 0, *range(2, cute.rank(sX))]
    return cute.make_tensor(sX.iterator, cute.select(sX.layout, mode=modes))


class BwdSm90:
    is_ordered = False

    def __init__(self, static: Static, tile: BwdTileSm90):
        self.static, self.tile = static, tile
        self.shapes = Shapes(static, tile)
        self.dtype = self.shapes.dtype

    @property
    def name(self) -> str:
        t, s = self.tile, self.static
        mask = ("l" if s.has_left else "") + ("r" if s.has_right else "") or "full"
        ordered = "_ordered" if self.is_ordered else ""
        return f"cute_flash_bwd_sm90_d{s.head_dim}_{s.dtype}_{mask}_{t.tile_m}x{t.tile_n}{ordered}"

    def fake_arguments(self) -> tuple:
        batch, heads, heads_kv, seqlen_q, seqlen_k, padded = (cute.sym_int() for _ in range(6))
        d, dp = self.static.head_dim, self.tile.head_dim

        def tensor(num_heads, seqlen):
            strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
            return make_fake_tensor(self.dtype, (batch, num_heads, seqlen, d), strides, assumed_align=16)

        def rows():
            return make_fake_compact_tensor(
                Float32, (batch, heads, padded), stride_order=(2, 1, 0), assumed_align=16
            )

        blocks = cute.sym_int()
        size = self.tile.tile_m * dp
        mdQ = make_fake_compact_tensor(
            Float32, (batch, heads, blocks, size), stride_order=(3, 2, 1, 0), assumed_align=16
        )
        q, k, v, do = (
            tensor(heads, seqlen_q),
            tensor(heads_kv, seqlen_k),
            tensor(heads_kv, seqlen_k),
            tensor(heads, seqlen_q),
        )
        dk, dv = tensor(heads_kv, seqlen_k), tensor(heads_kv, seqlen_k)
        order = (2, 1, 0)
        counters = make_fake_compact_tensor(
            Int32, (batch, heads, blocks), stride_order=order, assumed_align=4
        )
        return (
            q,
            k,
            v,
            do,
            rows(),
            rows(),
            mdQ,
            tensor(heads, seqlen_q) if self.is_ordered else None,
            counters if self.is_ordered else None,
            dk,
            dv,
            Float32(1.0),
            Float32(1.0),
            Int32(0),
            Int32(0),
            Int32(1),
            Int32(0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mD: cute.Tensor,
        mdQ: cute.Tensor,
        mdQ_rows: cute.Tensor | None,
        mCounters: cute.Tensor | None,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        scale: Float32,
        dq_scale: Float32,
        window_left: Int32,
        window_right: Int32,
        section: Int32,
        rotates: Int32,
        stream: CUstream,
    ):
        tile, static = self.tile, self.static
        load = cpasync.CopyBulkTensorTileG2SOp()
        batch, heads_kv, seqlen_k, _ = mK.shape
        num_n_blocks = cute.ceil_div(seqlen_k, tile.tile_n)
        MN, K = OperandMajorMode.MN, OperandMajorMode.K
        left = window_left if static.has_left else None
        right = window_right if static.has_right else None
        turns = None
        if cutlass.const_expr(self.is_ordered):
            band = Band(left, right)
            turns = Order(mCounters, band, mQ.shape[2], seqlen_k, rotates, tile.tile_m, tile.tile_n)
        params = Params(
            self.shapes,
            TmaTiles.of(load, mQ, self.shapes.q),
            TmaTiles.of(load, mdO, self.shapes.q),
            TmaTiles.of(load, mK, self.shapes.k),
            TmaTiles.of(load, mV, self.shapes.k),
            mLSE,
            mD,
            mdQ,
            mdQ_rows,
            turns,
            dq_scale,
            mdK,
            mdV,
            mQ.shape[2],
            seqlen_k,
            mQ.shape[1] // heads_kv,
            scale,
            Band(right, left),
            # The longest first; in order, the last: who is waited for must have begun.
            TileOrder(num_n_blocks, heads_kv, batch, section, static.has_left or self.is_ordered),
            make_mma(self.dtype, tile.tile_m, False, K, K),
            make_mma(self.dtype, tile.head_dim, True, K, MN),
            make_mma(self.dtype, tile.dq_part[1], False, MN, MN),
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(params).launch(
            grid=(num_n_blocks * heads_kv * batch, 1, 1),
            block=(tile.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = Shared.allocate(self.shapes)
        if warp_index == 0:
            with cute.arch.elect_one():
                shared.init_barriers()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tile = self._tile(p)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp_index == 0:
                copies.load(p, shared, tile)
            if warp_index == 1:
                if cutlass.const_expr(self.is_ordered):
                    copies.add_dq_in_order(p, shared, tile)
                else:
                    copies.add_dq(p, shared, tile)
        else:
            cute.arch.setmaxregister_increase(240)
            self.mma(p, shared, tile, warp_index // 4 - 1, thread % WARPGROUP_THREADS)

    def _tile(self, p: Params) -> Tile:
        n_block, head_kv, batch = p.order.decode(cute.arch.block_idx()[0])
        blocks = p.band.blocks(n_block, self.tile.tile_n, self.tile.tile_m, p.seqlen_k, p.seqlen_q)
        num = blocks.end - blocks.begin
        first = p.turns.first(n_block, num) if self.is_ordered else Int32(0)
        return Tile(n_block, head_kv, batch, blocks, Walk(blocks.begin, num, first))

    def _part(self, sX: cute.Tensor, size: int, wg: Int32) -> cute.Tensor:
        """A warpgroup's part of the first mode, or all of it."""
        if cute.size(sX, mode=[0]) == size:
            return sX
        rest = (None,) * (cute.rank(sX) - 1)
        return cute.logical_divide(sX, (size, *rest))[((None, wg), *rest)]

    def _main(self, p: Params, shared: Shared, wg: Int32, thread: Int32) -> Main:
        tile = self.tile
        s, dkv, dq = p.mma_s.get_slice(0), p.mma_dkv.get_slice(0), p.mma_dq.get_slice(0)
        rows = (WARPGROUP_ROWS, tile.head_dim)
        acc_dK = cute.make_rmem_tensor(dkv.partition_shape_C(rows), Float32)
        coords = cute.make_identity_tensor((WARPGROUP_ROWS, tile.tile_m))
        return Main(
            wg,
            thread,
            shared,
            s.make_fragment_A(s.partition_A(cute.local_tile(shared.sK, rows, (wg, 0)))),
            s.make_fragment_A(s.partition_A(cute.local_tile(shared.sV, rows, (wg, 0)))),
            s.make_fragment_B(s.partition_B(shared.sQ)),
            s.make_fragment_B(s.partition_B(shared.sdO)),
            dkv.make_fragment_B(dkv.partition_B(transposed(shared.sQ))),
            dkv.make_fragment_B(dkv.partition_B(transposed(shared.sdO))),
            dq.make_fragment_A(dq.partition_A(self._part(transposed(shared.sdS), tile.dq_part[0], wg))),
            dq.make_fragment_B(dq.partition_B(self._part(transposed(shared.sK), tile.dq_part[1], wg))),
            cute.make_rmem_tensor(s.partition_shape_C((WARPGROUP_ROWS, tile.tile_m)), Float32),
            acc_dK,
            cute.make_fragment_like(acc_dK),
            p.mma_s.get_slice(thread).partition_C(coords),
            Turns(FIRST_TURN, NUM_WARPGROUPS if tile.takes_turns else 1, wg),
        )

    @cute.jit
    def mma(self, p: Params, shared: Shared, tile: Tile, wg: Int32, thread: Int32):
        main = self._main(p, shared, wg, thread)
        first_row = tile.n_block * self.tile.tile_n + wg * WARPGROUP_ROWS
        mask = Mask(p.band, p.seqlen_k, p.seqlen_q, first_row, main.tScS)
        main.acc_dK.fill(0.0)
        main.acc_dV.fill(0.0)
        if cutlass.const_expr(self.tile.takes_turns):
            main.turns.begin()
        num, blocks = tile.walk.num, tile.blocks
        total = num * p.heads_per_kv
        cute.arch.mbarrier_wait(shared.kv_full, 0)
        if total > 0:
            shared.q.wait_full(0)
            acc_S = self.start_s(p, main, Int32(0))
            warpgroup.wait_group(0)
            main.acc_S.store(acc_S.load())
        # Keys past the end must not reach dQ: all of the last block is masked.
        is_tail = first_row + WARPGROUP_ROWS > p.seqlen_k
        head, m_block, count = Int32(0), Int32(0), Int32(0)
        for g in cutlass.range(p.heads_per_kv, unroll=1):
            for i in cutlass.range(num, unroll=1):
                before = (head, tile.batch, m_block)
                head, m_block = tile.head_kv * p.heads_per_kv + g, tile.walk.at(i)
                is_cut = m_block < blocks.full_begin or m_block >= blocks.full_end or is_tail
                fill = g * num + i
                acc_dS = self.probabilities(p, main, mask, m_block, fill, is_cut)
                count = self.products(p, main, tile, acc_dS, fill, (before, count, total))
        if total > 0:
            acc_dQ = self.start_dq(p, main, total - 1)
            warpgroup.wait_group(0)
            self.leave_dq(p, main, tile, acc_dQ, total - 1, (head, tile.batch, m_block), count)
        self.write(p.mdV, main.acc_dV, tile, main, p, Float32(1.0))
        self.write(p.mdK, main.acc_dK, tile, main, p, p.scale)

    @cute.jit
    def start_s(self, p: Params, main: Main, fill: Int32):
        """S^T = K Q^T"""
        rQ = main.rQ[None, None, None, main.shared.q.stage(fill)]
        # New for every block: nothing of it lives on while it is made.
        acc_S = cute.make_fragment_like(main.acc_S)
        start_gemm(p.mma_s, acc_S, main.rK, rQ, False)
        return acc_S

    @cute.jit
    def start_dq(self, p: Params, main: Main, fill: Int32):
        """dQ = dS K, as soon as both warpgroups have shared their dS"""
        ring = main.shared.ds
        ring.wait_full(fill)
        shape = p.mma_dq.get_slice(0).partition_shape_C(self.tile.dq_part)
        acc_dQ = cute.make_rmem_tensor(shape, Float32)
        start_gemm(p.mma_dq, acc_dQ, main.rdSt[None, None, None, ring.stage(fill)], main.rKt, False)
        return acc_dQ

    @cute.jit
    def probabilities(self, p: Params, main: Main, mask: Mask, m_block: Int32, fill: Int32, is_cut):
        """P^T and dS^T of a block whose S^T stands; dV += P^T dO is begun."""
        shared = main.shared
        stage = shared.q.stage(fill)
        # dP^T = V dO^T, beside the exponentials
        shared.do.wait_full(fill)
        main.turns.wait()
        acc_dP = cute.make_fragment_like(main.acc_S)
        start_gemm(p.mma_s, acc_dP, main.rV, main.rdO[None, None, None, stage], False)
        if is_cut:
            self.mask(main, mask, m_block)
        # P^T = exp(scale S^T - LSE)
        acc_P = main.acc_S
        rP, rdS = (cute.make_fragment_like(main.acc_S, self.dtype) for _ in range(2))
        self.exponentiate(p, main, acc_P, stage)
        convert(acc_P, rP)
        # dV += P^T dO, beside dS^T = P^T (dP^T - D)
        start_gemm(p.mma_dkv, main.acc_dV, as_operand_a(rP), main.rdOt[None, None, None, stage], True)
        main.turns.pass_on()
        warpgroup.wait_group(1)
        self.multiply(main, acc_P, acc_dP, stage)
        convert(acc_P, rdS)
        self.share_ds(p, main, rdS, fill)
        return rdS

    @cute.jit
    def products(self, p: Params, main: Main, tile: Tile, rdS: cute.Tensor, fill: Int32, state: tuple):
        """dK += dS^T Q;  dQ = dS K of the block before: so the warpgroups need not keep in step, and one
        multiplies while the other takes exponentials;  S^T of the next block. Returns the blocks of dQ handed
        over.
        """
        shared = main.shared
        before, count, total = state
        rQt = main.rQt[None, None, None, shared.q.stage(fill)]
        if fill > 0:
            acc_dQ = self.start_dq(p, main, fill - 1)
            warpgroup.wait_group(1)
            shared.do.release_by_all(fill)
            start_gemm(p.mma_dkv, main.acc_dK, as_operand_a(rdS), rQt, True)
            warpgroup.wait_group(1)
            count = self.leave_dq(p, main, tile, acc_dQ, fill - 1, before, count)
        else:
            warpgroup.wait_group(0)
            shared.do.release_by_all(fill)
            start_gemm(p.mma_dkv, main.acc_dK, as_operand_a(rdS), rQt, True)
        # After the last block, of what is left in the stage: for nothing, but without a branch.
        if fill + 1 < total:
            shared.q.wait_full(fill + 1)
        acc_S = self.start_s(p, main, fill + 1)
        warpgroup.wait_group(0)
        shared.q.release_by_all(fill)
        main.acc_S.store(acc_S.load())
        return count

    @cute.jit
    def exponentiate(self, p: Params, main: Main, acc: cute.Tensor, stage: Int32):
        """S^T -> exp(scale S^T - LSE), in place; a column is a query."""
        S_mn, first = as_mn(acc), as_mn(main.tScS)[0, 0][1]
        rows_LSE = cute.domain_offset((first,), main.shared.sLSE[None, stage])
        scale_log2 = p.scale * LOG2_E
        for c in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
            lse = rows_LSE[column_offset(c)]
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                S_mn[r, c] = cute.math.exp2(S_mn[r, c] * scale_log2 - lse, fastmath=True)

    @cute.jit
    def multiply(self, main: Main, acc_P: cute.Tensor, acc_dP: cute.Tensor, stage: Int32):
        """P^T -> dS^T = P^T (dP^T - D), in place"""
        P_mn, dP_mn, first = as_mn(acc_P), as_mn(acc_dP), as_mn(main.tScS)[0, 0][1]
        rows_D = cute.domain_offset((first,), main.shared.sD[None, stage])
        for c in cutlass.range_constexpr(cute.size(P_mn, mode=[1])):
            d = rows_D[column_offset(c)]
            for r in cutlass.range_constexpr(cute.size(P_mn, mode=[0])):
                P_mn[r, c] = P_mn[r, c] * (dP_mn[r, c] - d)

    @cute.jit
    def mask(self, main: Main, mask: Mask, m_block: Int32):
        S_mn = as_mn(main.acc_S)
        mask.apply(S_mn, m_block * self.tile.tile_m)
        mask.hide_tail(S_mn)

    @cute.jit
    def share_ds(self, p: Params, main: Main, rdS: cute.Tensor, fill: Int32):
        """dS to shared memory, for both warpgroups."""
        ring = main.shared.ds
        ring.wait_empty(fill)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, p.mma_s).get_slice(main.thread)
        stage = main.shared.sdS[None, None, ring.stage(fill)]
        sdS = cute.local_tile(stage, (WARPGROUP_ROWS, self.tile.tile_m), (main.wg, 0))
        cute.copy(atom, copy.retile(rdS), copy.partition_D(sdS))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ring.full_of(fill))

    @cute.jit
    def leave_dq(
        self, p: Params, main: Main, tile: Tile, acc_dQ: cute.Tensor, fill: Int32, where: tuple, count: Int32
    ):
        """dQ to the warp that adds it to global memory, or the result to its rows; dS has been read."""
        main.shared.ds.release(fill)
        if cutlass.const_expr(self.is_ordered):
            rank, last = p.turns.turn(tile.n_block, where[2])
            if rank < last:
                self.hand_over_dq(main, acc_dQ, count)
                count += 1
            else:
                self.close_dq(p, main, acc_dQ, where, rank)
        else:
            self.hand_over_dq(main, acc_dQ, count)
            count += 1
        return count

    @cute.jit
    def hand_over_dq(self, main: Main, acc_dQ: cute.Tensor, count: Int32):
        """In the order of the registers."""
        ring, dq_fill = main.shared.dq, count * NUM_WARPGROUPS + main.wg
        ring.wait_empty(dq_fill)
        sdQ = main.shared.sdQ[None, main.thread, None, main.wg]
        cute.autovec_copy(cute.make_tensor(acc_dQ.iterator, cute.make_layout(sdQ.shape)), sdQ)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ring.full_of(dq_fill))

    @cute.jit
    def close_dq(self, p: Params, main: Main, acc_dQ: cute.Tensor, where: tuple, rank: Int32):
        """The last tile of keys: its own products and the sums of all others, scaled, to the rows of dQ."""
        head, batch, m_block = where
        if rank > 0:
            if main.thread % 32 == 0:
                p.turns.wait(where, rank)
            cute.arch.sync_warp()
            add_sums(p.mdQ[batch, head, m_block, None], acc_dQ, main.wg, main.thread)
        acc_dQ.store(acc_dQ.load() * p.dq_scale)
        shape = (self.static, self.tile)
        store_dq(acc_dQ, p.mdQ_rows, where, p.mma_dq, shape, main.wg, main.thread)

    @cute.jit
    def write(self, mX: cute.Tensor, acc: cute.Tensor, tile: Tile, main: Main, p: Params, factor: Float32):
        first_row = tile.n_block * self.tile.tile_n + main.wg * WARPGROUP_ROWS
        acc.store(acc.load() * factor)
        rX = cute.make_fragment_like(acc, self.dtype)
        convert(acc, rX)
        head_dim = self.tile.head_dim
        gX = row_tile(mX[tile.batch, tile.head_kv, None, None], first_row, WARPGROUP_ROWS, head_dim)
        coords = cute.make_identity_tensor((WARPGROUP_ROWS, head_dim))
        tXcX = p.mma_dkv.get_slice(main.thread).partition_C(coords)
        packed = cute.make_tensor(
            cute.recast_tensor(rX, Int32).iterator, cute.make_layout((2, head_dim // 8))
        )
        store_rows(packed, gX, as_mn(tXcX), self.static.head_dim, p.seqlen_k - first_row)


class BwdSm90Ordered(BwdSm90):
    """Tiles of keys add to a block of dQ in turn, the first by storing, and the last writes the result: no
    sums to zero before and none to convert after, and the same bits every time. Worth it where there are few
    tiles of keys. Those of a head must be next to each other in the grid.
    """

    is_ordered = True
