"""Each operation of a mod: the traced graph and its derivative against the mod itself, called on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention

from cute_flash import attn, masks
from cute_flash.score_mod.derive import gradient
from cute_flash.score_mod.evaluate import evaluate
from cute_flash.score_mod.trace import bind
from tests.operations import SCORE_MODS, TABLE, places, scores

SIZE = 7


@pytest.mark.parametrize("name", SCORE_MODS)
def test_values_and_derivatives(name: str) -> None:
    mod, score = SCORE_MODS[name], scores(SIZE).requires_grad_()
    expected = mod(score, *places(SIZE)).double().expand(SIZE, SIZE)
    (expected_grad,) = torch.autograd.grad(expected.sum(), score)
    found = bind(mod, "score_mod")
    arguments = found.captures, found.scalars
    (value,) = evaluate(found.graph, arguments, torch.float64, places(SIZE), score)
    torch.testing.assert_close(value.expand(SIZE, SIZE), expected, rtol=1e-6, atol=1e-6)
    graph, one = gradient(found.graph).graph, torch.ones(SIZE, SIZE, dtype=torch.float64)
    (grad,) = evaluate(graph, arguments, torch.float64, places(SIZE), score, one)
    torch.testing.assert_close(grad.expand(SIZE, SIZE), expected_grad, rtol=1e-6, atol=1e-6)


def test_gradient_of_an_exponent() -> None:
    exponents = torch.tensor([0.5, 1.5, 2.0, 0.0], requires_grad=True)
    q, k, v = (torch.randn(1, 4, 8, 8, dtype=torch.float64) for _ in range(3))

    def mod(s, b, h, i, j):
        return (s.abs() + 0.1) ** exponents[h]

    (found,) = torch.autograd.grad(attn(q, k, v, score_mod=mod).square().sum(), exponents)
    s = q @ k.mT / 8**0.5
    out = torch.softmax((s.abs() + 0.1) ** exponents[:, None, None].double(), -1) @ v
    torch.testing.assert_close(found, torch.autograd.grad(out.square().sum(), exponents)[0])


def test_ints_divided_by_zero() -> None:
    q, k, v = (torch.randn(1, 4, 8, 8) for _ in range(3))
    zero = 0
    for mod, sign in ((lambda s, b, h, i, j: s + i // 0, "//"), (lambda s, b, h, i, j: s + i % zero, "%")):
        with pytest.raises(ValueError, match=rf"^{sign} of ints by 0 in a mod: make the divisor nonzero"):
            attn(q, k, v, score_mod=mod)
    guarded = attn(q, k, v, score_mod=lambda s, b, h, i, j: s + i // torch.where(j == 0, 1, j))
    assert guarded.isfinite().all()


# Indices of captured tensors


def test_negative_indices_wrap_as_in_torch() -> None:
    table = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    q, k, v = (torch.randn(1, 4, 9, 8, dtype=torch.float64) for _ in range(3))
    i = torch.arange(9)
    out = attn(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j])
    bias = table[:, i[:, None] - i]
    expected = attn(q, k, v, bias=bias)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out.square().sum(), table)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), table))


def test_indices_past_both_ends_are_clamped() -> None:
    table = torch.arange(4.0)
    found = bind(lambda s, b, h, q, kv: s * 0 + table[q - kv], "score_mod")
    score = torch.zeros(SIZE, SIZE)
    (values,) = evaluate(found.graph, (found.captures, ()), torch.float32, places(SIZE), score)
    expected = [[(d + 4 if d < 0 else d) for d in range(i, i - SIZE, -1)] for i in range(SIZE)]
    assert values.tolist() == [[min(max(float(d), 0.0), 3.0) for d in row] for row in expected]


SIZE_OF_TABLE = 5
INDICES: list[tuple[Any, bool]] = [
    (lambda b, h, q, kv: h, True),
    (lambda b, h, q, kv: b + kv * 2, True),
    (lambda b, h, q, kv: (q // 3 + kv) % 5, True),
    (lambda b, h, q, kv: (q - kv) % 5, True),
    (lambda b, h, q, kv: (q - kv).abs(), True),
    (lambda b, h, q, kv: (q - kv).clamp(0, 4), True),
    (lambda b, h, q, kv: torch.where(q > kv, q - 0, kv), True),
    (lambda b, h, q, kv: (q - kv) & 3, True),
    (lambda b, h, q, kv: (q > kv).int(), True),
    (lambda b, h, q, kv: (q * 0.5).int(), True),
    (lambda b, h, q, kv: 2, True),
    (lambda b, h, q, kv: -1, False),
    (lambda b, h, q, kv: q - kv, False),
    (lambda b, h, q, kv: (q - kv) % -5, False),
    (lambda b, h, q, kv: -h, False),
    (lambda b, h, q, kv: ~h, False),
    (lambda b, h, q, kv: torch.where(q > kv, q - kv, kv), False),
    (lambda b, h, q, kv: (q - kv).clamp(max=4), False),
    (lambda b, h, q, kv: q + SIZE_OF_TABLE, False),
    (lambda b, h, q, kv: (q - kv) % SIZE_OF_TABLE, False),
    (lambda b, h, q, kv: ((q - kv) * 0.5).int(), False),
]


@pytest.mark.parametrize("i", range(len(INDICES)))
def test_only_indices_that_may_be_negative_pay_for_wrapping(i: int) -> None:
    index, is_nonnegative = INDICES[i]
    table = torch.zeros(5)
    graph = bind(lambda s, b, h, q, kv: s + table[index(b, h, q, kv)], "score_mod").graph
    (load,) = (node for node in graph.nodes if node.op == "load")
    assert graph.is_nonnegative[load.args[0]] is is_nonnegative


# Unchanged functions of FlexAttention


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@pytest.mark.slow
def test_masks_of_flex_attention() -> None:
    near = masks.sliding_window(3)
    both = flex_attention.and_masks(causal, near)
    either = flex_attention.or_masks(near, lambda b, h, q, kv: kv < 2, flex_attention.and_masks())
    for mask in (both, either, flex_attention.noop_mask, flex_attention.or_masks(near)):
        graph = bind(mask, "mask_mod")
        (found,) = evaluate(graph.graph, (graph.captures, graph.scalars), torch.float32, places(SIZE))
        q, k, v = (torch.randn(1, 1, SIZE, 8) for _ in range(3))
        block_mask = flex_attention.create_block_mask(mask, 1, 1, SIZE, SIZE, device="cpu")
        expected = flex_attention.flex_attention(q, k, v, block_mask=block_mask)
        torch.testing.assert_close(attn(q, k, v, mask_mod=mask), expected, rtol=1e-4, atol=1e-5)
        assert found.dtype == torch.bool


def test_numpy_integers() -> None:
    np = pytest.importorskip("numpy")
    width, shift = np.int32(3), np.int64(1)
    mask = lambda b, h, q, kv: (q - kv < width) & (q + np.int64(0) >= kv) & (np.int64(1) + q >= shift)  # noqa: E731
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    torch.testing.assert_close(attn(q, k, v, mask_mod=mask), attn(q, k, v, mask_mod=masks.sliding_window(3)))
    found = attn(q, k, v, score_mod=lambda s, b, h, i, j: s + TABLE[h, np.int64(2)] * j)
    torch.testing.assert_close(found, attn(q, k, v, score_mod=lambda s, b, h, i, j: s + TABLE[h, 2] * j))
