"""The oracle against PyTorch and brute force; the CPU path against the oracle and finite differences."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cute_flash.reference import tiled as reference
from cute_flash.spec.band import Band
from tests.cases import (
    CAUSAL,
    FULL,
    SMALL,
    Case,
    assert_close,
    assert_error_within,
    assert_is_attention,
    assert_lse_close,
    make_inputs,
)


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


# The oracle


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


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [(torch.float16, 1e-5, 5e-3), (torch.bfloat16, 1e-4, 4e-2)]
)
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


# The CPU path


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_forward(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small chunks, so that small shapes have several of them.
    monkeypatch.setattr(reference, "MAX_ROWS", 32)
    monkeypatch.setattr(reference, "MAX_KEYS", 16)
    q, k, v = make_inputs(case, dtype)
    out, lse = reference.forward(q, k, v, case.band)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.is_contiguous()
    assert_is_attention(out, lse, q, k, v, case.band)


@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(200, 100)])
def test_forward_in_fp32_is_within_1e_5(band: Band) -> None:
    q, k, v = make_inputs(Case(1, 2, 1, 700, 1100, 64), torch.float32)
    oracle_out, oracle_lse = reference.dense(q, k, v, band)
    out, lse = reference.forward(q, k, v, band)
    assert float((out - oracle_out).abs().max() / oracle_out.abs().max()) <= 1e-5
    assert float((lse - oracle_lse).abs().max() / oracle_lse.abs().max()) <= 1e-5


def test_forward_of_large_scores_does_not_overflow() -> None:
    q, k, v = make_inputs(Case(1, 2, 2, 40, 40, 16, CAUSAL), torch.float32)
    out, lse = reference.forward(100 * q, 100 * k, v, CAUSAL)
    oracle_out, oracle_lse = reference.dense(100 * q, 100 * k, v, CAUSAL)
    # Scores of 1e5 carry absolute errors of 1e-2, which decide rows whose two best keys are that close.
    torch.testing.assert_close(out.double(), oracle_out, rtol=0, atol=0.02)
    torch.testing.assert_close(lse.double(), oracle_lse, rtol=1e-6, atol=0)


def test_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_ROWS", 8)
    case = Case(2, 4, 2, 21, 30, 8, Band(9, 2))
    contiguous = make_inputs(case, torch.float64)
    q = contiguous[0].transpose(1, 2).contiguous().transpose(1, 2)
    k = contiguous[1].mT.contiguous().mT
    v = contiguous[2].repeat_interleave(2, dim=2)[:, :, ::2]
    assert not any(x.is_contiguous() for x in (q, k, v))
    out, lse = reference.forward(q, k, v, case.band)
    assert out.is_contiguous()
    oracle_out, oracle_lse = reference.dense(*contiguous, case.band)
    torch.testing.assert_close(out, oracle_out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, oracle_lse, rtol=1e-11, atol=1e-12)
    dout = make_inputs(case, torch.float64, seed=3)[0].mT.contiguous().mT
    found = reference.backward(dout, q, k, v, out, lse, case.band)
    expected = oracle_gradients(dout, *contiguous, case.band)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


class Memory(TorchDispatchMode):
    """Watches every tensor that operations make: the largest one, and the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            # A view or the target of an in-place operation has its storage from an argument: no new memory.
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.watch(x)
        return result

    def watch(self, x: Tensor) -> None:
        size, key = x.untyped_storage().nbytes(), id(x)
        self.alive[key] = size
        weakref.finalize(x, self.alive.pop, key, None)
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, sum(self.alive.values()))


def largest_within_budget(q: Tensor, k: Tensor, v: Tensor, band: Band, budget: int) -> int:
    """Check the temporaries of forward and backward together; the bytes of the largest tensor of either."""
    with Memory() as forward:
        out, lse = reference.forward(q, k, v, band)
    assert forward.peak <= out.nbytes + lse.nbytes + budget
    with Memory() as backward:
        gradients = reference.backward(out, q, k, v, out, lse, band)
    # The gradients, dk and dv once more to accumulate them, and a dLSE of zeros.
    linear = sum(x.nbytes for x in gradients) + k.nbytes + v.nbytes + lse.nbytes
    assert backward.peak <= linear + budget
    return max(forward.largest, backward.largest)


@pytest.mark.parametrize("budget", [4 << 20, 64 << 20])
@pytest.mark.parametrize("heads_kv", [8, 1])
def test_memory_is_bounded(budget: int, heads_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_TEMPORARY_BYTES", budget)
    seqlen = 2048
    case = Case(1, 8, heads_kv, seqlen, seqlen, 8, Band(600, 0))
    q, k, v = make_inputs(case, torch.float32)
    # No tensor as large as the scores of even one of the eight heads.
    assert largest_within_budget(q, k, v, case.band, budget) < seqlen * seqlen * 4


@pytest.mark.parametrize(
    "case",
    # Many batches, many heads, many heads on one key head, wide heads: each alone could exceed the budget.
    [
        Case(64, 4, 4, 40, 40, 8),
        Case(1, 96, 96, 40, 40, 8),
        Case(1, 96, 1, 40, 40, 8),
        Case(2, 8, 2, 40, 40, 96),
    ],
    ids=lambda case: case.id,
)
def test_memory_is_bounded_in_every_direction(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 256 << 10
    monkeypatch.setattr(reference, "MAX_TEMPORARY_BYTES", budget)
    q, k, v = make_inputs(case, torch.float32)
    assert largest_within_budget(q, k, v, case.band, budget) <= max(budget, q.nbytes)
    assert_is_attention(*reference.forward(q, k, v, case.band), q, k, v, case.band)


def test_memory_meter_sees_the_oracle() -> None:
    q, k, v = make_inputs(Case(1, 2, 2, 256, 256, 8), torch.float64)
    with Memory() as memory:
        reference.dense(q, k, v, FULL)
    assert memory.largest == 2 * 256 * 256 * 8
    assert memory.peak >= 2 * memory.largest


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


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, band):  # type: ignore[no-untyped-def]
        out, lse = reference.forward(q, k, v, band)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.band = band
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        return *reference.backward(dout, *ctx.saved_tensors, ctx.band, None, dlse), None


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 2, 2, 5, 5, 3),
        Case(2, 2, 1, 4, 7, 3, CAUSAL),
        Case(1, 2, 2, 7, 4, 3, CAUSAL),
        Case(1, 4, 2, 5, 6, 2, Band(1, 2)),
        Case(1, 1, 1, 6, 3, 2, Band(0, 0)),
        Case(1, 1, 1, 3, 6, 2, Band(2, None)),
    ],
    ids=lambda case: case.id,
)
def test_gradcheck(case: Case, with_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_ROWS", 2)
    monkeypatch.setattr(reference, "MAX_KEYS", 3)
    inputs = [x.requires_grad_() for x in make_inputs(case, torch.float64)]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out, lse = Attention.apply(q, k, v, case.band)
        # Finite differences of -inf are NaN; a row that is empty stays so, and its LSE is no function of q.
        return (out, lse[lse != -torch.inf]) if with_lse else out

    assert torch.autograd.gradcheck(attention, inputs, eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_backward(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_ROWS", 32)
    monkeypatch.setattr(reference, "MAX_KEYS", 16)
    q, k, v = make_inputs(case, dtype)
    dout, _, _ = make_inputs(case, dtype, seed=1)
    dlse = make_inputs(case, torch.float32, seed=2)[0][..., 0]
    out, lse = reference.forward(q, k, v, case.band)
    found = reference.backward(dout, q, k, v, out, lse, case.band, None, dlse)
    expected = oracle_gradients(dout, q, k, v, case.band, dlse)
    for name, gradient, oracle in zip("qkv", found, expected, strict=True):
        assert gradient.dtype == dtype
        # fp32 inside, rounded once at the end, from an `out` rounded once: the oracle rounded to the dtype is
        # the whole yardstick.
        assert_error_within(f"d{name}", gradient, oracle, oracle.to(dtype))


def test_backward_ignores_what_empty_rows_receive() -> None:
    q, k, v = make_inputs(Case(1, 2, 1, 9, 4, 8, CAUSAL), torch.float32)
    out, lse = reference.forward(q, k, v, CAUSAL)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    clean = reference.backward(dout, q, k, v, out, lse, CAUSAL, None, dlse)
    dout[:, :, :5], dlse[:, :, :5] = torch.nan, torch.inf
    poisoned = reference.backward(dout, q, k, v, out, lse, CAUSAL, None, dlse)
    for gradient, expected in zip(poisoned, clean, strict=True):
        assert torch.equal(gradient, expected)
    assert torch.equal(poisoned[0][:, :, :5], torch.zeros(1, 2, 5, 8))


# The error rule itself


def test_error_rule_refuses_what_is_wrong() -> None:
    case = Case(1, 1, 1, 600, 600, 16, CAUSAL)
    q, k, v = make_inputs(case, torch.bfloat16)
    oracle = reference.dense(q, k, v, case.band)
    low = reference.dense_low_precision(q, k, v, case.band)[0]
    out, lse = reference.forward(q, k, v, case.band)
    assert_close(out, lse, *oracle, low)
    hole, late, outlier, shifted = out.clone(), out.clone(), out.clone(), lse.clone()
    hole[0, 0, 7, 3] = torch.nan
    # Later rows are small: all of them 3 % too large stays below what rounding does to the first row.
    late[:, :, 100:] *= 1.03
    outlier[0, 0, 300, 5] += 0.03
    shifted[0, 0, 200] += 3e-4
    wrong = [(hole, lse, "not finite"), (late, lse, "mean error"), (outlier, lse, "max error")]
    for wrong_out, wrong_lse, message in [*wrong, (out, shifted, "lse: beyond")]:
        with pytest.raises(AssertionError, match=message):
            assert_close(wrong_out, wrong_lse, *oracle, low)


def test_error_rule_wants_exact_empty_rows() -> None:
    oracle_lse = torch.tensor([[[-torch.inf, 1.0]]], dtype=torch.float64)
    assert_lse_close(torch.tensor([[[-torch.inf, 1.0]]]), oracle_lse)
    for wrong in (-1e30, torch.nan, 0.0):
        with pytest.raises(AssertionError):
            assert_lse_close(torch.tensor([[[wrong, 1.0]]]), oracle_lse)
    out, oracle_out = torch.full((1, 1, 2, 4), 1e-9), torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="exactly 0"):
        assert_close(out, oracle_lse.float(), oracle_out, oracle_lse, oracle_out + 1.0)
