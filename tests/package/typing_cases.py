"""The types of results, as `make lint` checks them: mypy reports an `ignore` that hides no error. Not imported."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from typing_extensions import assert_type

import cute_flash

x = torch.empty(1)
flag = bool(x)
assert_type(cute_flash.attn(x, x, x), Tensor)
assert_type(cute_flash.attn(x, x, x, causal=True, window=(3, None), bias=x, layout="bshd", return_lse=False), Tensor)
assert_type(cute_flash.attn(x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cute_flash.attn(x, x, x, return_max_logit=True, softcap=3.0), tuple[Tensor, Tensor])
assert_type(cute_flash.attn(x, x, x, return_lse=True, return_max_logit=True), tuple[Tensor, Tensor, Tensor])
assert_type(cute_flash.attn(x, x, x, return_lse=flag), Tensor | tuple[Tensor, ...])
assert_type(cute_flash.attn_varlen(x, x, x, x, x, max_seqlen_q=3), Tensor)
assert_type(cute_flash.attn_varlen(x, x, x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cute_flash.attn_varlen(x, x, x, x, x, return_max_logit=True), tuple[Tensor, Tensor])
both = cute_flash.attn_varlen(x, x, x, x, x, return_lse=True, return_max_logit=True)
assert_type(both, tuple[Tensor, Tensor, Tensor])
assert_type(cute_flash.attn_nested(x, x, x, dropout=0.1), Tensor)
assert_type(cute_flash.attn_nested(x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cute_flash.attn_nested(x, x, x, return_max_logit=True), tuple[Tensor, Tensor])
assert_type(cute_flash.attn_decode(x, x, x, cache_seqlens=3, k_scale=0.5), Tensor)
assert_type(cute_flash.attn_decode(x, x, x, cache_seqlens=x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cute_flash.attn_decode(x, x, x, cache_seqlens=x, return_lse=flag), Tensor | tuple[Tensor, Tensor])
assert_type(cute_flash.attn_decode(x, x, value_dim=512, scale=0.1, cache_seqlens=x, return_lse=False), Tensor)
assert_type(cute_flash.attn_decode(x, x, value_dim=512, cache_seqlens=x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cute_flash.flex_attention(x, x, x, None, None, 0.5, enable_gqa=True), Tensor)
assert_type(cute_flash.flex_attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
assert_type(cute_flash.flex_attention(x, x, x, return_aux=AuxRequest(lse=True)), tuple[Tensor, AuxOutput])
assert_type(cute_flash.merge([x], [x]), tuple[Tensor, Tensor])
assert_type(cute_flash.BlockMask.of(cute_flash.masks.causal(), (1, 1, 8, 8)), cute_flash.BlockMask)
cute_flash.attn(x, x, x, causal="yes")  # type: ignore[call-overload]
cute_flash.attn(x, x, x, casual=True)  # type: ignore[call-overload]
cute_flash.attn(x, x, x, layout="sbhd")  # type: ignore[call-overload]
cute_flash.attn_varlen(x, x, x, x, x, layout="bshd")  # type: ignore[call-overload]
cute_flash.attn_decode(x, x, x, cache_seqlens=x, kv_layout="NHD")  # type: ignore[call-overload]
cute_flash.attn_decode(x, x, x)  # type: ignore[call-overload]
cute_flash.attn_decode(x, x, cache_seqlens=x)  # type: ignore[call-overload]
cute_flash.attn_decode(x, x, x, cache_seqlens=x, value_dim=8)  # type: ignore[call-overload]
cute_flash.attn_decode(x, x, x, cache_seqlens=x, dropout=0.1)  # type: ignore[call-overload]
missing = cute_flash.attention  # type: ignore[attr-defined]
