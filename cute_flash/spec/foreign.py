"""Keywords of other libraries in calls of `attn` and the like: errors that name the keyword to use.

`attn`, `attn_varlen` and `attn_decode` have the parameters `*extra` and `**foreign`, so that wrong calls reach
`refuse_foreign` instead of ending in Python's `TypeError`. `without_foreign` leaves both parameters out of the
signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import BoundArguments, Parameter, signature
from typing import Any, TypeVar

from cute_flash.spec.keywords import AttnKeywords, DecodeKeywords, VarlenKeywords

Function = TypeVar("Function", bound=Callable)

_SCALE, _ALIBI, _SINKS, _LSE = "write scale=", "write alibi=", "write sinks=", "write return_lse=True"
_WINDOW = "write window=(left, right), with None instead of -1 for an unbounded side"
_CAUSAL = "write causal=; if Sq != Sk, it aligns the mask at the bottom right"
_GQA = "leave it out, because the shapes say which query heads share a K/V head"
_SCHEDULE = "leave it out, because tiles and schedules are chosen automatically"
_SHARED = {
    "softmax_scale": _SCALE,
    "sm_scale": _SCALE,
    "window_size": _WINDOW,
    "alibi_slopes": _ALIBI,
    "learnable_sink": _SINKS,
    "s_aux": _SINKS,
    "return_attn_probs": _LSE,
    "return_softmax_lse": _LSE,
    "enable_gqa": _GQA,
    "pack_gqa": _SCHEDULE,
    "sm_margin": _SCHEDULE,
    "qv": "concatenate q with qv, and k with v",
    "need_weights": "call attention_probs, which returns the weights",
}
_PAGES = "call attn_decode with page_table="
_MASK = "write mask_mod=lambda b, h, i, j: mask[i, j] for a bool mask of shape (Sq, Sk), or bias= for a float mask"
_ATTN = {
    **_SHARED,
    "attn_mask": _MASK,
    "mask": _MASK,
    "attn_bias": "write bias=",
    "is_causal": f"{_CAUSAL}, and SDPA's is_causal at the top left: for that, mask_mod=cute_flash.masks.causal()",
    "dropout_p": "write dropout=",
    "return_aux": "write return_lse=True or return_max_logit=True",
    "kernel_options": _SCHEDULE,
    "num_splits": _SCHEDULE,
    "key_padding_mask": "write mask_mod=lambda b, h, i, j: ~mask[b, j] for a bool mask (B, Sk) that is True at padding",
    "training": "write dropout= only while training",
    "page_table": _PAGES,
    "block_table": _PAGES,
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "use fp16 or bf16; attn_decode reads FP8 caches"),
}
_NESTED = "leave it out, because it follows from the NestedTensors"
_OFFSETS = "call attn_varlen, which takes q, k and v of shape (T, H, D)"
# Entry -> keyword of another library -> what to do instead.
FOREIGN: dict[str, dict[str, str]] = {
    "attn": {
        **_ATTN,
        **dict.fromkeys(
            ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "seqused_k"),
            _OFFSETS,
        ),
    },
    "attn_varlen": {
        **_ATTN,
        "layout": "leave it out, because q, k and v are (T, H, D)",
        "block_mask": "use score_mod and mask_mod, or call attn",
        "cu_seqlens": "write cu_seqlens_q= and cu_seqlens_k=",
        "max_seqlen": "write max_seqlen_q= and max_seqlen_k=, or leave it out",
    },
    "attn_nested": {
        **_ATTN,
        **dict.fromkeys(("layout", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), _NESTED),
        "block_mask": "use score_mod and mask_mod",
    },
    "attn_decode": {
        **_SHARED,
        "is_causal": _CAUSAL,
        "qv": "concatenate qv with q, and v with k in one cache, and write value_dim=",
        "head_dim_v": "write value_dim=",
        "indices": "write page_table= with a table for each query, (B, T, max_pages)",
        "k": "write k_new=",
        "v": "write v_new=",
        "block_table": "write page_table=",
        "cache_leftpad": "write leftpad=",
        "k_descale": "write k_scale=",
        "v_descale": "write v_scale=",
        "layout": "write kv_layout=",
        "q_descale": "give q in fp16 or bf16; only caches are FP8",
        **dict.fromkeys(("dropout", "dropout_p", "training"), "leave it out, because decoding has no dropout"),
        **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), "leave it out, because kernels read lengths"),
        **dict.fromkeys(
            ("bias", "attn_mask", "key_padding_mask", "score_mod", "mask_mod", "block_mask"),
            "call attn or attn_varlen, because attn_decode has only causal, window and attention_chunk",
        ),
    },
}
_RESULTS = ("return_lse", "return_max_logit")
# Entry -> its keywords.
_KEYWORDS = {
    "attn": (*AttnKeywords.__annotations__, *_RESULTS),
    "attn_varlen": (*VarlenKeywords.__annotations__, *_RESULTS),
    "attn_nested": (*VarlenKeywords.__annotations__, *_RESULTS),
    "attn_decode": (*DecodeKeywords.__annotations__, "cache_seqlens", "value_dim", "return_lse"),
}
# How similar a keyword must be to the suggested one: "dropout" is not "out", and "q_descale" is not "scale".
_CLOSE = 0.75
# Entry -> the number of its positional parameters, and the remedy for a call with more.
_POSITIONAL = {
    "attn": (3, f"all others are keywords, such as causal=True; for a mask, {_MASK}"),
    "attn_varlen": (5, "all others are keywords; leave out max_seqlen_q and max_seqlen_k, or name them"),
    "attn_decode": (3, "all others are keywords, such as k_new= and v_new="),
}


def without_foreign(function: Function) -> Function:
    """Leave `*extra` and `**foreign` out of the signature that `inspect.signature` and `help` show."""
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    shown = signature(function)
    parameters = [x for x in shown.parameters.values() if x.kind not in kinds]
    function.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def bind_keywords(function: Callable, *tensors: Any, **keywords: Any) -> BoundArguments:
    """The arguments of a call of a function with `without_foreign`, with defaults. Wrong keywords raise its error."""
    shown = signature(function)
    refuse_foreign(function.__name__, (), {name: x for name, x in keywords.items() if name not in shown.parameters})
    bound = shown.bind(*tensors, **keywords)
    bound.apply_defaults()
    return bound


def refuse_foreign(entry: str, extra: Sequence[Any], foreign: Mapping[str, Any]) -> None:
    """Raise a `TypeError` for the first foreign keyword, or for extra positional arguments."""
    for name in foreign:
        raise TypeError(unexpected_keyword(entry, name))
    if extra:
        count, remedy = _POSITIONAL[entry]
        raise TypeError(f"{entry}() takes {count} positional arguments but {count + len(extra)} were given: {remedy}")


def refuse_unknown(entry: str, keywords: Mapping[str, Any]) -> None:
    """Raise a `TypeError` for the first keyword that an entry does not have."""
    refuse_foreign(entry, (), {name: x for name, x in keywords.items() if name not in _KEYWORDS[entry]})


def unexpected_keyword(entry: str, name: str) -> str:
    """The message for a keyword that an entry does not have: that of Python, and a remedy if there is one."""
    message, function = f"{entry}() got an unexpected keyword argument {name!r}", entry.rpartition(".")[2]
    if remedy := FOREIGN.get(function, {}).get(name):
        return f"{message}: {remedy}"
    similar = get_close_matches(name, _KEYWORDS.get(function, ()), 1, _CLOSE)
    return f"{message}; did you mean {similar[0]!r}?" if similar else message
