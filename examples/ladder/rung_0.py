"""Rung 0: standard attention. Three kernels; the scores of all pairs of queries and keys go through HBM.

    scores    S = scale Q K^T            one thread for each score;  -inf above the diagonal if causal
    softmax   P = softmax(S), in place   one warp for each row
    output    O = P V                    one thread for each element

The scores are written twice and read four times: HBM bytes are O(S^2). The arithmetic is fp32, one FMA at a time.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Boolean, Float32

from examples.ladder import harness
from examples.ladder.tools import named

SIDE = 16  # a CTA of the first kernel computes 16 x 16 scores
NUM_WARPS = 4  # rows of a CTA of the other kernels


class Forward:
    ARCH = "sm_80"
    SCRATCH = ("scores",)

    def __init__(self, head_dim: int, is_causal: bool):
        self.head_dim, self.is_causal = head_dim, is_causal
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mS: cute.Tensor, scale: Float32,
        stream: CUstream,
    ):  # fmt: skip
        heads, seqlen = mQ.shape[0], mQ.shape[1]
        tiles, rows = cute.ceil_div(seqlen, SIDE), cute.ceil_div(seqlen, NUM_WARPS)
        named(self.scores, "rung_0_scores")(mQ, mK, mS, scale).launch(
            grid=(tiles, tiles, heads), block=(SIDE, SIDE, 1), stream=stream
        )
        named(self.softmax, "rung_0_softmax")(mS).launch(grid=(rows, heads, 1), block=(32, NUM_WARPS, 1), stream=stream)
        named(self.output, "rung_0_output")(mS, mV, mO).launch(
            grid=(rows, heads, 1), block=(self.head_dim, NUM_WARPS, 1), stream=stream
        )

    @cute.kernel
    def scores(self, mQ: cute.Tensor, mK: cute.Tensor, mS: cute.Tensor, scale: Float32):
        x, y, _ = cute.arch.thread_idx()
        tile_n, tile_m, head = cute.arch.block_idx()
        row, key, seqlen = tile_m * SIDE + y, tile_n * SIDE + x, mQ.shape[1]
        if row < seqlen and key < seqlen:
            score = Float32(0.0)
            for d in cutlass.range(self.head_dim, unroll=8):
                score += mQ[head, row, d].to(Float32) * mK[head, key, d].to(Float32)
            is_hidden = Boolean(False)
            if cutlass.const_expr(self.is_causal):
                is_hidden = key > row
            mS[head, row, key] = cutlass.select_(is_hidden, -Float32.inf, score * scale)

    @cute.kernel
    def softmax(self, mS: cute.Tensor):
        lane, warp, _ = cute.arch.thread_idx()
        block, head, _ = cute.arch.block_idx()
        row, seqlen = block * NUM_WARPS + warp, mS.shape[1]
        if row < seqlen:
            row_max, row_sum = -Float32.inf, Float32(0.0)
            for key in cutlass.range(lane, seqlen, 32, unroll=4):
                row_max = cute.arch.fmax(row_max, mS[head, row, key])
            row_max = cute.arch.warp_reduction_max(row_max)
            for key in cutlass.range(lane, seqlen, 32, unroll=4):
                row_sum += cute.math.exp(mS[head, row, key] - row_max, fastmath=True)
            row_sum = cute.arch.warp_reduction_sum(row_sum)
            for key in cutlass.range(lane, seqlen, 32, unroll=4):
                mS[head, row, key] = cute.math.exp(mS[head, row, key] - row_max, fastmath=True) / row_sum

    @cute.kernel
    def output(self, mS: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor):
        d, warp, _ = cute.arch.thread_idx()
        block, head, _ = cute.arch.block_idx()
        row, seqlen = block * NUM_WARPS + warp, mS.shape[1]
        if row < seqlen:
            out = Float32(0.0)
            for key in cutlass.range(seqlen, unroll=8):
                out += mS[head, row, key] * mV[head, key, d].to(Float32)
            mO[head, row, d] = out.to(BFloat16)


if __name__ == "__main__":
    harness.main(Forward)
