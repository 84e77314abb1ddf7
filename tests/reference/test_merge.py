"""`merge` and `attention_probs` against whole attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import attention_probs, attn, merge
from cute_flash.reference import merge as merge_module
from tests.combinations import normal

CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def qkv(sq: int = 7, sk: int = 11, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((2, 4, sq, 8), (2, 2, sk, 8), (2, 2, sk, 5))
    return [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


def parts(q: Tensor, k: Tensor, v: Tensor, cuts: list[int], **options: Any) -> tuple[list[Tensor], ...]:
    """Attention over [0, cut), [cut, ...), ...: (outs, lses)."""
    bounds = zip([0, *cuts], [*cuts, k.shape[2]], strict=True)
    found = [attn(q, k[:, :, a:b], v[:, :, a:b], return_lse=True, **options) for a, b in bounds]
    return [out for out, _ in found], [lse for _, lse in found]


# Merge


@pytest.mark.parametrize("cuts", [[], [4], [3, 3, 9], [0, 11]])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_parts_make_the_whole(cuts: list[int], is_stacked: bool) -> None:
    q, k, v = qkv()
    outs, lses = parts(q, k, v, cuts)
    found = merge(torch.stack(outs), torch.stack(lses)) if is_stacked else merge(outs, lses)
    torch.testing.assert_close(found, attn(q, k, v, return_lse=True), **CLOSE)


def test_gradients_of_the_whole() -> None:
    leaves = [x.requires_grad_() for x in qkv()]
    weights = normal(2, 4, 7, 5, seed=3), normal(2, 4, 7, seed=4)

    def grads(out: Tensor, lse: Tensor) -> Any:
        return torch.autograd.grad((out * weights[0]).sum() + (lse * weights[1]).sum(), leaves)

    found = grads(*merge(*parts(*leaves, [5, 5])))
    torch.testing.assert_close(found, grads(*attn(*leaves, return_lse=True)), **CLOSE)


def test_rows_that_no_part_sees() -> None:
    outs = [torch.zeros(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lses = [torch.tensor([[[-torch.inf, x, -torch.inf]]], dtype=torch.float64) for x in (0.3, -torch.inf)]
    lses = [x.requires_grad_() for x in lses]
    out, lse = merge(outs, lses)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, lses[0])
    grads = torch.autograd.grad(out.sum() + torch.where(lse == -torch.inf, 0.0, lse).sum(), (*outs, *lses))
    assert all(torch.isfinite(x).all() for x in grads)
    assert [x.item() for x in grads[2].flatten()] == [0, 1, 0]


def test_gradcheck_of_merge() -> None:
    outs = [normal(1, 2, 3, 2, seed=i).requires_grad_() for i in range(3)]
    lses = [normal(1, 2, 3, seed=i).requires_grad_() for i in range(3)]
    assert torch.autograd.gradcheck(lambda *x: merge(x[:3], x[3:]), (*outs, *lses))


def test_far_apart_and_in_half_precision() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    outs, lses = parts(q, k, v, [6])
    out, lse = merge(outs, [lses[0] - 1e4, lses[1] + 1e4])
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, outs[1])
    assert torch.equal(lse, lses[1] + 1e4)


def test_other_layouts() -> None:
    outs, lses = parts(*qkv(), [5])
    out, lse = merge(outs, lses)
    other, other_lse = merge([x.transpose(1, 2) for x in outs], lses, layout="bshd")
    torch.testing.assert_close((other.transpose(1, 2), other_lse), (out, lse))
    varlen = [x[0].transpose(0, 1) for x in outs], [x[0] for x in lses]
    other, other_lse = merge(*varlen, layout="thd")
    torch.testing.assert_close((other.transpose(0, 1), other_lse), (out[0], lse[0]))


def test_refusals_of_merge() -> None:
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="0 outs and 0 lses"):
        merge([], [])
    with pytest.raises(ValueError, match="2 outs and 1 lses"):
        merge([out, out], [lse])
    with pytest.raises(ValueError, match=r"outs\[1\] has shape \(1, 2, 5, 4\)"):
        merge([out, torch.zeros(1, 2, 5, 4)], [lse, lse])
    with pytest.raises(ValueError, match=r"expected \(1, 2, 3, 4\) and \(1, 3, 2\) with layout='bshd'"):
        merge([out], [lse], layout="bshd")
    with pytest.raises(ValueError, match="layout='hsd'"):
        merge([out], [lse], layout="hsd")
    with pytest.raises(ValueError, match=r"an out of shape \(1, 2, 3, 4\) with layout='thd'"):
        merge([out], [lse], layout="thd")


# Probabilities


@pytest.mark.parametrize(("window", "chunk"), [((None, None), None), ((None, 0), 4), ((2, 1), 0), ((None, None), 3)])
@pytest.mark.parametrize("lengths", [(7, 11), (11, 7), (5, 0)])
@pytest.mark.parametrize("features", [{}, {"softcap": 0.8}, {"alibi": 1}, {"alibi": 2}, {"sinks": True}])
def test_weights_times_values_are_attention(
    window: Any, chunk: int | None, lengths: tuple[int, int], features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_module, "MAX_SCORES", 200)
    q, k, v = qkv(*lengths)
    options: dict[str, Any] = {"window": window, "attention_chunk": chunk, "scale": 0.4, **features}
    if "alibi" in features:
        options["alibi"] = normal(4, seed=8) if features["alibi"] == 1 else normal(2, 4, seed=8)
    sinks = normal(4, seed=9) if "sinks" in features else None
    options.pop("sinks", None)
    out, lse = attn(q, k, v, **options, sinks=sinks, return_lse=True)
    P = attention_probs(q, k, lse, **options)
    assert P.shape == (2, 4, *lengths)
    torch.testing.assert_close(P @ v.repeat_interleave(2, 1), out, **CLOSE)
    seen = (lse > -torch.inf).double()
    weight = 1 if sinks is None else 1 - (sinks[:, None] - lse).exp()
    torch.testing.assert_close(P.sum(-1), (seen * weight).double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        (range(1, 6, 2), [1, 3, 5]),
        (slice(-2, None), [5, 6]),
        ([6, 0, -1], [6, 0, 6]),
        (torch.tensor([2, -7]), [2, 0]),
        ([], []),
    ],
)
def test_some_rows(rows: Any, chosen: list[int]) -> None:
    q, k, v = qkv()
    _, lse = attn(q, k, v, causal=True, return_lse=True)
    whole = attention_probs(q, k, lse, causal=True)
    # Not bitwise equal: BLAS may sum a product of another shape in another order.
    torch.testing.assert_close(attention_probs(q, k, lse, rows=rows, causal=True), whole[:, :, chosen], **CLOSE)


def test_weights_are_differentiable_with_large_masked_scores() -> None:
    q, k, v = qkv()
    k[:, :, -1] *= 1e4
    q, k = q.requires_grad_(), k.requires_grad_()
    _, lse = attn(q, k, v, causal=True, return_lse=True)
    weights = normal(2, 4, 1, 11, seed=4)
    P = attention_probs(q, k, lse, rows=[2], causal=True)
    found = torch.autograd.grad((P * weights).sum(), (q, k))
    scores = (q[:, :, 2:3] @ k.repeat_interleave(2, 1).mT) / 8**0.5
    expected = scores.masked_fill(torch.arange(11) > 6, -torch.inf).softmax(-1)
    torch.testing.assert_close(found, torch.autograd.grad((expected * weights).sum(), (q, k)), **CLOSE)


def test_half_precision_gives_fp32() -> None:
    q, k, v = qkv(dtype=torch.float16)
    _, lse = attn(q, k, v, return_lse=True)
    P = attention_probs(q, k, lse)
    assert P.dtype == torch.float32
    torch.testing.assert_close(P.sum(-1), torch.ones(2, 4, 7), rtol=1e-5, atol=1e-5)


def test_refusals_of_probabilities() -> None:
    q, k, _ = qkv()
    lse = torch.zeros(2, 4, 7)
    for options, message in (
        ({"rows": [7]}, "rows has 7: there are 7 queries"),
        ({"rows": torch.tensor([0.5])}, "rows is torch.float32"),
        ({"window": (-1, None)}, "window left=-1"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"alibi": torch.ones(3)}, r"alibi has shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_probs(q, k, lse, **options)
    with pytest.raises(ValueError, match=r"lse has shape \(2, 4\)"):
        attention_probs(q, k, lse[..., 0])
    with pytest.raises(ValueError, match="q has 4 heads and k, v have 3"):
        attention_probs(q, k[:, :1].expand(2, 3, 11, 8), lse)
