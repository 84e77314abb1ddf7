"""The calls for sequences of different lengths: packed tensors with offsets, and jagged NestedTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash import api
from cute_flash.spec.problem import UnsupportedError


def attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    return_max_logit: bool = False,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    score_mod_bwd: Callable | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`attn` on sequences that are packed one after the other.

    Args:
        q: (Tq, H, D). k, v: (Tk, Hkv, D) and (Tk, Hkv, Dv). H must be a multiple of Hkv.
        cu_seqlens_q, cu_seqlens_k: (B + 1), int32, on the device of q: where each sequence begins, from 0,
        and where the last ends. Lengths may be 0, on either side. Tokens after the last offset are padding:
        they give 0, an LSE of -inf, and gradients of 0.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, if known. A number that is too small is an
        error on the CPU, where lengths are known; a tensor is taken and not read.
        seqused_k: (B), int32: only so many keys of each sequence count; alignment is with them.
        The rest as for `attn`, each sequence by itself; alibi is (H) or (B, H). To score_mod and mask_mod,
        b is the sequence, and q_idx and kv_idx count within it.

    On CUDA lengths are read by the kernels alone: no host sync, nothing is compiled for new ones, and a
    captured graph takes those that are written into the same offsets. Offsets that are wrong give wrong
    results, within the tensors' memory. Gradients as for `attn`; with D above 128 by mma.sync.

    Returns:
        out, (Tq, H, Dv); with `return_lse` also lse, (H, Tq); with `return_max_logit` also (H).
    """
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}: give an int32 tensor of B + 1 offsets")
    left, right = api._band(causal, window)
    scale = api._default_scale(q) if scale is None else scale
    how = api._how(scale, left, right, deterministic, softcap, alibi, sinks, dropout, return_max_logit)
    how = api._invariant(how) if batch_invariant else how
    how = how._replace(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        max_seqlen_q=None if isinstance(max_seqlen_q, Tensor) else max_seqlen_q,
        max_seqlen_k=None if isinstance(max_seqlen_k, Tensor) else max_seqlen_k,
        float_out=api._wants_floats(q, out_dtype),
    )
    mods = score_mod, mask_mod, score_mod_bwd
    asked = None if mods == (None, None, None) else (None, *mods, None)
    return api._chosen(*api._general(q, k, v, how, asked), return_lse, return_max_logit)


def attn_nested(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`attn_varlen` on jagged NestedTensors, (B, H, j, D) as in torch SDPA or (B, j, H, D), all three alike.

    The output is jagged as q is, and so is the lse: (B, H, j), or (B, j, H).
    """
    order = _ragged_dim(q, "q")
    for name, x in (("k", k), ("v", v)):
        if _ragged_dim(x, name) != order:
            raise ValueError(
                f"{name} and q have their lengths in different dimensions: transpose one of them"
            )
    if k.offsets() is not v.offsets() and not torch.equal(k.offsets(), v.offsets()):
        raise ValueError("k and v have sequences of different lengths")
    Q, K, V = (x.transpose(1, 2) if order == 2 else x for x in (q, k, v))
    offsets = q.offsets()
    out, lse = attn_varlen(
        Q.values(),
        K.values(),
        V.values(),
        offsets.int(),
        k.offsets().int(),
        causal=causal,
        window=window,
        scale=scale,
        return_lse=True,
        deterministic=deterministic,
        softcap=softcap,
        alibi=alibi,
        sinks=sinks,
        dropout=dropout,
    )
    jagged = (torch.nested.nested_tensor_from_jagged(x, offsets) for x in (out, lse.transpose(0, 1)))
    out, lse = (x.transpose(1, 2) if order == 2 else x for x in jagged)
    return (out, lse) if return_lse else out


def _ragged_dim(x: Any, name: str) -> int:
    if not x.is_nested or x.layout != torch.jagged or x.dim() != 4:
        raise ValueError(f"{name}: expected a NestedTensor with layout=torch.jagged of four dimensions")
    if x.lengths() is not None:
        raise UnsupportedError(f"{name} has holes between its sequences: call contiguous() on it")
    ragged = [dim for dim, size in enumerate(x.shape) if not isinstance(size, int)]
    if ragged not in ([1], [2]):
        raise ValueError(
            f"{name} has its lengths in dimension {ragged}: expected (B, H, j, D) or (B, j, H, D)"
        )
    return ragged[0]
