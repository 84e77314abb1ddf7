"""The score transform of the forward: from Q K^T to scores in units of log2, before the mask.

    s' = log2(e) (softcap tanh(scale s / softcap) - slope |row + Sk - Sq - column|)

The softmax that follows has a scale of 1. The presence of a feature is compiled in; its value is a run-time argument.
After the first block of a tile the row max m so far, the *reference*, is known, and the last formula subtracts it.

`Score` is a list of formulas, which it applies one after the other. To add one, write a `ScoreFormula` and list it in
`Score.formulas`: it then reaches every path of the forward kernels (`device/scores/formula.py`). A bias and user mods
follow these formulas (`device/scores/mods.py`). The fused pass of user mods knows the scale only, so `is_scale_only`
decides whether it can be used.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.scores.alibi import Alibi
from cute_flash.device.scores.formula import Scale, ScoreFormula, ScoreTile
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.softcap import ExactSoftcap, Softcap
from cute_flash.device.softmax.fused_exp2 import FusedExp2, TransformedExp2
from cute_flash.device.softmax.softmax import LOG2_E, RowValues


@dataclass(frozen=True)
class Score:
    """The score transform of one head. None: the feature is absent."""

    scale_log2: Float32  # the factor of Q K^T
    softcap: Softcap | ExactSoftcap | None = None
    alibi: Alibi | None = None
    unit: cutlass.Constexpr = LOG2_E  # LOG2_E: fields named _log2 are in units of log2; 1: they are in natural units

    @staticmethod
    def of(
        scale: Float32,
        softcap: Float32 | None = None,
        returns_tanh: bool = False,
        unit: float = LOG2_E,
        is_exact: bool = False,
    ) -> "Score":
        """The transform without a slope, computed on the host.

        `returns_tanh`: softcap omits the factor softcap. `is_exact`: errors of fp32, not of 16-bit calls.
        """
        kind = ExactSoftcap if is_exact else Softcap
        formula = None if softcap is None else kind.of(scale, softcap, returns_tanh, unit)
        return Score(scale * unit, formula, unit=unit)

    def for_head(self, slope: Float32 | None) -> "Score":
        """The transform with the ALiBi slope of a head."""
        return replace(self, alibi=None if slope is None else Alibi(slope * self.unit))

    @property
    def formulas(self) -> list[ScoreFormula]:
        """The formulas, in the order in which they apply."""
        return [x for x in (self.softcap, self.alibi) if x is not None]

    @property
    def is_scale_only(self) -> bool:
        return not self.formulas

    def apply(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, looks_near: cutlass.Constexpr = True) -> None:
        """Transform the scores of the rows of `mask` from `first_col` on, in place, before the mask.

        `looks_near`: use the polynomial if all scores of the warp are near 0. This takes registers. It also makes a
        row's result depend on other rows, so `batch_invariant` disables it.
        """
        self._apply(acc_S_mn, ScoreTile(mask, first_col, looks_near=looks_near), None)

    def apply_relative(self, acc_S_mn: cute.Tensor, tile: ScoreTile, reference: RowValues) -> None:
        """`apply`, and subtract the reference of each row."""
        self._apply(acc_S_mn, tile, reference)

    def _apply(self, S_mn: cute.Tensor, tile: ScoreTile, reference: RowValues | None) -> None:
        scale = self.scale_log2
        *others, last = self.formulas or [Scale()]
        for formula in others:
            formula.apply(S_mn, tile, scale)
            scale = None
        if reference is None:
            last.apply(S_mn, tile, scale)
        else:
            last.apply_relative(S_mn, tile, scale, reference)

    def fused_exp2(self, acc_S_mn: cute.Tensor, tile: ScoreTile) -> FusedExp2:
        """The fused pass of a block. It fuses a single formula; several are applied in place first."""
        if len(self.formulas) == 1:
            return self.formulas[0].fused_exp2(acc_S_mn, tile, self.scale_log2)
        self._apply(acc_S_mn, tile, None)
        return TransformedExp2()
