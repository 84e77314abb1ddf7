"""Softcap, ALiBi, sinks, dropout and the largest logit through `attn`: keywords, layouts and generators.

`tests/reference/test_features.py` compares their values and gradients with the oracle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cute_flash import attn
from tests.combinations import normal, qkv


@pytest.mark.parametrize("off", [{"softcap": None}, {"softcap": 0.0}, {"dropout": 0.0}, {"dropout": None}])
def test_off_is_off(off: dict[str, Any]) -> None:
    q, k, v = qkv()
    assert torch.equal(attn(q, k, v, **off), attn(q, k, v))


def test_max_logit_has_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(5, 7))
    out, max_logit = attn(q, k, v, causal=True, scale=0.3, return_max_logit=True)
    assert not max_logit.requires_grad and out.requires_grad
    out.sum().backward()
    half = attn(*(x.detach().half() for x in (q, k, v)), return_lse=True, return_max_logit=True)
    assert [x.dtype for x in half] == [torch.float16, torch.float32, torch.float32]


@pytest.mark.parametrize("layout", ["bshd", "3-D", "2-D"])
def test_other_layouts(layout: str) -> None:
    """Results and gradients are those of the four dimensions."""
    leaves = [x.expand(2, -1, -1, -1)[:, : 1 if layout != "bshd" else None].clone() for x in qkv()]
    slopes = normal(2, leaves[0].shape[1], seed=5)
    if layout == "2-D":
        leaves, slopes = [x[:1] for x in leaves], slopes[:1]
    q, k, v = (x.requires_grad_() for x in leaves)
    options: dict[str, Any] = {"alibi": slopes, "softcap": 2.0, "sinks": slopes[0], "return_lse": True}
    reorder = {"bshd": lambda x: x.transpose(1, 2), "3-D": lambda x: x[:, 0], "2-D": lambda x: x[0, 0]}[layout]
    found, found_lse = attn(*map(reorder, (q, k, v)), **options, layout="bshd" if layout == "bshd" else "bhsd")
    out, lse = attn(q, k, v, **options)
    expected, expected_lse = reorder(out), lse if layout == "bshd" else reorder(lse)
    torch.testing.assert_close((found, found_lse), (expected, expected_lse))
    dout = normal(*expected.shape, seed=7)
    grads = [torch.autograd.grad(x, (q, k, v), dout) for x in (found, expected)]
    torch.testing.assert_close(grads[0], grads[1])


# Dropout and its generator


def test_dropout_follows_the_generator() -> None:
    q, k, v = qkv(20, 30)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs += [attn(q, k, v, dropout=0.5), attn(q, k, v, dropout=0.5)]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[4])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_in_a_checkpoint(use_reentrant: bool) -> None:
    found = []
    for is_saved in (False, True):
        torch.manual_seed(5)
        leaves = [x.requires_grad_() for x in qkv(20, 30)]

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attn(q, k, v, dropout=0.5).sin() + attn(q, k, v, dropout=0.2)

        out = checkpoint(layer, *leaves, use_reentrant=use_reentrant) if is_saved else layer(*leaves)
        torch.manual_seed(99)  # the backward pass must not use the generator
        out.sum().backward()
        found.append([out.detach(), *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
