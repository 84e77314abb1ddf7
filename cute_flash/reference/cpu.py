"""The CPU implementation of the attention operators, for every feature, dense and varlen.

It runs on any torch device; the GPU tests run it on the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_flash.reference import tiled
from cute_flash.reference.grads import FeatureGrads
from cute_flash.reference.varlen import sequences
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.describe import check_rng, describe
from cute_flash.spec.shapes import outputs

Gradients = tuple[Tensor, Tensor, Tensor, list[Tensor | None]]


def forward(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute attention in O(S) memory.

    Args:
        q: (B, H, Sq, D), or (Tq, H, D) with `args.cu_seqlens_q`.
        k: (B, Hkv, Sk, D) or (Tk, Hkv, D).
        v: (B, Hkv, Sk, Dv) or (Tk, Hkv, Dv).
        args: All other arguments.

    Returns:
        out: (B, H, Sq, Dv), in the stride order of q, or (Tq, H, Dv).
        lse: (B, H, Sq) or (H, Tq).
        max_logit: (H), or None without `args.return_max_logit`.

    Raises:
        ValueError: `spec.describe` rejects the call, or offsets are wrong.
    """
    describe(q, k, v, args)
    check_rng(args)
    out, lse, max_logit = outputs(q, v, args)
    if max_logit is not None:
        max_logit.fill_(-torch.inf)
    if args.cu_seqlens_q is not None:
        # The loop does not write the padding after the last sequence.
        out.zero_()
        lse.fill_(-torch.inf)
    for s in sequences(q, k, args):
        qkv = s.of_queries(q), s.of_keys(k), s.of_keys(v)
        tiled.forward(*qkv, args, s.of_queries(out), s.of_rows(lse), max_logit, s.index)
    return out, lse, max_logit


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: AttentionArgs
) -> Gradients:
    """Compute dq, dk, dv and the gradients of `args.differentiable`, in its order; None for those without a gradient.

    Gradients have the dtype and the stride order of their tensors.
    """
    check_rng(args)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    batch = q.shape[0] if args.cu_seqlens_q is None else args.cu_seqlens_q.shape[0] - 1
    grads = FeatureGrads.zeros(args, batch, q)
    for s in sequences(q, k, args):
        douts = s.of_queries(dout), None if dlse is None else s.of_rows(dlse)
        saved = tiled.Saved(s.of_queries(q), s.of_keys(k), s.of_keys(v), s.of_queries(out), s.of_rows(lse))
        tiled.backward(*douts, saved, args, s.of_queries(dq), s.of_keys(dk), s.of_keys(dv), grads, s.index)
    return dq, dk, dv, grads.result(args)
