"""An attention implementation for transformers 4.57 and 5: `register()`, then `attn_implementation="cute_attention"`.

transformers calls `mask` once per forward pass and mask type, and passes its result to `attention` in each layer:

    None                   no padding; the layer's is_causal and sliding_window are the mask
    (B, Sk), bool          the keys that are not padding, together with is_causal and sliding_window
    (B, S), int            the index of each token's sequence (varlen), together with is_causal and sliding_window
    (B, 1, Sq or 1, Sk)    the complete mask, bool; or the user's own mask, bool or additive
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash.api import attn, attn_varlen
from cute_flash.errors import UnsupportedError
from cute_flash.spec.refusals import refuse

# Tensors that transformers passes to every attention function, and that do not change the result.
NOT_NEEDED = ("position_ids", "cache_position", "num_items_in_batch")
# Keywords of `attn` that transformers calls otherwise.
REFUSED = {
    "causal": ((None, False), "write is_causal"),
    "scale": ((None,), "write scaling"),
    "sinks": ((None,), "write s_aux"),
}
# Mask functions of transformers by their qualified names.
MASK_PARTS = {
    "causal_mask_function": "causal",
    "sliding_window_overlay.<locals>.inner_mask": "sliding_window",
    "packed_sequence_mask_function.<locals>.inner_mask": "varlen",
}


def register(name: str = "cute_attention") -> str:
    """Register cute_flash as an attention implementation of transformers.

    Args:
        name: The name for `attn_implementation`. It must not contain "flash", which transformers treats specially.

    Returns:
        The name.

    Raises:
        ImportError: transformers 4.57 or later is not installed.
        ValueError: The name contains "flash", or names an implementation of transformers.

    Examples:
        >>> from cute_flash.integrations.transformers import register
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register())  # doctest: +SKIP
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("cute_flash.integrations.transformers needs transformers 4.57 or later") from error
    if "flash" in name or name in ("eager", "sdpa", "flex_attention") or "|" in name:
        raise ValueError(f"name={name!r}: transformers reserves it; use a name such as 'cute_attention'")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    config: Any = None,
    cache_position: Tensor | None = None,
    **keywords: Any,
) -> Tensor | None:
    """The mask of a forward pass, for `attention` (see the module's docstring).

    transformers defines the parameters. Version 4.57 gives `cache_position`, the positions of the queries, in place of
    `q_length` and `q_offset`.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = causal_mask_function if mask_function is None else mask_function
    is_compiling = torch.compiler.is_compiling()
    if cache_position is None:
        queries: dict[str, Any] = dict(q_length=q_length, q_offset=q_offset)
    else:
        queries, q_length = dict(cache_position=cache_position), cache_position.shape[0]
        q_offset = _first_position(cache_position, kv_offset + kv_length, is_compiling)
    padding = None if attention_mask is None else attention_mask[:, -kv_length:]
    if padding is None or padding.shape[1] == kv_length:
        has_padding = padding is not None and (is_compiling or not bool(padding.all()))
        # `is_causal` aligns the mask at the last key. In a static cache, unused keys follow the last query, so the full
        # mask is needed. `local_size` of a causal mask is a window, which the layer passes, or a chunk.
        is_aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
        is_chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
        if allow_is_bidirectional_skip and local_size is None:
            return padding[:, None, None, :] if has_padding and padding is not None else None
        if allow_is_causal_skip and is_aligned and not is_chunked:
            return padding if has_padding else None
        if not is_compiling and padding is None and q_offset == 0 and q_length == kv_length:
            parts = _parts(mask_function)
            if parts.keys() - {"sliding_window"} == {"causal", "varlen"}:
                return _closure(parts["varlen"])["packed_sequence_mask"]
    return sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        local_size=local_size,
        config=config,
        **queries,
        **keywords,
    )


def _first_position(cache_position: Tensor, end: int, is_compiling: bool) -> int | Tensor:
    """The position of the first query. `end` is one more than the position of the last key.

    As in transformers' mask for SDPA, a single query is taken to be at the last key; if there are as many queries as
    keys, the first query is at the first key. Else the host reads the position, or leaves it a tensor in a compiled
    function.
    """
    count = cache_position.shape[0]
    if count in (1, end):
        return end - count
    return cache_position[0] if is_compiling else int(cache_position[0])


def _parts(function: Callable) -> dict[str, Callable]:
    """The mask functions that transformers' `and_masks` combines, by their kind in `MASK_PARTS`, or else by name."""
    is_known = getattr(function, "__module__", "") == "transformers.masking_utils"
    name = function.__qualname__ if is_known else repr(function)
    if name != "and_masks.<locals>.and_mask":
        return {MASK_PARTS.get(name, name): function}
    return {kind: part for x in _closure(function)["mask_functions"] for kind, part in _parts(x).items()}


def _closure(function: Any) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, for transformers' `AttentionInterface`. q, k and v are (B, H, S, D).

    Returns:
        (out, None); `out` is (B, Sq, H, Dv).

    Raises:
        UnsupportedError: An argument is not supported, such as output_attentions or a paged cache.
    """
    _check_keywords(keywords)
    arguments: dict[str, Any] = dict(scale=scaling, softcap=softcap, sinks=s_aux, dropout=dropout or None)
    bias, is_complete = position_bias, attention_mask is not None and attention_mask.dim() == 4
    if is_complete and attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
        if attention_mask.dtype != torch.bool:
            bias, attention_mask = attention_mask if bias is None else bias + attention_mask, None
    else:
        # Only causal layers get a mask (B, S). GPT-2 of transformers 4.57 passes is_causal=False with it, as if the
        # mask were complete.
        if is_causal is None or attention_mask is not None:
            is_causal = getattr(module, "is_causal", True)
        arguments["causal"] = is_causal
        if sliding_window is not None:
            if not arguments["causal"]:
                raise UnsupportedError(
                    f"sliding_window={sliding_window} without is_causal: give a 4-D attention_mask with the window"
                )
            arguments["window"] = sliding_window - 1, None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if is_complete or bias is not None or (attention_mask is not None and attention_mask.dtype == torch.bool):
            raise UnsupportedError(
                "cu_seq_lens_q with an attention_mask or a position_bias: leave out cu_seq_lens_q, or mask and bias"
            )
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out = attn_varlen(
            q, k, v, cu_seq_lens_q.int(), cu_seq_lens_k.int(),
            max_seqlen_q=max_length_q, max_seqlen_k=max_length_k, **arguments,
        )  # fmt: skip
        return out.unflatten(0, (query.shape[0], query.shape[2])), None
    if attention_mask is not None:
        arguments["mask_mod"] = _mask_mod(attention_mask)
    return attn(query, key, value, bias=bias, **arguments).transpose(1, 2), None


def _mask_mod(mask: Tensor) -> Callable:
    if mask.dim() == 2 and mask.dtype == torch.bool:
        return lambda b, h, q_idx, kv_idx: mask[b, kv_idx]
    if mask.dim() == 2:
        return lambda b, h, q_idx, kv_idx: mask[b, q_idx] == mask[b, kv_idx]
    is_used = [size != 1 for size in mask.shape]
    table = mask.reshape([size for size in mask.shape if size != 1] or [1])

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[tuple([x for x, used in zip((b, h, q_idx, kv_idx), is_used) if used]) or 0]

    return visible


def _check_keywords(keywords: dict[str, Any]) -> None:
    if keywords.get("output_attentions"):
        raise UnsupportedError("output_attentions=True: no kernel returns weights; use attn_implementation='eager'")
    remedy = "leave it out, or register an attention function of your own that calls cute_flash.attn"
    refuse("cute_attention", keywords, remedy, REFUSED, ignores_unknown=True)
    for name, x in keywords.items():
        if name in ("cache", "k_cache", "v_cache", "block_table") and x is not None:
            raise UnsupportedError(
                f"{name}, of continuous batching: call cute_flash.install_as_flash_attn(metadata=True) before "
                "transformers is imported, and use attn_implementation='flash_attention_2'"
            )
        if isinstance(x, Tensor) and name not in NOT_NEEDED:
            raise UnsupportedError(
                f"{name} is a tensor that cute_flash does not support: use another attn_implementation"
            )
