"""From products to scores in a block of S, before the mask: scale, softcap, ALiBi, in units of log2.

    s' = log2(e) (softcap tanh(scale s / softcap) - slope |row + Sk - Sq - column|)

so that the softmax that follows has a scale of 1. Presence is compiled in, values are run-time. Where the
reference of the softmax is known, it is subtracted with the last FMA.

Beside the diagonal a slope is two FMAs a score: there the distance has one sign, and its term is a line,

    s' - m = s scale + (±slope column + (∓slope (row + Sk - Sq) - m))

Where all scores of a warp are near 0, which is common, the tangent is an odd polynomial of them: four
instructions a score, none of the special function unit. Sums of squares tell: they bound the largest. Else it
is made of an exponential and a reciprocal: with e = exp(2 x),

    tanh x = (e - 1) / (e + 1)

Four scores of a row share one reciprocal: 1 / a = b (c d) / (a b c d). With the softmax, that makes 2.25
instructions of the special function unit a score. tanh.approx would make 2, but it errs by 2^-11 of a score:
more than P in 16 bits shows, and all of it in the LSE. The polynomial errs by 2^-19 of the score, the other
way by 2^-21 of the score and 2^-23 of softcap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.exponents import PART_STEPS, Curve, Line
from cute_flash.device.mask import Mask, column_offset
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.views import as_mn

# tanh is 1 in fp32 from 2 x = 17.3 on, which is 25 in units of log2; the product of four such sums is finite.
MAX_EXPONENT = 30.0
TOGETHER = 4
# tanh x / x = 1 + x² (c1 + x² c2) up to |x| = NEAR, to a relative error of 1.4e-6: least maximum.
NEAR, SERIES = 0.3, (-0.33315445, 0.12683149)
# So many scores go one of the two ways together; so many sums of squares of them are looked at; a larger
# bound would not be a number when squared.
PART, SUMS, MAX_SQUARES = 8 * PART_STEPS, 2, 1e37
# An even smaller coefficient would be 0: a hidden score is -inf, and so is what a curve makes of it.
LEAST = 1e-37
# Of x over the product; powers of larger ones leave fp32.
MAX_NEAR_FACTOR = 65536.0


@dataclass(frozen=True)
class Score:
    """What happens to the products of one head; None: not asked for."""

    scale_log2: Float32  # of the products, where there is no cap
    rate: Float32 | None = None  # 2 log2(e) scale / softcap
    softcap_log2: Float32 | None = None
    slope_log2: Float32 | None = None
    cap: Float32 | None = None  # of the tangent: softcap_log2, or 1 where that is wanted
    near: Float32 | None = None  # square of the products up to which the series gives the same
    series: tuple | None = None
    unit: cutlass.Constexpr = LOG2_E  # 1: scores are natural, here and in all that is called log2

    @staticmethod
    def of(
        scale: Float32, softcap: Float32 | None = None, gives_tangent: bool = False, unit: float = LOG2_E
    ) -> "Score":
        """On the host: what all heads have in common. `gives_tangent`: not times the cap."""
        if softcap is None:
            return Score(scale * unit, unit=unit)
        x, softcap_log2 = scale / softcap, softcap * unit
        cap = Float32(1.0) if gives_tangent else softcap_log2
        near = (NEAR / x) * (NEAR / x)
        near = cutlass.select_(near < MAX_SQUARES, near, Float32(MAX_SQUARES))
        near = cutlass.select_(x < MAX_NEAR_FACTOR, near, Float32(-1.0))
        squared = x * x
        powers = (x * squared, x * squared * squared)
        terms = (x, *(coefficient * power for coefficient, power in zip(SERIES, powers)))
        c0, c1, c2 = (cap * term for term in terms)
        series = (c0, c1, cutlass.select_(c2 > LEAST, c2, Float32(LEAST)))
        return Score(scale * unit, x * (2 * LOG2_E), softcap_log2, None, cap, near, series, unit)

    def of_head(self, slope: Float32 | None) -> "Score":
        """With the slope of a head."""
        return replace(self, slope_log2=None if slope is None else slope * self.unit)

    @cute.jit
    def apply(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, looks_near: cutlass.Constexpr = True):
        """The block of scores of a mask's rows that begins at a column, in place; the mask comes after.

        `looks_near`: there are registers for the polynomial beside the other way.
        """
        if cutlass.const_expr(self.rate is not None):
            self.apply_cap(acc_S_mn, looks_near)
        self.bend(acc_S_mn, mask, first_col)

    @cute.jit
    def apply_from(
        self,
        acc_S_mn: cute.Tensor,
        mask: Mask,
        block: tuple,
        reference: tuple,
        looks_near: cutlass.Constexpr = True,
    ):
        """The same, less a reference of each row. `block`: its first column, and its rows and columns.
        `looks_near`: the way may depend on what rows and columns there are beside a score.
        """
        first_col = block[0]
        has_slope = cutlass.const_expr(self.slope_log2 is not None)
        if cutlass.const_expr(self.rate is not None):
            self.apply_cap(acc_S_mn, looks_near, None if has_slope else reference)
        if cutlass.const_expr(has_slope and not looks_near):
            self.bend(acc_S_mn, mask, first_col, reference)
        elif cutlass.const_expr(has_slope):
            is_before, is_after = self.sides(mask, block)
            if is_before | is_after:
                slope = self.slope_log2 if is_before else -self.slope_log2
                self.tilt(acc_S_mn, mask, first_col, slope, reference)
            else:
                self.bend(acc_S_mn, mask, first_col, reference)

    @cute.jit
    def begin(self, acc_S_mn: cute.Tensor, mask: Mask, block: tuple) -> Line | Curve:
        """Instead of `apply_from`, for a cap or a slope: the formula of a block. What none fits is done in
        place.
        """
        first_col = block[0]
        if cutlass.const_expr(self.rate is not None):
            parts = [range(i, min(i + PART, cute.size(acc_S_mn))) for i in range(0, cute.size(acc_S_mn), PART)]
            are_near = tuple(self.are_near(acc_S_mn, part) for part in parts)
            for is_near, part in zip(are_near, parts):
                if not is_near:
                    self.cap_all(acc_S_mn, part, None)
            return Curve(self.series, are_near)
        is_before, is_after = self.sides(mask, block)
        is_line = is_before | is_after
        if not is_line:
            self.bend(acc_S_mn, mask, first_col)
        factor = cutlass.select_(is_line, self.scale_log2, Float32(1.0))
        slope = cutlass.select_(is_before, self.slope_log2, -self.slope_log2)
        slope = cutlass.select_(is_line, slope, Float32(0.0))
        num = cute.size(acc_S_mn, mode=[0])
        return Line(factor, slope, tuple(-slope * self.first_distance(mask, r, first_col) for r in range(num)))

    def sides(self, mask: Mask, block: tuple) -> tuple:
        """Whether all keys of a block lie before its rows or beside them, and whether all lie after."""
        first_col, rows, columns = block
        first = mask.first_row + mask.seqlen_k - mask.seqlen_q
        return first_col + columns <= first + 1, first_col >= first + rows - 1

    @cute.jit
    def bend(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, reference: tuple | None = None):
        """Scale and slope, wherever the block lies."""
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            distance = self.first_distance(mask, r, first_col)
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                score = acc_S_mn[r, c]
                if cutlass.const_expr(self.rate is None):
                    score = score * self.scale_log2
                if cutlass.const_expr(self.slope_log2 is not None):
                    from_key = cute.math.absf(distance - Float32(column_offset(c)))
                    score = score - self.slope_log2 * from_key
                acc_S_mn[r, c] = score if reference is None else score - reference[r]

    @cute.jit
    def tilt(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, slope: Float32, reference: tuple):
        """Scale and slope, where all keys lie before, or all after: a line."""
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            first = -slope * self.first_distance(mask, r, first_col) - reference[r]
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                term = slope * Float32(column_offset(c)) + first
                if cutlass.const_expr(self.rate is None):
                    acc_S_mn[r, c] = acc_S_mn[r, c] * self.scale_log2 + term
                else:
                    acc_S_mn[r, c] = acc_S_mn[r, c] + term

    @cute.jit
    def apply_cap(self, acc: cute.Tensor, looks_near: cutlass.Constexpr = True, reference: tuple | None = None):
        """Products -> log2(e) softcap tanh(scale s / softcap), or that tangent, in place; less a reference.

        A product that is not a number stays one and spoils no other.
        """
        if cutlass.const_expr(looks_near):
            for first in cutlass.range_constexpr(0, cute.size(acc), PART):
                part = range(first, min(first + PART, cute.size(acc)))
                if self.are_near(acc, part):
                    self.cap_near(acc, part, reference)
                else:
                    self.cap_all(acc, part, reference)
        else:
            self.cap_all(acc, range(cute.size(acc)), reference)

    @cute.jit
    def are_near(self, acc: cute.Tensor, part: cutlass.Constexpr):
        """Whether the series serves all products of this warp."""
        sums = [acc[i] * acc[i] for i in part[:SUMS]]
        for i in cutlass.range_constexpr(part.start + SUMS, part.stop):
            sums[i % SUMS] = sums[i % SUMS] + acc[i] * acc[i]
        is_near = cutlass.Boolean(True)
        for total in sums:
            is_near = is_near & (total <= self.near)
        return cute.arch.vote_all_sync(is_near)

    @cute.jit
    def cap_near(self, acc: cute.Tensor, part: cutlass.Constexpr, reference: tuple | None):
        c0, c1, c2 = self.series
        for i in cutlass.range_constexpr(part.start, part.stop):
            squared = acc[i] * acc[i]
            capped = acc[i] * (c0 + squared * (c1 + squared * c2))
            acc[i] = capped if reference is None else capped - reference[i % len(reference)]

    @cute.jit
    def cap_all(self, acc: cute.Tensor, part: cutlass.Constexpr, reference: tuple | None):
        for i in cutlass.range_constexpr(part.start, part.stop, TOGETHER):
            four = self._capped([acc[i + j] for j in range(TOGETHER)])
            for j in cutlass.range_constexpr(TOGETHER):
                acc[i + j] = four[j] if reference is None else four[j] - reference[(i + j) % len(reference)]

    def first_distance(self, mask: Mask, r: int, first_col: Int32) -> Float32 | None:
        """How far the first column of this thread lies before the position of its r-th row."""
        if self.slope_log2 is None:
            return None
        row, column = as_mn(mask.tScS)[r, 0]
        return Float32(mask.first_row + row + mask.seqlen_k - mask.seqlen_q - first_col - column)

    def _capped(self, products: Sequence) -> list:
        exponents = (cute.arch.fmin(x * self.rate, MAX_EXPONENT, nan=True) for x in products)
        e = [cute.math.exp2(x, fastmath=True) for x in exponents]
        # Of a number and no number, this minimum is the number.
        sums = [cute.arch.fmin(x + 1.0, 2.0 ** (MAX_EXPONENT + 1)) for x in e]
        cap = self.cap
        return [(x * cap - cap) * y for x, y in zip(e, _reciprocals(sums))]


def _reciprocals(x: Sequence) -> list:
    """Of four numbers, by one of their product."""
    a, b, c, d = x
    ab, cd = a * b, c * d
    whole = cute.arch.rcp_approx(ab * cd)
    of_ab, of_cd = whole * cd, whole * ab
    return [of_ab * b, of_ab * a, of_cd * d, of_cd * c]
