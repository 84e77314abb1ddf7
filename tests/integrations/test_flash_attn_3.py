"""The functions of flash-attn 3's interface on the CPU, against plain torch and those of flash-attn 2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError, use_checks
from cute_flash.integrations import flash_attn as fa2
from cute_flash.integrations import flash_attn_3 as fa3
from cute_flash.integrations.flash_attn_tokens import UsedQueries
from tests.fakes.cuda import claiming_cuda
from tests.integrations.plain import assert_signature, plain, plain_batch

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
    "flash_attn_combine": (["out_partial", "lse_partial"], {"out": None, "out_dtype": None}),
    "get_scheduler_metadata": (
        ["batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "cache_seqlens"],
        {
            "qkv_dtype": torch.bfloat16, "headdim_v": None, "cu_seqlens_q": None, "cu_seqlens_k_new": None,
            "cache_leftpad": None, "page_size": None, "max_seqlen_k_new": 0, "causal": False, "window_size": (-1, -1),
            "attention_chunk": 0, "has_softcap": False, "num_splits": 0, "pack_gqa": None, "sm_margin": 0,
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


@pytest.mark.parametrize("paged", [False, True])
def test_unused_queries(paged: bool) -> None:
    """seqused_q: the mask is aligned to the last used query; results and gradients of other queries are 0."""
    q, k, v = (x.flatten(0, 1) for x in qkv())
    q = torch.cat((q, q[:3])).requires_grad_()  # padding after the last sequence
    cu_q, cu_k = torch.tensor([0, 9, 9, 26], dtype=torch.int32), torch.tensor([0, 17, 20, 34], dtype=torch.int32)
    used_q, used_k = torch.tensor([4, 0, 17], dtype=torch.int32), torch.tensor([12, 3, 14], dtype=torch.int32)
    kv, options = (k, v), {"seqused_k": used_k}
    if paged:
        options["page_table"] = torch.arange(34).view(2, 17).int()[[0, 1, 1]]
        options["seqused_k"] = used_k = torch.tensor([12, 3, 14], dtype=torch.int32)
        kv, cu_k = (k[:, None], v[:, None]), torch.tensor([0, 17, 17, 34], dtype=torch.int32)
    out, lse = fa3.flash_attn_varlen_func(
        q, *kv, cu_q, None if paged else cu_k, 17, 17, used_q, causal=True, window_size=(6, 0), num_splits=3,
        return_attn_probs=True, **options,
    )  # fmt: skip
    is_used = torch.zeros(29, dtype=torch.bool)
    for b, (begin, number) in enumerate(((0, 4), (9, 0), (9, 17))):
        rows, first = slice(begin, begin + number), int(cu_k[1 if paged and b == 1 else b])
        keys, values = (x[first : first + int(used_k[b])] for x in (k, v))
        expected, expected_lse = plain(q[rows], keys, values, window=(6, 0))
        torch.testing.assert_close(out[rows].double(), expected, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(lse[:, rows].double(), expected_lse, rtol=2e-4, atol=2e-5)
        is_used[rows] = True
    assert not out[~is_used].any() and (lse[:, ~is_used] == -torch.inf).all()
    if not paged:
        (dq,) = torch.autograd.grad(out.sum(), q)
        assert not dq[~is_used].any() and dq[:4].any() and dq[9:26].any()
    with pytest.raises(ValueError, match="seqused_q has 2 lengths: expected 3"):
        fa3.flash_attn_varlen_func(q, *kv, cu_q, cu_k, 17, 17, used_q[:2], **options)
    for wrong in (18, -1):
        used_q[2] = wrong
        message = rf"seqused_q\[2\]={wrong}: sequence 2 has 17 queries, use 0 to 17"
        with pytest.raises(ValueError, match=message):
            fa3.flash_attn_varlen_func(q, *kv, cu_q, cu_k, 17, 17, used_q, **options)
        # On CUDA the host reads no length, and the number is clamped; the checked mode reads it.
        with claiming_cuda():
            assert UsedQueries.of(q, cu_q, used_q).cu_seqlens.tolist() == [0, 4, 4, 4 + min(max(wrong, 0), 17)]
            with use_checks(), pytest.raises(ValueError, match=message):
                UsedQueries.of(q, cu_q, used_q)


@pytest.mark.parametrize("is_varlen", [False, True])
def test_combine(is_varlen: bool) -> None:
    """Parts of the keys are merged; the output of a part without keys is not read."""
    q, k, v = qkv()
    parts = [fa3.flash_attn_func(q, k[:, keys], v[:, keys], return_attn_probs=True)
             for keys in (slice(0, 3), slice(3, 4), slice(4, 17), slice(0, 2))]  # fmt: skip
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    outs[3], lses[3] = torch.nan, -torch.inf
    # As flash-attn's kernels write them: heads first in memory.
    lses = lses.transpose(2, 3)
    if is_varlen:
        outs, lses = outs.flatten(1, 2), lses.flatten(1, 2)
    out, lse = fa3.flash_attn_combine(outs, lses)
    expected, expected_lse = plain_batch(q, k, v)
    torch.testing.assert_close(out.view_as(expected).double(), expected, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(lse.view(2, 13, 4).transpose(1, 2).double(), expected_lse, rtol=2e-4, atol=2e-5)
    target = torch.empty_like(out, dtype=torch.bfloat16)
    for options in ({"out_dtype": torch.bfloat16}, {"out": target}, {"out": target, "out_dtype": torch.bfloat16}):
        found, _ = fa3.flash_attn_combine(outs, lses, **options)
        assert torch.equal(found, out.bfloat16()) and (found is target) == ("out" in options)
    empty, empty_lse = fa3.flash_attn_combine(outs[3:], lses[3:])
    assert not empty.any() and (empty_lse == -torch.inf).all()
    with pytest.raises(ValueError, match=r"lse_partial has .*: expected \(num_splits, B, S, H, D\) and"):
        fa3.flash_attn_combine(outs, lses.mT)
    with pytest.raises(ValueError, match=r"out is torch.bfloat16 of shape .*: expected torch.float32 of"):
        fa3.flash_attn_combine(outs, lses, target, torch.float32)


def test_scheduler_metadata() -> None:
    """It is accepted, and has no effect."""
    q, k, v = qkv()
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    metadata = fa3.get_scheduler_metadata(2, 13, 17, 4, 2, 20, lengths, page_size=None, num_splits=3, causal=True)
    assert metadata.dtype == torch.int32 and metadata.numel() == 0
    call: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    expected = fa3.flash_attn_with_kvcache(q, k, v, **call)
    for num_splits in (0, 1, 3, 100, -1, 10**6):
        found = fa3.flash_attn_with_kvcache(q, k, v, **call, scheduler_metadata=metadata, num_splits=num_splits)
        assert torch.equal(found, expected)


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
