"""Online softmax over blocks of scores (Milakov & Gimelshein; FlashAttention, algorithm 1).

Each row has a running maximum m of its scores s, and a running sum l of exp(scale * (s - m)). A new block raises m to
m', scales l and the output accumulator by exp(scale * (m - m')), and adds its own terms. exp is exp2 with the scale
folded in: one FMA and one MUFU per score. Each thread sums l over its own columns; at the end the four threads of a row
add up their sums.

`Softmax` has the statistics of the rows. `Softmax.step` is the softmax of a block in one call. Kernels that overlap it
with products call its parts instead: `ExactMax` (`exact.py`) raises m before the exponentials of a block,
`SpeculativeMax` (`speculative.py`) after them, and `exp2.py` and `fused_exp2.py` have the exponentials.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.memory.views import as_mn

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# In an accumulator of mma.sync or wgmma, four neighbouring threads hold the columns of one row.
THREADS_PER_ROW = 4
RowValues = tuple[Float32, ...]  # a value for each row of this thread

# How far m may lag behind the true maximum of a row, in units of log2. If it lags further, m, l and O are rescaled. A
# lag scales P and l by the same factor, so the final division by l cancels it. It only affects the rounding of P: with
# an exact maximum the largest P is 1, which has no rounding error; with a lag it is larger and is rounded. In a
# numerical model, on inputs with outliers, the error is at most 1.20 times that of an exact maximum with a threshold of
# 8, 1.06 times with 4, 1.04 times with 3 and 1.02 times with 2. On normal inputs one block in 100 exceeds 3, and one in
# 15 exceeds 2.
RESCALE_THRESHOLD = 3.0
# m is exact for the first EXACT_KEYS keys, because the largest P matters more with fewer keys. In the Hopper forward,
# only the first block is exact if two blocks together have more keys than this, or if later blocks use a speculative
# maximum. Exact blocks rescale like every block of FlashAttention-2. Measured on an H200 at S=512, the error relative
# to FlashAttention-2 is 1.056 if only the first block is exact, 1.038 with 192 exact keys, and 1.00 with 512. Short
# sequences without a mask are then 3 % slower with 192 keys, and 8 % slower with 512.
EXACT_KEYS = 128


def _row_reduce(value: Float32, combine: Callable[[Float32, Float32], Float32]) -> Float32:
    """Combine a value over the four threads of a row. The DSL's own reduction would add NaN handling."""
    for offset in (THREADS_PER_ROW // 2, 1):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


@dataclass(frozen=True)
class Softmax:
    """The softmax statistics of this thread's rows."""

    row_max: cute.Tensor  # (rows of this thread,) fp32, m times scale_log2
    row_sum: cute.Tensor  # (rows of this thread,) fp32, this thread's columns only
    alpha: cute.Tensor  # (rows of this thread,) fp32, the factor of the last rescaling
    scale_log2: Float32  # scale * log2(e)
    max_score: cute.Tensor | None = None  # (rows of this thread,) fp32, over this thread's columns, for max_logit
    is_exact: cutlass.Constexpr = False  # m never lags, so a row does not depend on the other rows of its warp
    # Sum each block separately first: an fp32 sum of 1 or more loses terms below 2^-24, and there may be many.
    sums_by_block: cutlass.Constexpr = False

    @staticmethod
    def start(
        acc_O_mn: cute.Tensor, scale_log2: Float32, tracks_max_score: bool = False, is_exact: bool = False
    ) -> "Softmax":
        """The statistics of the rows of an accumulator, for rows without keys so far."""
        rows = cute.size(acc_O_mn, mode=[0])
        statistics = (cute.make_rmem_tensor(rows, Float32) for _ in range(3))
        max_score = cute.make_rmem_tensor(rows, Float32) if tracks_max_score else None
        softmax = Softmax(*statistics, scale_log2, max_score, is_exact)
        softmax.restart()
        return softmax

    def restart(self):
        """Reset the statistics to those of rows without keys."""
        self.row_max.fill(-Float32.inf)
        self.row_sum.fill(0.0)
        if self.max_score is not None:
            self.max_score.fill(-Float32.inf)

    def reference(self) -> RowValues:
        """The row max m, which the score transform of a later block subtracts; 0 for rows without keys so far.

        The subtraction is part of an FMA of the transform. Transformed scores have a scale of 1.
        """
        rows = range(cute.size(self.row_max))
        has_none = [self.row_max[r] == -Float32.inf for r in rows]
        return tuple(cutlass.select_(has_none[r], Float32(0.0), self.row_max[r]) for r in rows)

    @cute.jit
    def step(
        self,
        acc_S_mn: cute.Tensor,
        acc_O_mn: cute.Tensor,
        keys_seen: Int32,
        combine_max: Callable[[cute.Tensor], None] | None = None,
    ):
        """Replace the scores of a block by P, and rescale the output if a maximum grew.

        `keys_seen`: number of keys in the blocks before this one. `combine_max`: combines the maxima of rows that
        several warps share, in place.
        """
        block_max = cute.make_fragment_like(self.row_max)
        threshold = self.threshold(keys_seen)
        self.block_max(acc_S_mn, block_max)
        if cutlass.const_expr(combine_max is not None):
            combine_max(block_max)
        if self.is_outgrown(block_max, threshold):
            self.raise_max(block_max, acc_O_mn)
        self.exponentiate(acc_S_mn)

    @cute.jit
    def block_max(self, acc_S_mn: cute.Tensor, block_max: cute.Tensor, reference: RowValues | None = None):
        """Write the maximum of each row over this thread's columns to `block_max`, before the scale."""
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            block_max[r] = acc_S_mn[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            if cutlass.const_expr(reference is not None):
                block_max[r] = block_max[r] + reference[r]
            # Tracked apart from m, which may lag behind the true maximum.
            if cutlass.const_expr(self.max_score is not None):
                self.max_score[r] = cute.arch.fmax(self.max_score[r], block_max[r])

    @cute.jit
    def threshold(self, keys_seen: Int32) -> Float32:
        """How far m may lag. `keys_seen`: number of keys in the blocks before this one."""
        if cutlass.const_expr(self.is_exact):
            return Float32(0.0)
        return Float32(0.0) if keys_seen < EXACT_KEYS else Float32(RESCALE_THRESHOLD)

    @cute.jit
    def is_outgrown(self, block_max: cute.Tensor, threshold: Float32):
        """Whether a row of this warp exceeds m by more than the threshold.

        The maximum over this thread's columns suffices, because the warp votes.
        """
        grew = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            grew = grew | (block_max[r] * self.scale_log2 - self.row_max[r] > threshold)
        return cute.arch.vote_any_sync(grew)

    @cute.jit
    def raise_max(self, block_max: cute.Tensor, acc_O_mn: cute.Tensor | None = None):
        """m' = max(m, block_max); alpha = exp(scale * (m - m')). Scales l by alpha, and O too if it is passed."""
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            m_old = self.row_max[r]
            m_new = cute.arch.fmax(m_old, _row_reduce(block_max[r], cute.arch.fmax) * self.scale_log2)
            # A row without keys so far holds zeros, so any finite factor is right; -inf - -inf would be NaN.
            grown = Float32(0.0) if m_old == -Float32.inf else m_old - m_new
            self.alpha[r] = cute.math.exp2(grown, fastmath=True)
            self.row_max[r] = m_new
            self.row_sum[r] = self.row_sum[r] * self.alpha[r]
            if cutlass.const_expr(acc_O_mn is not None):
                acc_O_mn[r, None].store(acc_O_mn[r, None].load() * self.alpha[r])

    @cute.jit
    def scale_rows(self, acc_O_mn: cute.Tensor, factors: cute.Tensor):
        """Scale the rows of O, by alpha or by 1 / l."""
        for r in cutlass.range_constexpr(cute.size(factors)):
            acc_O_mn[r, None].store(acc_O_mn[r, None].load() * factors[r])

    @cute.jit
    def add_sums(self, block_sum: cute.Tensor):
        """l += rowsum P"""
        for r in cutlass.range_constexpr(cute.size(block_sum)):
            self.row_sum[r] = self.row_sum[r] + block_sum[r]

    @cute.jit
    def exponentiate(self, acc_S_mn: cute.Tensor):
        """P = exp(scale * (S - m)) in place, and l += rowsum P."""
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            row_max = Float32(0.0) if self.row_max[r] == -Float32.inf else self.row_max[r]
            probs = cute.math.exp2(acc_S_mn[r, None].load() * self.scale_log2 - row_max, fastmath=True)
            if cutlass.const_expr(self.sums_by_block):
                self.row_sum[r] = self.row_sum[r] + probs.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            else:
                self.row_sum[r] = probs.reduce(cute.ReductionOp.ADD, self.row_sum[r], 0)
            acc_S_mn[r, None].store(probs)

    @cute.jit
    def max_logit(self, tScS: cute.Tensor, rows_left: Int32) -> Float32:
        """The largest score of this thread's rows that exist, in natural units."""
        coords, largest = as_mn(tScS), -Float32.inf
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            largest = cute.arch.fmax(largest, self.max_score[r] if coords[r, 0][0] < rows_left else largest)
        return largest * self.scale_log2 * LN_2

    @cute.jit
    def finish(
        self, acc_O_mn: cute.Tensor, lse: cute.Tensor, sink: Float32 | None = None, dropout_scale: Float32 | None = None
    ):
        """Normalise the output, and compute the natural LSE of each row."""
        inverse = cute.make_fragment_like(self.row_sum)
        self.compute_lse(lse, inverse, sink, dropout_scale)
        self.scale_rows(acc_O_mn, inverse)

    @cute.jit
    def compute_lse(
        self, lse: cute.Tensor, inverse: cute.Tensor, sink: Float32 | None = None, dropout_scale: Float32 | None = None
    ):
        """Compute the `normalisation` of each row. 1 / l includes the scale of dropout too."""
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            total = _row_reduce(self.row_sum[r], lambda a, b: a + b)
            lse[r], inverse[r] = normalisation(self.row_max[r], total, sink)
            if cutlass.const_expr(dropout_scale is not None):
                inverse[r] = inverse[r] * dropout_scale


class Normalisation(NamedTuple):
    """The factor of a row's output, and its LSE, after the last block."""

    lse: Float32  # natural
    inverse: Float32  # 1 / l


@cute.jit
def normalisation(m: Float32, row_sum: Float32, sink: Float32 | None) -> Normalisation:
    """The LSE and 1 / l of a row, both with the sink. Without keys the LSE is -inf, or the sink, and 1 / l is 0."""
    is_empty = row_sum == 0.0
    inverse = Float32(0.0) if is_empty else cute.arch.rcp_approx(row_sum)
    log_sum = cute.math.log2(row_sum, fastmath=True)
    lse = -Float32.inf if is_empty else (m + log_sum) * LN_2
    if cutlass.const_expr(sink is not None):
        lse, share = _add_sink(lse, sink)
        inverse = inverse * share
    return Normalisation(lse, inverse)


@cute.jit
def _add_sink(lse: Float32, sink: Float32) -> tuple[Float32, Float32]:
    """log(exp(lse) + exp(sink)), and the keys' share of that sum. Exact if either argument is -inf."""
    has_keys = lse != -Float32.inf
    log2_ratio = (sink - lse) * LOG2_E if has_keys else Float32(0.0)
    ratio = cute.math.exp2(log2_ratio, fastmath=True)
    smaller = cute.math.exp2(cute.arch.fmin(log2_ratio, -log2_ratio), fastmath=True)
    both = cute.arch.fmax(lse, sink) + cute.math.log2(1.0 + smaller, fastmath=True) * LN_2
    return (both if has_keys else sink), cute.arch.rcp_approx(1.0 + ratio)
