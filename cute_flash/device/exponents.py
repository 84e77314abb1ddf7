"""P of a block straight from its products: what more is asked for lies beside the exponentials.

The exponentials are what a softmax waits for, so the FMAs of a transform cost little between them and much
before them. That needs products to be kept as they are until sums were checked (`Softmax.is_suspicious`), and
one formula for a block, in units of log2:

    a line     s scale + slope column + first(row) - m      ALiBi beside the diagonal, where distances have
                                                            one sign; or scores that were bent before
    a curve    s (c0 + s² (c1 + s² c2)) - m                 a cap on scores near 0; or what was capped before
    written    score_mod(s scale + bias) - m                what users write (`device/written.py`), and -inf
                                                            where mask_mod says so

A formula is asked for the exponents of a k-step at a time: four columns of both rows of a thread.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_flash.device.mask import column_offset

# Steps of a row's 16 columns that a curve decides on together.
PART_STEPS = 4


class Formula:
    """Gives the exponents of a k-step; what is made of them is the same for all."""

    def exponents(self, scores: list, k: int, reference: tuple) -> list:
        """Of scores[row][column] of the k-th, less a reference of each row."""
        raise NotImplementedError

    @cute.jit
    def exponentiate(self, views: tuple, steps: cutlass.Constexpr, row_max: tuple):
        """P = exp(S - m), block_sum += rowsum P, of some k-steps of ((2, 2, 2), 1, k-step) views."""
        acc_S, acc_P, block_sum = views
        for k in cutlass.range_constexpr(steps.start, steps.stop):
            exponents = self.exponents(_of_step(acc_S, k), k, row_max)
            for pair in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    probs = [cute.math.exp2(x, fastmath=True) for x in exponents[r][2 * pair : 2 * pair + 2]]
                    block_sum[r] = block_sum[r] + (probs[0] + probs[1])
                    for i in cutlass.range_constexpr(2):
                        acc_P[(i, r, pair), 0, k] = probs[i]

    @cute.jit
    def block_max(self, acc_S: cute.Tensor, found: cute.Tensor):
        """The largest score of each row over this thread's columns, of a ((2, 2, 2), 1, k-step) view."""
        for r in cutlass.range_constexpr(2):
            found[r] = -Float32.inf
        for k in cutlass.range_constexpr(cute.size(acc_S, mode=[2])):
            exponents = self.exponents(_of_step(acc_S, k), k, (Float32(0.0), Float32(0.0)))
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    found[r] = cute.arch.fmax(found[r], exponents[r][i])

    def release(self):
        """A block is done."""


@dataclass(frozen=True)
class Line(Formula):
    factor: Float32
    slope: Float32
    first: tuple  # of each row, at its first column in this thread

    def exponents(self, scores: list, k: int, reference: tuple) -> list:
        columns = [Float32(column_offset(4 * k + i)) for i in range(4)]
        firsts = [self.first[r] - reference[r] for r in range(2)]
        terms = [[cute.math.fma(self.slope, column, first) for column in columns] for first in firsts]
        return [[cute.math.fma(scores[r][i], self.factor, terms[r][i]) for i in range(4)] for r in range(2)]


@dataclass(frozen=True)
class Curve(Formula):
    series: tuple
    are_near: tuple  # of each part: whether its scores are still products

    def capped(self, x: Float32, reference: Float32) -> Float32:
        """Of a product, less a reference. FMAs by name: products that occur twice would be no part of one."""
        c0, c1, c2 = self.series
        squared = x * x
        slope = cute.math.fma(squared, cute.math.fma(squared, c2, c1), c0)
        return cute.math.fma(x, slope, -reference)

    def exponents(self, scores: list, k: int, reference: tuple) -> list:
        """Of products."""
        return [[self.capped(x, reference[r]) for x in scores[r]] for r in range(2)]

    @cute.jit
    def exponentiate(self, views: tuple, steps: cutlass.Constexpr, row_max: tuple):
        for part in cutlass.range_constexpr(len(self.are_near)):
            first, last = PART_STEPS * part, PART_STEPS * (part + 1)
            here = range(max(first, steps.start), min(last, steps.stop))
            if cutlass.const_expr(len(here) > 0):
                if self.are_near[part]:
                    Formula.exponentiate(self, views, here, row_max)
                else:
                    Capped().exponentiate(views, here, row_max)

    @cute.jit
    def block_max(self, acc_S: cute.Tensor, found: cute.Tensor):
        """That of the largest product."""
        for r in cutlass.range_constexpr(2):
            found[r] = -Float32.inf
        for part in cutlass.range_constexpr(len(self.are_near)):
            steps = range(PART_STEPS * part, min(PART_STEPS * (part + 1), cute.size(acc_S, mode=[2])))
            for r in cutlass.range_constexpr(2):
                scores = [acc_S[(i, r, pair), 0, k] for k in steps for pair in range(2) for i in range(2)]
                largest = -Float32.inf
                for score in scores:
                    largest = cute.arch.fmax(largest, score)
                capped = self.capped(largest, Float32(0.0))
                found[r] = cute.arch.fmax(found[r], cutlass.select_(self.are_near[part], capped, largest))


class Capped(Formula):
    """What was capped before."""

    def exponents(self, scores: list, k: int, reference: tuple) -> list:
        return [[x - reference[r] for x in scores[r]] for r in range(2)]


def _of_step(acc_S: cute.Tensor, k: int) -> list:
    """[row][column]"""
    return [[acc_S[(i % 2, r, i // 2), 0, k] for i in range(4)] for r in range(2)]
