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

    def apply(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32 | None) -> None:
        self.apply_abs(S_mn, tile, scale)

    @cute.jit
    def apply_relative(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32 | None, reference: RowValues):
        """`looks_near` allows the linear formula if the whole block is on one side of the diagonal."""
        if cutlass.const_expr(not tile.looks_near):
            self.apply_abs(S_mn, tile, scale, reference)
        else:
            is_before, is_after = self.sides(tile)
            if is_before | is_after:
                slope = self.slope_log2 if is_before else -self.slope_log2
                self.apply_linear(S_mn, tile, scale, slope, reference)
            else:
                self.apply_abs(S_mn, tile, scale, reference)

    @cute.jit
    def fused_exp2(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32) -> "LinearExp2 | RowExp2":
        """The fused pass. A block across the diagonal is transformed here, in place."""
        is_before, is_after = self.sides(tile)
        is_linear = is_before | is_after
        if cutlass.const_expr(tile.has_alibi_step):
            is_linear = is_linear & fits(self.slope_log2, scale)
        if not is_linear:
            self.apply_abs(S_mn, tile, scale)
        factor = cutlass.select_(is_linear, scale, Float32(1.0))
        slope = cutlass.select_(is_before, self.slope_log2, -self.slope_log2)
        slope = cutlass.select_(is_linear, slope, Float32(0.0))
        rows = range(cute.size(S_mn, mode=[0]))
        if cutlass.const_expr(tile.has_alibi_step):
            return RowExp2(factor, tuple(-slope * self.middle_distance(tile, r) for r in rows))
        return LinearExp2(factor, slope, tuple(-slope * self.first_distance(tile.mask, r, tile.column) for r in rows))

    def step_word(self, word: Int32, tile: ScoreTile) -> Int32:
        """The operand of the k-step for a block. `word`: the operand before the diagonal (`alibi_step.row_word`).

        Blocks that are on neither side, and slopes that do not fit, have an operand of 0.
        """
        is_before, is_after = self.sides(tile)
        return cutlass.select_(is_before, word, cutlass.select_(is_after, word ^ SIGNS, Int32(0)))

    def sides(self, tile: ScoreTile) -> tuple[cutlass.Boolean, cutlass.Boolean]:
        """Whether all keys of a block are at or before the positions of its rows, and whether all are at or after.

        With the k-step, a right bound of at most 0 puts all blocks before: the mask hides the other keys afterwards.
        """
        mask = tile.mask
        first = mask.first_row + mask.seqlen_k - mask.seqlen_q
        is_before = tile.column + tile.columns <= first + 1
        if tile.has_alibi_step and mask.band.right is not None:
            is_before = is_before | (mask.band.right <= 0)
        return is_before, tile.column >= first + tile.rows - 1

    @cute.jit
    def apply_abs(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32 | None, reference: RowValues | None = None):
        """Apply scale and ALiBi to any block, with the absolute value of the distance."""
        for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
            distance = self.first_distance(tile.mask, r, tile.column)
            apply_to_row(S_mn, r, scale, self.slope_log2, distance, None if reference is None else reference[r])

    @cute.jit
    def apply_linear(
        self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32 | None, slope: Float32, reference: RowValues
    ):
        """Apply scale and ALiBi to a block on one side of the diagonal, where all distances have the same sign.

        `slope`: positive if all keys are before the rows' positions, negative if all are after.
        """
        for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
            first = -slope * self.first_distance(tile.mask, r, tile.column) - reference[r]
            for c in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
                term = slope * Float32(column_offset(c)) + first
                S_mn[r, c] = (S_mn[r, c] if scale is None else S_mn[r, c] * scale) + term

    def first_distance(self, mask: Mask, r: int, first_col: Int32) -> Float32:
        """The position of this thread's r-th row minus its first column."""
        row, column = as_mn(mask.tScS)[r, 0]
        return Float32(mask.first_row + row + mask.seqlen_k - mask.seqlen_q - first_col - column)

    def middle_distance(self, tile: ScoreTile, r: int) -> Float32:
        """The position of this thread's r-th row minus the middle column of the block."""
        mask, (row, _) = tile.mask, as_mn(tile.mask.tScS)[r, 0]
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
