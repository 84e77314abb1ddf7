"""Gradients of the arguments of score features: slopes, sinks, bias and captured tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.shapes import like, lse_dtype


@dataclass
class FeatureGrads:
    """Gradients of the arguments of score features, summed over blocks; None where there is none."""

    alibi: Tensor | None = None  # (B, H)
    sinks: Tensor | None = None  # (H)
    bias: Tensor | None = None
    captures: dict[int, Tensor] = field(default_factory=dict)  # by index in `AttentionArgs.captures`

    @staticmethod
    def zeros(args: AttentionArgs, batch: int, q: Tensor) -> FeatureGrads:
        """Contiguous zeros in the dtype of accumulators, for `batch` sequences."""
        heads, grads = q.shape[1], FeatureGrads()
        new: dict[str, Any] = {"dtype": lse_dtype(q.dtype), "device": q.device}
        if args.alibi is not None:
            grads.alibi = torch.zeros(batch, heads, **new)
        if args.sinks is not None:
            grads.sinks = torch.zeros(heads, **new)
        if args.bias is not None and args.bias_needs_grad:
            grads.bias = torch.zeros(args.bias.shape, **new)
        for i in args.captures_needing_grad:
            grads.captures[i] = torch.zeros(args.captures[i].shape, **new)
        return grads

    def result(self, args: AttentionArgs) -> list[Tensor | None]:
        """The gradients in the order of `AttentionArgs.differentiable`, with the dtype and strides of the arguments."""
        alibi = self.alibi
        if alibi is not None and args.alibi is not None and args.alibi.dim() == 1:
            alibi = alibi[0] if len(alibi) == 1 else alibi.sum(dim=0)
        grads = alibi, self.sinks, self.bias, *map(self.captures.get, range(len(args.captures)))
        return [
            None if x is None or grad is None else like(x, grad)
            for x, grad in zip(args.differentiable, grads, strict=True)
        ]
