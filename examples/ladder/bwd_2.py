"""Rung B2: one kernel, 5 products. The CTA of 64 keys has dS of each block, so it also adds its part of dQ.

One CTA has 64 keys of one head, in K and V, and sums their gradients. For each block of 64 queries:

    S^T = K Q^T                                      hidden keys are -inf
    P^T = exp(scale S^T - LSE)
    dV = dV + P^T dO
    dP^T = V dO^T
    dS^T = scale P^T (dP^T - delta)                  delta = rowsum(dO O), from the caller
    dK = dK + dS^T Q
    dQ = dQ + dS K                                   dQ in global memory, by atomics

All CTAs of a head add to the same dQ, in fp32, which the caller has zeroed. The order of the additions changes from run
to run, and so do the last bits of dQ. Rung B1 computed S and dP once more instead.
dS^T becomes dS through shared memory: it is stored as (key, query), and ldmatrix transposes it. dS K sums over the keys
of all warps, so a barrier stands between the two.
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
    bf16_operand_a,
    broadcast,
    gemm,
    gemm_rs,
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


def allocate(smem: SmemAllocator, rows: int, cols: int) -> cute.Tensor:
    """A row-major tile in shared memory."""
    return smem.allocate_tensor(BFloat16, cute.make_layout((rows, cols), stride=(cols, 1)), byte_alignment=128)


class Backward:
    ARCH = "sm_80"
    variant = "plain"  # order of the tiles in shared memory
    adds_dq = True  # in the same kernel

    def __init__(self, head_dim: int, is_causal: bool):
        self.head_dim, self.is_causal = head_dim, is_causal
        self.smem_bytes = 2 * (2 * TILE_M + 2 * TILE_N) * head_dim + 2 * TILE_N * TILE_M + 4 * 2 * TILE_M

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mdO: cute.Tensor, mLSE: cute.Tensor,
        mDelta: cute.Tensor, mdQ: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor, scale: Float32, stream: CUstream,
    ):  # fmt: skip
        queries, keys, (heads, seqlen) = (mQ, mdO, mLSE, mDelta), (mK, mV), mLSE.shape
        kernel, grid = named(self.kernel, "bwd_2"), (cute.ceil_div(seqlen, TILE_N), heads, 1)
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
        sQ, sdO, sK, sV = (allocate(smem, rows, self.head_dim) for rows in (TILE_M, TILE_M, TILE_N, TILE_N))
        sdS = allocate(smem, TILE_N, TILE_M)  # (key, query), as in registers
        sLSE, sDelta = (smem.allocate_tensor(Float32, cute.make_layout(TILE_M)) for _ in range(2))

        mma, copy = tensor_core_mma(NUM_WARPS), row_copy(NUM_THREADS, self.head_dim)
        thr_mma = mma.get_slice(thread)
        k, v = (operand_a(mma, thread, x) for x in (sK, sV))
        q, do = (operand_b(mma, thread, x) for x in (sQ, sdO))
        q_t, do_t = (operand_b(mma, thread, x, is_transposed=True) for x in (sQ, sdO))
        ds = operand_a(mma, thread, sdS, is_transposed=True)
        k_t = operand_b(mma, thread, sK, is_transposed=True)
        lse, delta = (thr_mma.partition_C(transposed(broadcast(x, TILE_N))) for x in (sLSE, sDelta))
        acc_dK, acc_dV = zeros(mma, TILE_N, self.head_dim), zeros(mma, TILE_N, self.head_dim)

        load_block(copy, thread, keys, (sK, sV), n_block, seqlen)
        for m_block in cutlass.range(cute.ceil_div(seqlen, TILE_M), unroll=1):
            load_block(copy, thread, queries, (sQ, sdO, sLSE, sDelta), m_block, seqlen)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()

            acc_S = zeros(mma, TILE_N, TILE_M)
            gemm(mma, acc_S, k, q)
            tile = cute.local_tile(cute.make_identity_tensor((seqlen, seqlen)), (TILE_M, TILE_N), (m_block, n_block))
            # Rows past the end need no mask: their Q, dO, LSE and delta are 0, so P^T dO and dS are 0.
            apply_mask(acc_S, thr_mma.partition_C(transposed(tile)), seqlen, self.is_causal)
            acc_S.store(cute.math.exp(scale * acc_S.load() - lse.load(), fastmath=True))  # P^T
            gemm_rs(mma, acc_dV, bf16_operand_a(acc_S), do_t)

            acc_dP = zeros(mma, TILE_N, TILE_M)
            gemm(mma, acc_dP, v, do)
            acc_S.store(scale * acc_S.load() * (acc_dP.load() - delta.load()))  # dS^T
            gemm_rs(mma, acc_dK, bf16_operand_a(acc_S), q_t)

            store_tile(mma, thread, acc_S, sdS)
            # dS is complete, and all warps are done with Q and dO before the next block overwrites them.
            cute.arch.sync_threads()
            acc_dQ = zeros(mma, TILE_M, self.head_dim)
            gemm(mma, acc_dQ, ds, k_t)
            add_block(mma, thread, acc_dQ, gdQ, m_block, seqlen)

        store_block(mma, thread, acc_dK, gdK, n_block, seqlen)
        store_block(mma, thread, acc_dV, gdV, n_block, seqlen)


if __name__ == "__main__":
    harness.main(Backward)
