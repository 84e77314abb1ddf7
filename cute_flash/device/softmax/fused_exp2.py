"""Fused score-to-exp2 pass: computes P of a block from Q K^T, and interleaves the score transform with exponentials.

The exponentials (MUFU) limit the softmax. FMAs of a transform cost little between exponentials, but would cost time in
a separate pass before them.
The pass is used with a speculative row max, which keeps Q K^T until the row sums are checked
(`SpeculativeMax.may_have_outgrown`). It needs one formula for a block, in units of log2:

    LinearExp2       s scale + slope column + first(row) - m      ALiBi off the diagonal (`device/scores/alibi.py`)
    RowExp2          s scale + first(row) - m                     the same, if S has the term of the column already
    SoftcapExp2      s (c0 + s² (c1 + s² c2)) - m                 softcap near 0 (`device/scores/softcap.py`)
    ModExp2          score_mod(s scale + bias) - m                user mods (`device/scores/mods.py`); -inf where masked
    TransformedExp2  s - m                                        scores that are already transformed

Exponents are computed for one k-step at a time: four columns of both rows of a thread.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_flash.device.softmax.exp2 import ProbBlock
from cute_flash.device.softmax.softmax import RowValues, Softmax

# Scores, biases or exponents of a k-step: [row][column], two rows of four columns.
StepScores = list[list[Float32]]


class FusedExp2:
    """The pass over a block. Subclasses compute the exponents of a k-step."""

    applies_mask = False  # whether the pass also masks scores
    is_relative = False

    def exponents(self, scores: StepScores, k: int, reference: RowValues) -> StepScores:
        """The exponents of the k-th k-step, minus the reference (row max) of their row."""
        raise NotImplementedError

    def exponentiate(self, softmax: Softmax, block: ProbBlock, steps: range, maybe_empty: bool) -> None:
        """As `PlainExp2.exponentiate`."""
        row_max = softmax.reference() if maybe_empty else tuple(softmax.row_max[r] for r in range(2))
        self.exponentiate_steps(block, steps, row_max)

    @cute.jit
    def exponentiate_steps(self, block: ProbBlock, steps: cutlass.Constexpr, row_max: RowValues):
        """P = exp(S - m) and block_sum += rowsum P for some k-steps."""
        acc_S, acc_P, block_sum = block.S_steps, block.P_steps, block.block_sum
        for k in cutlass.range_constexpr(steps.start, steps.stop):
            exponents = self.exponents(_step_scores(acc_S, k), k, row_max)
            for pair in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    probs = [cute.math.exp2(x, fastmath=True) for x in exponents[r][2 * pair : 2 * pair + 2]]
                    block_sum[r] = block_sum[r] + (probs[0] + probs[1])
                    for i in cutlass.range_constexpr(2):
                        acc_P[(i, r, pair), 0, k] = probs[i]

    @cute.jit
    def find_max(self, softmax: Softmax, block: ProbBlock):
        """Write `block_max`, before the scale of the softmax."""
        acc_S, result = block.S_steps, block.block_max
        result.fill(-Float32.inf)
        for k in cutlass.range_constexpr(cute.size(acc_S, mode=[2])):
            exponents = self.exponents(_step_scores(acc_S, k), k, (Float32(0.0), Float32(0.0)))
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    result[r] = cute.arch.fmax(result[r], exponents[r][i])

    def rebase(self, softmax: Softmax, block: ProbBlock) -> None:
        """Nothing: S is not relative to a row max."""

    def release(self) -> None:
        """Release the pipeline stage that the pass reads, if any. Called when the block is done."""


class TransformedExp2(FusedExp2):
    """The pass for scores that are already transformed."""

    def exponents(self, scores: StepScores, k: int, reference: RowValues) -> StepScores:
        return [[x - reference[r] for x in scores[r]] for r in range(2)]


def _step_scores(acc_S: cute.Tensor, k: int) -> StepScores:
    """The scores of the k-th k-step."""
    return [[acc_S[(i % 2, r, i // 2), 0, k] for i in range(4)] for r in range(2)]
