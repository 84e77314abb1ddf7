"""Rung 8: ping-pong. While one warpgroup computes its softmax, the tensor cores work for the other, and for itself.

Roles, tiles and pipelines are those of rung 7. A consumer changes the order of its work, as FlashAttention-3 does:

    S = Q K0^T;  P = softmax S
    for each further block j:
        wait for the turn
        start S = Q Kj^T                          first wgmma group
        start O = O + P V(j-1)                    second group
        pass the turn to the other warpgroup
        wait for S: for all groups but the last
        P = softmax S, in fp32                    while O += P V(j-1) runs
        wait for O;  O = alpha O;  P to bf16
    O = O + P V of the last block

Inside a warpgroup the product with V of the last block runs under the softmax of this block. The registers of P in bf16
belong to that product until the wait for O, so P is converted after it.

Between warpgroups, the turn is two named barriers. `bar.sync` waits until 256 threads have arrived: 128 that wait for
the turn, and 128 of the other warpgroup, which pass it by `bar.arrive` and go on. The products of the two warpgroups
then alternate, and so do their softmaxes. In rung 7 that was left to chance.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.views import as_mn, as_operand_a
from examples.ladder import harness, hopper
from examples.ladder.hopper import LOG2_E, WARPGROUP_ROWS, WARPGROUP_THREADS, Pipeline, TmaTiles
from examples.ladder.tools import named

TILE_M, TILE_N, STAGES = 128, 128, 2  # queries and keys of a tile; stages of K, and of V
CONSUMERS = TILE_M // WARPGROUP_ROWS
NUM_THREADS = (1 + CONSUMERS) * WARPGROUP_THREADS
FIRST_TURN = 1  # the named barrier of consumer 0's turn; barrier 0 is that of the CTA
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # of a thread; all together as many as at launch, 384 x 168


class Forward:
    ARCH = "sm_90a"

    def __init__(self, head_dim: int, is_causal: bool):
        self.head_dim, self.is_causal = head_dim, is_causal
        tiles = (WARPGROUP_ROWS, CONSUMERS), (TILE_N, STAGES), (TILE_N, STAGES)
        self.smem_bytes = sum(Pipeline.smem_bytes(rows, head_dim, stages) for rows, stages in tiles)

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32, stream: CUstream
    ):
        tma_q, tma_k, tma_v = TmaTiles.of(mQ, WARPGROUP_ROWS), TmaTiles.of(mK, TILE_N), TmaTiles.of(mV, TILE_N)
        mma_qk, mma_pv = hopper.wgmma(TILE_N), hopper.wgmma(self.head_dim, a_in_registers=True, b_is_transposed=True)
        grid = (cute.ceil_div(mQ.shape[1], TILE_M), mQ.shape[0], 1)
        kernel = named(self.kernel, "rung_8")
        kernel(tma_q, tma_k, tma_v, mO, scale * LOG2_E, mma_qk, mma_pv).launch(
            grid=grid, block=(NUM_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, tma_q: TmaTiles, tma_k: TmaTiles, tma_v: TmaTiles, mO: cute.Tensor, scale_log2: Float32,
        mma_qk: cute.TiledMma, mma_pv: cute.TiledMma,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        m_block, head, _ = cute.arch.block_idx()
        num_blocks = cute.ceil_div(mO.shape[1], TILE_N)
        if cutlass.const_expr(self.is_causal):
            # The longest tiles first; blocks above the diagonal are skipped.
            m_block = cute.arch.grid_dim()[0] - 1 - m_block
            num_blocks = m_block + 1

        smem = SmemAllocator()
        q = Pipeline.allocate(smem, tma_q, CONSUMERS)  # a stage for each warpgroup
        k, v = Pipeline.allocate(smem, tma_k, STAGES), Pipeline.allocate(smem, tma_v, STAGES)
        if warp == 0:
            with cute.arch.elect_one():
                q.init(1)
                k.init(4 * CONSUMERS)
                v.init(4 * CONSUMERS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                for w in cutlass.range_constexpr(CONSUMERS):
                    q.load(w, head, m_block * CONSUMERS + w)
                self.produce(k, head, num_blocks)
            if warp == 1:
                self.produce(v, head, num_blocks)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(q, k, v, mO, scale_log2, mma_qk, mma_pv, head, m_block, num_blocks)

    @cute.jit
    def produce(self, x: Pipeline, head: Int32, num_blocks: Int32):
        """The role of a warp that loads K or V, as far ahead as there are empty stages."""
        for n_block in cutlass.range(num_blocks, unroll=1):
            x.wait_empty(n_block)
            x.load(n_block, head, n_block)

    @cute.jit
    def consume(
        self, q: Pipeline, k: Pipeline, v: Pipeline, mO: cute.Tensor, scale_log2: Float32,
        mma_qk: cute.TiledMma, mma_pv: cute.TiledMma, head: Int32, m_block: Int32, num_blocks: Int32,
    ):  # fmt: skip
        """The role of a warpgroup that computes 64 queries."""
        thread, _, _ = cute.arch.thread_idx()
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS) - 1
        thread, m_tile, seqlen = thread % WARPGROUP_THREADS, m_block * CONSUMERS + warpgroup_index, mO.shape[1]
        rQ = hopper.operand_a(mma_qk, q.tiles)[None, None, None, warpgroup_index]
        rK, rV = hopper.operand_b(mma_qk, k.tiles), hopper.operand_b(mma_pv, v.tiles, is_transposed=True)
        acc_O, cS = hopper.accumulator(mma_pv, self.head_dim), hopper.positions(mma_qk, thread, TILE_N)
        acc_O.fill(0.0)
        O = as_mn(acc_O)  # (rows, columns) of this thread
        rows, first_row = hopper.Rows.start(), m_tile * WARPGROUP_ROWS

        if warpgroup_index == CONSUMERS - 1:
            self.pass_turn(warpgroup_index)  # consumer 0 is the first
        q.wait_full(warpgroup_index)
        k.wait_full(0)
        self.wait_for_turn(warpgroup_index)
        acc_S = hopper.accumulator(mma_qk, TILE_N)
        hopper.start_gemm(mma_qk, acc_S, rQ, rK[None, None, None, 0], False)
        self.pass_turn(warpgroup_index)
        warpgroup.wait_group(0)
        k.release(0)
        if num_blocks == 1:
            hopper.mask(as_mn(acc_S), cS, first_row, 0, seqlen, self.is_causal)
        rows.softmax(as_mn(acc_S), scale_log2)
        rP = cute.make_fragment_like(acc_S, BFloat16)
        rP.store(acc_S.load().to(BFloat16))

        for n_block in cutlass.range(1, num_blocks, unroll=1):
            acc_S = hopper.accumulator(mma_qk, TILE_N)
            S, before = as_mn(acc_S), n_block - 1
            k.wait_full(n_block)
            self.wait_for_turn(warpgroup_index)
            hopper.start_gemm(mma_qk, acc_S, rQ, rK[None, None, None, n_block % STAGES], False)
            v.wait_full(before)
            hopper.start_gemm(mma_pv, acc_O, as_operand_a(rP), rV[None, None, None, before % STAGES], True)
            self.pass_turn(warpgroup_index)
            warpgroup.wait_group(1)
            k.release(n_block)

            if n_block == num_blocks - 1:
                hopper.mask(S, cS, first_row, n_block * TILE_N, seqlen, self.is_causal)
            rows.softmax(S, scale_log2)
            warpgroup.wait_group(0)
            v.release(before)
            rows.rescale(O)
            rP.store(acc_S.load().to(BFloat16))

        v.wait_full(num_blocks - 1)
        hopper.start_gemm(mma_pv, acc_O, as_operand_a(rP), rV[None, None, None, (num_blocks - 1) % STAGES], True)
        warpgroup.wait_group(0)
        rows.normalise(O)
        gO = cute.local_tile(mO[head, None, None], (WARPGROUP_ROWS, self.head_dim), (m_tile, 0))
        hopper.store_rows(mma_pv, thread, acc_O, gO, seqlen - first_row)

    @cute.jit
    def wait_for_turn(self, warpgroup_index: Int32):
        cute.arch.barrier(barrier_id=FIRST_TURN + warpgroup_index, number_of_threads=CONSUMERS * WARPGROUP_THREADS)

    @cute.jit
    def pass_turn(self, warpgroup_index: Int32):
        other = CONSUMERS - 1 - warpgroup_index
        cute.arch.barrier_arrive(barrier_id=FIRST_TURN + other, number_of_threads=CONSUMERS * WARPGROUP_THREADS)


if __name__ == "__main__":
    harness.main(Forward)
