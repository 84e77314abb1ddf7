"""Rung 1: one kernel. Tiles in shared memory and the online softmax keep the scores out of HBM.

One CTA computes 64 queries of one head. For each block of 32 keys:

    copy K and V to shared memory
    S = Q K^T                                     8 x 4 scores of each thread, in registers
    m' = max(m, rowmax S);  P = exp(scale (S - m'));  alpha = exp(scale (m - m'))
    l = alpha l + rowsum P;  O = alpha O + P V    P goes through shared memory, because each row needs all of it

After the last block, O / l is the output. HBM bytes are O(S): Q, K, V and O. Each FMA takes two fp32 numbers. The 8 x 4
scores of a thread use each number of Q four times and each of K eight times, so the kernel is bound by FMAs and not by
shared memory.

Q, K and P are stored transposed: the eight rows, or four keys, of a thread are neighbours, and vectors load them.
"""

import operator

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32
from cutlass.memory import SmemAllocator

from examples.ladder import harness
from examples.ladder.tools import VECTOR, named

TILE_M, TILE_N, NUM_THREADS = 64, 32, 64
ROWS, COLS = 8, 4  # a thread computes ROWS x COLS scores
THREADS_X = TILE_N // COLS  # of a warp have the same queries


@cute.jit
def load_neighbours(sX: cute.Tensor, row: Int32, column: Int32, count: cutlass.Constexpr) -> cute.Tensor:
    """Neighbours of a row of sX, from `column` on, in registers."""
    values = cute.make_rmem_tensor(count, Float32)
    cute.autovec_copy(cute.local_tile(sX[row, None], (count,), (column // count,)), values)
    return values


@cute.jit
def over_row(value: Float32, combine: cutlass.Constexpr) -> Float32:
    """The maximum or the sum over the threads of a warp with the same queries: lanes that differ in bits 1 to 3."""
    for offset in cutlass.range_constexpr(3):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, 2 << offset))
    return value


class Forward:
    ARCH = "sm_80"

    def __init__(self, head_dim: int, is_causal: bool):
        self.head_dim, self.is_causal = head_dim, is_causal
        self.smem_bytes = 4 * ((TILE_M + 2 * TILE_N) * head_dim + TILE_N * TILE_M)

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32, stream: CUstream
    ):
        grid = (cute.ceil_div(mQ.shape[1], TILE_M), mQ.shape[0], 1)
        kernel = named(self.kernel, "rung_1")
        kernel(mQ, mK, mV, mO, scale).launch(grid=grid, block=(NUM_THREADS, 1, 1), stream=stream)

    @cute.jit
    def load(self, mX: cute.Tensor, sX: cute.Tensor, first: Int32, transposed: cutlass.Constexpr):
        """Copy rows of mX to sX in fp32; rows past the end are zeros. If transposed, a warp copies 32 rows at once."""
        rows = sX.shape[1] if transposed else sX.shape[0]
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(rows * self.head_dim // VECTOR // NUM_THREADS):
            index, per_row = thread + i * NUM_THREADS, self.head_dim // VECTOR
            row, vector = index // per_row, index % per_row
            if cutlass.const_expr(transposed):
                row, vector = index % rows, index // rows
            values = cute.make_rmem_tensor(VECTOR, BFloat16)
            values.fill(0.0)
            if first + row < mX.shape[0]:
                cute.autovec_copy(cute.local_tile(mX[first + row, None], (VECTOR,), (vector,)), values)
            for e in cutlass.range_constexpr(VECTOR):
                d = vector * VECTOR + e
                if cutlass.const_expr(transposed):
                    sX[d, row] = values[e].to(Float32)
                else:
                    sX[row, d] = values[e].to(Float32)

    @cute.kernel
    def kernel(self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32):
        thread, _, _ = cute.arch.thread_idx()
        m_block, head, _ = cute.arch.block_idx()
        seqlen, first_row, head_dim = mQ.shape[1], m_block * TILE_M, self.head_dim
        # This thread's first key and query. A 16-byte load of a warp takes two wavefronts, and not four, if lanes i and
        # i ^ 1 read the same address, as they do for K and V, or i and i ^ 2, for Q and P.
        x = thread // 2 % THREADS_X * COLS
        y = (thread % 2 + thread // 16 * 2) * ROWS
        smem = SmemAllocator()
        shapes = ((head_dim, TILE_M), (head_dim, TILE_N), (TILE_N, head_dim), (TILE_N, TILE_M))
        layouts = [cute.make_layout(shape, stride=(shape[1], 1)) for shape in shapes]
        sQ, sK, sV, sP = (smem.allocate_tensor(Float32, layout, byte_alignment=128) for layout in layouts)

        S = cute.make_rmem_tensor((ROWS, COLS), Float32)
        O = cute.make_rmem_tensor((ROWS, head_dim // THREADS_X), Float32)
        row_max, row_sum = cute.make_rmem_tensor(ROWS, Float32), cute.make_rmem_tensor(ROWS, Float32)
        O.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        self.load(mQ[head, None, None], sQ, first_row, True)
        for n_block in cutlass.range(cute.ceil_div(seqlen, TILE_N), unroll=1):
            first_key = n_block * TILE_N
            self.load(mK[head, None, None], sK, first_key, True)
            self.load(mV[head, None, None], sV, first_key, False)
            cute.arch.sync_threads()

            S.fill(0.0)
            for d in cutlass.range(head_dim, unroll=4):
                a, b = load_neighbours(sQ, d, y, ROWS), load_neighbours(sK, d, x, COLS)
                for r in cutlass.range_constexpr(ROWS):
                    for c in cutlass.range_constexpr(COLS):
                        S[r, c] += a[r] * b[c]

            for r in cutlass.range_constexpr(ROWS):
                for c in cutlass.range_constexpr(COLS):
                    row, key = first_row + y + r, first_key + x + c
                    is_hidden = key >= seqlen
                    if cutlass.const_expr(self.is_causal):
                        is_hidden = is_hidden or key > row
                    S[r, c] = cutlass.select_(is_hidden, -Float32.inf, S[r, c])
                # The first block has a visible key for each row, so m is finite from then on.
                scores = S[r, None].load()
                m = scores.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
                m = cute.arch.fmax(row_max[r], over_row(m, cute.arch.fmax))
                probs = cute.math.exp((scores - m) * scale, fastmath=True)
                alpha = cute.math.exp((row_max[r] - m) * scale, fastmath=True)
                row_sum[r] = alpha * row_sum[r] + probs.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                row_max[r] = m
                S[r, None].store(probs)
                O[r, None].store(O[r, None].load() * alpha)
            for c in cutlass.range_constexpr(COLS):
                cute.autovec_copy(S[None, c], cute.local_tile(sP[x + c, None], (ROWS,), (y // ROWS,)))
            cute.arch.sync_threads()

            for key in cutlass.range(TILE_N, unroll=2):
                p = load_neighbours(sP, key, y, ROWS)
                for i in cutlass.range_constexpr(head_dim // TILE_N):
                    b = load_neighbours(sV, key, x + i * TILE_N, COLS)
                    for r in cutlass.range_constexpr(ROWS):
                        for c in cutlass.range_constexpr(COLS):
                            O[r, COLS * i + c] += p[r] * b[c]
            # All threads are done with K, V and P before the next block overwrites them.
            cute.arch.sync_threads()

        for r in cutlass.range_constexpr(ROWS):
            total = over_row(row_sum[r], operator.add)
            if first_row + y + r < seqlen:
                for i in cutlass.range_constexpr(head_dim // TILE_N):
                    for c in cutlass.range_constexpr(COLS):
                        mO[head, first_row + y + r, x + i * TILE_N + c] = (O[r, COLS * i + c] / total).to(BFloat16)


if __name__ == "__main__":
    harness.main(Forward)
