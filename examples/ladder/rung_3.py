"""Rung 3: a swizzle. The kernel is that of rung 2; only the order of elements in shared memory changes.

An ldmatrix reads eight rows of 16 bytes at once. In a row-major tile they are in the same four of the 32 banks. Two
orders put them in different banks:

    padded      each row is 16 bytes longer, so the next row starts four banks further
    swizzled    the 16-byte chunk c of row r is stored at chunk c XOR (r mod 8) of its 128 bytes

Both have no conflicts in ldmatrix. A padded tile is larger, and cp.async, which writes 128 aligned bytes in a
wavefront, takes up to four wavefronts where the swizzle takes one: a padded row straddles these lines, and the 32-byte
sectors in them. TMA and wgmma (rung 6) support the swizzle only.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.views import as_mn
from examples.ladder import harness
from examples.ladder.tools import (
    VECTOR,
    gemm,
    load_rows,
    named,
    operand_a,
    operand_b,
    row_copy,
    row_max_of,
    row_sum_of,
    tensor_core_mma,
)  # fmt: skip

TILE_M, TILE_N, NUM_WARPS = 64, 64, 4  # queries and keys of a tile; a warp has 16 queries
NUM_THREADS = 32 * NUM_WARPS


def allocate(smem: SmemAllocator, rows: int, cols: int) -> cute.Tensor:
    """A tile in shared memory. Swizzled columns come in atoms of 64: 128 bytes."""
    if Forward.variant == "padded":
        layout = cute.make_layout((rows, cols), stride=(cols + VECTOR, 1))
        return smem.allocate_tensor(BFloat16, layout, byte_alignment=128)
    layout = cute.make_layout((rows, (64, cols // 64)), stride=(64, (1, 64 * rows)))
    # Bits 4 to 6 of an address, the chunk, are XORed with bits 7 to 9, the row.
    return smem.allocate_tensor(BFloat16, layout, byte_alignment=1024, swizzle=cute.make_swizzle(3, 4, 3))


class Forward:
    ARCH = "sm_80"
    VARIANTS = ("swizzled", "padded")  # --variant chooses one
    variant = "swizzled"

    def __init__(self, head_dim: int, is_causal: bool):
        self.head_dim, self.is_causal = head_dim, is_causal
        padding = VECTOR * (2 * TILE_M + 2 * TILE_N) if self.variant == "padded" else 0
        self.smem_bytes = 2 * ((TILE_M + 2 * TILE_N) * head_dim + TILE_M * TILE_N + padding)

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32, stream: CUstream
    ):
        mma, copy = tensor_core_mma(NUM_WARPS), row_copy(NUM_THREADS, self.head_dim)
        grid = (cute.ceil_div(mQ.shape[1], TILE_M), mQ.shape[0], 1)
        kernel = named(self.kernel, "rung_3")
        kernel(mQ, mK, mV, mO, scale, mma, copy).launch(grid=grid, block=(NUM_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32,
        mma: cute.TiledMma, copy: cute.TiledCopy,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        m_block, head, _ = cute.arch.block_idx()
        seqlen, first_row = mQ.shape[1], m_block * TILE_M
        gQ, gO = (cute.local_tile(mX[head, None, None], (TILE_M, self.head_dim), (m_block, 0)) for mX in (mQ, mO))
        gK, gV = (cute.local_tile(mX[head, None, None], (TILE_N, self.head_dim), (None, 0)) for mX in (mK, mV))

        smem = SmemAllocator()
        sQ = allocate(smem, TILE_M, self.head_dim)
        sK, sV = allocate(smem, TILE_N, self.head_dim), allocate(smem, TILE_N, self.head_dim)
        sP = allocate(smem, TILE_M, TILE_N)

        thr_mma = mma.get_slice(thread)
        q, k = operand_a(mma, thread, sQ), operand_b(mma, thread, sK)
        p, v = operand_a(mma, thread, sP), operand_b(mma, thread, sV, is_transposed=True)
        acc_S = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE_M, TILE_N)), Float32)
        acc_O = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE_M, self.head_dim)), Float32)
        acc_O.fill(0.0)
        S, O = as_mn(acc_S), as_mn(acc_O)  # (rows, columns) of this thread
        cS = as_mn(thr_mma.partition_C(cute.make_identity_tensor((TILE_M, TILE_N))))
        row_max = cute.make_rmem_tensor(cute.size(S, mode=[0]), Float32)
        row_sum = cute.make_fragment_like(row_max)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)

        load_rows(copy, thread, gQ, sQ, seqlen - first_row)
        for n_block in cutlass.range(cute.ceil_div(seqlen, TILE_N), unroll=1):
            first_key = n_block * TILE_N
            load_rows(copy, thread, gK[None, None, n_block], sK, seqlen - first_key)
            load_rows(copy, thread, gV[None, None, n_block], sV, seqlen - first_key)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()

            acc_S.fill(0.0)
            gemm(mma, acc_S, q, k)

            for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
                for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                    row, key = first_row + cS[r, c][0], first_key + cS[r, c][1]
                    is_hidden = key >= seqlen
                    if cutlass.const_expr(self.is_causal):
                        is_hidden = is_hidden or key > row
                    S[r, c] = cutlass.select_(is_hidden, -Float32.inf, S[r, c])
                # The first block has a visible key for each row, so m is finite from then on.
                scores = S[r, None].load()
                m = cute.arch.fmax(row_max[r], row_max_of(scores.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)))
                probs = cute.math.exp((scores - m) * scale, fastmath=True)
                alpha = cute.math.exp((row_max[r] - m) * scale, fastmath=True)
                row_sum[r] = alpha * row_sum[r] + probs.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                row_max[r] = m
                S[r, None].store(probs)
                O[r, None].store(O[r, None].load() * alpha)

            rP = cute.make_fragment_like(acc_S, BFloat16)
            rP.store(acc_S.load().to(BFloat16))
            cute.autovec_copy(rP, thr_mma.partition_C(sP))
            cute.arch.sync_threads()
            gemm(mma, acc_O, p, v)
            # All warps are done with K, V and P before the next block overwrites them.
            cute.arch.sync_threads()

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
