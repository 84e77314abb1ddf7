"""The functions of flash-attn 3's interface on the CPU, against plain torch and those of flash-attn 2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError
from cute_flash.integrations import flash_attn as fa2
from cute_flash.integrations import flash_attn_3 as fa3
from tests.integrations.plain import assert_signature, plain_batch

DESCALE = {"q_descale": None, "k_descale": None, "v_descale": None}
COMMON: dict[str, Any] = {
    "softmax_scale": None, "causal": False, "qv": None, **DESCALE, "window_size": (-1, -1), "attention_chunk": 0,
    "softcap": 0.0, "num_splits": 1, "pack_gqa": None, "deterministic": False, "sm_margin": 0,
    "return_attn_probs": False,
}  # fmt: skip
# Required parameters and defaults of flash-attn 3, in its order.
SIGNATURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "flash_attn_func": (["q", "k", "v"], COMMON),
    "flash_attn_qkvpacked_func": (
        ["qkv"],
        {
            "softmax_scale": None, "causal": False, **DESCALE, "window_size": (-1, -1), "attention_chunk": 0,
            "softcap": 0.0, "deterministic": False, "num_heads_q": None, "sm_margin": 0, "return_attn_probs": False,
        },
    ),
    "flash_attn_varlen_func": (
        ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
        {"seqused_q": None, "seqused_k": None, **COMMON},
    ),
    "flash_attn_with_kvcache": (
        ["q", "k_cache", "v_cache"],
        {
            "k": None, "v": None, "qv": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None,
            "cache_batch_idx": None, "cache_leftpad": None, "page_table": None, "cu_seqlens_q": None,
            "cu_seqlens_k_new": None, "max_seqlen_q": None, "rotary_seqlens": None, **DESCALE, "softmax_scale": None,
            "causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0,
            "rotary_interleaved": True, "scheduler_metadata": None, "num_splits": 0, "pack_gqa": None, "sm_margin": 0,
            "return_softmax_lse": False,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert_signature(getattr(fa3, name), *SIGNATURES[name])


def qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, s, h, 20, generator=generator) for s, h in ((13, 4), (17, 2), (17, 2))]


@pytest.mark.parametrize("name", ["return_attn_probs", "return_softmax_lse"])
def test_dense(name: str) -> None:
    inputs = [x.requires_grad_() for x in qkv()]
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0])
    options = {"window_size": (6, 0), "attention_chunk": 9, "s_aux": sinks, name: True}
    out, lse = fa3.flash_attn_func(*inputs, 0.3, True, **options)
    expected, expected_lse = plain_batch(*inputs, causal=True, window=(6, 0), chunk=9, scale=0.3, sinks=sinks)
    torch.testing.assert_close(out.double(), expected, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-4, atol=2e-5)
    grad = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, grad)
    for x, y in zip(gradients, torch.autograd.grad(expected, inputs, grad.double())):
        torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-5)


def test_qkv_in_one_tensor() -> None:
    q, k, v = qkv()
    q = q[:, :7].repeat(1, 3, 1, 1)[:, :17]
    out, lse = fa3.flash_attn_qkvpacked_func(
        torch.cat((q, k, v), 2), causal=True, num_heads_q=4, return_attn_probs=True
    )
    expected, expected_lse = plain_batch(q, k, v, causal=True)
    torch.testing.assert_close(out.double(), expected, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-4, atol=2e-5)
    stacked = torch.stack((k, k, v), 2)
    out = fa3.flash_attn_qkvpacked_func(stacked)
    torch.testing.assert_close(out.double(), plain_batch(k, k, v)[0], rtol=2e-4, atol=2e-5)
    with pytest.raises(ValueError, match=r"expected \(B, S, 5 \+ 2 Hkv, D\) with num_heads_q"):
        fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), num_heads_q=5)


def test_varlen() -> None:
    q, k, v = (x.flatten(0, 1) for x in qkv())
    cu_q, cu_k = torch.tensor([0, 13, 26], dtype=torch.int32), torch.tensor([0, 17, 34], dtype=torch.int32)
    used = torch.tensor([17, 5], dtype=torch.int32)
    options = {"causal": True, "attention_chunk": 6}
    found = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 13, 17, None, used, **options, return_attn_probs=True)
    expected = fa2.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 13, 17, **options, seqused_k=used, return_softmax_lse=True
    )
    assert len(found) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match=r"^seqused_q="):
        fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 13, 17, used)


def test_kvcache() -> None:
    q, k, v = qkv()
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    new = torch.randn(2, 2, 3, 2, 20)
    a, b = (k.clone(), v.clone()), (k.clone(), v.clone())
    found = fa3.flash_attn_with_kvcache(
        q[:, :3], *a, *new, cache_seqlens=lengths, causal=True, attention_chunk=10, return_softmax_lse=True, ver=3
    )
    expected = fa2.flash_attn_with_kvcache(
        q[:, :3], *b, *new, cache_seqlens=lengths, causal=True, attention_chunk=10, return_softmax_lse=True
    )
    torch.testing.assert_close((found, a), (expected, b), rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match=r"^qv="):
        fa3.flash_attn_with_kvcache(q, k, v, qv=q)
