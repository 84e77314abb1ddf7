"""Keys and values that a query does not see have no influence on it, even if they are NaN or infinite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import attn, attn_varlen
from tests.combinations import normal

BAD = 255
S = 300  # more than one block of keys of the CPU path
TABLE = normal(2, S, dtype=torch.float64, seed=9).requires_grad_()
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "causal": (dict(causal=True), lambda i, j: j <= i),
    "window": (dict(window=(40, 5)), lambda i, j: (j >= i - 40) & (j <= i + 5)),
    "mask_mod": (dict(mask_mod=lambda b, h, i, j: (i + j) % 3 != 1), lambda i, j: (i + j) % 3 != 1),
    "softcap": (dict(causal=True, softcap=2.0), lambda i, j: j <= i),
    "score_mod": (dict(causal=True, score_mod=lambda s, b, h, i, j: s * s + TABLE[h, j]), lambda i, j: j <= i),
    "dropout": (dict(causal=True, dropout=0.3), lambda i, j: j <= i),
    "seen by none": (
        dict(softcap=2.0, score_mod=lambda s, b, h, i, j: s * s + TABLE[h, j], mask_mod=lambda b, h, i, j: j != BAD),
        lambda i, j: torch.zeros_like(i, dtype=torch.bool),
    ),
}


def results(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keywords: dict[str, Any]) -> list[Tensor]:
    """out, LSE and dq of some rows; also the other gradients if these are all rows."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(0)
    out, lse = attn(*inputs, return_lse=True, **keywords)
    out, lse = out[:, :, rows], lse[:, :, rows]
    wrt = [*inputs, TABLE] if "score_mod" in keywords else inputs
    dq, *others = torch.autograd.grad(out.square().sum() + lse.sum(), wrt)
    return [out, lse, dq[:, :, rows], *(others if len(rows) == S else ())]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", CASES)
def test_unseen_keys_and_values(name: str, value: float) -> None:
    keywords, sees = CASES[name]
    q, k, v = (normal(1, 2, S, 8, dtype=torch.float64, seed=i) for i in range(3))
    seen = sees(torch.arange(S), BAD)
    rows = (~seen).nonzero().flatten()
    expected = results(q, k, v, rows, keywords)
    k, v = k.clone(), v.clone()
    k[:, :, BAD] = v[:, :, BAD] = value
    for got, want in zip(results(q, k, v, rows, keywords), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    # Rows that see the bad key and value become NaN.
    out = attn(q, k, v, **{**keywords, "dropout": 0.0})
    assert not math.isnan(value) or out[:, :, seen].isnan().all()


def test_a_value_that_is_seen_is_not_lost() -> None:
    q, k, v = (normal(1, 2, S, 8, dtype=torch.float64, seed=i) for i in range(3))
    v[:, :, 7, 3] = torch.inf
    out = attn(q, k, v, causal=True)
    assert (out[:, :, 7:, 3] == torch.inf).all() and out[:, :, :7].isfinite().all()
    assert out[:, :, :, :3].isfinite().all()


@pytest.mark.parametrize("used", [False, True])
def test_rows_outside_of_sequences(used: bool) -> None:
    """Padding, other sequences, and keys past seqused_k."""
    q, k, v = (normal(24, 2, 8, dtype=torch.float64, seed=i).requires_grad_() for i in range(3))
    offsets = torch.tensor([0, 9, 20], dtype=torch.int32)
    seqused = torch.tensor([5, 11], dtype=torch.int32) if used else None
    clean = attn_varlen(q, k, v, offsets, offsets, seqused_k=seqused)[9:20]
    expected = [clean, *torch.autograd.grad(clean.square().sum(), (q, k, v))]
    dirty = [x.detach().clone() for x in (q, k, v)]
    for x in dirty:
        x[:9] = torch.nan
        x[20:] = torch.nan
    dirty = [x.requires_grad_() for x in dirty]
    out = attn_varlen(*dirty, offsets, offsets, seqused_k=seqused)[9:20]
    got = [out, *torch.autograd.grad(out.square().sum(), dirty)]
    for x, y in zip(got[:1] + [g[9:20] for g in got[1:]], expected[:1] + [g[9:20] for g in expected[1:]]):
        torch.testing.assert_close(x, y)


def test_keys_past_seqused() -> None:
    q, k, v = (normal(20, 2, 8, dtype=torch.float64, seed=i) for i in range(3))
    offsets, seqused = torch.tensor([0, 20], dtype=torch.int32), torch.tensor([13], dtype=torch.int32)
    expected = attn_varlen(q, k, v, offsets, offsets, seqused_k=seqused)
    k[13:] = v[13:] = torch.nan
    torch.testing.assert_close(attn_varlen(q, k, v, offsets, offsets, seqused_k=seqused), expected)
