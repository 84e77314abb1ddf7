"""The error rules for gradients accept correct gradients and reject wrong ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_flash import attn
from cute_flash.spec.band import Band
from tests import cases, mod_cases, mod_gradients
from tests.gradients import Attend, assert_gradients, weighted
from tests.lengths import Lengths

CAUSAL = Band(None, 0)
CASES = (
    cases.Case(1, 4, 2, 40, 70, 32, CAUSAL),
    # Rows without keys; rows with one key.
    cases.Case(1, 2, 1, 90, 30, 32, CAUSAL),
    cases.Case(1, 2, 2, 50, 50, 16, Band(0, 0)),
)
# No batch, no heads, no queries, no keys.
EMPTY = [case for case in cases.SMALL if case.problem(torch.bfloat16).is_empty]


def drawn(case: cases.Case) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    inputs = cases.make_inputs(case, torch.bfloat16, "cpu")
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(inputs[0].shape, generator=generator)
    return inputs, dout, torch.randn(inputs[0].shape[:3], generator=generator)


def ours(case: cases.Case) -> Attend:
    return lambda *x: attn(*x, window=case.band.bounds, return_lse=True)


@pytest.mark.parametrize("case", (*CASES, *EMPTY), ids=lambda case: case.id)
@pytest.mark.parametrize("through_lse", [False, True])
def test_right_gradients_pass(case: cases.Case, through_lse: bool) -> None:
    inputs, dout, dlse = drawn(case)
    assert_gradients(ours(case), inputs, case.band, weighted(dout, dlse if through_lse else None))


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.id)
def test_a_gradient_of_the_lse_that_is_lost_is_seen(case: cases.Case) -> None:
    inputs, dout, dlse = drawn(case)

    def forgetful(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = ours(case)(*x)
        return out, lse.detach()

    with pytest.raises(AssertionError, match=r"d[qk]: "):
        assert_gradients(forgetful, inputs, case.band, weighted(dout, dlse))


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.id)
@pytest.mark.parametrize("wrong", range(3))
def test_a_gradient_that_is_a_tenth_too_large_is_seen(case: cases.Case, wrong: int) -> None:
    inputs, dout, _ = drawn(case)

    def larger(*x: Tensor) -> tuple[Tensor, Tensor]:
        turned = [1.1 * y - 0.1 * y.detach() if i == wrong else y for i, y in enumerate(x)]
        return ours(case)(*turned)

    with pytest.raises(AssertionError, match=f"d{'qkv'[wrong]}: "):
        assert_gradients(larger, inputs, case.band, weighted(dout))


def test_a_gradient_where_there_is_none_is_seen() -> None:
    case = next(case for case in EMPTY if case.seqlen_q and not case.seqlen_k)
    inputs, dout, _ = drawn(case)

    def leaking(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = ours(case)(*x)
        return out + 1e-6 * x[0], lse

    with pytest.raises(AssertionError, match="dq: should be 0"):
        assert_gradients(leaking, inputs, case.band, weighted(dout))


# ---- gradients with user mods


@pytest.mark.slow
@pytest.mark.parametrize("kind", mod_cases.KINDS, ids=lambda kind: kind.id)
def test_the_cpu_path_follows_the_rule_for_user_mods(kind: mod_cases.Kind) -> None:
    mod_gradients.assert_gradients(mod_cases.Case(kind, mod_cases.Sizes(2, 4, 2, 40, 50), 1, "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", mod_cases.VARLEN_KINDS, ids=lambda kind: kind.id)
def test_the_cpu_path_follows_the_rule_for_user_mods_of_varlen_batches(kind: mod_cases.Kind) -> None:
    lengths = Lengths([33, 0, 1, 40], [50, 7, 0, 21], [45, 7, 0, 20], (4, 9))
    mod_gradients.assert_gradients(mod_cases.VarlenCase.of(kind, lengths, 4, 2, 1, "cpu"))
