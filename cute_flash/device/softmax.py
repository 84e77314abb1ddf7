"""Online softmax over blocks of scores (Milakov & Gimelshein; FlashAttention, algorithm 1).

Per row: m, the running maximum of the scores, and l, the sum of exp(scale * (s - m)). A new block raises
m to m', scales l and the output accumulator by exp(scale * (m - m')), and adds its own terms. exp is exp2
with the scale folded in: one FMA and one MUFU per score. l is summed per thread and reduced over the four
threads of a row only at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.views import as_mn

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# Four neighbouring threads hold the columns of one row of an accumulator, on mma.sync and wgmma alike.
THREADS_PER_ROW = 4

# log2 of how far a row's reference maximum may lag behind its true one; beyond it, m, l and O are rescaled.
# The final division removes the factor exactly, so it shows only in the rounding of P: the largest P of an
# exact maximum is 1, which rounds to itself, and the heavier a key, the more its rounding matters. In a model
# of the kernels, on inputs with outliers, the error is up to 1.20 times that of an exact maximum with 8, 1.06
# with 4, 1.04 with 3, 1.02 with 2; on normal inputs one block in 100 exceeds 3, one in 15 exceeds 2.
RESCALE_THRESHOLD = 3.0
# Over the first keys the maximum is kept exact: the fewer there are, the more the heaviest weighs. An exact
# block runs the whole rescaling, as every block of FlashAttention-2 does. Measured on an H200, error against
# FlashAttention-2's at S=512 and speed of short full tiles: first block only 1.056, 192 keys 1.038 and 3 %
# slower, 512 keys 1.00 and 8 % slower.
EXACT_KEYS = 128
# Where P is made with the old maximum, its sums raise a suspicion: above this thread's part of l by so much.
SUSPICIOUS_EXCESS = 6.0
# It is confirmed by a single P above this share of the sums, or by a sum near what P in 16 bits can hold. In
# the model: error up to 1.04; of the blocks of normal inputs one in 50 is suspicious, one in 300 done again.
OUTWEIGHED_SHARE, OUTWEIGHED_BY = 0.5, 1.0
MAX_BLOCK_SUM = 256.0


def _row_reduce(value: Float32, combine: Callable[[Float32, Float32], Float32]) -> Float32:
    """Combine a value over the threads that share a row; the DSL's own reduction adds NaN handling."""
    offset = THREADS_PER_ROW // 2
    while offset:
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
        offset //= 2
    return value


@dataclass(frozen=True)
class Softmax:
    row_max: cute.Tensor  # (rows of this thread,) fp32, of scores times scale_log2
    row_sum: cute.Tensor  # (rows of this thread,) fp32, this thread's columns only
    alpha: cute.Tensor  # (rows of this thread,) fp32, the factor of the last rescaling
    scale_log2: Float32  # scale * log2(e)
    largest: cute.Tensor | None = None  # (rows of this thread,) fp32, of this thread's scores, if wanted
    is_exact: cutlass.Constexpr = False  # the maximum never lags behind: a row's own business, not its warp's

    @staticmethod
    def start(
        acc_O_mn: cute.Tensor, scale_log2: Float32, wants_largest: bool = False, is_exact: bool = False
    ) -> "Softmax":
        rows = cute.size(acc_O_mn, mode=[0])
        statistics = (cute.make_rmem_tensor(rows, Float32) for _ in range(3))
        largest = cute.make_rmem_tensor(rows, Float32) if wants_largest else None
        softmax = Softmax(*statistics, scale_log2, largest, is_exact)
        softmax.restart()
        return softmax

    def restart(self):
        """Forget all keys seen."""
        self.row_max.fill(-Float32.inf)
        self.row_sum.fill(0.0)
        if self.largest is not None:
            self.largest.fill(-Float32.inf)

    def reference(self) -> tuple:
        """What transformed scores of a further block are relative to: m, or 0 where no key was seen.

        The transform subtracts it at no cost; such scores have a scale of 1.
        """
        rows = range(cute.size(self.row_max))
        has_none = [self.row_max[r] == -Float32.inf for r in rows]
        return tuple(cutlass.select_(has_none[r], Float32(0.0), self.row_max[r]) for r in rows)

    @cute.jit
    def follow(self, acc_S_mn: cute.Tensor, reference: tuple | None):
        """Scores that are relative to a reference become relative to m, after it was raised."""
        if cutlass.const_expr(reference is not None):
            for r in cutlass.range_constexpr(cute.size(self.row_max)):
                grown = Float32(0.0) if self.row_max[r] == -Float32.inf else self.row_max[r] - reference[r]
                acc_S_mn[r, None].store(acc_S_mn[r, None].load() - grown)

    @cute.jit
    def step(self, acc_S_mn: cute.Tensor, acc_O_mn: cute.Tensor, keys_seen: Int32):
        """Turn a block of scores into probabilities in place; rescale the output if a maximum grew.

        `keys_seen`: keys of the blocks before this one.
        """
        block_max = cute.make_fragment_like(self.row_max)
        if self.is_outgrown(acc_S_mn, block_max, keys_seen):
            self.raise_max(block_max, acc_O_mn)
        self.exponentiate(acc_S_mn)

    @cute.jit
    def block_max(self, acc_S_mn: cute.Tensor, block_max: cute.Tensor, reference: tuple | None = None):
        """The maximum of each row over this thread's columns."""
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            block_max[r] = acc_S_mn[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            if cutlass.const_expr(reference is not None):
                block_max[r] = block_max[r] + reference[r]
            # The maximum that weights are relative to may lag behind.
            if cutlass.const_expr(self.largest is not None):
                self.largest[r] = cute.arch.fmax(self.largest[r], block_max[r])

    @cute.jit
    def is_outgrown(
        self,
        acc_S_mn: cute.Tensor,
        block_max: cute.Tensor,
        keys_seen: Int32,
        reference: tuple | None = None,
    ):
        """Whether a row of this warp outgrew its maximum by more than may be; fills `block_max`.

        The maximum over this thread's columns suffices to ask: the warp votes.
        """
        threshold = Float32(0.0)
        if cutlass.const_expr(not self.is_exact):
            threshold = Float32(0.0) if keys_seen < EXACT_KEYS else Float32(RESCALE_THRESHOLD)
        self.block_max(acc_S_mn, block_max, reference)
        grew = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            grew = grew | (block_max[r] * self.scale_log2 - self.row_max[r] > threshold)
        return cute.arch.vote_any_sync(grew)

    @cute.jit
    def is_suspicious(self, block_sum: cute.Tensor, is_relative: cutlass.Constexpr = False):
        """Whether the sums of a block, made with the old maximum, leave it open that a row outgrew that.

        No number is suspicious too: a row whose maximum is still -inf makes one of scores that are -inf;
        where scores are relative, it is looked at.
        """
        is_usual = cutlass.Boolean(True)
        for r in cutlass.range_constexpr(cute.size(block_sum)):
            usual = cute.arch.fmin(self.row_sum[r] + SUSPICIOUS_EXCESS, MAX_BLOCK_SUM)
            is_usual = is_usual & (block_sum[r] <= usual)
            if cutlass.const_expr(is_relative):
                is_usual = is_usual & (self.row_max[r] != -Float32.inf)
        return cute.arch.vote_any_sync(not is_usual)

    @cute.jit
    def is_outweighed(self, block_max: cute.Tensor, block_sum: cute.Tensor):
        """Whether a single key of the block outweighs what a row has seen, or its sum is too large."""
        is_within = cutlass.Boolean(True)
        for r in cutlass.range_constexpr(cute.size(block_sum)):
            largest = cute.math.exp2(block_max[r] * self.scale_log2 - self.row_max[r], fastmath=True)
            share = (self.row_sum[r] + block_sum[r]) * OUTWEIGHED_SHARE + OUTWEIGHED_BY
            is_within = is_within & (largest <= share) & (block_sum[r] <= MAX_BLOCK_SUM)
        return cute.arch.vote_any_sync(not is_within)

    @cute.jit
    def raise_max(self, block_max: cute.Tensor, acc_O_mn: cute.Tensor | None = None):
        """m' = max(m, block_max); alpha = exp(scale * (m - m')); l is scaled by it, and O, if it is given."""
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            m_old = self.row_max[r]
            m_new = cute.arch.fmax(m_old, _row_reduce(block_max[r], cute.arch.fmax) * self.scale_log2)
            # A row without keys so far holds zeros, which any finite factor keeps; -inf - -inf would be NaN.
            grown = Float32(0.0) if m_old == -Float32.inf else m_old - m_new
            self.alpha[r] = cute.math.exp2(grown, fastmath=True)
            self.row_max[r] = m_new
            self.row_sum[r] = self.row_sum[r] * self.alpha[r]
            if cutlass.const_expr(acc_O_mn is not None):
                acc_O_mn[r, None].store(acc_O_mn[r, None].load() * self.alpha[r])

    def rescale(self, acc_O_mn: cute.Tensor):
        """O is scaled by alpha."""
        self.scale_rows(acc_O_mn, self.alpha)

    @cute.jit
    def scale_rows(self, acc_O_mn: cute.Tensor, factors: cute.Tensor):
        for r in cutlass.range_constexpr(cute.size(factors)):
            acc_O_mn[r, None].store(acc_O_mn[r, None].load() * factors[r])

    @cute.jit
    def exponentiate_steps(
        self,
        acc_S: cute.Tensor,
        acc_P: cute.Tensor,
        block_sum: cute.Tensor,
        steps: range,
        maybe_empty: bool,
        is_relative: bool = False,
    ):
        """P = exp(scale (S - m)), block_sum += rowsum P, of some k-steps of ((2, 2, 2), 1, k-step) views.

        `S` is kept, and `l` left alone: the caller may find that it must begin again with another m.
        `maybe_empty`: some row may not have seen a key yet, so that its maximum is still -inf.
        `is_relative`: S is what it is relative to m, scaled.
        """
        row_max = [self.row_max[r] for r in range(2)]
        if cutlass.const_expr(maybe_empty and not is_relative):
            for r in cutlass.range_constexpr(2):
                row_max[r] = Float32(0.0) if row_max[r] == -Float32.inf else row_max[r]
        for k in cutlass.range_constexpr(steps.start, steps.stop):
            for pair in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    scores = acc_S[(None, r, pair), 0, k].load()
                    if cutlass.const_expr(not is_relative):
                        scores = scores * self.scale_log2 - row_max[r]
                    probs = cute.math.exp2(scores, fastmath=True)
                    block_sum[r] = block_sum[r] + (probs[0] + probs[1])
                    acc_P[(None, r, pair), 0, k].store(probs)

    @cute.jit
    def add_sums(self, block_sum: cute.Tensor):
        """l += rowsum P"""
        for r in cutlass.range_constexpr(cute.size(block_sum)):
            self.row_sum[r] = self.row_sum[r] + block_sum[r]

    @cute.jit
    def exponentiate(self, acc_S_mn: cute.Tensor):
        """P = exp(scale * (S - m)) in place; l += rowsum P. A row without keys so far has no maximum."""
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            row_max = Float32(0.0) if self.row_max[r] == -Float32.inf else self.row_max[r]
            probs = cute.math.exp2(acc_S_mn[r, None].load() * self.scale_log2 - row_max, fastmath=True)
            self.row_sum[r] = probs.reduce(cute.ReductionOp.ADD, self.row_sum[r], 0)
            acc_S_mn[r, None].store(probs)

    @cute.jit
    def largest_of(self, tScS: cute.Tensor, rows_left: Int32) -> Float32:
        """The largest score that this thread has seen, natural, of rows that exist."""
        coords, found = as_mn(tScS), -Float32.inf
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            found = cute.arch.fmax(found, self.largest[r] if coords[r, 0][0] < rows_left else found)
        return found * self.scale_log2 * LN_2

    @cute.jit
    def finish(
        self,
        acc_O_mn: cute.Tensor,
        lse: cute.Tensor,
        sink: Float32 | None = None,
        keep_scale: Float32 | None = None,
    ):
        """Normalise the output; write each row's LSE."""
        inverse = cute.make_fragment_like(self.row_sum)
        self.close(lse, inverse, sink, keep_scale)
        self.scale_rows(acc_O_mn, inverse)

    @cute.jit
    def close(
        self,
        lse: cute.Tensor,
        inverse: cute.Tensor,
        sink: Float32 | None = None,
        keep_scale: Float32 | None = None,
    ):
        """Each row's LSE, natural log, and 1 / l, times the scale of dropout. A row without keys gives 0, and
        -inf or the sink.
        """
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            total = _row_reduce(self.row_sum[r], lambda a, b: a + b)
            is_empty = total == 0.0
            inverse[r] = Float32(0.0) if is_empty else cute.arch.rcp_approx(total)
            log_sum = cute.math.log2(total, fastmath=True)
            lse[r] = -Float32.inf if is_empty else (self.row_max[r] + log_sum) * LN_2
            if cutlass.const_expr(sink is not None):
                lse[r], share = _beside(lse[r], sink)
                inverse[r] = inverse[r] * share
            if cutlass.const_expr(keep_scale is not None):
                inverse[r] = inverse[r] * keep_scale


@cute.jit
def _beside(lse: Float32, sink: Float32) -> tuple[Float32, Float32]:
    """log(exp(lse) + exp(sink)), and the share that stays for the keys. Exact where either is -inf."""
    has_keys = lse != -Float32.inf
    over = (sink - lse) * LOG2_E if has_keys else Float32(0.0)
    weight = cute.math.exp2(over, fastmath=True)
    smaller = cute.math.exp2(cute.arch.fmin(over, -over), fastmath=True)
    both = cute.arch.fmax(lse, sink) + cute.math.log2(1.0 + smaller, fastmath=True) * LN_2
    return (both if has_keys else sink), cute.arch.rcp_approx(1.0 + weight)
