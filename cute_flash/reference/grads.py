"""Gradients of the arguments of score features: slopes, sinks, bias and captured tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.shapes import like


@dataclass
class FeatureGrads:
    """Gradients of the arguments of score features, summed over blocks; None where there is none."""

    alibi: Tensor | None = None  # (B, H)
    sinks: Tensor | None = None  # (H)
    bias: Tensor | None = None
    captures: dict[int, Tensor] = field(default_factory=dict)  # by index in `AttentionArgs.captures`

    @staticmethod
    def zeros(args: AttentionArgs, batch: int, heads: int, dtype: torch.dtype) -> FeatureGrads:
        """Contiguous sums in `dtype`, which is that of the accumulators."""

        def zeros(x: Tensor, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=x.device)

        return FeatureGrads(
            alibi=None if args.alibi is None else zeros(args.alibi, batch, heads),
            sinks=None if args.sinks is None else zeros(args.sinks, heads),
            bias=zeros(args.bias, *args.bias.shape) if args.bias is not None and args.bias_needs_grad else None,
            captures={i: zeros(args.captures[i], *args.captures[i].shape) for i in args.captures_needing_grad},
        )

    def result(self, args: AttentionArgs) -> list[Tensor | None]:
        """In the order of `AttentionArgs.differentiable`, each in the dtype and strides of its argument."""
        alibi = self.alibi
        if alibi is not None and args.alibi is not None and args.alibi.dim() == 1:
            alibi = alibi[0] if len(alibi) == 1 else alibi.sum(dim=0)
        grads = alibi, self.sinks, self.bias, *map(self.captures.get, range(len(args.captures)))
        return [
            None if x is None or grad is None else like(x, grad)
            for x, grad in zip(args.differentiable, grads, strict=True)
        ]
