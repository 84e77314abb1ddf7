"""P of a block straight from its products: what softcap or a slope adds lies beside the exponentials.

The exponentials are what a softmax waits for, so the FMAs of a transform cost little between them and much
before them. That needs scores to be kept as they are until sums were checked (`Softmax.is_suspicious`), and
one formula for a block:

    a line     s scale + slope column + first(row) - m      ALiBi beside the diagonal, where distances have
                                                            one sign; or scores that were bent before
    a curve    s (c0 + s² (c1 + s² c2)) - m                 a cap on scores near 0; or what was capped before
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_flash.device.mask import column_offset

# Steps of a row's 16 columns that a curve decides on together.
PART_STEPS = 4


@dataclass(frozen=True)
class Line:
    factor: Float32
    slope: Float32
    first: tuple  # of each row, at its first column in this thread

    @cute.jit
    def block_max(self, acc_S_mn: cute.Tensor, block_max: cute.Tensor):
        """The largest score of each row over this thread's columns."""
        for r in cutlass.range_constexpr(cute.size(block_max)):
            block_max[r] = -Float32.inf
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                term = cute.math.fma(self.slope, Float32(column_offset(c)), self.first[r])
                score = cute.math.fma(acc_S_mn[r, c], self.factor, term)
                block_max[r] = cute.arch.fmax(block_max[r], score)

    @cute.jit
    def exponentiate(
        self,
        acc_S: cute.Tensor,
        acc_P: cute.Tensor,
        block_sum: cute.Tensor,
        steps: cutlass.Constexpr,
        row_max: tuple,
    ):
        """P = exp(S - m), block_sum += rowsum P, of some k-steps of ((2, 2, 2), 1, k-step) views."""
        first = [self.first[r] - row_max[r] for r in range(2)]
        for k in cutlass.range_constexpr(steps.start, steps.stop):
            for pair in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    columns = [Float32(16 * k + 8 * pair + i) for i in range(2)]
                    terms = [cute.math.fma(self.slope, column, first[r]) for column in columns]
                    scores = [acc_S[(i, r, pair), 0, k] for i in range(2)]
                    exponents = [cute.math.fma(scores[i], self.factor, terms[i]) for i in range(2)]
                    _store(acc_P, block_sum, (r, pair, k), exponents)


@dataclass(frozen=True)
class Curve:
    series: tuple
    are_near: tuple  # of each part: whether its scores are still products

    def capped(self, x: Float32, reference: Float32) -> Float32:
        """Of a product, less a reference. FMAs by name: products that occur twice would be no part of one."""
        c0, c1, c2 = self.series
        squared = x * x
        slope = cute.math.fma(squared, cute.math.fma(squared, c2, c1), c0)
        return cute.math.fma(x, slope, -reference)

    @cute.jit
    def block_max(self, acc_S_mn: cute.Tensor, block_max: cute.Tensor):
        """The largest score of each row over this thread's columns: that of the largest product."""
        columns = cute.size(acc_S_mn, mode=[1])
        for r in cutlass.range_constexpr(cute.size(block_max)):
            block_max[r] = -Float32.inf
            for part in cutlass.range_constexpr(len(self.are_near)):
                found = -Float32.inf
                for c in cutlass.range_constexpr(4 * PART_STEPS * part, columns):
                    if cutlass.const_expr(c < 4 * PART_STEPS * (part + 1)):
                        found = cute.arch.fmax(found, acc_S_mn[r, c])
                found = cutlass.select_(self.are_near[part], self.capped(found, Float32(0.0)), found)
                block_max[r] = cute.arch.fmax(block_max[r], found)

    @cute.jit
    def exponentiate(
        self,
        acc_S: cute.Tensor,
        acc_P: cute.Tensor,
        block_sum: cute.Tensor,
        steps: cutlass.Constexpr,
        row_max: tuple,
    ):
        """P = exp(S - m), block_sum += rowsum P, of some k-steps of ((2, 2, 2), 1, k-step) views."""
        for part in cutlass.range_constexpr(len(self.are_near)):
            first, last = PART_STEPS * part, PART_STEPS * (part + 1)
            here = range(max(first, steps.start), min(last, steps.stop))
            if cutlass.const_expr(len(here) > 0):
                if self.are_near[part]:
                    self._exponentiate(acc_S, acc_P, block_sum, here, row_max, True)
                else:
                    self._exponentiate(acc_S, acc_P, block_sum, here, row_max, False)

    @cute.jit
    def _exponentiate(
        self,
        acc_S: cute.Tensor,
        acc_P: cute.Tensor,
        block_sum: cute.Tensor,
        steps: cutlass.Constexpr,
        row_max: tuple,
        is_near: cutlass.Constexpr,
    ):
        for k in cutlass.range_constexpr(steps.start, steps.stop):
            for pair in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    scores = [acc_S[(i, r, pair), 0, k] for i in range(2)]
                    if cutlass.const_expr(is_near):
                        exponents = [self.capped(x, row_max[r]) for x in scores]
                    else:
                        exponents = [x - row_max[r] for x in scores]
                    _store(acc_P, block_sum, (r, pair, k), exponents)


def _store(acc_P: cute.Tensor, block_sum: cute.Tensor, place: tuple, exponents: list) -> None:
    """Two neighbours of a row."""
    r, pair, k = place
    probs = [cute.math.exp2(x, fastmath=True) for x in exponents]
    block_sum[r] = block_sum[r] + (probs[0] + probs[1])
    for i in range(2):
        acc_P[(i, r, pair), 0, k] = probs[i]
