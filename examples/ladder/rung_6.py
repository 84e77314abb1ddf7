"""Rung 6: TMA and wgmma, which copy and multiply while the threads go on.

One CTA is one warpgroup (4 warps) and computes 64 queries of one head. For each block of 64 keys:

    wait until K has landed                       TMA counts its bytes at an mbarrier
    S = Q K^T                                     wgmma, both operands in shared memory; fp32 accumulators
    S = -inf for keys past the end, and above the diagonal if causal: only in the last block
    m' = max(m, rowmax S);  P = exp(scale (S - m'));  alpha = exp(scale (m - m'))
    l = alpha l + rowsum P;  O = alpha O
    wait until V has landed
    O = O + P V                                   wgmma; P stays in registers, which are operand A
    load K and V of the block after the next      into the stage that is free now

TMA: one thread asks for a tile of 64 rows, and the TMA unit writes it in the 128-byte swizzle, with zeros past the end.
wgmma: one instruction of 4 warps multiplies 64 x 16 by 16 x 64 or more; there is no ldmatrix, and no fragment of K
or V in registers. Both are asynchronous: threads wait for TMA at an mbarrier, and for wgmma by `wait_group`.

A CTA still does one thing at a time: it waits for its products, then computes its softmax. Its tiles leave room for
more CTAs on the SM, which multiply meanwhile, but each of them loads all of K and V. Rung 7 shares the loads.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.views import as_mn, as_operand_a
from examples.ladder import harness, hopper
from examples.ladder.hopper import LOG2_E, WARPGROUP_ROWS, WARPGROUP_THREADS, Pipeline, TmaTiles
from examples.ladder.tools import named

TILE_M, TILE_N, STAGES = 64, 64, 2  # queries and keys of a tile; stages of K, and of V
NUM_THREADS = WARPGROUP_THREADS


class Forward:
    ARCH = "sm_90a"

    def __init__(self, head_dim: int, is_causal: bool):
        self.head_dim, self.is_causal = head_dim, is_causal
        tiles = (TILE_M, 1), (TILE_N, STAGES), (TILE_N, STAGES)
        self.smem_bytes = sum(Pipeline.smem_bytes(rows, head_dim, stages) for rows, stages in tiles)

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32, stream: CUstream
    ):
        tma_q, tma_k, tma_v = TmaTiles.of(mQ, WARPGROUP_ROWS), TmaTiles.of(mK, TILE_N), TmaTiles.of(mV, TILE_N)
        grid = (cute.ceil_div(mQ.shape[1], TILE_M), mQ.shape[0], 1)
        kernel = named(self.kernel, "rung_6")
        kernel(tma_q, tma_k, tma_v, mO, scale * LOG2_E).launch(grid=grid, block=(NUM_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, tma_q: TmaTiles, tma_k: TmaTiles, tma_v: TmaTiles, mO: cute.Tensor, scale_log2: Float32):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        seqlen = mO.shape[1]
        m_block, head, num_blocks = hopper.query_tile(seqlen, TILE_M, self.is_causal)

        smem = SmemAllocator()
        q = Pipeline.allocate(smem, tma_q, 1)
        k, v = (Pipeline.allocate(smem, tma, STAGES) for tma in (tma_k, tma_v))
        hopper.init_barriers(q, k, v)

        if warp == 0:
            q.load(0, head, m_block)
            for i in cutlass.range_constexpr(STAGES):
                if i < num_blocks:
                    k.load(i, head, i)
                    v.load(i, head, i)

        mma_qk, mma_pv = hopper.wgmma(TILE_N), hopper.wgmma(self.head_dim, a_in_registers=True, b_is_transposed=True)
        rQ = hopper.operand_a(mma_qk, q.tiles)[None, None, None, 0]
        rK, rV = hopper.operand_b(mma_qk, k.tiles), hopper.operand_b(mma_pv, v.tiles, is_transposed=True)
        acc_O, cS = hopper.accumulator(mma_pv, self.head_dim), hopper.positions(mma_qk, thread, TILE_N)
        acc_O.fill(0.0)
        O = as_mn(acc_O)  # (rows, columns) of this thread
        rows, first_row = hopper.Rows.start(), m_block * TILE_M

        q.wait_full(0)
        for n_block in cutlass.range(num_blocks, unroll=1):
            acc_S = hopper.accumulator(mma_qk, TILE_N)
            S = as_mn(acc_S)
            k.wait_full(n_block)
            hopper.start_gemm(mma_qk, acc_S, rQ, rK[None, None, None, n_block % STAGES], False)
            warpgroup.wait_group(0)

            if n_block == num_blocks - 1:
                hopper.mask(S, cS, first_row, n_block * TILE_N, seqlen, self.is_causal)
            rows.softmax(S, scale_log2)
            rows.rescale(O)
            rP = cute.make_fragment_like(acc_S, BFloat16)
            rP.store(acc_S.load().to(BFloat16))

            v.wait_full(n_block)
            hopper.start_gemm(mma_pv, acc_O, as_operand_a(rP), rV[None, None, None, n_block % STAGES], True)
            warpgroup.wait_group(0)
            # All warps are done with K and V, so TMA may overwrite them.
            cute.arch.sync_threads()
            if warp == 0 and n_block + STAGES < num_blocks:
                k.load(n_block + STAGES, head, n_block + STAGES)
                v.load(n_block + STAGES, head, n_block + STAGES)

        rows.normalise(O)
        hopper.store_rows(mma_pv, thread, acc_O, mO[head, None, None], m_block)


if __name__ == "__main__":
    harness.main(Forward)
