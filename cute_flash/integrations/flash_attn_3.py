"""The functions of flash-attn 3's `flash_attn_interface` (names, parameters, defaults, results).

They call the functions of `integrations.flash_attn`. Calls that return the LSE return (out, softmax_lse).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash.integrations import flash_attn
from cute_flash.integrations import flash_attn_args as args
from cute_flash.reference.merge import merge
from cute_flash.spec.values import as_int, check_are_tensors


# fmt: off
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False, *, s_aux: Tensor | None = None, **others: Any,
) -> Any:
    """`flash_attn_func` of flash-attn 3. `return_attn_probs` returns (out, softmax_lse)."""
    return _forward(flash_attn.flash_attn_func, locals())


def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, window_size: Any = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None,
    sm_margin: int = 0, return_attn_probs: bool = False, **others: Any,
) -> Any:
    """`flash_attn_func` on qkv, (B, S, 3, H, D), or (B, S, H + 2 Hkv, D) with `num_heads_q`."""
    q, k, v = _parts(qkv, num_heads_q)
    return args.forward(flash_attn_func, locals(), ("qkv", "num_heads_q"))


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: Any,
    max_seqlen_k: Any, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False, *,
    s_aux: Tensor | None = None, **others: Any,
) -> Any:
    """`flash_attn_varlen_func` of flash-attn 3. `return_attn_probs` returns (out, softmax_lse), the LSE (H, Tq)."""
    return _forward(flash_attn.flash_attn_varlen_func, locals())


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False, *,
    s_aux: Tensor | None = None, **others: Any,
) -> Any:
    """`flash_attn_with_kvcache` of flash-attn 3. `return_softmax_lse` returns (out, softmax_lse)."""
    return args.forward(flash_attn.flash_attn_with_kvcache, locals())


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
    cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
    page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False, window_size: Any = (-1, -1),
    attention_chunk: int = 0, has_softcap: bool = False, num_splits: int = 0, pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """`get_scheduler_metadata` of flash-attn 3. Returns an empty tensor: the kernels need no metadata.

    They divide the keys among CTAs themselves, by the lengths that they read when they run.
    """
    return cache_seqlens.new_empty(0, dtype=torch.int32)
# fmt: on


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`flash_attn_combine` of flash-attn 3: merges attention over disjoint parts of the keys by `cute_flash.merge`.

    Args:
        out_partial: Outputs of the parts, (num_splits, B, S, H, D), or (num_splits, T, H, D) of varlen batches. They
            are not read where their LSE is -inf.
        lse_partial: Their log-sum-exps, (num_splits, B, S, H) or (num_splits, T, H).
        out: Receives the output.
        out_dtype: The dtype of the output; that of `out`, else that of `out_partial` by default.

    Returns:
        The output, (B, S, H, D) or (T, H, D), and the log-sum-exp over all parts, (B, S, H) or (T, H).

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    check_are_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.dim() not in (4, 5) or lse_partial.shape != out_partial.shape[:-1] or not len(out_partial):
        raise ValueError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial has {tuple(lse_partial.shape)}: "
            "expected (num_splits, B, S, H, D) and (num_splits, B, S, H), or without B"
        )
    dtype = out_dtype or (out_partial if out is None else out).dtype
    if out is not None and (out.shape != out_partial.shape[1:] or out.dtype != dtype):
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)}: expected {dtype} of {tuple(out_partial.shape[1:])}"
        )
    parts = out_partial.masked_fill((lse_partial == -math.inf)[..., None], 0.0)
    layout = "thd" if out_partial.dim() == 4 else "bshd"
    merged, lse = merge(parts, lse_partial.transpose(-1, -2), layout=layout)  # type: ignore[arg-type]
    merged = merged.to(dtype)
    return (merged if out is None else out.copy_(merged)), lse.transpose(-1, -2)


def _forward(function: Callable, arguments: dict[str, Any]) -> Any:
    """`forward`, with `return_attn_probs` as `return_softmax_lse`, which returns (out, softmax_lse)."""
    returns_lse = arguments["others"].get("return_softmax_lse") or arguments["return_attn_probs"]
    return args.forward(function, arguments, ("return_attn_probs",), return_softmax_lse=returns_lse)


def _parts(qkv: Tensor, num_heads_q: Any) -> Any:
    """q, k and v of qkv, as views."""
    check_are_tensors(qkv=qkv)
    if num_heads_q is None:
        return args.unstacked("qkv", qkv, 5, 3)
    heads = as_int("num_heads_q", num_heads_q)
    if qkv.dim() != 4 or qkv.shape[2] <= heads or (qkv.shape[2] - heads) % 2:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}: expected (B, S, {heads} + 2 Hkv, D) with num_heads_q")
    heads_kv = (qkv.shape[2] - heads) // 2
    return qkv.split((heads, heads_kv, heads_kv), 2)
