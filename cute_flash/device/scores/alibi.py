"""ALiBi in the forward: s' = scale s - slope |row + Sk - Sq - column|.

Off the diagonal the distance has one sign, so ALiBi is linear in the column and takes two FMAs per score; the second
subtracts the row max m too:

    s' - m = s scale + (±slope column + (∓slope (row + Sk - Sq) - m))

In Hopper tiles with a speculative row max, if ALiBi is the only formula, the tensor cores add the term of the column
(`device/scores/alibi_step.py`).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.memory.views import as_mn
from cute_flash.device.scores.alibi_step import SIGNS, fits
from cute_flash.device.scores.formula import ScoreFormula, ScoreTile
from cute_flash.device.scores.mask import Mask, column_offset
from cute_flash.device.softmax.fused_exp2 import FusedExp2, StepScores
from cute_flash.device.softmax.softmax import RowValues


@dataclass(frozen=True)
class Alibi(ScoreFormula):
    """ALiBi with the slope of one head."""

    slope_log2: Float32  # in the units of `Score.unit`

    def apply(
        self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, scale: Float32 | None, looks_near: cutlass.Constexpr
    ) -> None:
        self.apply_abs(acc_S_mn, mask, first_col, scale)

    @cute.jit
    def apply_relative(
        self,
        acc_S_mn: cute.Tensor,
        mask: Mask,
        tile: ScoreTile,
        scale: Float32 | None,
        reference: RowValues,
        looks_near: cutlass.Constexpr,
    ):
        """`looks_near` allows the linear formula if the whole block is on one side of the diagonal."""
        if cutlass.const_expr(not looks_near):
            self.apply_abs(acc_S_mn, mask, tile.column, scale, reference)
        else:
            is_before, is_after = self.sides(mask, tile, False)
            if is_before | is_after:
                slope = self.slope_log2 if is_before else -self.slope_log2
                self.apply_linear(acc_S_mn, mask, tile.column, scale, slope, reference)
            else:
                self.apply_abs(acc_S_mn, mask, tile.column, scale, reference)

    @cute.jit
    def fused_exp2(
        self, acc_S_mn: cute.Tensor, mask: Mask, tile: ScoreTile, scale: Float32, has_alibi_step: cutlass.Constexpr
    ) -> "LinearExp2 | RowExp2":
        """The fused pass. A block across the diagonal is transformed here, in place."""
        is_before, is_after = self.sides(mask, tile, has_alibi_step)
        is_linear = is_before | is_after
        if cutlass.const_expr(has_alibi_step):
            is_linear = is_linear & fits(self.slope_log2, scale)
        if not is_linear:
            self.apply_abs(acc_S_mn, mask, tile.column, scale)
        factor = cutlass.select_(is_linear, scale, Float32(1.0))
        slope = cutlass.select_(is_before, self.slope_log2, -self.slope_log2)
        slope = cutlass.select_(is_linear, slope, Float32(0.0))
        rows = range(cute.size(acc_S_mn, mode=[0]))
        if cutlass.const_expr(has_alibi_step):
            return RowExp2(factor, tuple(-slope * self.middle_distance(mask, r, tile) for r in rows))
        return LinearExp2(factor, slope, tuple(-slope * self.first_distance(mask, r, tile.column) for r in rows))

    def step_word(self, word: Int32, mask: Mask, tile: ScoreTile) -> Int32:
        """The operand of the k-step for a block. `word`: the operand before the diagonal (`alibi_step.row_word`).

        Blocks that are on neither side, and slopes that do not fit, have an operand of 0.
        """
        is_before, is_after = self.sides(mask, tile, True)
        return cutlass.select_(is_before, word, cutlass.select_(is_after, word ^ SIGNS, Int32(0)))

    def sides(self, mask: Mask, tile: ScoreTile, has_alibi_step: bool) -> tuple[cutlass.Boolean, cutlass.Boolean]:
        """Whether all keys of a block are at or before the positions of its rows, and whether all are at or after.

        With the k-step, a right bound of at most 0 puts all blocks before: the mask hides the other keys afterwards.
        """
        first = mask.first_row + mask.seqlen_k - mask.seqlen_q
        is_before = tile.column + tile.columns <= first + 1
        if has_alibi_step and mask.band.right is not None:
            is_before = is_before | (mask.band.right <= 0)
        return is_before, tile.column >= first + tile.rows - 1

    @cute.jit
    def apply_abs(
        self,
        acc_S_mn: cute.Tensor,
        mask: Mask,
        first_col: Int32,
        scale: Float32 | None,
        reference: RowValues | None = None,
    ):
        """Apply scale and ALiBi to any block, with the absolute value of the distance."""
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            distance = self.first_distance(mask, r, first_col)
            apply_to_row(acc_S_mn, r, scale, self.slope_log2, distance, None if reference is None else reference[r])

    @cute.jit
    def apply_linear(
        self,
        acc_S_mn: cute.Tensor,
        mask: Mask,
        first_col: Int32,
        scale: Float32 | None,
        slope: Float32,
        reference: RowValues,
    ):
        """Apply scale and ALiBi to a block on one side of the diagonal, where all distances have the same sign.

        `slope`: positive if all keys are before the rows' positions, negative if all are after.
        """
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            first = -slope * self.first_distance(mask, r, first_col) - reference[r]
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                term = slope * Float32(column_offset(c)) + first
                acc_S_mn[r, c] = (acc_S_mn[r, c] if scale is None else acc_S_mn[r, c] * scale) + term

    def first_distance(self, mask: Mask, r: int, first_col: Int32) -> Float32:
        """The position of this thread's r-th row minus its first column."""
        row, column = as_mn(mask.tScS)[r, 0]
        return Float32(mask.first_row + row + mask.seqlen_k - mask.seqlen_q - first_col - column)

    def middle_distance(self, mask: Mask, r: int, tile: ScoreTile) -> Float32:
        """The position of this thread's r-th row minus the middle column of the block."""
        row, _ = as_mn(mask.tScS)[r, 0]
        return Float32(mask.first_row + row + mask.seqlen_k - mask.seqlen_q - (tile.column + tile.columns // 2))


@cute.jit
def apply_to_row(
    acc_S_mn: cute.Tensor,
    r: cutlass.Constexpr,
    scale: Float32 | None,
    slope: Float32,
    distance: Float32,
    reference: Float32 | None = None,
):
    """Apply scale and ALiBi to a row. `distance`: the row's position minus this thread's first column."""
    for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
        score = acc_S_mn[r, c] if scale is None else acc_S_mn[r, c] * scale
        score = score - slope * cute.math.absf(distance - Float32(column_offset(c)))
        acc_S_mn[r, c] = score if reference is None else score - reference


@dataclass(frozen=True)
class LinearExp2(FusedExp2):
    """Exponents that are linear in the column: ALiBi off the diagonal.

    In other blocks the scores are already transformed, and the factor is 1 and the slope 0.
    """

    factor: Float32
    slope: Float32
    first: RowValues  # the ALiBi term at this thread's first column

    def exponents(self, scores: StepScores, k: int, reference: RowValues) -> StepScores:
        columns = [Float32(column_offset(4 * k + i)) for i in range(4)]
        firsts = [self.first[r] - reference[r] for r in range(2)]
        terms = [[cute.math.fma(self.slope, column, first) for column in columns] for first in firsts]
        return [[cute.math.fma(scores[r][i], self.factor, terms[r][i]) for i in range(4)] for r in range(2)]


@dataclass(frozen=True)
class RowExp2(FusedExp2):
    """Exponents of scores that have the ALiBi term of the column already; that of the row is added here."""

    factor: Float32
    first: RowValues  # the ALiBi term at the middle column of the block; 0 if the scores are transformed

    def exponents(self, scores: StepScores, k: int, reference: RowValues) -> StepScores:
        firsts = [self.first[r] - reference[r] for r in range(2)]
        return [[cute.math.fma(x, self.factor, firsts[r]) for x in scores[r]] for r in range(2)]
