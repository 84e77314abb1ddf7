"""CUDA kernels of torch's flash attention operators, for `integrations.sdpa`.

The contract of the operators:

    q, k, v     (B, H, S, D) for `_scaled_dot_product_…`; else (B, S, H, D), or (T, H, D) with cum_seq_q
    out, dq     the strides of `empty_like(q)`; dk and dv likewise
    lse         (B, H, Sq), or (H, T) with cum_seq_q; fp32
    rng_state   (2), seed and offset of dropout, for the backward: int64 with dropout, else uint64 and not initialised
    unused      (), uint64, not initialised

torch's own kernels return uint64 with dropout too. The dropout masks of the two implementations differ, so the backward
of each checks this dtype, and raises an error if the other implementation ran the forward.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_flash import ops
from cute_flash.decode import attn_decode
from cute_flash.errors import UnsupportedError
from cute_flash.integrations.flash_attn_args import padded, window
from cute_flash.runtime.rng import draw_seed
from cute_flash.spec.args import AttentionArgs, to_schema
from cute_flash.spec.family import current_family


# fmt: off
def sdpa_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:
    """`aten::_scaled_dot_product_flash_attention`."""
    args = _args(query, value, dropout_p, is_causal, scale)
    out, lse, *states = _forward(query, key, value, args, return_debug_mask)
    return out, lse, None, None, query.shape[2], key.shape[2], *states


def sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> Any:
    """`aten::_scaled_dot_product_flash_attention_backward`."""
    args = _with_rng_state(_args(query, value, dropout_p, is_causal, scale), philox_seed)
    return _backward(grad_out, query, key, value, out, logsumexp, args)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> Any:
    """`aten::_flash_attention_forward`. With a `block_table`, k and v are the pages of a K/V cache."""
    if alibi_slopes is not None:
        raise UnsupportedError("alibi_slopes: torch's backward does not get them; use cute_flash.attn(alibi=...)")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        for name, x in (("seqused_k", seqused_k), ("block_table", block_table)):
            if x is not None:
                raise UnsupportedError(
                    f"{name} with tensors that require grad: torch's backward does not get it; use torch.no_grad()"
                )
    args = _args(query, value, dropout_p, is_causal, scale, window_size_left, window_size_right)
    if block_table is not None:
        lengths = cum_seq_k.diff() if seqused_k is None and cum_seq_k is not None else seqused_k
        if cum_seq_q is None or lengths is None:
            raise ValueError("block_table needs cum_seq_q, and seqused_k or cum_seq_k")
        if dropout_p:
            raise UnsupportedError(f"dropout_p={dropout_p} with block_table: gather the pages into key and value")
        with torch.no_grad():
            out, lse = attn_decode(
                query, key, value, cache_seqlens=lengths, page_table=block_table, cu_seqlens_q=cum_seq_q, causal=False,
                window=(args.window_left, args.window_right), scale=args.scale, num_splits=num_splits or None,
                return_lse=True,
            )
        return _like(query, out), lse, *_states(query, args, return_debug_mask)
    if num_splits not in (None, 0, 1):
        raise UnsupportedError(f"num_splits={num_splits} without block_table: leave it out, or use 1")
    args = args._replace(
        cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k, seqused_k=seqused_k, batch_invariant=num_splits == 1
    )
    if cum_seq_q is not None:
        return _forward(query, key, value, args, return_debug_mask)
    if seqused_k is not None:
        raise UnsupportedError("seqused_k without cum_seq_q: give cum_seq_q and cum_seq_k, or leave it out")
    query, key, value = _transposed(query, key, value)
    out, *others = _forward(query, key, value, args, return_debug_mask)
    return out.transpose(1, 2), *others


def flash_forward_out(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, **keywords: Any,
) -> Tensor:
    """`aten::_flash_attention_forward_no_dropout_inplace`: `flash_forward`, and a copy to `out`."""
    if dropout_p:
        raise UnsupportedError(f"dropout_p={dropout_p} with out: use 0.0")
    result, lse, *_ = flash_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, is_causal, return_debug_mask, **keywords
    )
    out.copy_(result)
    return lse


def flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    """`aten::_flash_attention_backward`."""
    args = _args(query, value, dropout_p, is_causal, scale, window_size_left, window_size_right)
    args = _with_rng_state(args, rng_state)._replace(cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k)
    if cum_seq_q is not None:
        return _backward(grad_out, query, key, value, out, logsumexp, args)
    grad_out, query, key, value, out = _transposed(grad_out, query, key, value, out)
    return _transposed(*_backward(grad_out, query, key, value, out, logsumexp, args))
# fmt: on


KERNELS: dict[str, Any] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_out,
    "_flash_attention_backward": flash_backward,
}


def _args(
    query: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None,
    left: int | None = None, right: int | None = None,
) -> AttentionArgs:  # fmt: skip
    if value.shape[-1] != query.shape[-1]:
        raise UnsupportedError(
            f"value has head dim {value.shape[-1]} and query has {query.shape[-1]}: torch's flash operators need equal "
            "ones; use cute_flash.attn"
        )
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p={dropout_p}: use a probability from 0 up to, not including, 1")
    scale = (query.shape[-1] or 1) ** -0.5 if scale is None else scale
    return _cached_args(scale, *window((left, 0 if is_causal else right)), dropout_p, current_family())


@lru_cache(maxsize=1024)
def _cached_args(scale: float, left: int | None, right: int | None, dropout: float, family: str) -> AttentionArgs:
    return AttentionArgs(scale=scale, window_left=left, window_right=right, dropout=dropout, kernel_family=family)


def _with_rng_state(args: AttentionArgs, rng_state: Tensor) -> AttentionArgs:
    if not args.dropout:
        return args
    if rng_state.dtype != torch.int64:
        raise UnsupportedError(
            f"rng_state is {rng_state.dtype}: another implementation computed the forward, with another dropout mask; "
            "run forward and backward inside the same `with sdpa():`"
        )
    return args._replace(rng=rng_state)


def _forward(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, return_debug_mask: bool) -> tuple[Tensor, ...]:
    """out, lse, rng_state, unused and an empty debug mask. q, k and v are (B, H, S, D) or (T, H, D)."""
    states = _states(q, args, return_debug_mask)
    if args.dropout:
        args = args._replace(rng=states[0])
    operands = padded(q), padded(k), padded(v)
    if ops.is_direct(*operands, args):
        out, lse, _ = ops._cuda.forward(*operands, args)
    else:
        out, lse, _ = ops.attention_fwd(*operands, *to_schema(args))
    return _like(q, out), lse, *states


def _states(q: Tensor, args: AttentionArgs, return_debug_mask: bool) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and an empty debug mask."""
    if return_debug_mask:
        raise UnsupportedError("return_debug_mask=True: no kernel returns the dropout mask; use False")
    rng_state = draw_seed(q.device) if args.dropout else q.new_empty(2, dtype=torch.uint64)
    return rng_state, q.new_empty((), dtype=torch.uint64), q.new_empty(0)


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: AttentionArgs
) -> tuple[Tensor, ...]:
    gradients = ops.gradients(
        padded(grad_out), None, padded(q), padded(k), padded(v), padded(out), lse, args
    )  # fmt: skip
    return tuple(_like(x, gradient) for x, gradient in zip((q, k, v), gradients))


def _like(x: Tensor, result: Tensor) -> Tensor:
    """A result without the columns of padding, with the strides of `empty_like(x)`."""
    if x.shape == result.shape and x.is_contiguous() and result.is_contiguous():
        return result
    if x.shape == result.shape and result.stride() == torch.empty_like(x, device="meta").stride():
        return result
    return torch.empty_like(x).copy_(result[..., : x.shape[-1]])


def _transposed(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)
