"""`attn_varlen` and `attn_nested` on the CPU: offsets of every kind, and refusals.

`tests/reference/test_features.py` compares values and gradients with the oracle.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import TraceError, api, attn, attn_nested, attn_varlen, merge, reference
from tests.combinations import RNG, Combination, VarlenCombination, normal, results
from tests.lengths import Lengths

CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("seed", range(24))
def test_combinations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one, pick = replace(Combination.drawn(seed), dtype=torch.float64), random.Random(seed)
    sizes, batch = [0, 0, 1, 5, 17, 33], pick.randrange(1, 5)
    queries, keys = ([pick.choice(sizes) for _ in range(batch)] for _ in range(2))
    used = [pick.randrange(sk + 1) for sk in keys] if pick.random() < 0.5 else None
    case = VarlenCombination(one, Lengths(queries, keys, used, (pick.choice([0, 3]), pick.choice([0, 3]))))
    tensors, weights = case.tensors(), case.weights(torch.Generator().manual_seed(3))
    monkeypatch.setattr(api, "_seed", lambda q: torch.tensor(RNG))
    found = results(case.attend, tensors, weights)
    expected = results(lambda x: case.dense(reference.dense, x, None), tensors, weights)
    torch.testing.assert_close(found, expected, **CLOSE)


def qkv(queries: int = 9, keys: int = 12) -> list[Tensor]:
    return [normal(n, h, 4, seed=i) for i, (n, h) in enumerate(((queries, 4), (keys, 2), (keys, 2)))]


def test_equal_lengths_are_a_batch() -> None:
    q, k, v = (normal(3, h, 7, 4, seed=i) for i, h in enumerate((4, 2, 2)))
    cu = offsets([7, 7, 7])
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    out, lse, most = attn_varlen(*flat, cu, cu, causal=True, return_lse=True, return_max_logit=True)
    expected, expected_lse, expected_most = attn(q, k, v, causal=True, return_lse=True, return_max_logit=True)
    torch.testing.assert_close(out.unflatten(0, (3, 7)).transpose(1, 2), expected)
    torch.testing.assert_close(lse.unflatten(1, (3, 7)).transpose(0, 1), expected_lse)
    torch.testing.assert_close(most, expected_most)


def test_keys_that_no_query_sees_have_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    # The second sequence has keys and no queries, the third queries and no keys.
    cu_q, cu_k = offsets([4, 0, 5]), offsets([6, 6, 0])
    out, lse = attn_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    assert torch.equal(out[4:], torch.zeros(5, 4, 4, dtype=torch.float64))
    assert torch.equal(lse[:, 4:], torch.full((4, 5), -torch.inf, dtype=torch.float64))
    dout = torch.ones_like(out)
    dout[4:] = torch.nan
    out.backward(dout)
    assert not q.grad[4:].any() and not k.grad[6:].any() and not v.grad[6:].any()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert v.grad[:6].abs().min() > 0


def test_no_sequences_at_all() -> None:
    q, k, v = qkv(3, 2)
    out, lse = attn_varlen(q, k, v, offsets([]), offsets([]), return_lse=True)
    assert not out.any() and torch.equal(lse, torch.full((4, 3), -torch.inf, dtype=torch.float64))
    nothing = attn_varlen(*qkv(0, 0), offsets([0, 0]), offsets([0, 0]))
    assert nothing.shape == (0, 4, 4)


def test_upper_bounds_of_lengths() -> None:
    q, k, v = qkv()
    cu_q, cu_k = offsets([4, 5]), offsets([2, 10])
    expected = attn_varlen(q, k, v, cu_q, cu_k)
    for longest in ((5, 10), (500, 1000), (torch.tensor(5), torch.tensor(10)), (None, 10)):
        found = attn_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=longest[0], max_seqlen_k=longest[1])
        assert torch.equal(found, expected)


def test_parts_of_varlen_batches_merge() -> None:
    q, k, v = qkv(4, 12)
    whole = attn_varlen(q, k, v, offsets([4]), offsets([12]), return_lse=True)
    parts = [
        attn_varlen(q, k[a:b], v[a:b], offsets([4]), offsets([b - a]), return_lse=True) for a, b in ((0, 5), (5, 12))
    ]
    torch.testing.assert_close(merge(*zip(*parts, strict=True), layout="thd"), whole, **CLOSE)


def test_fp32_outputs() -> None:
    lengths = Lengths([5, 0, 4], [7, 3, 2])
    q, k, v = (x.bfloat16() for x in qkv())
    offsets = lengths.cu_q, lengths.cu_k
    out, rounded = attn_varlen(q, k, v, *offsets, out_dtype=torch.float32), attn_varlen(q, k, v, *offsets)
    assert out.dtype == torch.float32 and torch.equal(out.bfloat16(), rounded)


# ---- jagged tensors


@pytest.mark.parametrize("order", [1, 2])
def test_nested(order: int) -> None:
    lengths = [(4, 2), (0, 3), (5, 7)]
    leaves = [x.requires_grad_() for x in qkv()]
    cu = [offsets(list(column)) for column in zip(*lengths, strict=True)]
    expected, expected_lse = attn_varlen(*leaves, *cu, causal=True, return_lse=True)
    grads = torch.autograd.grad(expected.sin().sum() + expected_lse[expected_lse > -torch.inf].sum(), leaves)

    where = [x.long() for x in cu]
    jagged = [
        torch.nested.nested_tensor_from_jagged(x, at)
        for x, at in zip(leaves, (where[0], where[1], where[1]), strict=True)
    ]
    if order == 2:
        jagged = [x.transpose(1, 2) for x in jagged]
    out, lse = attn_nested(*jagged, causal=True, return_lse=True)
    assert out.is_nested and out.shape[order] == jagged[0].shape[order]
    flat, flat_lse = (x.transpose(1, 2).values() if order == 2 else x.values() for x in (out, lse))
    torch.testing.assert_close(flat, expected)
    torch.testing.assert_close(flat_lse.transpose(0, 1), expected_lse)
    found = torch.autograd.grad(flat.sin().sum() + flat_lse[flat_lse > -torch.inf].sum(), leaves)
    torch.testing.assert_close(found, grads)
    # out has the jagged layout of its input, so that they can be added.
    assert (out + jagged[0]).is_nested


def test_refusals_of_nested() -> None:
    dense = torch.zeros(2, 4, 3, 8)
    with pytest.raises(ValueError, match="q: expected a NestedTensor"):
        attn_nested(dense, dense, dense)
    first, second = (
        torch.nested.nested_tensor_from_jagged(torch.zeros(6, 4, 8), torch.tensor(x)) for x in ([0, 2, 6], [0, 3, 6])
    )
    with pytest.raises(ValueError, match="k and v have sequences of different lengths"):
        attn_nested(first, first, second)
    with pytest.raises(ValueError, match="k and q have different ragged dimensions"):
        attn_nested(first, first.transpose(1, 2), first)


@pytest.mark.parametrize(
    "shape", [(4, 3, 9, 11), (4, 1, 9, 11), (3, 12, 12), (9, 11), (1, 11), (9, 1), (1,), ()], ids=str
)
@pytest.mark.parametrize(
    "score_mod",
    [None, lambda score, b, h, i, j: 2 * score + h, lambda score, b, h, i, j: 0.5 * (i - j)],
    ids=["alone", "score_mod", "score_mod without a score"],
)
def test_bias(shape: tuple[int, ...], score_mod: Any) -> None:
    """Each sequence has the bias of its own positions, before the score_mod, as a dense call has."""
    queries, keys = [5, 0, 9, 3], [11, 4, 2, 0]
    q, k, v = (normal(sum(n), 3, 8).requires_grad_() for n in (queries, keys, keys))
    bias = normal(*shape).requires_grad_()
    cu_q, cu_k = offsets(queries), offsets(keys)
    bounds = {"max_seqlen_q": 9, "max_seqlen_k": 11}
    out = attn_varlen(q, k, v, cu_q, cu_k, bias=bias, score_mod=score_mod, causal=True, **bounds)
    whole = bias.expand(4, 3, *(size if size != 1 else 12 for size in (1, 1, *shape)[-2:]))
    expected = torch.cat([
        attn(
            *(x[start : start + n][None] for x, start, n in ((q, cu_q[b], nq), (k, cu_k[b], nk), (v, cu_k[b], nk))),
            layout="bshd", bias=whole[b : b + 1, :, :nq, :nk], score_mod=score_mod, causal=True,
        )[0]
        for b, (nq, nk) in enumerate(zip(queries, keys))
    ])  # fmt: skip
    torch.testing.assert_close(out, expected, **CLOSE)
    dout = normal(*out.shape)
    for found, wanted in zip(*(torch.autograd.grad(x, (q, k, v, bias), dout) for x in (out, expected))):
        torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize(
    ("bias", "others", "message"),
    [
        (torch.zeros(9, 9), {"max_seqlen_k": 9}, "max_seqlen_q=None: give a max_seqlen_q of at most 9"),
        (torch.zeros(9, 8), {"max_seqlen_q": 9, "max_seqlen_k": 9}, "max_seqlen_k=9: give a max_seqlen_k of at most 8"),
        (
            torch.zeros(3, 9, 9),
            {"max_seqlen_q": 9, "max_seqlen_k": 9},
            "does not broadcast with 2 sequences and 4 heads",
        ),
        (torch.zeros(1, dtype=torch.int32), {}, "bias is torch.int32"),
        (torch.zeros(1, dtype=torch.bool), {}, "bias is torch.bool: pass a mask as mask_mod"),
        (torch.zeros(1, 1, 1, 1, 1), {}, "give a floating-point tensor of at most 4 dimensions"),
        (0.5, {}, "bias is a float"),
        (torch.zeros(1), {"score_mod_bwd": lambda grad, score, b, h, i, j: grad}, "add the bias inside"),
    ],
)
def test_bias_refusals(bias: Any, others: dict, message: str) -> None:
    q, cu = torch.zeros(9, 4, 8), offsets([5, 4])
    with pytest.raises(ValueError, match=message):
        attn_varlen(q, q, q, cu, cu, bias=bias, **others)


def test_trace_errors_with_a_bias_name_the_function_of_the_user() -> None:
    numbers = [1.0] * 300

    def of_bad_operation(s, b, h, q, kv):
        return torch.lgamma(s)

    def of_bad_result(s, b, h, q, kv):
        return None

    def of_bad_capture(s, b, h, q, kv):
        return s + numbers[0]

    def of_bad_signature(s):
        return s

    q, cu = torch.zeros(9, 4, 8), offsets([5, 4])
    for mod in (of_bad_operation, of_bad_result, of_bad_capture, of_bad_signature):
        first = mod.__code__.co_firstlineno
        with pytest.raises(TraceError, match=rf"{re.escape(__file__)}:({first}|{first + 1})\)$"):
            attn_varlen(q, q, q, cu, cu, bias=torch.zeros(4, 1, 1), score_mod=mod)
    message = r"score_mod is of type str: give a function of \(score, b, h, q_idx, kv_idx\)"
    with pytest.raises(ValueError, match=message):
        attn_varlen(q, q, q, cu, cu, bias=torch.zeros(4, 1, 1), score_mod="causal")
