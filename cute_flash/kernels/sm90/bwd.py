"""Backward attention with TMA, wgmma and specialised warps: Hopper.

For each tile of keys, over the query heads that share them and blocks i of queries, in persistent blocks:

    S^T  = K Qi^T                       keys are rows: P^T and dS^T stay in registers as operands
    P^T  = exp(scale S^T - LSE)         0 outside the band
    dP^T = V dOi^T
    dS^T = P^T (dP^T - D),  D = rowsum(dO O) - dLSE
    dV  += P^T dOi
    dK  += dS^T Qi                      times scale at the end
    dQi += dS K                         fp32 additions in global memory, times scale at the end

| warpgroup | warps | role                                           |
|-----------|-------|------------------------------------------------|
| 0         | 0     | load: TMA of K and V, of Q, dO, LSE and D      |
| 0         | 1     | dQ: bulk additions to global memory            |
| 0         | 2     | the same, where tiles of keys take turns       |
| 1, 2      | all   | mma: 64 keys of the tile and half of dQ each   |

| shared memory | elements                    | life                                        |
|---------------|-----------------------------|---------------------------------------------|
| sK, sV        | tile_n x tile_d             | whole tile                                  |
| sQ, sdO       | stages x tile_m x tile_d    | one block, until dK and dV in the next      |
| sdS           | 2 x tile_n x tile_m         | one block, until dQ in the next but one     |
| sdQ           | tile_m x tile_d, fp32       | one block, in the order of the accumulators |
| sLSE, sD      | stages x tile_m, fp32       | one block of queries                        |
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from cute_flash.device.band import Band
from cute_flash.device.pipeline import WARPGROUP_THREADS, WarpgroupOrder
from cute_flash.device.copies import row_tile
from cute_flash.device.block_sparse import BwdBlockIndex
from cute_flash.device.epilogue import store_rows
from cute_flash.device.mask import Mask, column_offset
from cute_flash.device.mods_bwd import ModScores
from cute_flash.device.semaphore import DQSemaphore
from cute_flash.device.ptx import rederived
from cute_flash.device.tma import VarlenTmaTiles
from cute_flash.device.tile_scheduler import StaticTileScheduler, PersistentTileScheduler
from cute_flash.device.seqlen import SeqlenInfo, VarlenTileList, with_batch_mode
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.tma import TmaTiles
from cute_flash.device.views import as_mn, as_operand_a, transposed
from cute_flash.device.wgmma import convert, make_mma, start_gemm
from cute_flash.kernels.common.params import bwd_score_params
from cute_flash.kernels.sm90 import bwd_producer as producer
from cute_flash.kernels.sm90.bwd_storage import NO_TILE, NUM_WARPGROUPS, Params, Config, SharedStorage, Tile
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.spec.features import MODS
from cute_flash.spec.problem import Static

# Named barrier 0 is the one of all threads.
FIRST_ORDER_BARRIER = 1
# Of a thread of the warpgroup that copies, and of the others, together all that there are.
REGISTERS = 24, 240


@dataclass(frozen=True)
class Main:
    """What a warpgroup works with."""

    wg: Int32
    thread: Int32
    shared: SharedStorage
    rK: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K), its own keys
    rV: cute.Tensor
    rQ: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, stage)
    rdO: cute.Tensor
    rQt: cute.Tensor
    rdOt: cute.Tensor
    rdSt: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, stage), its own rows or all
    rKt: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K), all columns or its own
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    tScS: cute.Tensor  # (key, query) of every element of S^T
    order: WarpgroupOrder
    dslope: cute.Tensor | None  # (1), of the head at hand


class BwdSm90:
    def __init__(self, static: Static, tile: BwdTileSm90):
        self.static, self.tile = static, tile
        self.config = Config(static, tile)
        self.dtype = self.config.dtype
        self.has_score = bool(static.features) or static.has_mods
        self.is_written, self.is_listed = static.has_mods, static.block_sparse
        self.has_alibi, self.has_dropout = "alibi" in static.features, "dropout" in static.features
        # What needs the registers in which LSE would wait.
        self.has_function = any(name in MODS for name in static.features)
        # With a semaphore every tile has a CTA of its own: the tile that is waited for has begun.
        differs = static.is_bounded or static.varlen or static.block_sparse
        self.is_dynamic = differs and not static.deterministic

    @property
    def name(self) -> str:
        t, s = self.tile, self.static
        mask = ("l" if s.has_left else "") + ("r" if s.has_right else "") or "full"
        tags = "".join(f"_{name}" for name in s.tags)
        return f"cute_flash_bwd_sm90_d{s.widths}_{s.dtype}_{mask}_{t.tile_m}x{t.tile_n}{tags}"

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
        load, tma, config = cpasync.CopyBulkTensorTileG2SOp(), TmaTiles, self.config
        if cutlass.const_expr(static.varlen):
            q, k, v, dout_cast, dk, dv = (with_batch_mode(x) for x in (q, k, v, dout_cast, dk, dv))
            tma = VarlenTmaTiles
        batch, heads_kv, seqlen_k, _ = k.shape
        num_n_blocks = cute.ceil_div(seqlen_k, tile.tile_n)
        # The longest tiles first; with a semaphore the last, as a tile that is waited for must have begun.
        descends = static.has_left or static.deterministic
        left = window_left if static.has_left else None
        right = window_right if static.has_right else None
        semaphore = None
        if cutlass.const_expr(static.deterministic):
            semaphore = DQSemaphore(dq_semaphore, Band(left, right), q.shape[2], seqlen_k, tile.tile_m, tile.tile_n)
        MN, K = OperandMajorMode.MN, OperandMajorMode.K
        params = Params(
            config=config,
            q=tma.of(load, q, config.q),
            do=tma.of(load, dout_cast, config.q),
            k=tma.of(load, k, config.k),
            v=tma.of(load, v, config.k),
            mLSE=lse_log2,
            mD=delta,
            mdQ=dq_accum,
            dq_semaphore=semaphore,
            mdK=dk,
            mdV=dv,
            seqlen_q=q.shape[2],
            seqlen_k=seqlen_k,
            heads_per_kv=q.shape[1] // heads_kv,
            scale=scale,
            band=Band(right, left),
            order=StaticTileScheduler(num_n_blocks, heads_kv, batch, heads_per_l2_group, descends),
            queue=PersistentTileScheduler(num_n_blocks * heads_kv * batch, tile_counter, self.is_dynamic),
            tile_list=VarlenTileList(kv_tile_list, heads_kv, heads_per_l2_group) if static.varlen else None,
            mma_s=make_mma(self.dtype, tile.tile_m, False, K, K),
            mma_dkv=make_mma(self.dtype, tile.head_dim, True, K, MN),
            mma_dq=make_mma(self.dtype, tile.dq_part[1], False, MN, MN),
            terms=score_params,
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(params).launch(
            grid=(num_ctas, 1, 1),
            block=(tile.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = SharedStorage.allocate(self.config)
        if warp_index == 0:
            with cute.arch.elect_one():
                shared.init_barriers(p.num_adders)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Until the preprocess kernel has ended; the postprocess kernel may be launched, and waits likewise.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        for_copies, for_mma = REGISTERS
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(for_copies)
            if warp_index == 0:
                producer.load(p, shared)
            if warp_index > 0 and warp_index <= p.num_adders:
                producer.add_dq(p, shared, warp_index - 1)
        else:
            cute.arch.setmaxregister_increase(for_mma)
            self.mma(p, shared, warp_index // 4 - 1, thread % WARPGROUP_THREADS)

    def _part(self, sX: cute.Tensor, size: int, wg: Int32) -> cute.Tensor:
        """A warpgroup's part of the first mode, or all of it."""
        if cute.size(sX, mode=[0]) == size:
            return sX
        rest = (None,) * (cute.rank(sX) - 1)
        return cute.logical_divide(sX, (size, *rest))[((None, wg), *rest)]

    def _main(self, p: Params, shared: SharedStorage, wg: Int32, thread: Int32) -> Main:
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
            acc_dK,
            cute.make_fragment_like(acc_dK),
            p.mma_s.get_slice(thread).partition_C(coords),
            WarpgroupOrder(FIRST_ORDER_BARRIER, NUM_WARPGROUPS, wg),
            cute.make_rmem_tensor(1, Float32) if self.has_alibi else None,
        )

    def dv_factor(self, p: Params) -> Float32:
        return p.terms.keep_scale if self.has_dropout else Float32(1.0)

    @cute.jit
    def mma(self, p: Params, shared: SharedStorage, wg: Int32, thread: Int32):
        main = self._main(p, shared, wg, thread)
        main.order.start()
        count, fill = Int32(0), Int32(0)  # of tiles; of blocks of queries
        shared.k.wait_full(count)
        coord = shared.read_tile(count)
        while coord[0] != NO_TILE:
            tile = p.tile(count, fill, coord)
            self.one_tile(p, main, tile)
            fill += p.num_blocks(tile)
            count += 1
            shared.k.wait_full(count)
            coord = shared.read_tile(count)

    @cute.jit
    def one_tile(self, p: Params, main: Main, tile: Tile):
        """dK and dV of a tile of keys."""
        shared, begin = main.shared, tile.fill
        first_row = tile.n_block * self.tile.tile_n + main.wg * WARPGROUP_ROWS
        mask = Mask(p.band, tile.seqlen.k_len, tile.seqlen.q_len, first_row, main.tScS)
        main.acc_dK.fill(0.0)
        main.acc_dV.fill(0.0)
        if cutlass.const_expr(main.dslope is not None):
            main.dslope.fill(0.0)
        shape = p.mma_s.get_slice(0).partition_shape_C((WARPGROUP_ROWS, self.tile.tile_m))
        operands = tuple(cute.make_rmem_tensor(shape, self.dtype) for _ in range(2))
        total = p.num_blocks(tile)
        shared.v.wait_full(tile.count)
        # On the way through the blocks of a head: counted along, for a division takes long.
        place = (Int32(0),)
        if cutlass.const_expr(self.has_score):
            place = (Int32(0), tile.head_kv * p.heads_per_kv)
        if cutlass.const_expr(self.is_listed):
            # An empty list has memory too.
            place = (Int32(0), p.entry(tile, Int32(0)).bits)
        if total > 0:
            place = self.one_block(p, main, tile, mask, operands, (begin, place), 0)
        if total > 1:
            place = self.one_block(p, main, tile, mask, operands, (begin + 1, place), 1)
        for fill in cutlass.range(begin + 2, begin + total, unroll=1):
            place = self.one_block(p, main, tile, mask, operands, (fill, place), 2)
        shared.v.release(tile.count)
        if total > 0:
            last = begin + total - 1
            self.start_dv_dk(p, main, operands, last)
            self.stage_ds(p, main, operands[1], last)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(shared.ds.full_barrier(last))
            if total > 1:
                self.last_dq(p, main, last - 1)
            self.last_dq(p, main, last)
            shared.do.release_per_thread(last)
            shared.q.release_per_thread(last)
        cute.arch.sync_warp()
        shared.k.release(tile.count)
        self.write(p.mdV, self.static.width_v, main.acc_dV, tile, main, p, self.dv_factor(p))
        self.write(p.mdK, self.static.head_dim, main.acc_dK, tile, main, p, p.scale)

    @cute.jit
    def one_block(
        self,
        p: Params,
        main: Main,
        tile: Tile,
        mask: Mask,
        operands: tuple,
        where: tuple,
        blocks_before: cutlass.Constexpr,
    ):
        """Products, then P^T and dS^T: one warpgroup multiplies while the other takes exponentials.

        dV and dK follow one block late, from `operands`, P^T and dS^T, and dQ two, so that no warpgroup waits
        for the other's dS. `blocks_before`: 2 stands for any number above. `where`: the number of the block
        among all of this thread block, and among those of its head, of which the next one's is returned.
        """
        fill, place = where
        shared, (rP, rdS) = main.shared, operands
        stage = shared.q.stage(fill)
        acc_S, acc_dP = (cute.make_fragment_like(rP, Float32) for _ in range(2))
        main.order.wait()
        if cutlass.const_expr(blocks_before > 0):
            self.start_dv_dk(p, main, operands, fill - 1)
        if cutlass.const_expr(blocks_before > 1):
            acc_dQ = self.start_dq(p, main, fill - 2)
        if cutlass.const_expr(self.has_score and self.tile.early_dropout):
            # Beside products, and before S and dP take registers.
            m_block, head = self.block_and_head(p, tile, place)
            scores = p.terms.block(mask, head, tile.batch, m_block * self.tile.tile_m, turned=True)
        if cutlass.const_expr(blocks_before > 0):
            warpgroup.wait_group(blocks_before - 1)
            shared.do.release_per_thread(fill - 1)
            shared.q.release_per_thread(fill - 1)
        # S^T = K Q^T, beside which dQ leaves
        shared.q.wait_full(fill)
        of_keys, of_values = self.static.k_steps
        start_gemm(p.mma_s, acc_S, main.rK, main.rQ[None, None, None, stage], False, of_keys)
        if cutlass.const_expr(blocks_before > 1):
            warpgroup.wait_group(1)
            shared.ds.release(fill - 2)
            self.stage_dq(main, acc_dQ, fill - 2)
        if cutlass.const_expr(blocks_before > 0):
            self.stage_ds(p, main, rdS, fill - 1)
        # dP^T = V dO^T
        shared.do.wait_full(fill)
        start_gemm(p.mma_s, acc_dP, main.rV, main.rdO[None, None, None, stage], False, of_values)
        main.order.arrive()
        if cutlass.const_expr(blocks_before > 0):
            # Only now: the products need not wait until all have seen the stores.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(shared.ds.full_barrier(fill - 1))
        if cutlass.const_expr(blocks_before > 1):
            self.publish_dq(main, fill - 2)
        # P^T = exp(scale S^T - LSE)
        if cutlass.const_expr(self.has_score and not self.tile.early_dropout):
            m_block, head = self.block_and_head(p, tile, place)
            scores = p.terms.block(mask, head, tile.batch, m_block * self.tile.tile_m, turned=True)
            if cutlass.const_expr(self.is_written):
                scores.prepare()
        if cutlass.const_expr(self.tile.early_lse and not self.has_function):
            rLSE = self.load_rows(main, shared.sLSE, stage)
        warpgroup.wait_group(1)
        if cutlass.const_expr(self.has_function):
            rLSE = self.rows(main, shared.sLSE, stage)
        elif cutlass.const_expr(not self.tile.early_lse):
            rLSE = self.load_rows(main, shared.sLSE, stage)
        if cutlass.const_expr(self.has_score):
            scores.cap(acc_S)
        if cutlass.const_expr(not self.is_written):
            self.mask(p, tile, mask, acc_S, place[0])
        elif cutlass.const_expr(not scores.hides_weights):
            self.hide(p, tile, mask, scores, acc_S, place)
        if cutlass.const_expr(self.has_score):
            scores.weigh(acc_S, rP, rLSE)
            if cutlass.const_expr(self.is_written and scores.hides_weights):
                self.hide(p, tile, mask, scores, acc_S, place)
                scores.pack_weights(acc_S, rP)
        else:
            self.exponentiate(p, acc_S, rLSE)
            convert(acc_S, rP)
        # dS^T = P^T (dP^T - D)
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.has_score):
            sLSE, sD = (self.rows(main, sX, stage) for sX in (shared.sLSE, shared.sD))
            sums = scores.differentiate(acc_S, acc_dP, sLSE, sD, main.dslope)
        else:
            self.multiply(acc_S, acc_dP, self.load_rows(main, shared.sD, stage))
        convert(acc_S, rdS)
        if cutlass.const_expr(self.is_written):
            sums.end()
        if cutlass.const_expr(self.is_listed):
            place = self.following_listed(p, main, tile, place)
        else:
            place = self.following(p, main, tile, place)
        return place

    def block_and_head(self, p: Params, tile: Tile, place: tuple) -> tuple:
        """The block of queries at a place on the way, and its head."""
        if not self.is_listed:
            return tile.block(place[0]), place[1]
        entry = BwdBlockIndex(place[1])
        return entry.m_block, tile.head_kv * p.heads_per_kv + entry.head

    @cute.jit
    def following_listed(self, p: Params, main: Main, tile: Tile, place: tuple):
        """The number of the next block in the list, and what stands there."""
        i, entry = place[0] + 1, BwdBlockIndex(place[1])
        if cutlass.const_expr(p.terms.slopes is not None):
            if entry.is_last:
                self.store_dslope(p, main, tile, tile.head_kv * p.heads_per_kv + entry.head)
        return i, p.entry(tile, cutlass.min(i, tile.num_listed - 1)).bits

    @cute.jit
    def store_dslope(self, p: Params, main: Main, tile: Tile, head: Int32):
        seqlen = self.seqlen(p, main, tile)
        block = seqlen.padded_k_block(tile.n_block, self.tile.tile_n)
        part = (block * NUM_WARPGROUPS + main.wg) * 4 + main.thread // 32
        p.terms.store_dslope(main.dslope, head, seqlen, part)

    @cute.jit
    def following(self, p: Params, main: Main, tile: Tile, place: tuple):
        """Where the next block is on the way through those of a head, and, where it matters, its head."""
        is_last = place[0] + 1 == tile.block_iter.num
        i = cutlass.select_(is_last, Int32(0), place[0] + 1)
        found = (i,)
        if cutlass.const_expr(self.has_score):
            if cutlass.const_expr(p.terms.slopes is not None):
                if is_last:
                    self.store_dslope(p, main, tile, place[1])
            found = (i, place[1] + Int32(is_last))
        return found

    @cute.jit
    def start_dv_dk(self, p: Params, main: Main, operands: tuple, fill: Int32):
        """dV += P^T dO, dK += dS^T Q"""
        stage = main.shared.q.stage(fill)
        rP, rdS = (as_operand_a(operand) for operand in operands)
        start_gemm(p.mma_dkv, main.acc_dV, rP, main.rdOt[None, None, None, stage], True)
        start_gemm(p.mma_dkv, main.acc_dK, rdS, main.rQt[None, None, None, stage], True)

    @cute.jit
    def start_dq(self, p: Params, main: Main, fill: Int32):
        """dQ = dS K, as soon as both warpgroups have shared their dS"""
        pipeline = main.shared.ds
        pipeline.wait_full(fill)
        shape = p.mma_dq.get_slice(0).partition_shape_C(self.tile.dq_part)
        acc_dQ = cute.make_rmem_tensor(shape, Float32)
        start_gemm(p.mma_dq, acc_dQ, main.rdSt[None, None, None, pipeline.stage(fill)], main.rKt, False)
        return acc_dQ

    @cute.jit
    def last_dq(self, p: Params, main: Main, fill: Int32):
        acc_dQ = self.start_dq(p, main, fill)
        warpgroup.wait_group(0)
        main.shared.ds.release(fill)
        self.stage_dq(main, acc_dQ, fill)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.publish_dq(main, fill)

    def rows(self, main: Main, sX: cute.Tensor, stage: Int32) -> cute.Tensor:
        """LSE or D of this thread's columns, where they are."""
        coords = as_mn(main.tScS)
        columns = cute.make_layout((2, cute.size(coords, mode=[1]) // 2), stride=(1, 8))
        return cute.make_tensor(sX[None, stage].iterator + coords[0, 0][1], columns)

    @cute.jit
    def load_rows(self, main: Main, sX: cute.Tensor, stage: Int32) -> cute.Tensor:
        """LSE or D of this thread's columns: a column is a query."""
        coords = as_mn(main.tScS)
        rows = cute.domain_offset((coords[0, 0][1],), sX[None, stage])
        rX = cute.make_rmem_tensor(cute.size(coords, mode=[1]), Float32)
        for c in cutlass.range_constexpr(cute.size(rX)):
            rX[c] = rows[column_offset(c)]
        return rX

    @cute.jit
    def exponentiate(self, p: Params, acc: cute.Tensor, rLSE: cute.Tensor):
        """S^T -> exp(scale S^T - LSE), in place"""
        S_mn, scale_log2 = as_mn(acc), p.scale * LOG2_E
        for c in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                S_mn[r, c] = cute.math.exp2(S_mn[r, c] * scale_log2 - rLSE[c], fastmath=True)

    @cute.jit
    def multiply(self, acc_P: cute.Tensor, acc_dP: cute.Tensor, rD: cute.Tensor):
        """P^T -> dS^T = P^T (dP^T - D), in place"""
        P_mn, dP_mn = as_mn(acc_P), as_mn(acc_dP)
        for c in cutlass.range_constexpr(cute.size(P_mn, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(P_mn, mode=[0])):
                P_mn[r, c] = P_mn[r, c] * (dP_mn[r, c] - rD[c])

    @cute.jit
    def mask(self, p: Params, tile: Tile, mask: Mask, acc_S: cute.Tensor, i: Int32):
        """-inf outside the band. Keys past the end must not reach dQ: all blocks of the last keys are cut."""
        m_block, blocks = tile.block(i), tile.blocks
        is_tail = mask.first_row + WARPGROUP_ROWS > mask.seqlen_q
        if m_block < blocks.full_begin or m_block >= blocks.full_end or is_tail:
            mask.apply(as_mn(acc_S), m_block * self.tile.tile_m)
            mask.apply_to_tail_rows(as_mn(acc_S))

    @cute.jit
    def hide(self, p: Params, tile: Tile, mask: Mask, scores: ModScores, acc_S: cute.Tensor, place: tuple):
        """What the band, the ends and mask_mod hide."""
        m_block, _head = self.block_and_head(p, tile, place)
        blocks, is_tail = tile.blocks, mask.first_row + WARPGROUP_ROWS > mask.seqlen_q
        if m_block < blocks.full_begin or m_block >= blocks.full_end or is_tail:
            scores.cut(acc_S, mask, m_block * self.tile.tile_m)
        scores.hide(acc_S, BwdBlockIndex(place[1]).is_partial if cutlass.const_expr(self.is_listed) else None)

    @cute.jit
    def stage_ds(self, p: Params, main: Main, rdS: cute.Tensor, fill: Int32):
        """dS to shared memory, for both warpgroups; they are told after a fence."""
        pipeline = main.shared.ds
        pipeline.wait_empty(fill)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, p.mma_s).get_slice(main.thread)
        stage = main.shared.sdS[None, None, pipeline.stage(fill)]
        sdS = cute.local_tile(stage, (WARPGROUP_ROWS, self.tile.tile_m), (main.wg, 0))
        cute.copy(atom, copy.retile(rdS), copy.partition_D(sdS))

    @cute.jit
    def stage_dq(self, main: Main, acc_dQ: cute.Tensor, fill: Int32):
        """To shared memory, in the order of the registers."""
        main.shared.dq.wait_released((fill - 1) * NUM_WARPGROUPS + main.wg)
        sdQ = main.shared.sdQ[None, main.thread, None, main.wg]
        cute.autovec_copy(cute.make_tensor(acc_dQ.iterator, cute.make_layout(sdQ.shape)), sdQ)

    @cute.jit
    def publish_dq(self, main: Main, fill: Int32):
        """After a fence."""
        cute.arch.mbarrier_arrive(main.shared.dq.full_barrier(fill * NUM_WARPGROUPS + main.wg))

    def seqlen(self, p: Params, main: Main, tile: Tile) -> SeqlenInfo:
        """That of a packed batch is read again, not kept in registers."""
        return tile.seqlen if p.tile_list is None else p.seqlen(main.shared.read_tile(tile.count))

    @cute.jit
    def write(
        self,
        mX: cute.Tensor,
        width: cutlass.Constexpr,
        acc: cute.Tensor,
        tile: Tile,
        main: Main,
        p: Params,
        factor: Float32,
    ):
        """dK or dV, as far as it has rows and columns."""
        first_row = tile.n_block * self.tile.tile_n + main.wg * WARPGROUP_ROWS
        acc.store(acc.load() * factor)
        rX = cute.make_fragment_like(acc, self.dtype)
        convert(acc, rX)
        head_dim = self.tile.head_dim
        seqlen = self.seqlen(p, main, tile)
        gX = row_tile(seqlen.slice_head(mX, tile.head_kv), seqlen.k_row(first_row), WARPGROUP_ROWS, head_dim)
        coords = cute.make_identity_tensor((WARPGROUP_ROWS, head_dim))
        tXcX = p.mma_dkv.get_slice(rederived(main.thread)).partition_C(coords)
        packed = cute.make_tensor(cute.recast_tensor(rX, Int32).iterator, cute.make_layout((2, head_dim // 8)))
        store_rows(packed, gX, as_mn(tXcX), width, seqlen.k_len - first_row)
