"""Softcap in the forward: s' = softcap tanh(scale s / softcap).

tanh has two methods. If all scores of a warp are near 0, which is common, it is an odd polynomial: four instructions
per score, none of them MUFU. Sums of squares bound the largest score. Otherwise it takes an exponential and a
reciprocal: with e = exp(2 x),

    tanh x = (e - 1) / (e + 1)

Four scores share one reciprocal: 1 / a = b (c d) / (a b c d). With the exponential of the softmax, that is 2.25 MUFU
instructions per score. tanh.approx would make it 2, but its relative error of 2^-11 is visible in 16-bit P and in the
LSE. The relative error of the polynomial is 2^-19. The second method errs by 2^-21 of the score plus 2^-23 of softcap.
These errors are too large for fp32 calls, which have `ExactSoftcap`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_flash.device.scores.formula import ScoreFormula, ScoreTile
from cute_flash.device.softmax.exp2 import ProbBlock
from cute_flash.device.softmax.fused_exp2 import FusedExp2, StepScores, TransformedExp2
from cute_flash.device.softmax.softmax import LOG2_E, RowValues, Softmax

# Upper limit of 2 x in units of log2. tanh rounds to 1 in fp32 from 26 on, and the product of four e + 1 stays finite.
MAX_EXPONENT = 30.0
TOGETHER = 4  # scores that share a reciprocal
# tanh x / x = 1 + x² (c1 + x² c2) up to |x| = NEAR, with a relative error of 1.4e-6 (minimax).
NEAR, SERIES = 0.3, (-0.33315445, 0.12683149)
# One method is chosen for the scores of a thread in this many k-steps (of 16 columns) together.
PART_STEPS = 4
# PART: the number of those scores. SUMS: number of partial sums of squares in a part. MAX_SQUARES: upper limit of
# `Softcap.near`.
PART, SUMS, MAX_SQUARES = 8 * PART_STEPS, 2, 1e37
# Lower limit of c2: it must not underflow to 0, because the polynomial of a masked score (-inf) must be -inf.
LEAST = 1e-37
# Upper limit of scale / softcap for the polynomial; the powers of larger ratios leave the range of fp32.
MAX_NEAR_FACTOR = 65536.0


@dataclass(frozen=True)
class ExactSoftcap(ScoreFormula):
    """Softcap of fp32 calls, with tanh of the CUDA math library: its error is one or two units in the last place."""

    ratio: Float32  # scale / softcap
    softcap_log2: Float32  # softcap in the units of `Score.unit`
    cap: Float32  # factor of tanh: softcap_log2, or 1 for tanh itself

    @staticmethod
    def of(scale: Float32, softcap: Float32, returns_tanh: bool, unit: float) -> "ExactSoftcap":
        """The formula, computed on the host. `returns_tanh`: omit the factor softcap."""
        softcap_log2 = softcap * unit
        return ExactSoftcap(scale / softcap, softcap_log2, Float32(1.0) if returns_tanh else softcap_log2)

    def apply(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32 | None) -> None:
        self.apply_cap(S_mn)

    @cute.jit
    def apply_cap(self, acc: cute.Tensor, looks_near: cutlass.Constexpr = False):
        """Q K^T -> cap tanh(scale s / softcap), in place. There is one method for scores of any size."""
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = self.cap * cute.math.tanh(acc[i] * self.ratio)


class Series(NamedTuple):
    """The coefficients of the polynomial x (c0 + x² (c1 + x² c2))."""

    c0: Float32
    c1: Float32
    c2: Float32


@dataclass(frozen=True)
class Softcap(ScoreFormula):
    """Softcap of scores. The methods fold the scale of Q K^T into their constants, and ignore the argument `scale`."""

    rate: Float32  # 2 log2(e) scale / softcap
    softcap_log2: Float32  # softcap in the units of `Score.unit`
    cap: Float32  # factor of tanh: softcap_log2, or 1 for tanh itself
    near: Float32  # largest sum of squares of q·k for which the polynomial is accurate
    series: Series

    @staticmethod
    def of(scale: Float32, softcap: Float32, returns_tanh: bool, unit: float) -> "Softcap":
        """The formula, computed on the host. `returns_tanh`: omit the factor softcap."""
        x, softcap_log2 = scale / softcap, softcap * unit
        cap = Float32(1.0) if returns_tanh else softcap_log2
        near = (NEAR / x) * (NEAR / x)
        near = cutlass.select_(near < MAX_SQUARES, near, Float32(MAX_SQUARES))
        near = cutlass.select_(x < MAX_NEAR_FACTOR, near, Float32(-1.0))
        squared = x * x
        c1 = cap * (SERIES[0] * (x * squared))
        c2 = cap * (SERIES[1] * (x * squared * squared))
        series = Series(cap * x, c1, cutlass.select_(c2 > LEAST, c2, Float32(LEAST)))
        return Softcap(x * (2 * LOG2_E), softcap_log2, cap, near, series)

    def apply(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32 | None) -> None:
        self.apply_cap(S_mn, tile.looks_near)

    def apply_relative(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32 | None, reference: RowValues) -> None:
        self.apply_cap(S_mn, tile.looks_near, reference)

    @cute.jit
    def fused_exp2(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32 | None) -> "SoftcapExp2":
        """The fused pass. Parts whose scores are not near 0 are capped here, in place."""
        parts = [range(i, min(i + PART, cute.size(S_mn))) for i in range(0, cute.size(S_mn), PART)]
        are_near = tuple(self.are_near(S_mn, part) for part in parts)
        for is_near, part in zip(are_near, parts):
            if not is_near:
                self.cap_all(S_mn, part, None)
        return SoftcapExp2(self.series, are_near)

    @cute.jit
    def apply_cap(self, acc: cute.Tensor, looks_near: cutlass.Constexpr = True, reference: RowValues | None = None):
        """Q K^T -> cap tanh(scale s / softcap), in place, minus the reference of its row if there is one.

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
    def cap_near(self, acc: cute.Tensor, part: cutlass.Constexpr, reference: RowValues | None):
        """Softcap by the polynomial."""
        c0, c1, c2 = self.series
        for i in cutlass.range_constexpr(part.start, part.stop):
            squared = acc[i] * acc[i]
            capped = acc[i] * (c0 + squared * (c1 + squared * c2))
            acc[i] = capped if reference is None else capped - reference[i % len(reference)]

    @cute.jit
    def cap_all(self, acc: cute.Tensor, part: cutlass.Constexpr, reference: RowValues | None):
        """Softcap by an exponential and a shared reciprocal, for scores of any size."""
        for i in cutlass.range_constexpr(part.start, part.stop, TOGETHER):
            four = self._capped([acc[i + j] for j in range(TOGETHER)])
            for j in cutlass.range_constexpr(TOGETHER):
                acc[i + j] = four[j] if reference is None else four[j] - reference[(i + j) % len(reference)]

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


@dataclass(frozen=True)
class SoftcapExp2(FusedExp2):
    """Softcap by a polynomial in parts whose scores are near 0. The scores of other parts are already capped."""

    series: Series
    are_near: tuple[cutlass.Boolean, ...]  # for each part, whether its scores are near 0 and not yet capped

    def capped(self, x: Float32, reference: Float32) -> Float32:
        """The polynomial of a score, minus a reference.

        FMAs are explicit, because the compiler does not fuse a product that occurs twice.
        """
        c0, c1, c2 = self.series
        squared = x * x
        slope = cute.math.fma(squared, cute.math.fma(squared, c2, c1), c0)
        return cute.math.fma(x, slope, -reference)

    def exponents(self, scores: StepScores, k: int, reference: RowValues) -> StepScores:
        return [[self.capped(x, reference[r]) for x in scores[r]] for r in range(2)]

    @cute.jit
    def exponentiate_steps(self, block: ProbBlock, steps: cutlass.Constexpr, row_max: RowValues):
        for part in cutlass.range_constexpr(len(self.are_near)):
            first, last = PART_STEPS * part, PART_STEPS * (part + 1)
            here = range(max(first, steps.start), min(last, steps.stop))
            if cutlass.const_expr(len(here) > 0):
                if self.are_near[part]:
                    FusedExp2.exponentiate_steps(self, block, here, row_max)
                else:
                    TransformedExp2().exponentiate_steps(block, here, row_max)

    @cute.jit
    def find_max(self, softmax: Softmax, block: ProbBlock):
        """Write `block_max`. The maximum is taken first and then capped, because capping is monotonic."""
        acc_S, result = block.S_steps, block.block_max
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
