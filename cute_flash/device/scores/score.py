"""Softcap and ALiBi in the forward: from Q K^T to scores in units of log2, before the mask.

    s' = log2(e) (softcap tanh(scale s / softcap) - slope |row + Sk - Sq - column|)

The softmax that follows has a scale of 1. The presence of a feature is compiled in; its value is a run-time argument.
After the first block of a tile the row max m so far, the *reference*, is known, and the last FMA subtracts it.

Off the diagonal the distance has one sign, so ALiBi is linear in the column and takes two FMAs per score:

    s' - m = s scale + (±slope column + (∓slope (row + Sk - Sq) - m))

In Hopper tiles with a speculative row max, if ALiBi is the only transform, the tensor cores add the term of the column
(`device/scores/alibi_step.py`).

tanh has two methods. If all scores of a warp are near 0, which is common, it is an odd polynomial: four instructions
per score, none of them MUFU. Sums of squares bound the largest score. Otherwise it takes an exponential and a
reciprocal: with e = exp(2 x),

    tanh x = (e - 1) / (e + 1)

Four scores share one reciprocal: 1 / a = b (c d) / (a b c d). With the exponential of the softmax, that is 2.25 MUFU
instructions per score. tanh.approx would make it 2, but its relative error of 2^-11 is visible in 16-bit P and in the
LSE. The relative error of the polynomial is 2^-19. The second method errs by 2^-21 of the score plus 2^-23 of softcap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.memory.views import as_mn
from cute_flash.device.scores.alibi_step import SIGNS, fits
from cute_flash.device.scores.mask import Mask, column_offset
from cute_flash.device.softmax.fused_exp2 import PART_STEPS, LinearExp2, RowExp2, SoftcapExp2
from cute_flash.device.softmax.softmax import LOG2_E

# Upper limit of 2 x in units of log2. tanh rounds to 1 in fp32 from 26 on, and the product of four e + 1 stays finite.
MAX_EXPONENT = 30.0
TOGETHER = 4  # scores that share a reciprocal
# tanh x / x = 1 + x² (c1 + x² c2) up to |x| = NEAR, with a relative error of 1.4e-6 (minimax).
NEAR, SERIES = 0.3, (-0.33315445, 0.12683149)
# PART: number of scores of a thread that use the same method. SUMS: number of partial sums of squares in a part.
# MAX_SQUARES: upper limit of `Score.near`.
PART, SUMS, MAX_SQUARES = 8 * PART_STEPS, 2, 1e37
# Lower limit of c2: it must not underflow to 0, because the polynomial of a masked score (-inf) must be -inf.
LEAST = 1e-37
# Upper limit of scale / softcap for the polynomial; the powers of larger ratios leave the range of fp32.
MAX_NEAR_FACTOR = 65536.0


@dataclass(frozen=True)
class Score:
    """The score transform of one head. None: the feature is absent."""

    scale_log2: Float32  # factor of Q K^T if there is no softcap
    rate: Float32 | None = None  # 2 log2(e) scale / softcap
    softcap_log2: Float32 | None = None
    slope_log2: Float32 | None = None
    cap: Float32 | None = None  # factor of tanh: softcap_log2, or 1 for tanh itself
    near: Float32 | None = None  # largest sum of squares of q·k for which the polynomial is accurate
    series: tuple | None = None  # coefficients of the polynomial
    unit: cutlass.Constexpr = LOG2_E  # LOG2_E: fields named _log2 are in units of log2; 1: they are in natural units

    @staticmethod
    def of(scale: Float32, softcap: Float32 | None = None, returns_tanh: bool = False, unit: float = LOG2_E) -> "Score":
        """The transform without a slope, computed on the host. `returns_tanh`: `apply_cap` omits the factor softcap."""
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
        """The transform with the ALiBi slope of a head."""
        return replace(self, slope_log2=None if slope is None else slope * self.unit)

    @cute.jit
    def apply(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, looks_near: cutlass.Constexpr = True):
        """Transform the scores of the rows of `mask` from `first_col` on, in place, before the mask.

        `looks_near`: use the polynomial if all scores of the warp are near 0. This takes registers. It also makes a
        row's result depend on other rows, so `batch_invariant` disables it.
        """
        if cutlass.const_expr(self.rate is not None):
            self.apply_cap(acc_S_mn, looks_near)
        self.apply_abs_alibi(acc_S_mn, mask, first_col)

    @cute.jit
    def apply_relative(
        self, acc_S_mn: cute.Tensor, mask: Mask, block: tuple, reference: tuple, looks_near: cutlass.Constexpr = True
    ):
        """`apply`, and subtract the reference of each row.

        `block`: (first column, number of rows, number of columns). `looks_near`: as for `apply`; it also allows the
        linear formula of ALiBi if the whole block is on one side of the diagonal.
        """
        first_col = block[0]
        has_slope = cutlass.const_expr(self.slope_log2 is not None)
        if cutlass.const_expr(self.rate is not None):
            self.apply_cap(acc_S_mn, looks_near, None if has_slope else reference)
        if cutlass.const_expr(has_slope and not looks_near):
            self.apply_abs_alibi(acc_S_mn, mask, first_col, reference)
        elif cutlass.const_expr(has_slope):
            is_before, is_after = self.sides(mask, block, False)
            if is_before | is_after:
                slope = self.slope_log2 if is_before else -self.slope_log2
                self.apply_linear_alibi(acc_S_mn, mask, first_col, slope, reference)
            else:
                self.apply_abs_alibi(acc_S_mn, mask, first_col, reference)

    @cute.jit
    def fused_exp2(
        self, acc_S_mn: cute.Tensor, mask: Mask, block: tuple, has_alibi_step: cutlass.Constexpr
    ) -> LinearExp2 | RowExp2 | SoftcapExp2:
        """The fused pass of a block, for softcap or ALiBi.

        Where its formula does not hold, scores are transformed in place first. `block`: as for `apply_relative`.
        `has_alibi_step`: Q K^T has the k-step of `alibi_word`.
        """
        first_col = block[0]
        if cutlass.const_expr(self.rate is not None):
            parts = [range(i, min(i + PART, cute.size(acc_S_mn))) for i in range(0, cute.size(acc_S_mn), PART)]
            are_near = tuple(self.are_near(acc_S_mn, part) for part in parts)
            for is_near, part in zip(are_near, parts):
                if not is_near:
                    self.cap_all(acc_S_mn, part, None)
            return SoftcapExp2(self.series, are_near)
        is_before, is_after = self.sides(mask, block, has_alibi_step)
        is_linear = is_before | is_after
        if cutlass.const_expr(has_alibi_step):
            is_linear = is_linear & fits(self.slope_log2, self.scale_log2)
        if not is_linear:
            self.apply_abs_alibi(acc_S_mn, mask, first_col)
        factor = cutlass.select_(is_linear, self.scale_log2, Float32(1.0))
        slope = cutlass.select_(is_before, self.slope_log2, -self.slope_log2)
        slope = cutlass.select_(is_linear, slope, Float32(0.0))
        num = cute.size(acc_S_mn, mode=[0])
        if cutlass.const_expr(has_alibi_step):
            return RowExp2(factor, tuple(-slope * self.block_distance(mask, r, block) for r in range(num)))
        return LinearExp2(factor, slope, tuple(-slope * self.first_distance(mask, r, first_col) for r in range(num)))

    def alibi_word(self, word: Int32, mask: Mask, block: tuple) -> Int32:
        """The operand of the k-step of ALiBi for a block; `word`: before the diagonal (`alibi_step.row_word`).

        Blocks that are on neither side, and slopes that do not fit, have an operand of 0.
        """
        is_before, is_after = self.sides(mask, block, True)
        return cutlass.select_(is_before, word, cutlass.select_(is_after, word ^ SIGNS, Int32(0)))

    def scaled(self, x: Float32) -> Float32:
        """The score times the scale, unless softcap has already applied it."""
        return x * self.scale_log2 if self.rate is None else x

    def sides(self, mask: Mask, block: tuple, has_alibi_step: bool) -> tuple:
        """Whether all keys of a block are at or before the positions of its rows, and whether all are at or after.

        With the k-step, a right bound of at most 0 puts all blocks before: the mask hides the other keys afterwards.
        """
        first_col, rows, columns = block
        first = mask.first_row + mask.seqlen_k - mask.seqlen_q
        is_before = first_col + columns <= first + 1
        if has_alibi_step and mask.band.right is not None:
            is_before = is_before | (mask.band.right <= 0)
        return is_before, first_col >= first + rows - 1

    @cute.jit
    def apply_abs_alibi(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, reference: tuple | None = None):
        """Apply scale and ALiBi to any block, with the absolute value of the distance."""
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
        """Apply scale and ALiBi to a block on one side of the diagonal, where all distances have the same sign.

        `slope`: positive if all keys are before the rows' positions, negative if all are after.
        """
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            first = -slope * self.first_distance(mask, r, first_col) - reference[r]
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                term = slope * Float32(column_offset(c)) + first
                acc_S_mn[r, c] = self.scaled(acc_S_mn[r, c]) + term

    @cute.jit
    def apply_cap(self, acc: cute.Tensor, looks_near: cutlass.Constexpr = True, reference: tuple | None = None):
        """Q K^T -> cap tanh(scale s / softcap), in place, minus the reference if there is one.

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
        """Whether the polynomial is accurate for this part of the scores in all lanes of the warp."""
        sums = [acc[i] * acc[i] for i in part[:SUMS]]
        for i in cutlass.range_constexpr(part.start + SUMS, part.stop):
            sums[i % SUMS] = sums[i % SUMS] + acc[i] * acc[i]
        is_near = cutlass.Boolean(True)
        for total in sums:
            is_near = is_near & (total <= self.near)
        return cute.arch.vote_all_sync(is_near)

    @cute.jit
    def cap_near(self, acc: cute.Tensor, part: cutlass.Constexpr, reference: tuple | None):
        """Softcap by the polynomial."""
        c0, c1, c2 = self.series
        for i in cutlass.range_constexpr(part.start, part.stop):
            squared = acc[i] * acc[i]
            capped = acc[i] * (c0 + squared * (c1 + squared * c2))
            acc[i] = capped if reference is None else capped - reference[i % len(reference)]

    @cute.jit
    def cap_all(self, acc: cute.Tensor, part: cutlass.Constexpr, reference: tuple | None):
        """Softcap by an exponential and a shared reciprocal, for scores of any size."""
        for i in cutlass.range_constexpr(part.start, part.stop, TOGETHER):
            four = self._capped([acc[i + j] for j in range(TOGETHER)])
            for j in cutlass.range_constexpr(TOGETHER):
                acc[i + j] = four[j] if reference is None else four[j] - reference[(i + j) % len(reference)]

    def first_distance(self, mask: Mask, r: int, first_col: Int32) -> Float32 | None:
        """The position of this thread's r-th row minus its first column; None without ALiBi."""
        if self.slope_log2 is None:
            return None
        row, column = as_mn(mask.tScS)[r, 0]
        return Float32(mask.first_row + row + mask.seqlen_k - mask.seqlen_q - first_col - column)

    def block_distance(self, mask: Mask, r: int, block: tuple) -> Float32:
        """The position of this thread's r-th row minus the middle column of the block."""
        (row, _), (first_col, _, columns) = as_mn(mask.tScS)[r, 0], block
        return Float32(mask.first_row + row + mask.seqlen_k - mask.seqlen_q - (first_col + columns // 2))

    def _capped(self, scores: Sequence) -> list:
        """Softcap of four scores, which share a reciprocal."""
        exponents = (cute.arch.fmin(x * self.rate, MAX_EXPONENT, nan=True) for x in scores)
        e = [cute.math.exp2(x, fastmath=True) for x in exponents]
        # This minimum replaces NaN by the limit, so that a NaN does not reach the shared reciprocal.
        sums = [cute.arch.fmin(x + 1.0, 2.0 ** (MAX_EXPONENT + 1)) for x in e]
        cap = self.cap
        return [(x * cap - cap) * y for x, y in zip(e, _reciprocals(sums))]


def _reciprocals(x: Sequence) -> list:
    """The reciprocals of four numbers, from the reciprocal of their product."""
    a, b, c, d = x
    ab, cd = a * b, c * d
    inverse = cute.arch.rcp_approx(ab * cd)
    inverse_ab, inverse_cd = inverse * cd, inverse * ab
    return [inverse_ab * b, inverse_ab * a, inverse_cd * d, inverse_cd * c]
