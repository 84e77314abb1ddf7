"""Softcap and ALiBi in the forward: from Q K^T to scores, before the mask, in units of log2.

    s' = log2(e) (softcap tanh(scale s / softcap) - slope |row + Sk - Sq - column|)

The softmax that follows has a scale of 1. The presence of a feature is compiled in, its value is a run-time argument.
After the first block of a tile the running row max m, the *reference*, is known, and the last FMA subtracts it.

Beside the diagonal ALiBi takes two FMAs per score: the distance has one sign there, and its term is linear,

    s' - m = s scale + (±slope column + (∓slope (row + Sk - Sq) - m))

If all scores of a warp are near 0, which is common, tanh is computed as an odd polynomial: four instructions per score,
none of the special function unit. Sums of squares bound the largest score. Otherwise tanh takes an exponential and a
reciprocal: with e = exp(2 x),

    tanh x = (e - 1) / (e + 1)

Four scores of a row share one reciprocal: 1 / a = b (c d) / (a b c d). With the softmax, that is 2.25 instructions of
the special function unit per score. tanh.approx would make it 2, but has a relative error of 2^-11, which is visible
in 16-bit P and in the LSE. The polynomial has a relative error of 2^-19, the exponential one of 2^-21 plus 2^-23 of
softcap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.fused_exp2 import PART_STEPS, LinearExp2, SoftcapExp2
from cute_flash.device.mask import Mask, column_offset
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.views import as_mn

# tanh is 1 in fp32 from 2 x = 17.3 on, which is 25 in units of log2; the product of four such sums is finite.
MAX_EXPONENT = 30.0
TOGETHER = 4
# tanh x / x = 1 + x² (c1 + x² c2) up to |x| = NEAR, with a relative error of 1.4e-6 (minimax).
NEAR, SERIES = 0.3, (-0.33315445, 0.12683149)
# Scores for which one of the two methods is chosen together; number of sums of squares; the limit of `Score.near`.
PART, SUMS, MAX_SQUARES = 8 * PART_STEPS, 2, 1e37
# A smaller coefficient would be 0, and the polynomial of a masked score, -inf, must be -inf.
LEAST = 1e-37
# Largest ratio of x to q·k: powers of larger ones leave fp32.
MAX_NEAR_FACTOR = 65536.0


@dataclass(frozen=True)
class Score:
    """The score transform of one head. None: the feature is absent."""

    scale_log2: Float32  # of Q K^T, without softcap
    rate: Float32 | None = None  # 2 log2(e) scale / softcap
    softcap_log2: Float32 | None = None
    slope_log2: Float32 | None = None
    cap: Float32 | None = None  # factor of tanh: softcap_log2, or 1 for tanh itself
    near: Float32 | None = None  # largest (q·k)² for which the polynomial is accurate
    series: tuple | None = None  # coefficients of the polynomial
    unit: cutlass.Constexpr = LOG2_E  # LOG2_E: scores are in units of log2; 1: in natural units, despite the names

    @staticmethod
    def of(scale: Float32, softcap: Float32 | None = None, returns_tanh: bool = False, unit: float = LOG2_E) -> "Score":
        """The part that all heads share, computed on the host. `returns_tanh`: `apply_cap` omits the factor softcap."""
        if softcap is None:
            return Score(scale * unit, unit=unit)
        x, softcap_log2 = scale / softcap, softcap * unit
        cap = Float32(1.0) if returns_tanh else softcap_log2
        near = (NEAR / x) * (NEAR / x)
        near = cutlass.select_(near < MAX_SQUARES, near, Float32(MAX_SQUARES))
        near = cutlass.select_(x < MAX_NEAR_FACTOR, near, Float32(-1.0))
        squared = x * x
        c1 = cap * (SERIES[0] * (x * squared))
        c2 = cap * (SERIES[1] * (x * squared * squared))
        series = (cap * x, c1, cutlass.select_(c2 > LEAST, c2, Float32(LEAST)))
        return Score(scale * unit, x * (2 * LOG2_E), softcap_log2, None, cap, near, series, unit)

    def for_head(self, slope: Float32 | None) -> "Score":
        """With the ALiBi slope of a head."""
        return replace(self, slope_log2=None if slope is None else slope * self.unit)

    @cute.jit
    def apply(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, looks_near: cutlass.Constexpr = True):
        """Transform a block of a mask's rows that begins at a column, in place, before the mask.

        `looks_near`: use the polynomial if all scores of the warp are near 0. It takes registers, and makes a row's
        result depend on the other rows, so `batch_invariant` disables it.
        """
        if cutlass.const_expr(self.rate is not None):
            self.apply_cap(acc_S_mn, looks_near)
        self.apply_abs_alibi(acc_S_mn, mask, first_col)

    @cute.jit
    def apply_relative(
        self, acc_S_mn: cute.Tensor, mask: Mask, block: tuple, reference: tuple, looks_near: cutlass.Constexpr = True
    ):
        """Do what `apply` does, and subtract the reference of each row.

        `block`: its first column, its rows and its columns. `looks_near`: as for `apply`; it also allows a choice
        between two formulas of ALiBi for the whole block.
        """
        first_col = block[0]
        has_slope = cutlass.const_expr(self.slope_log2 is not None)
        if cutlass.const_expr(self.rate is not None):
            self.apply_cap(acc_S_mn, looks_near, None if has_slope else reference)
        if cutlass.const_expr(has_slope and not looks_near):
            self.apply_abs_alibi(acc_S_mn, mask, first_col, reference)
        elif cutlass.const_expr(has_slope):
            is_before, is_after = self.sides(mask, block)
            if is_before | is_after:
                slope = self.slope_log2 if is_before else -self.slope_log2
                self.apply_linear_alibi(acc_S_mn, mask, first_col, slope, reference)
            else:
                self.apply_abs_alibi(acc_S_mn, mask, first_col, reference)

    @cute.jit
    def fused_exp2(self, acc_S_mn: cute.Tensor, mask: Mask, block: tuple) -> LinearExp2 | SoftcapExp2:
        """The fused pass of a block, for softcap or ALiBi. Scores that its formula does not fit are transformed in
        place first.
        """
        first_col = block[0]
        if cutlass.const_expr(self.rate is not None):
            parts = [range(i, min(i + PART, cute.size(acc_S_mn))) for i in range(0, cute.size(acc_S_mn), PART)]
            are_near = tuple(self.are_near(acc_S_mn, part) for part in parts)
            for is_near, part in zip(are_near, parts):
                if not is_near:
                    self.cap_all(acc_S_mn, part, None)
            return SoftcapExp2(self.series, are_near)
        is_before, is_after = self.sides(mask, block)
        is_linear = is_before | is_after
        if not is_linear:
            self.apply_abs_alibi(acc_S_mn, mask, first_col)
        factor = cutlass.select_(is_linear, self.scale_log2, Float32(1.0))
        slope = cutlass.select_(is_before, self.slope_log2, -self.slope_log2)
        slope = cutlass.select_(is_linear, slope, Float32(0.0))
        num = cute.size(acc_S_mn, mode=[0])
        return LinearExp2(factor, slope, tuple(-slope * self.first_distance(mask, r, first_col) for r in range(num)))

    def scaled(self, x: Float32) -> Float32:
        """Softcap includes the scale."""
        return x * self.scale_log2 if self.rate is None else x

    def sides(self, mask: Mask, block: tuple) -> tuple:
        """Whether all keys of a block are at or before the positions of its rows, and whether all are at or after."""
        first_col, rows, columns = block
        first = mask.first_row + mask.seqlen_k - mask.seqlen_q
        return first_col + columns <= first + 1, first_col >= first + rows - 1

    @cute.jit
    def apply_abs_alibi(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, reference: tuple | None = None):
        """Scale and ALiBi at any position of the block."""
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            distance = self.first_distance(mask, r, first_col)
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                score = self.scaled(acc_S_mn[r, c])
                if cutlass.const_expr(self.slope_log2 is not None):
                    from_key = cute.math.absf(distance - Float32(column_offset(c)))
                    score = score - self.slope_log2 * from_key
                acc_S_mn[r, c] = score if reference is None else score - reference[r]

    @cute.jit
    def apply_linear_alibi(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, slope: Float32, reference: tuple):
        """Scale and ALiBi if all keys are before, or all after: the distance has one sign."""
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            first = -slope * self.first_distance(mask, r, first_col) - reference[r]
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                term = slope * Float32(column_offset(c)) + first
                acc_S_mn[r, c] = self.scaled(acc_S_mn[r, c]) + term

    @cute.jit
    def apply_cap(self, acc: cute.Tensor, looks_near: cutlass.Constexpr = True, reference: tuple | None = None):
        """Q K^T -> log2(e) softcap tanh(scale s / softcap), or tanh, in place, minus the reference if there is one.

        A NaN stays NaN and changes no other score.
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
        """Whether the polynomial is accurate for all scores of this warp."""
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
        """Distance from the first column of this thread to the position of its r-th row."""
        if self.slope_log2 is None:
            return None
        row, column = as_mn(mask.tScS)[r, 0]
        return Float32(mask.first_row + row + mask.seqlen_k - mask.seqlen_q - first_col - column)

    def _capped(self, scores: Sequence) -> list:
        exponents = (cute.arch.fmin(x * self.rate, MAX_EXPONENT, nan=True) for x in scores)
        e = [cute.math.exp2(x, fastmath=True) for x in exponents]
        # The minimum of a number and a NaN is the number.
        sums = [cute.arch.fmin(x + 1.0, 2.0 ** (MAX_EXPONENT + 1)) for x in e]
        cap = self.cap
        return [(x * cap - cap) * y for x, y in zip(e, _reciprocals(sums))]


def _reciprocals(x: Sequence) -> list:
    """The reciprocals of four numbers, from that of their product."""
    a, b, c, d = x
    ab, cd = a * b, c * d
    inverse = cute.arch.rcp_approx(ab * cd)
    inverse_ab, inverse_cd = inverse * cd, inverse * ab
    return [inverse_ab * b, inverse_ab * a, inverse_cd * d, inverse_cd * c]
