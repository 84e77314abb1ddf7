"""Rung 5: fewer instructions for each score. FlashAttention-2 on Ampere, without its last refinements.

    P       never leaves registers: the accumulator of Q K^T has the layout of operand A of P V
    Q       at D = 64, is loaded into registers once, and not for every block; at D = 128, O needs them
    warps   have 32 queries, so each ldmatrix of K and V feeds two rows of mma.sync
    exp     becomes exp2 with scale * log2(e) folded into one FMA: exp2(S * c - m * c)
    masks   are applied to the last blocks only; if causal, blocks above the diagonal are skipped

If causal, the tiles of all heads with most keys start first, so that the short ones fill the SMs at the end.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.views import as_mn, as_operand_a
from examples.ladder import harness
from examples.ladder.tools import (
    at_stage,
    gemm,
    gemm_rs,
    load_fragment,
    load_rows,
    named,
    operand_a,
    operand_b,
    row_copy,
    row_max_of,
    row_sum_of,
    tensor_core_mma,
)  # fmt: skip

TILE_M, TILE_N, NUM_WARPS = 128, 48, 4  # queries and keys of a tile; a warp has 32 queries
NUM_THREADS = 32 * NUM_WARPS
STAGES = 2  # of K and V; the loop alternates between them
LOG2_E = 1.4426950408889634


def allocate(smem: SmemAllocator, rows: int, cols: int, stages: int) -> cute.Tensor:
    """Swizzled tiles in shared memory: (rows, columns, stage)."""
    layout = cute.make_layout((rows, (64, cols // 64), stages), stride=(64, (1, 64 * rows), rows * cols))
    return smem.allocate_tensor(BFloat16, layout, byte_alignment=1024, swizzle=cute.make_swizzle(3, 4, 3))


class Forward:
    ARCH = "sm_80"
    variant = "swizzled"
    keeps_p = True  # in registers

    def __init__(self, head_dim: int, is_causal: bool):
        self.head_dim, self.is_causal = head_dim, is_causal
        self.keeps_q = head_dim == 64  # in registers
        self.smem_bytes = 2 * ((TILE_M + 2 * STAGES * TILE_N) * head_dim)

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32, stream: CUstream
    ):
        mma, copy = tensor_core_mma(NUM_WARPS), row_copy(NUM_THREADS, self.head_dim)
        grid = (mQ.shape[0], cute.ceil_div(mQ.shape[1], TILE_M), 1)
        kernel = named(self.kernel, "rung_5")
        kernel(mQ, mK, mV, mO, scale, mma, copy).launch(grid=grid, block=(NUM_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32,
        mma: cute.TiledMma, copy: cute.TiledCopy,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        head, m_block, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.is_causal):
            m_block = cute.arch.grid_dim()[1] - 1 - m_block
        seqlen, first_row = mQ.shape[1], m_block * TILE_M
        gQ, gO = (cute.local_tile(mX[head, None, None], (TILE_M, self.head_dim), (m_block, 0)) for mX in (mQ, mO))
        gK, gV = (cute.local_tile(mX[head, None, None], (TILE_N, self.head_dim), (None, 0)) for mX in (mK, mV))

        smem = SmemAllocator()
        sQ = allocate(smem, TILE_M, self.head_dim, 1)[None, None, 0]
        sK, sV = allocate(smem, TILE_N, self.head_dim, STAGES), allocate(smem, TILE_N, self.head_dim, STAGES)

        thr_mma = mma.get_slice(thread)
        q, k = operand_a(mma, thread, sQ), operand_b(mma, thread, sK)
        v = operand_b(mma, thread, sV, is_transposed=True)
        acc_S = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE_M, TILE_N)), Float32)
        acc_O = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE_M, self.head_dim)), Float32)
        acc_O.fill(0.0)
        S, O = as_mn(acc_S), as_mn(acc_O)  # (rows, columns) of this thread
        cS = as_mn(thr_mma.partition_C(cute.make_identity_tensor((TILE_M, TILE_N))))
        row_max = cute.make_rmem_tensor(cute.size(S, mode=[0]), Float32)
        row_sum = cute.make_fragment_like(row_max)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)

        scale_log2 = scale * LOG2_E
        last_key, full_blocks = seqlen, seqlen // TILE_N  # blocks from `full_blocks` on have hidden scores
        if cutlass.const_expr(self.is_causal):
            last_key = cutlass.min(seqlen, first_row + TILE_M)
            full_blocks = first_row // TILE_N
        num_blocks = cute.ceil_div(last_key, TILE_N)
        load_rows(copy, thread, gQ, sQ, seqlen - first_row)
        load_rows(copy, thread, gK[None, None, 0], sK[None, None, 0], seqlen)
        load_rows(copy, thread, gV[None, None, 0], sV[None, None, 0], seqlen)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for step in cutlass.range_constexpr(self.head_dim // 16 if self.keeps_q else 0):
            load_fragment(q, step)
        for n_block in cutlass.range(num_blocks, unroll=1):
            first_key, stage = n_block * TILE_N, n_block % STAGES
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if n_block + 1 < num_blocks:
                following = seqlen - first_key - TILE_N
                load_rows(copy, thread, gK[None, None, n_block + 1], sK[None, None, 1 - stage], following)
                load_rows(copy, thread, gV[None, None, n_block + 1], sV[None, None, 1 - stage], following)
            cute.arch.cp_async_commit_group()

            acc_S.fill(0.0)
            gemm(mma, acc_S, q, at_stage(k, stage), a_is_loaded=self.keeps_q)

            if n_block >= full_blocks:
                for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
                    for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                        row, key = first_row + cS[r, c][0], first_key + cS[r, c][1]
                        is_hidden = key >= seqlen
                        if cutlass.const_expr(self.is_causal):
                            is_hidden = is_hidden or key > row
                        S[r, c] = cutlass.select_(is_hidden, -Float32.inf, S[r, c])

            for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
                # The first block has a visible key for each row, so m is finite from then on.
                scores = S[r, None].load()
                m = cute.arch.fmax(row_max[r], row_max_of(scores.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)))
                probs = cute.math.exp2(scores * scale_log2 - m * scale_log2, fastmath=True)
                alpha = cute.math.exp2((row_max[r] - m) * scale_log2, fastmath=True)
                row_sum[r] = alpha * row_sum[r] + probs.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                row_max[r] = m
                S[r, None].store(probs)
                O[r, None].store(O[r, None].load() * alpha)

            rP = cute.make_fragment_like(acc_S, BFloat16)
            rP.store(acc_S.load().to(BFloat16))
            gemm_rs(mma, acc_O, as_operand_a(rP), at_stage(v, stage))

        rO = cute.make_fragment_like(acc_O, BFloat16)
        for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
            O[r, None].store(O[r, None].load() * cute.arch.rcp_approx(row_sum_of(row_sum[r])))
        rO.store(acc_O.load().to(BFloat16))
        out, mine = as_mn(thr_mma.partition_C(gO)), as_mn(rO)
        cO = as_mn(thr_mma.partition_C(cute.make_identity_tensor((TILE_M, self.head_dim))))
        for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
            if first_row + cO[r, 0][0] < seqlen:
                cute.autovec_copy(mine[r, None], out[r, None])


if __name__ == "__main__":
    harness.main(Forward)
