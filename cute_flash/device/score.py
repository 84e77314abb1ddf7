"""From products to scores in a block of S, before the mask: scale, softcap, ALiBi, in units of log2.

    s' = log2(e) (softcap tanh(scale s / softcap) - slope |row + Sk - Sq - column|)

so that the softmax that follows has a scale of 1. Presence is compiled in, values are run-time.

The tangent is made of an exponential and a reciprocal: with e = exp(2 x) and u = 1 / (e + 1),

    tanh x = (e - 1) u,    1 - tanh² x = 4 e u²

Four scores of a row share one reciprocal: 1 / a = b (c d) / (a b c d). With the softmax, that makes 2.25
instructions of the special function unit a score. tanh.approx would make 2, but it errs by 2^-11 of a score:
more than P in 16 bits shows, and all of it in the LSE. This errs by 2^-21 of the score and 2^-23 of softcap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.mask import Mask, column_offset
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.views import as_mn

# tanh is 1 in fp32 from 2 x = 17.3 on, which is 25 in units of log2; the product of four such sums is finite.
MAX_EXPONENT = 30.0
TOGETHER = 4


@dataclass(frozen=True)
class Score:
    """What happens to the products of one head; None: not asked for."""

    scale_log2: Float32  # of the products, where there is no cap
    rate: Float32 | None = None  # 2 log2(e) scale / softcap
    softcap_log2: Float32 | None = None
    slope_log2: Float32 | None = None

    @staticmethod
    def of(scale: Float32, softcap: Float32 | None = None) -> "Score":
        """On the host: what all heads have in common."""
        if softcap is None:
            return Score(scale * LOG2_E)
        return Score(scale * LOG2_E, scale / softcap * (2 * LOG2_E), softcap * LOG2_E)

    def of_head(self, slope: Float32 | None) -> "Score":
        """With the slope of a head."""
        slope_log2 = None if slope is None else slope * LOG2_E
        return Score(self.scale_log2, self.rate, self.softcap_log2, slope_log2)

    @cute.jit
    def apply(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32):
        """The block of scores of a mask's rows that begins at a column, in place; the mask comes after."""
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            distance = self.first_distance(mask, r, first_col)
            for c in cutlass.range_constexpr(0, cute.size(acc_S_mn, mode=[1]), TOGETHER):
                products = [acc_S_mn[r, c + i] for i in range(TOGETHER)]
                scores, _ = self.of_four(products, distance, c)
                for i in cutlass.range_constexpr(TOGETHER):
                    acc_S_mn[r, c + i] = scores[i]

    def first_distance(self, mask: Mask, r: int, first_col: Int32) -> Float32 | None:
        """How far the first column of this thread lies before the position of its r-th row."""
        if self.slope_log2 is None:
            return None
        row, column = as_mn(mask.tScS)[r, 0]
        return Float32(mask.first_row + row + mask.seqlen_k - mask.seqlen_q - first_col - column)

    def of_four(self, products: Sequence, distance: Float32 | None, c: int) -> tuple[list, list]:
        """The scores of a thread's columns c to c + 3 in a row, and by what gradients grow: 1 - tanh².

        Only what is used is computed. A product that is not a number stays one and spoils no other.
        """
        if self.rate is None:
            scores, factors = [x * self.scale_log2 for x in products], [None] * len(products)
        else:
            scores, factors = self._capped(products)
        if self.slope_log2 is not None:
            for i in range(len(products)):
                from_key = cute.math.absf(distance - Float32(column_offset(c + i)))
                scores[i] = scores[i] - self.slope_log2 * from_key
        return scores, factors

    def _capped(self, products: Sequence) -> tuple[list, list]:
        exponents = (cute.arch.fmin(x * self.rate, MAX_EXPONENT, nan=True) for x in products)
        e = [cute.math.exp2(x, fastmath=True) for x in exponents]
        # Of a number and no number, this minimum is the number.
        sums = [cute.arch.fmin(x + 1.0, 2.0 ** (MAX_EXPONENT + 1)) for x in e]
        u = _reciprocals(sums)
        cap = self.softcap_log2
        scores = [(x * cap - cap) * y for x, y in zip(e, u)]
        return scores, [4.0 * x * y * y for x, y in zip(e, u)]


def _reciprocals(x: Sequence) -> list:
    """Of four numbers, by one of their product."""
    a, b, c, d = x
    ab, cd = a * b, c * d
    whole = cute.arch.rcp_approx(ab * cd)
    of_ab, of_cd = whole * cd, whole * ab
    return [of_ab * b, of_ab * a, of_cd * d, of_cd * c]
