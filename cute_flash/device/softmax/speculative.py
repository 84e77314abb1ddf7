"""The speculative row max: P of a block is computed with the old m, before the maximum of the block is known.

If the row sums show that m may be too small, the maximum is computed, and P again if m is in fact too small.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.softmax.exp2 import PlainExp2, ProbBlock
from cute_flash.device.softmax.fused_exp2 import FusedExp2
from cute_flash.device.softmax.softmax import Softmax

# A block is checked if its row sums exceed this thread's part of l by more than this.
SPECULATION_EXCESS = 6.0
# In the Hopper forward the check fails if a single P exceeds REDO_OFFSET + REDO_SHARE (l + the block's row sum), or if
# a block's sum exceeds MAX_BLOCK_SUM, which keeps P in the range of fp16. In the model the error is at most 1.04 times
# that of an exact maximum. Of the blocks of normal inputs one in 50 is checked, and one in 300 is computed again. In
# the mma.sync forward the check fails if m lags by more than RESCALE_THRESHOLD.
REDO_SHARE, REDO_OFFSET = 0.5, 1.0
MAX_BLOCK_SUM = 256.0


@dataclass(frozen=True)
class SpeculativeMax:
    """Checks after the exponentials of a block whether m was too small. Has the methods of `ExactMax`."""

    softmax: Softmax
    maybe_empty = False  # a row without keys so far gives a NaN sum, which `may_have_outgrown` detects

    def raise_before_exp2(self, block: ProbBlock, exp2: PlainExp2 | FusedExp2) -> cutlass.Boolean:
        """Nothing: m is raised after the exponentials, with O."""
        return cutlass.Boolean(False)

    @cute.jit
    def correct_after_exp2(
        self, block: ProbBlock, exp2: PlainExp2 | FusedExp2, acc_O_mn: cute.Tensor, finish_probs: Callable[[], None]
    ):
        """Compute P of all k-steps again with a larger m, if m was too small; scale l and O by alpha.

        `finish_probs`: converts P, as after the first computation.
        """

        # A function, because a dynamic branch would copy the values of a pass that it uses.
        def redo() -> None:
            self.softmax.raise_max(block.block_max, acc_O_mn)
            exp2.rebase(self.softmax, block)
            block.block_sum.fill(0.0)
            exp2.exponentiate(self.softmax, block, range(block.steps), True)
            finish_probs()

        if self.may_have_outgrown(block.block_sum, exp2.is_relative):
            self._redo_if_needed(block, exp2, redo)

    @cute.jit
    def _redo_if_needed(self, block: ProbBlock, exp2: PlainExp2 | FusedExp2, redo: Callable[[], None]):
        exp2.find_max(self.softmax, block)
        if self.must_redo(block.block_max, block.block_sum):
            redo()

    @cute.jit
    def may_have_outgrown(self, block_sum: cute.Tensor, is_relative: cutlass.Constexpr = False):
        """Whether a row of this warp may exceed m by too much, judged by the row sums of a block computed with m.

        A NaN sum means yes: a row without keys so far has m = -inf, and gives NaN for scores of -inf. Relative scores
        give no NaN, so m is compared with -inf instead.
        """
        return cute.arch.vote_any_sync(self.sums_exceed(block_sum, is_relative))

    @cute.jit
    def sums_exceed(self, block_sum: cute.Tensor, is_relative: cutlass.Constexpr = False):
        """The condition of `may_have_outgrown` for the rows of this thread."""
        is_fine = cutlass.Boolean(True)
        for r in cutlass.range_constexpr(cute.size(block_sum)):
            most = cute.arch.fmin(self.softmax.row_sum[r] + SPECULATION_EXCESS, MAX_BLOCK_SUM)
            is_fine = is_fine & (block_sum[r] <= most)
            if cutlass.const_expr(is_relative):
                is_fine = is_fine & (self.softmax.row_max[r] != -Float32.inf)
        return not is_fine

    @cute.jit
    def must_redo(self, block_max: cute.Tensor, block_sum: cute.Tensor):
        """Whether P must be computed again: one P is too large a share of its row sum, or a row sum is too large."""
        is_within = cutlass.Boolean(True)
        for r in cutlass.range_constexpr(cute.size(block_sum)):
            largest = cute.math.exp2(block_max[r] * self.softmax.scale_log2 - self.softmax.row_max[r], fastmath=True)
            share = (self.softmax.row_sum[r] + block_sum[r]) * REDO_SHARE + REDO_OFFSET
            is_within = is_within & (largest <= share) & (block_sum[r] <= MAX_BLOCK_SUM)
        return cute.arch.vote_any_sync(not is_within)

    # ---- in the mma.sync forward, which computes P in its final dtype at once

    @cute.jit
    def exponentiate_to(self, rP: cute.Tensor, acc_S: cute.Tensor, block_sum: cute.Tensor, maybe_empty: bool):
        """P = exp(scale (S - m)) in the dtype of `rP`, and block_sum = rowsum P. S and l stay unchanged.

        `acc_S`, `rP`: ((2, 2), MMA_M, MMA_N). `maybe_empty`: rows may have no keys so far, which have m = -inf.
        """
        block_sum.fill(0.0)
        rows = range(cute.size(self.softmax.row_max))
        row_max = [self.softmax.row_max[r] for r in rows]
        if cutlass.const_expr(maybe_empty):
            row_max = [cutlass.select_(m == -Float32.inf, Float32(0.0), m) for m in row_max]
        for n in cutlass.range_constexpr(cute.size(acc_S, mode=[2])):
            for r in cutlass.range_constexpr(cute.size(self.softmax.row_max)):
                two = (None, r % 2), r // 2, n
                probs = cute.math.exp2(acc_S[two].load() * self.softmax.scale_log2 - row_max[r], fastmath=True)
                block_sum[r] = block_sum[r] + (probs[0] + probs[1])
                rP[two].store(probs.to(rP.element_type))

    @cute.jit
    def max_exceeds(self, block_max: cute.Tensor, keys_seen: Int32):
        """Whether a row of this warp exceeds m by more than the threshold, or has no keys so far."""
        threshold = self.softmax.threshold(keys_seen)
        is_within = cutlass.Boolean(True)
        for r in cutlass.range_constexpr(cute.size(self.softmax.row_max)):
            # Without keys so far, this is NaN.
            is_within = is_within & (block_max[r] * self.softmax.scale_log2 - self.softmax.row_max[r] <= threshold)
        return cute.arch.vote_any_sync(not is_within)
