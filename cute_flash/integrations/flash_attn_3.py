"""The functions of flash-attn 3's `flash_attn_interface` (names, parameters, defaults, results).

They call the functions of `integrations.flash_attn`. Calls that return the LSE return (out, softmax_lse).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cute_flash.integrations import flash_attn
from cute_flash.integrations import flash_attn_args as args
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
# fmt: on


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
