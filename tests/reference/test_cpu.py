"""The CPU path of plain attention against the oracle and finite differences; strides and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.reference import plain_args, tiled
from cute_flash.spec.band import Band
from tests.cases import CAUSAL, FULL, SMALL, Case, assert_error_within, assert_is_attention, make_inputs
from tests.reference.memory import largest_within_budget


def with_dtypes(*others: torch.dtype) -> Any:
    """Every case in fp64 and in one of the other dtypes."""
    pairs = [(case, dtype) for i, case in enumerate(SMALL) for dtype in (torch.float64, others[i % len(others)])]
    return pytest.mark.parametrize(("case", "dtype"), pairs, ids=lambda x: getattr(x, "id", str(x)))


@with_dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_forward(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small chunks, so that small shapes have several chunks.
    monkeypatch.setattr(tiled, "MAX_ROWS", 32)
    monkeypatch.setattr(tiled, "MAX_KEYS", 16)
    q, k, v = make_inputs(case, dtype)
    out, lse, _ = reference.forward(q, k, v, plain_args(q, case.band))
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.is_contiguous()
    assert_is_attention(out, lse, q, k, v, case.band)


@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(200, 100)])
def test_forward_in_fp32_is_within_1e_5(band: Band) -> None:
    q, k, v = make_inputs(Case(1, 2, 1, 700, 1100, 64), torch.float32)
    oracle_out, oracle_lse = reference.dense(q, k, v, band)
    out, lse, _ = reference.forward(q, k, v, plain_args(q, band))
    assert float((out - oracle_out).abs().max() / oracle_out.abs().max()) <= 1e-5
    assert float((lse - oracle_lse).abs().max() / oracle_lse.abs().max()) <= 1e-5


def test_forward_of_large_scores_does_not_overflow() -> None:
    q, k, v = make_inputs(Case(1, 2, 2, 40, 40, 16, CAUSAL), torch.float32)
    out, lse, _ = reference.forward(100 * q, 100 * k, v, plain_args(q, CAUSAL))
    oracle_out, oracle_lse = reference.dense(100 * q, 100 * k, v, CAUSAL)
    # Scores of 1e5 have absolute errors of 1e-2, which matter in rows whose two largest scores are as close.
    torch.testing.assert_close(out.double(), oracle_out, rtol=0, atol=0.02)
    torch.testing.assert_close(lse.double(), oracle_lse, rtol=1e-6, atol=0)


def test_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "MAX_ROWS", 8)
    case = Case(2, 4, 2, 21, 30, 8, Band(9, 2))
    contiguous = make_inputs(case, torch.float64)
    q = contiguous[0].transpose(1, 2).contiguous().transpose(1, 2)
    k = contiguous[1].mT.contiguous().mT
    v = contiguous[2].repeat_interleave(2, dim=2)[:, :, ::2]
    assert not any(x.is_contiguous() for x in (q, k, v))
    args = plain_args(q, case.band)
    out, lse, max_logit = reference.forward(q, k, v, args)
    assert out.stride() == q.stride() and lse.is_contiguous() and max_logit is None
    oracle_out, oracle_lse = reference.dense(*contiguous, case.band)
    torch.testing.assert_close(out, oracle_out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, oracle_lse, rtol=1e-11, atol=1e-12)
    dout = make_inputs(case, torch.float64, seed=3)[0].mT.contiguous().mT
    *found, others = reference.backward(dout, None, q, k, v, out, lse, args)
    expected = oracle_gradients(dout, *contiguous, case.band)
    torch.testing.assert_close(found, list(expected), rtol=1e-11, atol=1e-12)
    assert [x.stride() for x in found] == [torch.empty_like(x).stride() for x in (q, k, v)]
    assert others == [None, None, None]


@pytest.mark.slow
@pytest.mark.parametrize("budget", [4 << 20, 16 << 20])
@pytest.mark.parametrize("heads_kv", [8, 1])
def test_memory_is_bounded(budget: int, heads_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "MAX_TEMPORARY_BYTES", budget)
    seqlen = 1024
    case = Case(1, 8, heads_kv, seqlen, seqlen, 8, Band(300, 0))
    q, k, v = make_inputs(case, torch.float32)
    # No tensor as large as the scores of even one of the eight heads.
    assert largest_within_budget(q, k, v, plain_args(q, case.band), budget) < seqlen * seqlen * 4


@pytest.mark.parametrize(
    "case",
    # Many batches, many heads, many heads on one key head, wide heads: each alone could exceed the budget.
    [Case(64, 4, 4, 40, 40, 8), Case(1, 96, 96, 40, 40, 8), Case(1, 96, 1, 40, 40, 8), Case(2, 8, 2, 40, 40, 96)],
    ids=lambda case: case.id,
)
def test_memory_is_bounded_in_every_direction(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 256 << 10
    monkeypatch.setattr(tiled, "MAX_TEMPORARY_BYTES", budget)
    q, k, v = make_inputs(case, torch.float32)
    assert largest_within_budget(q, k, v, plain_args(q, case.band), budget) <= max(budget, q.nbytes)
    out, lse, _ = reference.forward(q, k, v, plain_args(q, case.band))
    assert_is_attention(out, lse, q, k, v, case.band)


# The backward pass of the CPU path


def oracle_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, band: Band, dlse: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Autograd through the fp64 oracle."""
    q, k, v = leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = reference.dense(q, k, v, band)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + torch.where(lse == -torch.inf, 0.0, lse * dlse.double()).sum()
    return torch.autograd.grad(loss, leaves)


@with_dtypes(torch.float32, torch.bfloat16)
def test_backward(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "MAX_ROWS", 32)
    monkeypatch.setattr(tiled, "MAX_KEYS", 16)
    q, k, v = make_inputs(case, dtype)
    dout, _, _ = make_inputs(case, dtype, seed=1)
    dlse = make_inputs(case, torch.float32, seed=2)[0][..., 0]
    out, lse, _ = reference.forward(q, k, v, plain_args(q, case.band))
    *found, _ = reference.backward(dout, dlse, q, k, v, out, lse, plain_args(q, case.band))
    expected = oracle_gradients(dout, q, k, v, case.band, dlse)
    for name, gradient, oracle in zip("qkv", found, expected, strict=True):
        assert gradient.dtype == dtype
        # The CPU path rounds `out` once and each gradient once, and computes everything else in fp32 or fp64. So the
        # yardstick is the oracle, rounded to the dtype.
        assert_error_within(f"d{name}", gradient, oracle, oracle.to(dtype))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])], ids=["plain", "sinks"])
def test_backward_ignores_gradients_of_rows_without_keys(sinks: torch.Tensor | None, poison: float) -> None:
    """With sinks these rows have a finite LSE: their dLSE reaches the sinks, and neither q nor k."""
    q, k, v = make_inputs(Case(1, 2, 1, 9, 4, 8, CAUSAL), torch.float32)
    args = plain_args(q, CAUSAL)._replace(sinks=sinks)
    out, lse, _ = reference.forward(q, k, v, args)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    *clean, _ = reference.backward(dout, dlse, q, k, v, out, lse, args)
    dout[:, :, :5], dlse[:, :, :5] = torch.nan, poison
    *poisoned, _ = reference.backward(dout, dlse, q, k, v, out, lse, args)
    for gradient, expected in zip(poisoned, clean, strict=True):
        assert torch.equal(gradient, expected)
    assert torch.equal(poisoned[0][:, :, :5], torch.zeros(1, 2, 5, 8))
