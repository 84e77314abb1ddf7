"""Rung B3: what rungs 3 to 5 did for the forward pass: a swizzle, double buffering, and no work above the diagonal.

One CTA has 64 keys of one head, in K and V, and sums their gradients. For each block of 64 queries, which if causal
starts at the diagonal, because earlier queries see none of the keys:

    start to copy Q, dO, LSE and delta of the next block to the other stage
    S^T = K Q^T                                      hidden keys are -inf
    P^T = exp(scale S^T - LSE)
    dV = dV + P^T dO
    dP^T = V dO^T
    dS^T = scale P^T (dP^T - delta)                  delta = rowsum(dO O), from the caller
    dK = dK + dS^T Q
    dQ = dQ + dS K                                   dQ in global memory, by atomics

Without bank conflicts, ldmatrix is faster in all five products, also where it transposes: for dV, dK and dQ. The
barrier at the top of the loop does three things: the block has landed for all warps, and all warps are done with the
other stage and with dS of the previous block. D = 128 needs 105 KB of shared memory: A100 and H100 have it, RTX GPUs
do not.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32
from cutlass.memory import SmemAllocator

from examples.ladder import harness
from examples.ladder.tools import (
    add_block,
    apply_mask,
    at_stage,
    bf16_operand_a,
    broadcast,
    gemm,
    gemm_rs,
    in_stage,
    load_block,
    named,
    operand_a,
    operand_b,
    row_blocks,
    row_copy,
    store_block,
    store_tile,
    tensor_core_mma,
    transposed,
    zeros,
)  # fmt: skip

TILE_M, TILE_N, NUM_WARPS = 64, 64, 4  # queries and keys of a tile; a warp has 16 rows
NUM_THREADS = 32 * NUM_WARPS
STAGES = 2  # of Q and dO; the loop alternates between them


def allocate(smem: SmemAllocator, rows: int, cols: int, stages: int) -> cute.Tensor:
    """Swizzled tiles in shared memory: (rows, columns, stage)."""
    layout = cute.make_layout((rows, (64, cols // 64), stages), stride=(64, (1, 64 * rows), rows * cols))
    return smem.allocate_tensor(BFloat16, layout, byte_alignment=1024, swizzle=cute.make_swizzle(3, 4, 3))


class Backward:
    ARCH = "sm_80"
    variant = "swizzled"
    adds_dq = True  # in the same kernel

    def __init__(self, head_dim: int, is_causal: bool):
        self.head_dim, self.is_causal = head_dim, is_causal
        self.smem_bytes = (
            2 * (2 * STAGES * TILE_M + 2 * TILE_N) * head_dim + 2 * TILE_N * TILE_M + 4 * 2 * STAGES * TILE_M
        )

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mdO: cute.Tensor, mLSE: cute.Tensor,
        mDelta: cute.Tensor, mdQ: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor, scale: Float32, stream: CUstream,
    ):  # fmt: skip
        queries, keys, (heads, seqlen) = (mQ, mdO, mLSE, mDelta), (mK, mV), mLSE.shape
        kernel, grid = named(self.kernel, "bwd_3"), (cute.ceil_div(seqlen, TILE_N), heads, 1)
        kernel(queries, keys, mdQ, mdK, mdV, scale).launch(grid=grid, block=(NUM_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, queries: tuple, keys: tuple, mdQ: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor, scale: Float32
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        n_block, head, _ = cute.arch.block_idx()
        seqlen = mdK.shape[1]
        queries = row_blocks(head, TILE_M, *queries)  # Q, dO, LSE and delta: (rows, columns, block), (rows, block)
        (gdQ,) = row_blocks(head, TILE_M, mdQ)
        keys, (gdK, gdV) = row_blocks(head, TILE_N, *keys), row_blocks(head, TILE_N, mdK, mdV)

        smem = SmemAllocator()
        sQ, sdO = (allocate(smem, TILE_M, self.head_dim, STAGES) for _ in range(2))
        sK, sV = (allocate(smem, TILE_N, self.head_dim, 1)[None, None, 0] for _ in range(2))
        sdS = allocate(smem, TILE_N, TILE_M, 1)[None, None, 0]  # (key, query), as in registers
        sLSE, sDelta = (smem.allocate_tensor(Float32, cute.make_layout((TILE_M, STAGES))) for _ in range(2))
        tiles = sQ, sdO, sLSE, sDelta

        mma, copy = tensor_core_mma(NUM_WARPS), row_copy(NUM_THREADS, self.head_dim)
        thr_mma = mma.get_slice(thread)
        k, v = (operand_a(mma, thread, x) for x in (sK, sV))
        q, do = (operand_b(mma, thread, x) for x in (sQ, sdO))
        q_t, do_t = (operand_b(mma, thread, x, is_transposed=True) for x in (sQ, sdO))
        ds = operand_a(mma, thread, sdS, is_transposed=True)
        k_t = operand_b(mma, thread, sK, is_transposed=True)
        acc_dK, acc_dV = zeros(mma, TILE_N, self.head_dim), zeros(mma, TILE_N, self.head_dim)

        load_block(copy, thread, keys, (sK, sV), n_block, seqlen)
        first, num_blocks = 0, cute.ceil_div(seqlen, TILE_M)
        if cutlass.const_expr(self.is_causal):
            first = n_block * TILE_N // TILE_M
        load_block(copy, thread, queries, in_stage(tiles, first % STAGES), first, seqlen)
        cute.arch.cp_async_commit_group()
        for m_block in cutlass.range(first, num_blocks, unroll=1):
            stage = m_block % STAGES
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if m_block + 1 < num_blocks:
                load_block(copy, thread, queries, in_stage(tiles, 1 - stage), m_block + 1, seqlen)
            cute.arch.cp_async_commit_group()

            acc_S = zeros(mma, TILE_N, TILE_M)
            gemm(mma, acc_S, k, at_stage(q, stage))
            tile = cute.local_tile(cute.make_identity_tensor((seqlen, seqlen)), (TILE_M, TILE_N), (m_block, n_block))
            # Rows past the end need no mask: their Q, dO, LSE and delta are 0, so P^T dO and dS are 0.
            apply_mask(acc_S, thr_mma.partition_C(transposed(tile)), seqlen, self.is_causal)
            lse, delta = (
                thr_mma.partition_C(transposed(broadcast(x, TILE_N))) for x in in_stage((sLSE, sDelta), stage)
            )
            acc_S.store(cute.math.exp(scale * acc_S.load() - lse.load(), fastmath=True))  # P^T
            gemm_rs(mma, acc_dV, bf16_operand_a(acc_S), at_stage(do_t, stage))

            acc_dP = zeros(mma, TILE_N, TILE_M)
            gemm(mma, acc_dP, v, at_stage(do, stage))
            acc_S.store(scale * acc_S.load() * (acc_dP.load() - delta.load()))  # dS^T
            gemm_rs(mma, acc_dK, bf16_operand_a(acc_S), at_stage(q_t, stage))

            store_tile(mma, thread, acc_S, sdS)
            # dS is complete before a warp reads the keys of the others.
            cute.arch.sync_threads()
            acc_dQ = zeros(mma, TILE_M, self.head_dim)
            gemm(mma, acc_dQ, ds, k_t)
            add_block(mma, thread, acc_dQ, gdQ, m_block, seqlen)

        store_block(mma, thread, acc_dK, gdK, n_block, seqlen)
        store_block(mma, thread, acc_dV, gdV, n_block, seqlen)


if __name__ == "__main__":
    harness.main(Backward)
