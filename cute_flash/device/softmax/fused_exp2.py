"""Fused score-to-exp2 pass: computes P of a block from Q K^T, and interleaves the score transform with exponentials.

The exponentials (MUFU) limit the softmax. FMAs of a transform cost little between exponentials, but would cost time in
a separate pass before them.
The pass is used with a speculative row max, which keeps Q K^T until the row sums are checked
(`Softmax.may_have_outgrown`). It needs one formula for a block, in units of log2:

    LinearExp2     s scale + slope column + first(row) - m      ALiBi off the diagonal, where distances have one
                                                                sign; or scores that are already transformed
    RowExp2        s scale + first(row) - m                     the same, if S has the term of the column already
                                                                (`device/scores/alibi_step.py`)
    SoftcapExp2    s (c0 + s² (c1 + s² c2)) - m                 softcap of scores near 0; or scores already capped
    ModExp2        score_mod(s scale + bias) - m                user mods (`device/scores/mods.py`); -inf where masked

Exponents are computed for one k-step at a time: four columns of both rows of a thread.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_flash.device.scores.mask import column_offset

# `SoftcapExp2` chooses one of its two methods for this many k-steps (of 16 columns) together.
PART_STEPS = 4


class FusedExp2:
    """The pass over a block. Subclasses compute the exponents of a k-step."""

    def exponents(self, scores: list, k: int, reference: tuple) -> list:
        """The exponents of scores[row][column] of the k-th k-step, minus the reference (row max) of their row."""
        raise NotImplementedError

    @cute.jit
    def exponentiate(self, views: tuple, steps: cutlass.Constexpr, row_max: tuple):
        """P = exp(S - m) and block_sum += rowsum P for some k-steps.

        `views`: S and P as ((2, 2, 2), 1, k-step), and block_sum.
        """
        acc_S, acc_P, block_sum = views
        for k in cutlass.range_constexpr(steps.start, steps.stop):
            exponents = self.exponents(_step_scores(acc_S, k), k, row_max)
            for pair in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    probs = [cute.math.exp2(x, fastmath=True) for x in exponents[r][2 * pair : 2 * pair + 2]]
                    block_sum[r] = block_sum[r] + (probs[0] + probs[1])
                    for i in cutlass.range_constexpr(2):
                        acc_P[(i, r, pair), 0, k] = probs[i]

    @cute.jit
    def block_max(self, acc_S: cute.Tensor, result: cute.Tensor):
        """The largest score of each row over this thread's columns. `acc_S`: a ((2, 2, 2), 1, k-step) view."""
        result.fill(-Float32.inf)
        for k in cutlass.range_constexpr(cute.size(acc_S, mode=[2])):
            exponents = self.exponents(_step_scores(acc_S, k), k, (Float32(0.0), Float32(0.0)))
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    result[r] = cute.arch.fmax(result[r], exponents[r][i])

    def release(self):
        """Release the pipeline stage that the pass reads, if any. Called when the block is done."""


@dataclass(frozen=True)
class LinearExp2(FusedExp2):
    """Exponents that are linear in the column: ALiBi off the diagonal.

    In other blocks the scores are already transformed, and the factor is 1 and the slope 0.
    """

    factor: Float32
    slope: Float32
    first: tuple  # for each row, the ALiBi term at this thread's first column

    def exponents(self, scores: list, k: int, reference: tuple) -> list:
        columns = [Float32(column_offset(4 * k + i)) for i in range(4)]
        firsts = [self.first[r] - reference[r] for r in range(2)]
        terms = [[cute.math.fma(self.slope, column, first) for column in columns] for first in firsts]
        return [[cute.math.fma(scores[r][i], self.factor, terms[r][i]) for i in range(4)] for r in range(2)]


@dataclass(frozen=True)
class RowExp2(FusedExp2):
    """Exponents of scores that have the ALiBi term of the column already; that of the row is added here."""

    factor: Float32
    first: tuple  # for each row, the ALiBi term at the middle column of the block; 0 if the scores are transformed

    def exponents(self, scores: list, k: int, reference: tuple) -> list:
        firsts = [self.first[r] - reference[r] for r in range(2)]
        return [[cute.math.fma(x, self.factor, firsts[r]) for x in scores[r]] for r in range(2)]


@dataclass(frozen=True)
class SoftcapExp2(FusedExp2):
    """Softcap by a polynomial in parts whose scores are near 0. The scores of other parts are already capped."""

    series: tuple  # c0, c1 and c2
    are_near: tuple  # for each part of PART_STEPS k-steps, whether its scores are near 0 and not yet capped

    def capped(self, x: Float32, reference: Float32) -> Float32:
        """The polynomial of a score, minus a reference.

        FMAs are explicit, because the compiler does not fuse a product that occurs twice.
        """
        c0, c1, c2 = self.series
        squared = x * x
        slope = cute.math.fma(squared, cute.math.fma(squared, c2, c1), c0)
        return cute.math.fma(x, slope, -reference)

    def exponents(self, scores: list, k: int, reference: tuple) -> list:
        return [[self.capped(x, reference[r]) for x in scores[r]] for r in range(2)]

    @cute.jit
    def exponentiate(self, views: tuple, steps: cutlass.Constexpr, row_max: tuple):
        for part in cutlass.range_constexpr(len(self.are_near)):
            first, last = PART_STEPS * part, PART_STEPS * (part + 1)
            here = range(max(first, steps.start), min(last, steps.stop))
            if cutlass.const_expr(len(here) > 0):
                if self.are_near[part]:
                    FusedExp2.exponentiate(self, views, here, row_max)
                else:
                    CappedExp2().exponentiate(views, here, row_max)

    @cute.jit
    def block_max(self, acc_S: cute.Tensor, result: cute.Tensor):
        """The maximum of each row. It is taken first and then capped, because capping is monotonic."""
        result.fill(-Float32.inf)
        for part in cutlass.range_constexpr(len(self.are_near)):
            steps = range(PART_STEPS * part, min(PART_STEPS * (part + 1), cute.size(acc_S, mode=[2])))
            for r in cutlass.range_constexpr(2):
                scores = [acc_S[(i, r, pair), 0, k] for k in steps for pair in range(2) for i in range(2)]
                largest = -Float32.inf
                for score in scores:
                    largest = cute.arch.fmax(largest, score)
                capped = self.capped(largest, Float32(0.0))
                result[r] = cute.arch.fmax(result[r], cutlass.select_(self.are_near[part], capped, largest))


class CappedExp2(FusedExp2):
    """The pass for scores that are already capped."""

    def exponents(self, scores: list, k: int, reference: tuple) -> list:
        return [[x - reference[r] for x in scores[r]] for r in range(2)]


def _step_scores(acc_S: cute.Tensor, k: int) -> list:
    """The scores of the k-th k-step: [row][column]."""
    return [[acc_S[(i % 2, r, i // 2), 0, k] for i in range(4)] for r in range(2)]
