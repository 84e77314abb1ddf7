"""Backward attention with TMA, wgmma and specialised warps for wide heads: Hopper.

For each tile of keys, over the query heads that share them and blocks i of queries:

    S    = Qi K^T                       queries are rows; a warpgroup has half of the keys
    P    = exp(scale S - LSE)           0 outside the band
    dP   = dOi V^T
    dS   = P (dP - D),  D = rowsum(dO O) - dLSE
    dV^T += dOi^T P                     P and dS pass through shared memory, transposed;
    dK^T += Qi^T dS                     a warpgroup has half of the rows, times scale at the end
    dQi  += dS K                        half of the columns; fp32 additions in global memory

Wide dK and dV leave few registers: dQ is made by halves, one after the other in the same place. In a block,
with the halves of dV, dQ and dK written as 0 and 1 and what belongs to the next block with a dash, a
warpgroup gives the tensor cores

    dQ0 dK0   S' dK1 dQ1   dV0' dP' dV1'

so that exponentials are taken beside dK1 and dQ1, and dS' is made, stored and waited for beside dV1'. dQ0 and
dQ1 leave at equal distances, for the additions to keep up.

| warpgroup | warps | role                                                    |
|-----------|-------|---------------------------------------------------------|
| 0         | 0     | load: TMA of K and V, of Q, dO, LSE and D               |
| 0         | 1, 2  | dQ of a warpgroup: bulk additions to global memory      |
| 1, 2      | all   | mma: half of the keys, half of the columns of gradients |

| shared memory | elements                    | life                                        |
|---------------|-----------------------------|---------------------------------------------|
| sK, sV        | tile_n x tile_d             | whole tile; dK and dV leave through them    |
| sQ            | 2 x tile_m x tile_d         | S to dK1, which is two blocks               |
| sdO           | tile_m x tile_d             | dV0 to dV1                                  |
| sP            | tile_n x tile_m             | exponentials to dV1                         |
| sdS           | tile_n x tile_m             | dS to dQ1                                   |
| sdQ           | 7/8 of half of dQ, fp32     | a half at a time; the rest has no room      |
| sLSE, sD      | stages x tile_m, fp32       | one block of queries                        |
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from cute_flash.device.band import Band
from cute_flash.device.pipeline import WARPGROUP_THREADS, WarpgroupOrder
from cute_flash.device.mask import Mask
from cute_flash.device.ptx import rederived
from cute_flash.device.tile_scheduler import StaticTileScheduler
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.stmatrix import store_transposed
from cute_flash.device.tma import TmaTiles
from cute_flash.device.views import as_mn, transposed
from cute_flash.device.wgmma import convert, make_mma, start_gemm
from cute_flash.kernels.sm90.bwd_producer import load_block, load_keys
from cute_flash.kernels.sm90.bwd_storage import BOTH, NUM_WARPGROUPS, Tile
from cute_flash.kernels.sm90.bwd_wide_storage import Params, Config, SharedStorage
from cute_flash.kernels.sm90.dq import add_four, bulk_add
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90Wide
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.spec.band import FAR
from cute_flash.spec.problem import Static

# Named barriers; 0 is the one of all threads.
FIRST_FREE, WRITTEN, FIRST_OUTPUT, P_WRITTEN = 1, 3, 4, 6
HALVES = 2
# Of a product over columns: with fewer, ptxas would let every product wait for the one before.
LEAST_STEPS = 8


@dataclass(frozen=True)
class Main:
    """What a warpgroup works with; pairs are of the halves of its columns, 64 each."""

    wg: Int32
    thread: Int32
    shared: SharedStorage
    rQ: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, stage)
    rdO: cute.Tensor
    rK: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K), its own keys
    rV: cute.Tensor
    rdOt: tuple  # descriptors (MMA, MMA_M, MMA_K, stage)
    rQt: tuple
    rP: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K)
    rdS: cute.Tensor
    rdSt: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K)
    rKt: tuple  # descriptors (MMA, MMA_N, MMA_K)
    acc_dK: tuple
    acc_dV: tuple
    acc_S: cute.Tensor
    acc_dP: cute.Tensor
    acc_dQ: cute.Tensor  # a half of it at a time, in the registers of dP
    tScS: cute.Tensor  # (query, key) of every element of S
    free: WarpgroupOrder  # sP is read no more by the other warpgroup


class BwdSm90Wide:
    def __init__(self, static: Static, tile: BwdTileSm90Wide):
        self.static, self.tile = static, tile
        self.config = Config(static, tile)
        self.dtype = self.config.dtype
        self.keys = tile.tile_n // NUM_WARPGROUPS  # of a warpgroup
        # Of S and dP, whose widths may differ.
        self.steps = tuple(None if x is None else range(max(len(x), LEAST_STEPS)) for x in static.k_steps)

    @property
    def name(self) -> str:
        t, s = self.tile, self.static
        mask = ("l" if s.has_left else "") + ("r" if s.has_right else "") or "full"
        return f"cute_flash_bwd_sm90_wide_d{s.widths}_{s.dtype}_{mask}_{t.tile_m}x{t.tile_n}"

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
        num_ctas: Int32,
        tile_counter: Int64,
        stream: CUstream,
    ):
        """The first operands of `BwdSm90`. A CTA has one tile, and dQ no fixed order: `tile_counter` and
        `dq_semaphore` are not used.
        """
        tile, static, config = self.tile, self.static, self.config
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        batch, heads_kv, seqlen_k, _ = k.shape
        num_n_blocks = cute.ceil_div(seqlen_k, tile.tile_n)
        MN, K = OperandMajorMode.MN, OperandMajorMode.K
        params = Params(
            config=config,
            q=TmaTiles.of(load, q, config.q),
            do=TmaTiles.of(load, dout_cast, config.q),
            k=TmaTiles.of(load, k, config.k),
            v=TmaTiles.of(load, v, config.k),
            dk=TmaTiles.of(store, dk, config.out),
            dv=TmaTiles.of(store, dv, config.out),
            mLSE=lse_log2,
            mD=delta,
            mdQ=dq_accum,
            seqlen_q=q.shape[2],
            seqlen_k=seqlen_k,
            heads_per_kv=q.shape[1] // heads_kv,
            scale=scale,
            band=Band(*self.bounds(window_left, window_right)),
            order=StaticTileScheduler(num_n_blocks, heads_kv, batch, heads_per_l2_group, static.has_left),
            mma_s=make_mma(self.dtype, self.keys, False, K, K),
            mma_dkv=make_mma(self.dtype, tile.tile_n, False, MN, K),
            mma_dq=make_mma(self.dtype, WARPGROUP_ROWS, False, MN, MN),
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(params).launch(
            grid=(num_ctas, 1, 1),
            block=(tile.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def bounds(self, left: Int32, right: Int32) -> tuple:
        """Of the band. Without a right bound there is one that hides nothing: ptxas is short of registers
        for the other masks by themselves, and would let every product wait for the one before.
        """
        static = self.static
        return left if static.has_left else None, right if static.has_right else Int32(FAR)

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = SharedStorage.allocate(self.config)
        if warp_index == 0:
            with cute.arch.elect_one():
                shared.init_barriers()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Until the preprocess kernel has ended; the postprocess kernel may be launched, and waits likewise.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        for_copies, for_mma = self.tile.registers
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(for_copies)
            if warp_index == 0:
                self.load(p, shared)
            elif warp_index <= NUM_WARPGROUPS:
                self.add_parts(p, shared, warp_index - 1)
        else:
            cute.arch.setmaxregister_increase(for_mma)
            self.mma(p, shared, warp_index // 4 - 1, thread % WARPGROUP_THREADS)

    @cute.jit
    def load(self, p: Params, shared: SharedStorage):
        """K, the first block of queries, V, and the other blocks."""
        tile, fill = p.tile(), Int32(0)
        load_keys(p, p.k, shared.k, shared.sK, tile)
        if tile.block_iter.num * p.heads_per_kv > 0:
            load_block(p, shared, tile, fill, Int32(0), Int32(0))
        load_keys(p, p.v, shared.v, shared.sV, tile)
        for g in cutlass.range(p.heads_per_kv, unroll=1):
            for i in cutlass.range(1 if g == 0 else 0, tile.block_iter.num, unroll=1):
                load_block(p, shared, tile, fill + i, g, i)
            fill += tile.block_iter.num

    @cute.jit
    def add_parts(self, p: Params, shared: SharedStorage, wg: Int32):
        """Add what a warpgroup stages of dQ to global memory; a warp for each, so that neither waits until
        the other's part has left.
        """
        tile, sums, fill = p.tile(), Int32(0), Int32(0)
        sums = p.first_sums(tile)
        elements = self.tile.tile_m * self.tile.head_dim
        source = shared.sdQ[None, None, None, wg].iterator
        for _ in cutlass.range(p.heads_per_kv, unroll=1):
            for i in cutlass.range(tile.block_iter.num, unroll=1):
                first = p.mdQ.iterator + Int64(sums + i) * elements
                for half in cutlass.range_constexpr(HALVES):
                    staged = (HALVES * (fill + i) + half) * NUM_WARPGROUPS + wg
                    shared.dq.wait_full(staged)
                    with cute.arch.elect_one():
                        part = (HALVES * wg + half) * (elements // (HALVES * NUM_WARPGROUPS))
                        bulk_add(first + part, source, 4 * 4 * WARPGROUP_THREADS * self.tile.dq_pieces)
                        cute.arch.cp_async_bulk_commit_group()
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    shared.dq.release(staged)
            fill += tile.block_iter.num
            sums += p.mdQ.shape[2]
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)

    def _main(self, p: Params, shared: SharedStorage, wg: Int32, thread: Int32) -> Main:
        tile, columns = self.tile, WARPGROUP_ROWS
        s, dkv, dq = p.mma_s.get_slice(0), p.mma_dkv.get_slice(0), p.mma_dq.get_slice(0)

        def part(sX: cute.Tensor, rows: int, half: int) -> cute.Tensor:
            """(columns, rows, ...) of a half of this warpgroup's columns."""
            rest = (None,) * (cute.rank(sX) - 2)
            return cute.local_tile(transposed(sX), (columns, rows), (HALVES * wg + half, 0, *rest))

        def keys(sX: cute.Tensor) -> cute.Tensor:
            return cute.local_tile(sX, (self.keys, tile.head_dim), (wg, 0))

        def columns_a(sX: cute.Tensor) -> tuple:
            parts = (part(sX, tile.tile_m, half) for half in range(HALVES))
            return tuple(dkv.make_fragment_A(dkv.partition_A(sY)) for sY in parts)

        def accumulators() -> tuple:
            shape = dkv.partition_shape_C((columns, tile.tile_n))
            return tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(HALVES))

        return Main(
            wg,
            thread,
            shared,
            s.make_fragment_A(s.partition_A(shared.sQ)),
            s.make_fragment_A(s.partition_A(shared.sdO)),
            s.make_fragment_B(s.partition_B(keys(shared.sK))),
            s.make_fragment_B(s.partition_B(keys(shared.sV))),
            columns_a(shared.sdO),
            columns_a(shared.sQ),
            dkv.make_fragment_B(dkv.partition_B(shared.sP)),
            dkv.make_fragment_B(dkv.partition_B(shared.sdS)),
            dq.make_fragment_A(dq.partition_A(transposed(shared.sdS))),
            tuple(dq.make_fragment_B(dq.partition_B(part(shared.sK, tile.tile_n, half))) for half in range(HALVES)),
            accumulators(),
            accumulators(),
            *self._temporaries(p),
            self._coords(p, thread),
            WarpgroupOrder(FIRST_FREE, NUM_WARPGROUPS, wg),
        )

    def _temporaries(self, p: Params) -> tuple:
        """S, dP and dQ. The latter share registers, which the compiler does not find by itself: it keeps what
        is written anew in every block over the whole loop, and spills.
        """
        s, dq = p.mma_s.get_slice(0), p.mma_dq.get_slice(0)
        scores = cute.make_layout(s.partition_shape_C((self.tile.tile_m, self.keys)))
        half = cute.make_layout(dq.partition_shape_C((self.tile.tile_m, WARPGROUP_ROWS)))
        acc_S, acc_dQ = cute.make_rmem_tensor(scores, Float32), cute.make_rmem_tensor(half, Float32)
        return acc_S, cute.make_tensor(acc_dQ.iterator, scores), acc_dQ

    @cute.jit
    def mma(self, p: Params, shared: SharedStorage, wg: Int32, thread: Int32):
        """dK and dV of a tile of keys."""
        main, tile = self._main(p, shared, wg, thread), p.tile()
        for half in cutlass.range_constexpr(HALVES):
            main.acc_dK[half].fill(0.0)
            main.acc_dV[half].fill(0.0)
        total = tile.block_iter.num * p.heads_per_kv
        shared.k.wait_full(0)
        shared.v.wait_full(0)
        if total > 0:
            self.first_scores(p, main, tile)
            where = (p.first_sums(tile), Int32(0))
            for fill in cutlass.range(total - 1, unroll=1):
                where = self.one_block(p, main, tile, fill, where)
            self.last_block(p, main, total - 1, where)
        self.write(p, main, tile)

    @cute.jit
    def first_scores(self, p: Params, main: Main, tile: Tile):
        """P and dS of the first block; dV has been started."""
        self.start_s(p, main, Int32(0))
        self.start_dp(p, main, Int32(0))
        warpgroup.wait_group(1)
        self.make_p(p, main, tile, self.load_rows(main, main.shared.sLSE[None, 0]), Int32(0))
        self.share(main, main.shared.sP)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.start_early_dv(p, main, Int32(0))
        # dP
        rD = self.load_rows(main, main.shared.sD[None, 0])
        warpgroup.wait_group(HALVES)
        self.make_ds(main, rD)

    @cute.jit
    def start_early_dv(self, p: Params, main: Main, fill: Int32):
        """dV as soon as both warpgroups have written P, and before they have dS, which is made beside it."""
        cute.arch.barrier(barrier_id=P_WRITTEN, number_of_threads=BOTH)
        for half in cutlass.range_constexpr(HALVES):
            self.start_dv(p, main, fill, half)

    @cute.jit
    def one_block(self, p: Params, main: Main, tile: Tile, fill: Int32, where: tuple):
        """Gradients of a block from its P and dS, and P and dS of the next.

        The products, in the order of the tensor cores:

            dV1 (started in the block before) dQ0 dK0 | S' dK1 dQ1 | dV0' dP' dV1'

        The halves of dQ come at equal distances, and there is dV0' to wait beside for room for dQ1.

        sP: written after `free`, which both warpgroups pass on after dV. sdS, of which there is one: written
        after the barrier P_WRITTEN, to which both come after dQ1, the last that reads it. `where`: number of
        the block among all sums of dQ, and among those of its head that see the keys; the next one's is
        returned.
        """
        shared = main.shared
        self.start_dq(p, main, fill, 0)
        self.start_dk(p, main, fill, 0)
        # dV
        warpgroup.wait_group(2)
        shared.do.release_per_thread(fill)
        main.free.arrive()
        # dQ0, which leaves beside dK0
        warpgroup.wait_group(1)
        rest = self.stage_dq(main, fill, 0)
        self.start_s(p, main, fill + 1)
        self.start_dk(p, main, fill, 1)
        self.start_dq(p, main, fill, 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.add_rest(p, main, rest, where, 0)
        self.publish_dq(main, fill, 0)
        sums, i = where
        sums, i = sums + 1, i + 1
        if i == tile.block_iter.num:
            sums, i = sums + (p.mdQ.shape[2] - tile.block_iter.num), Int32(0)
        # S: exponentials beside dK1 and dQ1
        rLSE = self.load_rows(main, shared.sLSE[None, shared.q.stage(fill + 1)])
        warpgroup.wait_group(2)
        self.make_p(p, main, tile, rLSE, i)
        main.free.wait()
        self.share(main, shared.sP)
        cute.arch.fence_proxy("async.shared", space="cta")
        # dK1 and dQ1, in whose place dP comes; it leaves beside dV0
        warpgroup.wait_group(0)
        shared.q.release(fill)
        cute.arch.barrier(barrier_id=P_WRITTEN, number_of_threads=BOTH)
        # dV0 reads dO before dP does.
        shared.do.wait_full(fill + 1)
        self.start_dv(p, main, fill + 1, 0)
        rest = self.stage_dq(main, fill, 1)
        self.start_dp(p, main, fill + 1)
        self.start_dv(p, main, fill + 1, 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.add_rest(p, main, rest, where, 1)
        self.publish_dq(main, fill, 1)
        # dP; D beside it
        rD = self.load_rows(main, shared.sD[None, shared.do.stage(fill + 1)])
        warpgroup.wait_group(1)
        self.make_ds(main, rD)
        return sums, i

    @cute.jit
    def last_block(self, p: Params, main: Main, fill: Int32, where: tuple):
        self.start_dq(p, main, fill, 0)
        for half in cutlass.range_constexpr(HALVES):
            self.start_dk(p, main, fill, half)
        warpgroup.wait_group(HALVES)
        rest = self.stage_dq(main, fill, 0)
        self.start_dq(p, main, fill, 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.publish_dq(main, fill, 0)
        self.add_rest(p, main, rest, where, 0)
        warpgroup.wait_group(0)
        rest = self.stage_dq(main, fill, 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.publish_dq(main, fill, 1)
        self.add_rest(p, main, rest, where, 1)

    @cute.jit
    def start_s(self, p: Params, main: Main, fill: Int32):
        """S = Q K^T"""
        pipeline = main.shared.q
        pipeline.wait_full(fill)
        rQ = main.rQ[None, None, None, pipeline.stage(fill)]
        start_gemm(p.mma_s, main.acc_S, rQ, main.rK, False, self.steps[0])

    @cute.jit
    def start_dp(self, p: Params, main: Main, fill: Int32):
        """dP = dO V^T"""
        pipeline = main.shared.do
        pipeline.wait_full(fill)
        rdO = main.rdO[None, None, None, pipeline.stage(fill)]
        start_gemm(p.mma_s, main.acc_dP, rdO, main.rV, False, self.steps[1])

    @cute.jit
    def start_dv(self, p: Params, main: Main, fill: Int32, half: cutlass.Constexpr):
        """A half of dV^T += dO^T P"""
        rdOt = main.rdOt[half][None, None, None, main.shared.do.stage(fill)]
        start_gemm(p.mma_dkv, main.acc_dV[half], rdOt, main.rP, True)

    @cute.jit
    def start_dk(self, p: Params, main: Main, fill: Int32, half: cutlass.Constexpr):
        """A half of dK^T += Q^T dS"""
        rQt = main.rQt[half][None, None, None, main.shared.q.stage(fill)]
        start_gemm(p.mma_dkv, main.acc_dK[half], rQt, main.rdS, True)

    @cute.jit
    def start_dq(self, p: Params, main: Main, fill: Int32, half: cutlass.Constexpr):
        """A half of dQ = dS K"""
        start_gemm(p.mma_dq, main.acc_dQ, main.rdSt, main.rKt[half], False)

    def staged(self, main: Main, fill: Int32, half: int) -> Int32:
        """Number of this half of dQ among all that pass through shared memory: a stage is a warpgroup's."""
        return (HALVES * fill + half) * NUM_WARPGROUPS + main.wg

    @cute.jit
    def stage_dq(self, main: Main, fill: Int32, half: cutlass.Constexpr):
        """A half of dQ to shared memory, in the order of the registers, but for the last four, which have no
        room there; they are returned, for `add_rest`. `add_parts` is told by `publish_dq`, after a fence.
        """
        main.shared.dq.wait_empty(self.staged(main, fill, half))
        sdQ, pieces = main.shared.sdQ[None, main.thread, None, main.wg], self.tile.dq_pieces
        cute.autovec_copy(cute.make_tensor(main.acc_dQ.iterator, cute.make_layout((4, pieces))), sdQ)
        rest = cute.make_rmem_tensor(4, Float32)
        for j in cutlass.range_constexpr(4):
            rest[j] = cute.arch.inline_ptx(
                "mov.b32 {$w0}, {$r0};",
                write_only_types=[Float32],
                read_only_args=[main.acc_dQ[4 * pieces + j]],
            )
        return rest

    @cute.jit
    def add_rest(self, p: Params, main: Main, rest: cute.Tensor, where: tuple, half: cutlass.Constexpr):
        """The last piece from registers. Late: a fence waits until all additions before it are complete."""
        elements = self.tile.tile_m * self.tile.head_dim
        first = p.mdQ.iterator + Int64(where[0]) * elements
        add_four(first, rest, HALVES * main.wg + half, self.tile.dq_pieces, main.thread)

    @cute.jit
    def publish_dq(self, main: Main, fill: Int32, half: cutlass.Constexpr):
        cute.arch.mbarrier_arrive(main.shared.dq.full_barrier(self.staged(main, fill, half)))

    @cute.jit
    def make_p(self, p: Params, main: Main, tile: Tile, rLSE: cute.Tensor, i: Int32):
        """S -> P = exp(scale S - LSE), in place"""
        self.mask(p, main, tile, i)
        S_mn, scale_log2 = as_mn(main.acc_S), p.scale * LOG2_E
        for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
                S_mn[r, c] = cute.math.exp2(S_mn[r, c] * scale_log2 - rLSE[r], fastmath=True)

    @cute.jit
    def mask(self, p: Params, main: Main, tile: Tile, i: Int32):
        """-inf outside the band. Queries past the end have an infinite LSE."""
        if i < tile.block_iter.full_begin or i >= tile.block_iter.full_end:
            first_query = tile.block_iter.block(i) * self.tile.tile_m
            first_key = tile.n_block * self.tile.tile_n + main.wg * self.keys
            coords = self._coords(p, rederived(main.thread))
            mask = Mask(p.band, p.seqlen_q, p.seqlen_k, first_query, coords)
            mask.apply(as_mn(main.acc_S), first_key)

    def _coords(self, p: Params, thread: Int32) -> cute.Tensor:
        """(query, key) of every element of S"""
        coords = cute.make_identity_tensor((self.tile.tile_m, self.keys))
        return p.mma_s.get_slice(thread).partition_C(coords)

    @cute.jit
    def make_ds(self, main: Main, rD: cute.Tensor):
        """dS = P (dP - D), in place of P, to shared memory; returns when both warpgroups have come so far."""
        shared = main.shared
        P_mn, dP_mn = as_mn(main.acc_S), as_mn(main.acc_dP)
        for r in cutlass.range_constexpr(cute.size(P_mn, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(P_mn, mode=[1])):
                P_mn[r, c] = P_mn[r, c] * (dP_mn[r, c] - rD[r])
        self.share(main, shared.sdS)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=WRITTEN, number_of_threads=BOTH)

    @cute.jit
    def load_rows(self, main: Main, sX: cute.Tensor) -> cute.Tensor:
        """LSE or D of this thread's rows."""
        coords = as_mn(main.tScS)
        rX = cute.make_rmem_tensor(cute.size(coords, mode=[0]), Float32)
        for r in cutlass.range_constexpr(cute.size(rX)):
            rX[r] = sX[coords[r, 0][0]]
        return rX

    @cute.jit
    def share(self, main: Main, sX: cute.Tensor):
        """P or dS to this warpgroup's keys of sX (tile_n, tile_m)."""
        rX = cute.make_fragment_like(main.acc_S, self.dtype)
        convert(main.acc_S, rX)
        first = sX.iterator + main.wg * (self.keys * self.tile.tile_m)
        store_transposed(rX, first, main.thread)

    @cute.jit
    def write(self, p: Params, main: Main, tile: Tile):
        """dV and dK through where V and K were. After P and dS of the last block, nobody but a warpgroup
        itself reads its columns of K, and nobody V.
        """
        shared = main.shared
        self.stage_output(main, main.acc_dV, shared.sV, Float32(1.0))
        self.stage_output(main, main.acc_dK, shared.sK, p.scale)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=FIRST_OUTPUT + main.wg, number_of_threads=WARPGROUP_THREADS)
        if cute.arch.make_warp_uniform(main.thread // 32) == 0:
            where = (tile.n_block, tile.head_kv, tile.batch, main.wg)
            with cute.arch.elect_one():
                self.send(p.dv, shared.sV, self.static.width_v, where)
                self.send(p.dk, shared.sK, self.static.head_dim, where)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def send(self, tiles: TmaTiles, sX: cute.Tensor, width: cutlass.Constexpr, where: tuple):
        """A warpgroup's columns, where `width` goes so far: of a matrix that ends before, they have no place
        of their own, and would land on the first.
        """
        wg = where[3]
        sY = cute.local_tile(sX, (tiles.rows, tiles.cols), (0, wg))
        if cutlass.const_expr(width > tiles.cols):
            tiles.store(sY, *where)
        else:
            if wg == 0:
                tiles.store(sY, *where)

    @cute.jit
    def stage_output(self, main: Main, accs: tuple, sX: cute.Tensor, factor: Float32):
        """A warpgroup's columns of dK or dV to sX (tile_n, tile_d)."""
        for half in cutlass.range_constexpr(HALVES):
            acc = accs[half]
            acc.store(acc.load() * factor)
            rX = cute.make_fragment_like(acc, self.dtype)
            convert(acc, rX)
            column = (HALVES * main.wg + half) * WARPGROUP_ROWS
            store_transposed(rX, sX.iterator + column * self.tile.tile_n, main.thread)
