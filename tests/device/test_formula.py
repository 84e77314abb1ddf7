"""A new score formula reaches every path of the Hopper forward, although it defines `apply` only."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.gradients.score_bwd import BwdScoreParams
from cute_flash.device.memory.views import as_mn
from cute_flash.device.mma.wgmma import make_mma
from cute_flash.device.scores.band import Band
from cute_flash.device.scores.formula import ScoreFormula
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.score import Score
from cute_flash.device.softmax.exp2 import PlainExp2, ProbBlock
from cute_flash.device.softmax.fused_exp2 import FusedExp2
from cute_flash.device.softmax.softmax import LN_2, Softmax
from cute_flash.kernels.common.params import HeadScoreParams
from cute_flash.kernels.sm90 import fwd_scores
from cute_flash.kernels.sm90.fwd_scores import KvBlock
from tests.device.test_score import SCALE, exact_scores
from tests.device.tiles import FOR_HOPPER, coordinates, load, store

pytestmark = pytest.mark.usefixtures("on_one_thread")

ROWS, COLUMNS, THREADS = 64, 96, 128
SEQLEN, FIRST_ROW, N_BLOCK = 500, 64, 2
ROW_MAX = 0.75  # of every row before the block, in units of log2
STEP = 0.5


@dataclass(frozen=True)
class Staircase(ScoreFormula):
    """A toy: adds STEP to the scores of every even row of a thread. It has no other method."""

    def apply(self, acc_S_mn: Any, tile: Any, scale: Any) -> None:
        for r in range(0, cute.size(acc_S_mn, mode=[0]), 2):
            for c in range(cute.size(acc_S_mn, mode=[1])):
                acc_S_mn[r, c] = acc_S_mn[r, c] + STEP
        assert scale is None, "softcap comes first, and applies the scale"


class UserMods:
    """User mods that change nothing. The fused pass of user mods would omit the toy."""

    def transform(self, acc_S_mn: Any, mask: Any, first_col: Any, bias: Any) -> None: ...

    def apply_mask(self, acc_S_mn: Any, mask: Any, first_col: Any) -> None: ...

    def fused_exp2(self, *arguments: Any, **keywords: Any) -> None:
        raise AssertionError("the fused pass of user mods knows the scale only")


class Blocks:
    """A block iterator. No block is masked."""

    def starts_masked(self) -> Boolean:
        return Boolean(False)


# path: (block, whether there are user mods, whether the row max is speculative, the pass)
PATHS = {
    "first": ("first", False, False, PlainExp2),
    "relative": ("further", False, False, PlainExp2),
    "fused": ("further", False, True, FusedExp2),
    "with user mods": ("further", True, True, PlainExp2),
}


@pytest.mark.compiles
@pytest.mark.parametrize("path", PATHS)
def test_a_new_formula_reaches_every_path(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The test adds a formula to `Score.formulas` and looks at P of a block."""
    block_kind, has_mods, speculates, exp2_type = PATHS[path]
    monkeypatch.setattr(Score, "formulas", property(lambda self: [self.softcap, Staircase()]))
    static = SimpleNamespace(batch_invariant=False, has_mods=has_mods)
    tile_config = SimpleNamespace(tile_n=COLUMNS)
    config = SimpleNamespace(static=static, tile=tile_config, fuses_exp2=True, has_alibi_step=False)
    steps, passes = COLUMNS // 16, []

    @cute.jit
    def program(out, products, numbers):  # type: ignore[no-untyped-def]
        mma = make_mma(cutlass.BFloat16, COLUMNS, True, OperandMajorMode.K, OperandMajorMode.K)
        score = Score.of(numbers[0], numbers[1])
        for thread in range(THREADS):
            tScS = coordinates(mma, Int32(thread), (ROWS, COLUMNS))
            acc_S = load(mma, Int32(thread), products, (ROWS, COLUMNS))
            mask = Mask(Band(), Int32(SEQLEN), Int32(SEQLEN), Int32(FIRST_ROW), tScS)
            softmax = Softmax.start(as_mn(acc_S), Float32(1.0))
            softmax.row_max.fill(ROW_MAX)
            params = HeadScoreParams(score, None, None, UserMods() if has_mods else None)
            tile = SimpleNamespace(score_params=params, mask=mask, block_iter=Blocks())
            kv, exp2 = KvBlock(Int32(N_BLOCK), COLUMNS, None), PlainExp2()
            if cutlass.const_expr(block_kind == "first"):
                fwd_scores.transform_first(config, tile, acc_S, kv)
            else:
                exp2 = fwd_scores.transform_further(config, softmax, tile, acc_S, kv, Int32(1), False, speculates)
            passes.append(exp2)
            block = ProbBlock.of(acc_S, softmax)
            exp2.exponentiate(softmax, block, range(steps), False)
            store(block.acc_P, tScS, out)

    products = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) * 4
    out, softcap = torch.full((ROWS, COLUMNS), torch.nan), 3.0
    arguments = [*map(from_dlpack, (out, products, torch.tensor([SCALE, softcap])))]
    cute.compile(program, *arguments, options=FOR_HOPPER)(*arguments)
    assert {type(one) for one in passes} <= {*exp2_type.__subclasses__(), exp2_type}
    expected = exact_scores(products, softcap, None, (SEQLEN, SEQLEN, FIRST_ROW, N_BLOCK * COLUMNS)) / LN_2
    # The first row of a thread is in the upper half of each 16 rows.
    expected += STEP * (torch.arange(ROWS) // 8 % 2 == 0)[:, None]
    torch.testing.assert_close(out.double(), (expected - ROW_MAX).exp2(), rtol=1e-4, atol=1e-6)


def test_the_backward_refuses_a_formula_without_a_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Score, "formulas", property(lambda self: [Staircase()]))
    params = BwdScoreParams(Score(Float32(1.0)), Int32(1), None, None, None, None, None)
    with pytest.raises(NotImplementedError, match="Staircase"):
        params.block(None, None, None, None, is_transposed=True)  # type: ignore[arg-type]
