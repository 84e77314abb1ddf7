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
| 1, 2      | all   | mma: 64 keys of the tile each, half of dQ's columns each |

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
from cutlass.memory import SmemAllocator

from cute_flash.band import Band, BlockRange
from cute_flash.device.barriers import WARPGROUP_THREADS, Ring
from cute_flash.device.copies import row_tile
from cute_flash.device.epilogue import store_rows
from cute_flash.device.mask import Mask, column_offset
from cute_flash.device.scheduler import TileOrder
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.tma import TmaTiles
from cute_flash.device.views import as_mn, as_operand_a
from cute_flash.device.wgmma import convert, make_mma, start_gemm
from cute_flash.kernels.arguments import DTYPES
from cute_flash.problem import Static
from cute_flash.tiles import WARPGROUP_ROWS, BwdTileSm90
from layouts.smem import SmemTile, byte_swizzle, to_cute

NUM_WARPGROUPS = 2
BOTH = NUM_WARPGROUPS * WARPGROUP_THREADS
DS_STAGES = 2
SMEM_ALIGN = 1024


def bulk_add(target: cute.Pointer, source: cute.Pointer, num_bytes: int):
    """Start adding `num_bytes` of fp32 in shared memory to global memory; by one thread."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(num_bytes)],
    )


@dataclass(frozen=True)
class Params:
    q: TmaTiles  # (tile_m, tile_d)
    do: TmaTiles
    k: TmaTiles  # (tile_n, tile_d)
    v: TmaTiles
    mLSE: cute.Tensor  # (B, H, Sq padded) in units of log2, +inf for rows without keys
    mD: cute.Tensor  # (B, H, Sq padded)
    mdQ: cute.Tensor  # (B, H, m_block, elements of a tile) fp32, in the order of the accumulators
    mdK: cute.Tensor  # (B, Hkv, Sk, D)
    mdV: cute.Tensor
    seqlen_q: Int32
    seqlen_k: Int32
    heads_per_kv: Int32
    scale: Float32
    band: Band  # of keys over queries: left and right change places
    order: TileOrder
    mma_s: cute.TiledMma  # K Q^T and V dO^T
    mma_dkv: cute.TiledMma  # P^T dO and dS^T Q
    mma_dq: cute.TiledMma  # dS K, half of the columns


@dataclass(frozen=True)
class Shared:
    sK: cute.Tensor  # (tile_n, tile_d)
    sV: cute.Tensor
    sQ: cute.Tensor  # (tile_m, tile_d, stage)
    sdO: cute.Tensor
    sdS: cute.Tensor  # (tile_n, tile_m, stage)
    sLSE: cute.Tensor  # (tile_m, stage)
    sD: cute.Tensor
    sdQ: cute.Tensor  # (4, thread, register / 4, warpgroup) fp32
    kv_full: cute.Pointer
    q: Ring  # with LSE
    do: Ring  # with D
    dq: Ring  # a stage for each warpgroup
    ds: Ring  # full: both warpgroups have written; empty: both have read


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
    rdSt: cute.Tensor
    rKt: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K), its own columns of all keys
    acc_S: cute.Tensor
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    tScS: cute.Tensor  # (key, query) of every element of S^T


def transposed(sX: cute.Tensor) -> cute.Tensor:
    modes = [1, 0, *range(2, cute.rank(sX))]
    return cute.make_tensor(sX.iterator, cute.select(sX.layout, mode=modes))


class BwdSm90:
    def __init__(self, static: Static, tile: BwdTileSm90):
        self.static, self.tile, self.dtype = static, tile, DTYPES[static.dtype]
        self.q_tile = SmemTile(tile.tile_m, tile.head_dim)
        self.k_tile = SmemTile(tile.tile_n, tile.head_dim)
        self.ds_tile = SmemTile(tile.tile_n, tile.tile_m)

    @property
    def name(self) -> str:
        t, s = self.tile, self.static
        mask = ("l" if s.has_left else "") + ("r" if s.has_right else "") or "full"
        return f"cute_flash_bwd_sm90_d{s.head_dim}_{s.dtype}_{mask}_{t.tile_m}x{t.tile_n}"

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
        return (
            q,
            k,
            v,
            do,
            rows(),
            rows(),
            mdQ,
            dk,
            dv,
            Float32(1.0),
            Int32(0),
            Int32(0),
            Int32(1),
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
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        section: Int32,
        stream: CUstream,
    ):
        tile, static = self.tile, self.static
        load = cpasync.CopyBulkTensorTileG2SOp()
        batch, heads_kv, seqlen_k, _ = mK.shape
        num_n_blocks = cute.ceil_div(seqlen_k, tile.tile_n)
        MN, K = OperandMajorMode.MN, OperandMajorMode.K
        params = Params(
            TmaTiles.of(load, mQ, self.q_tile),
            TmaTiles.of(load, mdO, self.q_tile),
            TmaTiles.of(load, mK, self.k_tile),
            TmaTiles.of(load, mV, self.k_tile),
            mLSE,
            mD,
            mdQ,
            mdK,
            mdV,
            mQ.shape[2],
            seqlen_k,
            mQ.shape[1] // heads_kv,
            scale,
            Band(window_right if static.has_right else None, window_left if static.has_left else None),
            TileOrder(num_n_blocks, heads_kv, batch, section, static.has_left),
            make_mma(self.dtype, tile.tile_m, False, K, K),
            make_mma(self.dtype, tile.head_dim, True, K, MN),
            make_mma(self.dtype, tile.head_dim // 2, False, MN, MN),
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
        shared = self._allocate()
        if warp_index == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(shared.kv_full, 1)
                shared.q.init(1, BOTH)
                shared.do.init(1, BOTH)
                shared.dq.init(WARPGROUP_THREADS, 1)
                shared.ds.init(BOTH, 4 * NUM_WARPGROUPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        n_block, head_kv, batch = p.order.decode(cute.arch.block_idx()[0])
        blocks = p.band.blocks(n_block, self.tile.tile_n, self.tile.tile_m, p.seqlen_k, p.seqlen_q)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp_index == 0:
                self.load(p, shared, n_block, head_kv, batch, blocks)
            if warp_index == 1:
                self.add_dq(p, shared, head_kv, batch, blocks)
        else:
            cute.arch.setmaxregister_increase(240)
            self.mma(
                p, shared, (n_block, head_kv, batch), blocks, warp_index // 4 - 1, thread % WARPGROUP_THREADS
            )

    def _allocate(self) -> Shared:
        smem, tile = SmemAllocator(), self.tile

        def allocate(one: SmemTile, stages: int) -> cute.Tensor:
            affine = to_cute(one.staged(stages).layout)
            return smem.allocate_tensor(self.dtype, affine, SMEM_ALIGN, swizzle=byte_swizzle(one))

        sK, sV = allocate(self.k_tile, 1)[None, None, 0], allocate(self.k_tile, 1)[None, None, 0]
        sQ, sdO = allocate(self.q_tile, tile.stages), allocate(self.q_tile, tile.stages)
        sdS = allocate(self.ds_tile, DS_STAGES)
        rows = cute.make_layout((tile.tile_m, tile.stages))
        sLSE, sD = smem.allocate_tensor(Float32, rows, 128), smem.allocate_tensor(Float32, rows, 128)
        per_thread = tile.tile_m * tile.head_dim // BOTH
        order = cute.make_layout((4, WARPGROUP_THREADS, per_thread // 4, NUM_WARPGROUPS))
        sdQ = smem.allocate_tensor(Float32, order, 128)
        kv_full = smem.allocate_array(cutlass.Int64, 2, byte_alignment=8)
        rings = [
            Ring.allocate(smem, stages) for stages in (tile.stages, tile.stages, NUM_WARPGROUPS, DS_STAGES)
        ]
        return Shared(sK, sV, sQ, sdO, sdS, sLSE, sD, sdQ, kv_full, *rings)

    @cute.jit
    def load(
        self, p: Params, shared: Shared, n_block: Int32, head_kv: Int32, batch: Int32, blocks: BlockRange
    ):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.kv_full, 2 * self.k_tile.bytes)
        p.k.load(shared.sK, n_block, head_kv, batch, shared.kv_full)
        p.v.load(shared.sV, n_block, head_kv, batch, shared.kv_full)
        num = blocks.end - blocks.begin
        for g in cutlass.range(p.heads_per_kv, unroll=1):
            head = head_kv * p.heads_per_kv + g
            for i in cutlass.range(num, unroll=1):
                fill, m_block = g * num + i, blocks.begin + i
                where = (m_block, head, batch)
                self.load_rows(p.q, shared.q, shared.sQ, (p.mLSE, shared.sLSE), fill, where)
                self.load_rows(p.do, shared.do, shared.sdO, (p.mD, shared.sD), fill, where)

    @cute.jit
    def load_rows(
        self, tiles: TmaTiles, ring: Ring, sX: cute.Tensor, statistic: tuple, fill: Int32, where: tuple
    ):
        """A block of Q or dO, and the fp32 statistic of its rows."""
        m_block, head, batch = where
        mY, sY = statistic
        tile_m, stage = self.tile.tile_m, ring.stage(fill)
        ring.wait_empty(fill)
        ring.expect(fill, self.q_tile.bytes + 4 * tile_m)
        tiles.load(sX[None, None, stage], *where, ring.full_of(fill))
        gY = cute.local_tile(mY[batch, head, None], (tile_m,), (m_block,))
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        with cute.arch.elect_one():
            cute.copy(atom, gY, sY[None, stage], mbar_ptr=ring.full_of(fill))

    @cute.jit
    def add_dq(self, p: Params, shared: Shared, head_kv: Int32, batch: Int32, blocks: BlockRange):
        """Add each warpgroup's half of dQ to global memory as soon as it stands."""
        num, part = blocks.end - blocks.begin, self.tile.tile_m * self.tile.head_dim // NUM_WARPGROUPS
        for g in cutlass.range(p.heads_per_kv, unroll=1):
            head = head_kv * p.heads_per_kv + g
            for i in cutlass.range(num, unroll=1):
                gdQ = p.mdQ[batch, head, blocks.begin + i, None]
                for w in cutlass.range_constexpr(NUM_WARPGROUPS):
                    fill = (g * num + i) * NUM_WARPGROUPS + w
                    shared.dq.wait_full(fill)
                    with cute.arch.elect_one():
                        bulk_add(gdQ.iterator + w * part, shared.sdQ[None, None, None, w].iterator, 4 * part)
                        cute.arch.cp_async_bulk_commit_group()
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    shared.dq.release(fill)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)

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
            dq.make_fragment_A(dq.partition_A(transposed(shared.sdS))),
            dq.make_fragment_B(
                dq.partition_B(
                    cute.local_tile(transposed(shared.sK), (tile.head_dim // 2, tile.tile_n), (wg, 0))
                )
            ),
            cute.make_rmem_tensor(s.partition_shape_C((WARPGROUP_ROWS, tile.tile_m)), Float32),
            acc_dK,
            cute.make_fragment_like(acc_dK),
            p.mma_s.get_slice(thread).partition_C(coords),
        )

    @cute.jit
    def mma(self, p: Params, shared: Shared, where: tuple, blocks: BlockRange, wg: Int32, thread: Int32):
        main = self._main(p, shared, wg, thread)
        n_block, _, _ = where
        first_row = n_block * self.tile.tile_n + wg * WARPGROUP_ROWS
        mask = Mask(p.band, p.seqlen_k, p.seqlen_q, first_row, main.tScS)
        main.acc_dK.fill(0.0)
        main.acc_dV.fill(0.0)
        num = blocks.end - blocks.begin
        total = num * p.heads_per_kv
        cute.arch.mbarrier_wait(shared.kv_full, 0)
        if total > 0:
            shared.q.wait_full(0)
            acc_S = self.start_s(p, main, Int32(0))
            warpgroup.wait_group(0)
            main.acc_S.store(acc_S.load())
        # Keys past the end must not reach dQ: all of the last block is masked.
        is_tail = first_row + WARPGROUP_ROWS > p.seqlen_k
        for g in cutlass.range(p.heads_per_kv, unroll=1):
            for i in cutlass.range(num, unroll=1):
                m_block = blocks.begin + i
                is_cut = m_block < blocks.full_begin or m_block >= blocks.full_end or is_tail
                self.one_block(p, main, mask, m_block, g * num + i, total, is_cut)
        if total > 0:
            acc_dQ = self.start_dq(p, main, total - 1)
            warpgroup.wait_group(0)
            self.hand_over_dq(main, acc_dQ, total - 1)
        self.write(p.mdV, main.acc_dV, where, wg, thread, p, Float32(1.0))
        self.write(p.mdK, main.acc_dK, where, wg, thread, p, p.scale)

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
        shape = p.mma_dq.get_slice(0).partition_shape_C((self.tile.tile_m, self.tile.head_dim // 2))
        acc_dQ = cute.make_rmem_tensor(shape, Float32)
        start_gemm(p.mma_dq, acc_dQ, main.rdSt[None, None, None, ring.stage(fill)], main.rKt, False)
        return acc_dQ

    @cute.jit
    def one_block(self, p: Params, main: Main, mask: Mask, m_block: Int32, fill: Int32, total: Int32, is_cut):
        """S^T of this block stands; that of the next is begun here. dQ is that of the block before: so the
        warpgroups need not keep in step, and one multiplies while the other takes exponentials.
        """
        shared = main.shared
        stage = shared.q.stage(fill)
        # dP^T = V dO^T, beside the exponentials
        shared.do.wait_full(fill)
        acc_dP = cute.make_fragment_like(main.acc_S)
        start_gemm(p.mma_s, acc_dP, main.rV, main.rdO[None, None, None, stage], False)
        if is_cut:
            self.mask(p, main, mask, m_block)
        # P^T = exp(scale S^T - LSE)
        acc_P = main.acc_S
        rP, rdS = (cute.make_fragment_like(main.acc_S, self.dtype) for _ in range(2))
        self.exponentiate(p, main, acc_P, stage)
        convert(acc_P, rP)
        # dV += P^T dO, beside dS^T = P^T (dP^T - D)
        start_gemm(p.mma_dkv, main.acc_dV, as_operand_a(rP), main.rdOt[None, None, None, stage], True)
        warpgroup.wait_group(1)
        self.multiply(main, acc_P, acc_dP, stage)
        convert(acc_P, rdS)
        self.share_ds(p, main, rdS, fill)

        # dQ = dS K of the block before;  dK += dS^T Q;  S^T of the next block
        rQt = main.rQt[None, None, None, stage]
        if fill > 0:
            acc_dQ = self.start_dq(p, main, fill - 1)
            warpgroup.wait_group(1)
            shared.do.release_by_all(fill)
            start_gemm(p.mma_dkv, main.acc_dK, as_operand_a(rdS), rQt, True)
            warpgroup.wait_group(1)
            self.hand_over_dq(main, acc_dQ, fill - 1)
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
    def mask(self, p: Params, main: Main, mask: Mask, m_block: Int32):
        S_mn = as_mn(main.acc_S)
        mask.apply(S_mn, m_block * self.tile.tile_m)
        for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
            if mask.first_row + as_mn(main.tScS)[r, 0][0] >= p.seqlen_k:
                S_mn[r, None].fill(-Float32.inf)

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
    def hand_over_dq(self, main: Main, acc_dQ: cute.Tensor, fill: Int32):
        """dQ to the warp that adds it to global memory, in the order of the registers; dS has been read."""
        main.shared.ds.release(fill)
        ring, dq_fill = main.shared.dq, fill * NUM_WARPGROUPS + main.wg
        ring.wait_empty(dq_fill)
        sdQ = main.shared.sdQ[None, main.thread, None, main.wg]
        cute.autovec_copy(cute.make_tensor(acc_dQ.iterator, cute.make_layout(sdQ.shape)), sdQ)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ring.full_of(dq_fill))

    @cute.jit
    def write(
        self,
        mX: cute.Tensor,
        acc: cute.Tensor,
        where: tuple,
        wg: Int32,
        thread: Int32,
        p: Params,
        factor: Float32,
    ):
        n_block, head_kv, batch = where
        first_row = n_block * self.tile.tile_n + wg * WARPGROUP_ROWS
        acc.store(acc.load() * factor)
        rX = cute.make_fragment_like(acc, self.dtype)
        convert(acc, rX)
        gX = row_tile(mX[batch, head_kv, None, None], first_row, WARPGROUP_ROWS, self.tile.head_dim)
        coords = p.mma_dkv.get_slice(thread).partition_C(
            cute.make_identity_tensor((WARPGROUP_ROWS, self.tile.head_dim))
        )
        packed = cute.make_tensor(
            cute.recast_tensor(rX, Int32).iterator, cute.make_layout((2, self.tile.head_dim // 8))
        )
        store_rows(packed, gX, as_mn(coords), self.static.head_dim, p.seqlen_k - first_row)
