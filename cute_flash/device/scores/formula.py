"""The interface of a score formula, such as softcap or ALiBi: from Q K^T to scores, before the mask.

The Hopper forward transforms the scores of a block on one of three paths. `Score` asks every formula of the call on all
of them:

| path     | method           | blocks                                                                              |
|----------|------------------|-------------------------------------------------------------------------------------|
| in place | `apply`          | the first block of a tile; every block with a bias or user mods, unless fused       |
| relative | `apply_relative` | other blocks, if the row max is exact: the row max so far is subtracted too         |
| fused    | `fused_exp2`     | other blocks, if the row max is speculative: one pass computes P from Q K^T         |

The mma.sync forward and decode use the first path only. A new formula must define `apply`; the other two paths then use
it, until the formula has a faster method of its own. `kernels/sm90/fwd_scores.py` chooses the path.

Backward kernels compute P again, and the derivative: `prob` and `differentiate` of `BlockScores`
(`device/gradients/score_bwd.py`) and of `ModScores` (`device/gradients/mods_bwd.py`). They refuse a formula that is not
in `DIFFERENTIATED`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.scores.mask import Mask
from cute_flash.device.softmax.fused_exp2 import FusedExp2, TransformedExp2
from cute_flash.device.softmax.softmax import RowValues


class ScoreTile(NamedTuple):
    """The size of a block of scores, and its first key. Its first row is `Mask.first_row`."""

    column: Int32  # the first key
    rows: int
    columns: int


class ScoreFormula:
    """One formula of `Score`. Scores are in the units of `Score.unit`.

    Arguments that several methods have:

    Args:
        acc_S_mn: Q K^T, or the result of the formulas before this one, for the rows of `mask`.
        scale: the factor of Q K^T; None if a formula before this one has applied it.
        looks_near: the formula may choose a method by the scores of all rows of a warp; `batch_invariant` forbids this.
    """

    def apply(
        self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, scale: Float32 | None, looks_near: cutlass.Constexpr
    ) -> None:
        """Transform scores from the key `first_col` on, in place."""
        raise NotImplementedError

    def apply_relative(
        self,
        acc_S_mn: cute.Tensor,
        mask: Mask,
        tile: ScoreTile,
        scale: Float32 | None,
        reference: RowValues,
        looks_near: cutlass.Constexpr,
    ) -> None:
        """`apply`, and subtract the reference of each row."""
        self.apply(acc_S_mn, mask, tile.column, scale, looks_near)
        for r in range(cute.size(acc_S_mn, mode=[0])):
            acc_S_mn[r, None].store(acc_S_mn[r, None].load() - reference[r])

    def fused_exp2(
        self, acc_S_mn: cute.Tensor, mask: Mask, tile: ScoreTile, scale: Float32 | None, has_alibi_step: bool
    ) -> FusedExp2:
        """The fused pass of a block. Scores for which it has no formula are transformed in place here.

        `has_alibi_step`: Q K^T has the k-step of ALiBi (`device/scores/alibi_step.py`).
        """
        self.apply(acc_S_mn, mask, tile.column, scale, True)
        return TransformedExp2()


class Scale(ScoreFormula):
    """The scale alone, for calls whose other formulas are a bias and user mods."""

    @cute.jit
    def apply(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, scale: Float32, looks_near: cutlass.Constexpr):
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                acc_S_mn[r, c] = acc_S_mn[r, c] * scale
