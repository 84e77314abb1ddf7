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
| sdS           | tile_n x tile_m             | one block: the halves of both warpgroups    |
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
from cute_flash.device.mask import Mask
from cute_flash.device.ptx import pack
from cute_flash.device.scheduler import TileOrder
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.tma import TmaTiles
from cute_flash.device.views import as_mn, as_operand_a
from cute_flash.kernels.arguments import DTYPES
from cute_flash.problem import Static
from cute_flash.tiles import WARPGROUP_ROWS, BwdTileSm90
from layouts.smem import SmemTile, byte_swizzle, to_cute

NUM_WARPGROUPS = 2
BOTH = NUM_WARPGROUPS * WARPGROUP_THREADS
# Named barriers: dS of both warpgroups stands in shared memory; both have read it.
DS_FULL, DS_EMPTY = 1, 2
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
    sdS: cute.Tensor  # (tile_n, tile_m)
    sLSE: cute.Tensor  # (tile_m, stage)
    sD: cute.Tensor
    sdQ: cute.Tensor  # (4, thread, register / 4, warpgroup) fp32
    kv_full: cute.Pointer
    q: Ring  # with LSE
    do: Ring  # with D
    dq: Ring  # a stage for each warpgroup


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
            self._mma(tile.tile_m, False, K, K),
            self._mma(tile.head_dim, True, K, MN),
            self._mma(tile.head_dim // 2, False, MN, MN),
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(params).launch(
            grid=(num_n_blocks * heads_kv * batch, 1, 1),
            block=(tile.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _mma(self, columns: int, a_in_registers: bool, a_major, b_major) -> cute.TiledMma:
        source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
        shape = (WARPGROUP_ROWS, columns, 16)
        return cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, a_major, b_major)
        )

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = self._allocate()
        if warp_index == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(shared.kv_full, 1)
                shared.q.init(1, 4 * NUM_WARPGROUPS)
                shared.do.init(1, 4 * NUM_WARPGROUPS)
                shared.dq.init(WARPGROUP_THREADS, 1)
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
        sdS = allocate(self.ds_tile, 1)[None, None, 0]
        rows = cute.make_layout((tile.tile_m, tile.stages))
        sLSE, sD = smem.allocate_tensor(Float32, rows, 128), smem.allocate_tensor(Float32, rows, 128)
        per_thread = tile.tile_m * tile.head_dim // BOTH
        order = cute.make_layout((4, WARPGROUP_THREADS, per_thread // 4, NUM_WARPGROUPS))
        sdQ = smem.allocate_tensor(Float32, order, 128)
        kv_full = smem.allocate_array(cutlass.Int64, 2, byte_alignment=8)
        rings = [Ring.allocate(smem, stages) for stages in (tile.stages, tile.stages, NUM_WARPGROUPS)]
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

    @cute.jit
    def mma(self, p: Params, shared: Shared, where: tuple, blocks: BlockRange, wg: Int32, thread: Int32):
        tile = self.tile
        n_block, head_kv, batch = where
        first_row = n_block * tile.tile_n + wg * WARPGROUP_ROWS
        s, dkv, dq = p.mma_s.get_slice(0), p.mma_dkv.get_slice(0), p.mma_dq.get_slice(0)
        half = tile.head_dim // 2
        mine = lambda sX: cute.local_tile(sX, (WARPGROUP_ROWS, tile.head_dim), (wg, 0))
        turned = lambda sX: cute.make_tensor(sX.iterator, cute.select(sX.layout, mode=[1, 0, 2]))
        rK, rV = (
            s.make_fragment_A(s.partition_A(mine(shared.sK))),
            s.make_fragment_A(s.partition_A(mine(shared.sV))),
        )
        rQ, rdO = s.make_fragment_B(s.partition_B(shared.sQ)), s.make_fragment_B(s.partition_B(shared.sdO))
        rQt = dkv.make_fragment_B(dkv.partition_B(turned(shared.sQ)))
        rdOt = dkv.make_fragment_B(dkv.partition_B(turned(shared.sdO)))
        sdSt = cute.make_tensor(shared.sdS.iterator, cute.select(shared.sdS.layout, mode=[1, 0]))
        rdSt = dq.make_fragment_A(dq.partition_A(sdSt))
        sKt = cute.make_tensor(shared.sK.iterator, cute.select(shared.sK.layout, mode=[1, 0]))
        rKt = dq.make_fragment_B(dq.partition_B(cute.local_tile(sKt, (half, tile.tile_n), (wg, 0))))

        acc_dK = cute.make_rmem_tensor(dkv.partition_shape_C((WARPGROUP_ROWS, tile.head_dim)), Float32)
        acc_dV = cute.make_fragment_like(acc_dK)
        acc_dK.fill(0.0)
        acc_dV.fill(0.0)
        coords = p.mma_s.get_slice(thread).partition_C(
            cute.make_identity_tensor((WARPGROUP_ROWS, tile.tile_m))
        )
        mask = Mask(p.band, p.seqlen_k, p.seqlen_q, first_row, coords)
        frags = (rK, rV, rQ, rdO, rQt, rdOt, rdSt, rKt)
        cute.arch.mbarrier_wait(shared.kv_full, 0)
        # Keys past the end must not reach dQ: all of the last block is masked.
        is_tail = first_row + WARPGROUP_ROWS > p.seqlen_k
        num = blocks.end - blocks.begin
        for g in cutlass.range(p.heads_per_kv, unroll=1):
            head = head_kv * p.heads_per_kv + g
            for i in cutlass.range(num, unroll=1):
                m_block = blocks.begin + i
                is_cut = m_block < blocks.full_begin or m_block >= blocks.full_end or is_tail
                self.one_block(
                    p,
                    shared,
                    frags,
                    (acc_dK, acc_dV),
                    mask,
                    (head, batch, m_block, g * num + i),
                    is_cut,
                    (wg, thread),
                )
        self.write(p.mdV, acc_dV, where, wg, thread, p, Float32(1.0))
        self.write(p.mdK, acc_dK, where, wg, thread, p, p.scale)

    @cute.jit
    def one_block(
        self,
        p: Params,
        shared: Shared,
        frags: tuple,
        accs: tuple,
        mask: Mask,
        what: tuple,
        is_cut,
        who: tuple,
    ):
        tile = self.tile
        rK, rV, rQ, rdO, rQt, rdOt, rdSt, rKt = frags
        acc_dK, acc_dV = accs
        head, batch, m_block, fill = what
        wg, thread = who
        stage = shared.q.stage(fill)
        shape = p.mma_s.get_slice(0).partition_shape_C((WARPGROUP_ROWS, tile.tile_m))
        # S^T = K Q^T;  dP^T = V dO^T
        shared.q.wait_full(fill)
        acc_S = cute.make_rmem_tensor(shape, Float32)
        self.start_gemm(p.mma_s, acc_S, rK, rQ[None, None, None, stage], False)
        shared.do.wait_full(fill)
        acc_dP = cute.make_rmem_tensor(shape, Float32)
        self.start_gemm(p.mma_s, acc_dP, rV, rdO[None, None, None, stage], False)
        warpgroup.wait_group(1)

        # P^T = exp(scale S^T - LSE)
        S_mn, dP_mn, coords = as_mn(acc_S), as_mn(acc_dP), as_mn(mask.tScS)
        if is_cut:
            mask.apply(S_mn, m_block * tile.tile_m)
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                if mask.first_row + coords[r, 0][0] >= p.seqlen_k:
                    S_mn[r, None].fill(-Float32.inf)
        first = coords[0, 0][1]
        rows_LSE = cute.domain_offset((first,), shared.sLSE[None, stage])
        rows_D = cute.domain_offset((first,), shared.sD[None, stage])
        scale_log2 = p.scale * LOG2_E
        rP, rdS = cute.make_rmem_tensor(shape, self.dtype), cute.make_rmem_tensor(shape, self.dtype)
        columns = cute.size(S_mn, mode=[1])
        for c in cutlass.range_constexpr(columns):
            lse = rows_LSE[c % 2 + c // 2 * 8]
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                S_mn[r, c] = cute.math.exp2(S_mn[r, c] * scale_log2 - lse, fastmath=True)
        # dS^T = P^T (dP^T - D)
        warpgroup.wait_group(0)
        for c in cutlass.range_constexpr(columns):
            d = rows_D[c % 2 + c // 2 * 8]
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                dP_mn[r, c] = S_mn[r, c] * (dP_mn[r, c] - d)
        self.convert(acc_S, rP)
        self.convert(acc_dP, rdS)

        # dS to shared memory, for both warpgroups
        cute.arch.barrier(barrier_id=DS_EMPTY, number_of_threads=BOTH)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, p.mma_s).get_slice(thread)
        sdS = cute.local_tile(shared.sdS, (WARPGROUP_ROWS, tile.tile_m), (wg, 0))
        cute.copy(atom, copy.retile(rdS), copy.partition_D(sdS))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=DS_FULL, number_of_threads=BOTH)

        # dV += P^T dO;  dQ = dS K;  dK += dS^T Q
        self.start_gemm(p.mma_dkv, acc_dV, as_operand_a(rP), rdOt[None, None, None, stage], True)
        acc_dQ = cute.make_rmem_tensor(
            p.mma_dq.get_slice(0).partition_shape_C((tile.tile_m, tile.head_dim // 2)), Float32
        )
        self.start_gemm(p.mma_dq, acc_dQ, rdSt, rKt, False)
        self.start_gemm(p.mma_dkv, acc_dK, as_operand_a(rdS), rQt[None, None, None, stage], True)
        warpgroup.wait_group(2)
        shared.do.release(fill)
        dq_fill = fill * NUM_WARPGROUPS + wg
        shared.dq.wait_empty(dq_fill)
        warpgroup.wait_group(1)
        sdQ = shared.sdQ[None, thread, None, wg]
        cute.autovec_copy(cute.make_tensor(acc_dQ.iterator, cute.make_layout(sdQ.shape)), sdQ)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(shared.dq.full_of(dq_fill))
        warpgroup.wait_group(0)
        shared.q.release(fill)

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
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * factor
        rX = cute.make_fragment_like(acc, self.dtype)
        self.convert(acc, rX)
        gX = row_tile(mX[batch, head_kv, None, None], first_row, WARPGROUP_ROWS, self.tile.head_dim)
        coords = p.mma_dkv.get_slice(thread).partition_C(
            cute.make_identity_tensor((WARPGROUP_ROWS, self.tile.head_dim))
        )
        packed = cute.make_tensor(
            cute.recast_tensor(rX, Int32).iterator, cute.make_layout((2, self.tile.head_dim // 8))
        )
        store_rows(packed, gX, as_mn(coords), self.static.head_dim, p.seqlen_k - first_row)

    @cute.jit
    def convert(self, acc: cute.Tensor, fragment: cute.Tensor):
        packed = cute.recast_tensor(fragment, Int32)
        for i in cutlass.range_constexpr(cute.size(acc) // 2):
            packed[i] = pack(acc[2 * i], acc[2 * i + 1], self.dtype)

    @cute.jit
    def start_gemm(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        rA: cute.Tensor,
        rB: cute.Tensor,
        accumulate: cutlass.Constexpr,
    ):
        warpgroup.fence()
        atom = cute.make_mma_atom(tiled_mma.op)
        for k in cutlass.range_constexpr(cute.size(rB, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
            cute.gemm(atom, acc, rA[None, None, k], rB[None, None, k], acc)
        warpgroup.commit_group()
