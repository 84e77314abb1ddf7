"""The interface of a score formula, such as softcap or ALiBi: from Q K^T to scores, before the mask.

The Hopper forward transforms the scores of a block on one of three paths. On each of them, `Score` calls a method of
every formula of the call:

| path     | method           | blocks                                                                              |
|----------|------------------|-------------------------------------------------------------------------------------|
| in place | `apply`          | the first block of a tile; every block with a bias or user mods, unless fused       |
| relative | `apply_relative` | other blocks, if the row max is not speculative: the row max so far is subtracted   |
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
    """The block of scores that formulas transform: the rows of `mask`, from the key `column` on."""

    mask: Mask
    column: Int32
    rows: int = 0  # of the block; only `apply_relative` and `fused_exp2` know the size
    columns: int = 0
    # Formulas may choose a method by the scores of all rows of a warp. `batch_invariant` forbids this.
    looks_near: bool = True
    has_alibi_step: bool = False  # Q K^T has the k-step of ALiBi (`device/scores/alibi_step.py`)


class ScoreFormula:
    """One formula of `Score`. Scores are in the units of `Score.unit`.

    `S_mn`: Q K^T, or the result of the formulas before this one. `scale`: the factor of Q K^T; None if a formula before
    this one has applied it.
    """

    def apply(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32 | None) -> None:
        """Transform scores in place."""
        raise NotImplementedError

    def apply_relative(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32 | None, reference: RowValues) -> None:
        """`apply`, and subtract the reference of each row."""
        self.apply(S_mn, tile, scale)
        for r in range(cute.size(S_mn, mode=[0])):
            S_mn[r, None].store(S_mn[r, None].load() - reference[r])

    def fused_exp2(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32 | None) -> FusedExp2:
        """The pass that computes P. By default, the scores are transformed in place first, here."""
        self.apply(S_mn, tile, scale)
        return TransformedExp2()


class Scale(ScoreFormula):
    """The scale alone, for calls whose other formulas are a bias and user mods."""

    @cute.jit
    def apply(self, S_mn: cute.Tensor, tile: ScoreTile, scale: Float32):
        for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
                S_mn[r, c] = S_mn[r, c] * scale
