"""Shapes, strides and types of outputs and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_flash.spec.args import AttentionArgs


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def out_like(q: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(B, H, Sq, Dv), dense, in the order of q's strides; in the dtype of q by default."""
    dtype = q.dtype if dtype is None else dtype
    if q.shape[3] == v.shape[3]:
        return torch.empty_like(q, dtype=dtype)
    # A tensor like q tells the order; the last dimension changes its size in it.
    like_q = torch.empty_like(q).stride()
    order = sorted(range(4), key=lambda i: like_q[i], reverse=True)
    out = torch.empty([(*q.shape[:3], v.shape[3])[i] for i in order], dtype=dtype, device=q.device)
    return out.permute([order.index(i) for i in range(4)])


def lse_like(q: Tensor) -> Tensor:
    """(B, H, Sq), contiguous."""
    return torch.empty(q.shape[:3], dtype=lse_dtype(q.dtype), device=q.device)


def outputs(q: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and, if the call asks for it, max_logit (H), uninitialised."""
    most = q.new_empty(q.shape[1], dtype=lse_dtype(q.dtype)) if args.return_max_logit else None
    if args.cu_seqlens_q is None:
        return out_like(q, v, args.out_dtype(q)), lse_like(q), most
    total, heads, _ = q.shape
    out = q.new_empty(total, heads, v.shape[2], dtype=args.out_dtype(q))
    return out, q.new_empty(heads, total, dtype=lse_dtype(q.dtype)), most


def like(x: Tensor, grad: Tensor) -> Tensor:
    """A gradient in the dtype of x and in the order of its strides."""
    if x.dtype == grad.dtype and x.is_contiguous() and grad.is_contiguous():
        return grad
    return torch.empty_like(x).copy_(grad)
