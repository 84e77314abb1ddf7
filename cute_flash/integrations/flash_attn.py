"""The functions of flash-attn 2.8 (names, parameters, defaults, results) on top of `attn` and `attn_decode`.

Keywords of flash-attn 3, vLLM and SGLang are accepted too. A keyword without a counterpart raises an error, unless its
value turns it off. docs/integrations/flash-attn.md lists the keywords.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cute_flash.api import attn, attn_varlen
from cute_flash.errors import UnsupportedError
from cute_flash.integrations import flash_attn_args as args
from cute_flash.integrations import flash_attn_tokens as tokens
from cute_flash.spec.values import as_bool, check_are_tensors


# fmt: off
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, return_softmax_lse: bool = False, s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None, sinks: Tensor | None = None, attention_chunk: int | None = None,
    **others: Any,
) -> Any:
    """`flash_attn_func` of flash-attn: `cute_flash.attn` on (B, S, H, D).

    Args:
        q: Queries, (B, Sq, H, D). Head dims that are not multiples of 8 are padded with zeros.
        k: Keys, (B, Sk, Hkv, D).
        v: Values, (B, Sk, Hkv, Dv).
        dropout_p: Probability that an attention weight is dropped.
        softmax_scale: Factor of q kᵀ; 1 / sqrt(D) by default.
        causal: Mask the keys after the query's own position, aligned bottom right.
        window_size: (left, right), integers of any type; a negative bound or None: unbounded.
        softcap: As for `attn`; 0 or less: no cap.
        alibi_slopes: Slopes, (H) or (B, H).
        deterministic: Compute bitwise reproducible gradients.
        return_attn_probs: Return (out, softmax_lse, None). Not with dropout: no kernel returns its mask.
        return_softmax_lse: Return (out, softmax_lse).
        s_aux: Attention sinks, (H).
        learnable_sink: Another name of s_aux.
        sinks: Another name of s_aux.
        attention_chunk: As for `attn`; 0 or None: no chunks.
        **others: Keywords of flash-attn 3, with values that turn them off.

    Returns:
        `out`, (B, Sq, H, Dv), or a tuple that starts with `out` and the LSE, (B, H, Sq).

    Raises:
        ValueError: Arguments are invalid.
        UnsupportedError: An argument has no counterpart. The message names it.

    Example:
        >>> import torch
        >>> from cute_flash.integrations.flash_attn import flash_attn_func
        >>> q, k, v = (torch.randn(1, 16, 4, 30) for _ in range(3))
        >>> out, lse, _ = flash_attn_func(q, k, v, causal=True, window_size=(7, -1), return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 16, 4, 30]), torch.Size([1, 4, 16]))
    """
    args.check_off("flash_attn_func", others)
    width = args.result_width(dropout_p, return_attn_probs, return_softmax_lse)
    args.check_qkv(q, k, v, 4)
    out, lse = attn(
        args.padded(q), args.padded(k), args.padded(v), layout="bshd", dropout=dropout_p, deterministic=deterministic,
        return_lse=True, **args.keywords(q, softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk),
        sinks=args.sinks(s_aux, learnable_sink, sinks),
    )
    return args.results(args.narrowed(out, v), lse, width)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **others: Any,
) -> Any:
    """`flash_attn_func` on qkv, (B, S, 3, H, D)."""
    q, k, v = args.unstacked("qkv", qkv, 5, 3)
    return args.forward(flash_attn_func, locals(), ("qkv",))


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **others: Any,
) -> Any:
    """`flash_attn_func` on q and kv, (B, Sk, 2, Hkv, D)."""
    k, v = args.unstacked("kv", kv, 5, 2)
    return args.forward(flash_attn_func, locals(), ("kv",))


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, *, page_table: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, return_softmax_lse: bool = False,
    s_aux: Tensor | None = None, learnable_sink: Tensor | None = None, sinks: Tensor | None = None,
    attention_chunk: int | None = None, **others: Any,
) -> Any:
    """`flash_attn_varlen_func` of flash-attn: `attn_varlen`, or `attn_decode` if k and v are pages of a block_table.

    The LSE is (H, Tq). With a block_table, k and v are (num_pages, page_size, Hkv, D), and the lengths of the keys are
    `seqused_k` or the differences of `cu_seqlens_k`; dropout and `backward()` raise `UnsupportedError`.

    With `seqused_q`, only the first seqused_q[b] queries of sequence b are used. The other ones have output 0, LSE -inf
    and gradient 0. The call gathers the used queries, and copies the output back.
    """
    args.check_off("flash_attn_varlen_func", others)
    width = args.result_width(dropout_p, return_attn_probs, return_softmax_lse)
    table = args.one_of(block_table=block_table, page_table=page_table)
    args.check_qkv(q, k, v, 3, 3 if table is None else 4)
    keywords = args.keywords(q, softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk)
    keywords["sinks"] = args.sinks(s_aux, learnable_sink, sinks)
    if table is not None and dropout_p:
        raise UnsupportedError(f"dropout_p={dropout_p} with block_table: gather the pages into k and v, or use 0.0")
    used = None
    if seqused_q is not None:
        used = tokens.UsedQueries.of(q, cu_seqlens_q, seqused_q)
        q, cu_seqlens_q = used.q, used.cu_seqlens
    if table is None:
        out, lse = attn_varlen(
            args.padded(q), args.padded(k), args.padded(v), cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q,  # type: ignore
            max_seqlen_k=max_seqlen_k, seqused_k=seqused_k, dropout=dropout_p, deterministic=deterministic,
            return_lse=True, **keywords,
        )
    else:
        if seqused_k is None:
            check_are_tensors(cu_seqlens_k=cu_seqlens_k)
            seqused_k = cu_seqlens_k.diff()  # type: ignore[union-attr]
        out, lse = args.decode(
            args.padded(q), args.padded(k), args.padded(v), cache_seqlens=seqused_k, page_table=table,
            cu_seqlens_q=cu_seqlens_q, **keywords,
        )
    if used is not None:
        out, lse = used.restored(out, lse)
    return args.results(args.narrowed(out, v), lse, width)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Any, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **others: Any,
) -> Any:
    """`flash_attn_varlen_func` on qkv, (T, 3, H, D)."""
    q, k, v = args.unstacked("qkv", qkv, 4, 3)
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen)
    return args.forward(flash_attn_varlen_func, locals(), ("qkv", "cu_seqlens", "max_seqlen", "lengths"), **lengths)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any, max_seqlen_k: Any,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **others: Any,
) -> Any:
    """`flash_attn_varlen_func` on q and kv, (Tk, 2, Hkv, D)."""
    k, v = args.unstacked("kv", kv, 4, 2)
    return args.forward(flash_attn_varlen_func, locals(), ("kv",))


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int | None = 0,
    return_softmax_lse: bool = False, *, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: Any = None, rotary_seqlens: Tensor | None = None,
    k_descale: Any = None, v_descale: Any = None, s_aux: Tensor | None = None, learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None, attention_chunk: int | None = None, **others: Any,
) -> Any:
    """`flash_attn_with_kvcache` of flash-attn: `attn_decode`. k and v are appended to the caches in place.

    Returns `out`, or (out, softmax_lse) with `return_softmax_lse`. `max_seqlen_q` has no effect. Each call
    copies a cache whose head dim is not a multiple of 8.

    `attn_decode` appends and attends in one call, unless the offsets of q and k are different tensors, or queries are
    rotated by other positions than those in the mask. Then one call appends, torch operations rotate q, and another
    call attends.
    """
    args.check_off("flash_attn_with_kvcache", others)
    table = args.one_of(block_table=block_table, page_table=page_table)
    args.check_qkv(q, k_cache, v_cache, 4 if cu_seqlens_q is None else 3, 4, ("k_cache", "v_cache"))
    # If k has no offsets of its own, it has the tokens of q.
    offsets_k = cu_seqlens_q if cu_seqlens_k_new is None and k is not None and k.dim() == 3 else cu_seqlens_k_new
    dims_k = 4 if offsets_k is None else 3
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if (x is None) != (k is None or v is None):
            raise ValueError(f"{name} alone: give both k and v, or neither")
        if x is not None and (x.dim() != dims_k or x.shape[-1] != cache.shape[-1]):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: expected {dims_k} dimensions and head dim {cache.shape[-1]}"
            )
    if cu_seqlens_k_new is not None and k is None:
        raise ValueError("cu_seqlens_k_new without k: leave it out, or give k and v")
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("k without cache_seqlens: give the number of rows of each sequence before the append")
        cache_seqlens = k_cache.shape[1] * (1 if table is None else table.shape[-1])
    starts = cache_seqlens if rotary_seqlens is None else rotary_seqlens
    rotary = tokens.Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, starts)
    if starts is not cache_seqlens and (k is None or rotary is None):
        raise ValueError("rotary_seqlens without k or without rotary_cos: leave it out")
    if rotary_seqlens is not None:
        batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        tokens.check_lengths("rotary_seqlens", rotary_seqlens, q, batch)
    caches = args.padded(k_cache), args.padded(v_cache)
    places = {
        "page_table": table, "cache_batch_idx": cache_batch_idx,
        "k_scale": args.scale("k_descale", k_descale, k_cache), "v_scale": args.scale("v_descale", v_descale, v_cache),
    }  # fmt: skip
    keywords = {
        **args.keywords(q, softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk), **places,
        "cu_seqlens_q": cu_seqlens_q, "leftpad": cache_leftpad, "num_splits": args.splits(num_splits),
        "sinks": args.sinks(s_aux, learnable_sink, sinks),
    }  # fmt: skip
    new: dict[str, Any] = {
        "k_new": None if k is None else args.padded(k), "v_new": None if v is None else args.padded(v),
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved,
    }  # fmt: skip
    is_banded = keywords["causal"] or keywords["window"] != (None, None) or bool(keywords["attention_chunk"])
    # `attn_decode` rotates a query by its position in the mask, flash-attn by `starts` plus the query's index.
    has_other_positions = rotary is not None and k is not None and (
        starts is not cache_seqlens or (is_banded and cu_seqlens_q is None and q.shape[1] != k.shape[1])
    )
    if k is not None and (has_other_positions or offsets_k is not cu_seqlens_q):
        args.check_decode(args.padded(q), *caches, cache_seqlens=cache_seqlens, **keywords)
        if rotary is not None:
            q = rotary.rotated(q, cu_seqlens_q, moves=is_banded)
            if starts is not cache_seqlens:
                new |= {"k_new": args.padded(rotary.rotated(k, offsets_k)), "rotary_cos": None, "rotary_sin": None}
        tokens.append(caches, cache_seqlens, offsets_k, **new, **places)
        cache_seqlens = cache_seqlens + (k.shape[1] if offsets_k is None else offsets_k.diff())
        new = {}
    out, lse = args.decode(args.padded(q), *caches, appended=(k, v), cache_seqlens=cache_seqlens, **new, **keywords)
    for cache, copy in zip((k_cache, v_cache), caches):
        if k is not None and copy is not cache:
            cache.detach().copy_(args.narrowed(copy, cache))
    return args.results(args.narrowed(out, v_cache), lse, 2 if as_bool("return_softmax_lse", return_softmax_lse) else 1)
# fmt: on
