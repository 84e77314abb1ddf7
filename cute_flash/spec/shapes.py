"""Shapes, strides and dtypes of outputs and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_flash.spec.args import AttentionArgs


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the LSE and of accumulators, for inputs of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def out_like(q: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty (B, H, Sq, Dv) tensor, dense, in the stride order of q; in the dtype of q by default."""
    dtype = q.dtype if dtype is None else dtype
    if q.shape[3] == v.shape[3]:
        return torch.empty_like(q, dtype=dtype)
    # Allocate in the order of the strides that `empty_like(q)` would have, then permute back. If D is 1, its stride has
    # no meaning, and fake tensors have another one, so Dv is the innermost dimension.
    like_q = torch.empty_like(q).stride()
    strides = *like_q[:3], like_q[3] if q.shape[3] != 1 else 0
    order = sorted(range(4), key=lambda i: strides[i], reverse=True)
    out = torch.empty([(*q.shape[:3], v.shape[3])[i] for i in order], dtype=dtype, device=q.device)
    return out.permute([order.index(i) for i in range(4)])


def outputs(q: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Uninitialised out, lse and max_logit (H), which is None unless `args.return_max_logit`."""
    dtype = lse_dtype(q.dtype)
    max_logit = q.new_empty(q.shape[1], dtype=dtype) if args.return_max_logit else None
    if args.cu_seqlens_q is None:
        return out_like(q, v, args.out_dtype(q)), q.new_empty(q.shape[:3], dtype=dtype), max_logit
    total, heads, _ = q.shape
    out = q.new_empty(total, heads, v.shape[2], dtype=args.out_dtype(q))
    return out, q.new_empty(heads, total, dtype=dtype), max_logit


def like(x: Tensor, grad: Tensor) -> Tensor:
    """Convert a gradient to the dtype and the stride order of x."""
    if x.dtype == grad.dtype and x.is_contiguous() and grad.is_contiguous():
        return grad
    return torch.empty_like(x).copy_(grad)
