"""The oracle against PyTorch and brute force; its yardstick; the error rule of `tests.cases`."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cute_flash import reference
from cute_flash.spec.band import Band
from tests.cases import CAUSAL, FULL, Case, assert_close, assert_lse_close, make_inputs
from tests.reference.memory import Memory


def brute_force(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    """Attention one row at a time, over the list of keys that the definition of the band lets it see."""
    (batch, heads, sq, _), (_, heads_kv, sk, _) = q.shape, k.shape
    out, lse = torch.zeros_like(q), torch.full((batch, heads, sq), -torch.inf, dtype=q.dtype)
    for b, h, i in itertools.product(range(batch), range(heads), range(sq)):
        own = i + sk - sq
        first = 0 if band.left is None else own - band.left
        last = sk - 1 if band.right is None else own + band.right
        keys = [j for j in range(sk) if first <= j <= last]
        if keys:
            head = h * heads_kv // heads
            scores = scale * (k[b, head, keys] @ q[b, h, i])
            lse[b, h, i] = scores.exp().sum().log()
            out[b, h, i] = (scores - lse[b, h, i]).exp() @ v[b, head, keys]
    return out, lse


@pytest.mark.parametrize(("is_causal", "band"), [(False, FULL), (True, CAUSAL)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_dense_is_sdpa(is_causal: bool, band: Band, scale: float | None) -> None:
    q, k, v = make_inputs(Case(2, 4, 2, 33, 33, 16), torch.float64)
    expected = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
    torch.testing.assert_close(reference.dense(q, k, v, band, scale)[0], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("band", [CAUSAL, Band(3, 1), Band(0, 0), Band(2, None), Band(None, 2)])
@pytest.mark.parametrize(("sq", "sk"), [(5, 9), (9, 5), (6, 6), (3, 0)])
def test_dense_is_brute_force(band: Band, sq: int, sk: int) -> None:
    q, k, v = make_inputs(Case(1, 4, 2, sq, sk, 8, band), torch.float64, seed=1)
    expected_out, expected_lse = brute_force(q, k, v, band, scale=0.25)
    out, lse = reference.dense(q, k, v, band, scale=0.25)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.float16, 1e-5, 5e-3), (torch.bfloat16, 1e-4, 4e-2)])
def test_low_precision_rounds_and_only_rounds(dtype: torch.dtype, least: float, most: float) -> None:
    case = Case(2, 4, 2, 40, 60, 32, Band(20, 3))
    q, k, v = make_inputs(case, dtype)
    out, lse = reference.dense_low_precision(q, k, v, case.band)
    oracle_out, oracle_lse = reference.dense(q, k, v, case.band)
    assert out.dtype == dtype
    assert least < float((out - oracle_out).abs().max()) < most
    assert float((lse - oracle_lse).abs().max()) < most


def test_low_precision_of_empty_rows_is_zero() -> None:
    q, k, v = make_inputs(Case(1, 2, 2, 9, 4, 8, CAUSAL), torch.bfloat16)
    out, lse = reference.dense_low_precision(q, k, v, CAUSAL)
    assert torch.equal(out[:, :, :5], torch.zeros(1, 2, 5, 8, dtype=torch.bfloat16))
    assert torch.equal(lse[:, :, :5], torch.full((1, 2, 5), -torch.inf))
    assert torch.isfinite(lse[:, :, 5:]).all()


def test_memory_meter_sees_the_oracle() -> None:
    q, k, v = make_inputs(Case(1, 2, 2, 256, 256, 8), torch.float64)
    with Memory() as memory:
        reference.dense(q, k, v, FULL)
    assert memory.largest == 2 * 256 * 256 * 8
    assert memory.peak >= 2 * memory.largest


# The error rule itself


def test_error_rule_rejects_wrong_results() -> None:
    case = Case(1, 1, 1, 600, 600, 16, CAUSAL)
    q, k, v = make_inputs(case, torch.bfloat16)
    oracle = reference.dense(q, k, v, case.band)
    low = reference.dense_low_precision(q, k, v, case.band)[0]
    out, lse, _ = reference.forward(q, k, v, reference.plain_args(q, case.band))
    assert_close(out, lse, *oracle, low)
    hole, late, outlier, shifted = out.clone(), out.clone(), out.clone(), lse.clone()
    hole[0, 0, 7, 3] = torch.nan
    # Later rows are small: an error of 3 % in all of them is below the rounding error of the first row.
    late[:, :, 100:] *= 1.03
    outlier[0, 0, 300, 5] += 0.03
    shifted[0, 0, 200] += 3e-4
    wrong = [(hole, lse, "not finite"), (late, lse, "mean error"), (outlier, lse, "max error")]
    for wrong_out, wrong_lse, message in [*wrong, (out, shifted, "lse: beyond")]:
        with pytest.raises(AssertionError, match=message):
            assert_close(wrong_out, wrong_lse, *oracle, low)


def test_error_rule_requires_exact_rows_without_keys() -> None:
    oracle_lse = torch.tensor([[[-torch.inf, 1.0]]], dtype=torch.float64)
    assert_lse_close(torch.tensor([[[-torch.inf, 1.0]]]), oracle_lse)
    for wrong in (-1e30, torch.nan, 0.0):
        with pytest.raises(AssertionError):
            assert_lse_close(torch.tensor([[[wrong, 1.0]]]), oracle_lse)
    out, oracle_out = torch.full((1, 1, 2, 4), 1e-9), torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="exactly 0"):
        assert_close(out, oracle_lse.float(), oracle_out, oracle_lse, oracle_out + 1.0)
