"""TypedDicts of the keywords of `attn`, `attn_varlen` and `attn_decode`, for their overloads.

`return_lse` and `return_max_logit` are missing: they decide the type of the result, so each overload names them.
`cache_seqlens` of `attn_decode` is missing, because it is required, and `value_dim`, because it replaces `v_cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypedDict

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    from cute_flash.score_mod.block_mask import BlockMask


class SharedKeywords(TypedDict, total=False):
    """Keywords of `attn`, `attn_varlen` and `attn_nested`."""

    causal: bool
    window: tuple[int | None, int | None]
    attention_chunk: int | None
    scale: float | None
    deterministic: bool
    softcap: float | None
    alibi: Tensor | None
    sinks: Tensor | None
    dropout: float | None
    out_dtype: torch.dtype | None
    batch_invariant: bool
    bias: Tensor | None
    score_mod: Callable | None
    mask_mod: Callable | None
    score_mod_bwd: Callable | None


class AttnKeywords(SharedKeywords, total=False):
    """Keywords of `attn`."""

    layout: Literal["bhsd", "bshd"]
    block_mask: BlockMask | TorchBlockMask | None


class VarlenKeywords(SharedKeywords, total=False):
    """Keywords of `attn_varlen` and `attn_nested`."""

    max_seqlen_q: int | Tensor | None
    max_seqlen_k: int | Tensor | None
    seqused_k: Tensor | None


class DecodeKeywords(TypedDict, total=False):
    """Keywords of `attn_decode`."""

    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    leftpad: Tensor | None
    k_new: Tensor | None
    v_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    cu_seqlens_q: Tensor | None
    causal: bool
    window: tuple[int | None, int | None]
    attention_chunk: int | None
    softcap: float | None
    alibi: Tensor | None
    sinks: Tensor | None
    scale: float | None
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None
    kv_layout: Literal["nhd", "hnd"]
    num_splits: int | None
    out: Tensor | None
