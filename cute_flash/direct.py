"""Differentiable calls on CUDA without the dispatcher.

An operator's autograd takes every argument apart and puts it together again, on its way there and back: most
of what the host does for a short call. Where `ops.is_direct`, this does what it does: the same functions
compute, and the same is kept for the same gradients.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class Direct(Function):
    """A call of the operator of `module`: `ops`, `general` or `custom`."""

    @staticmethod
    def forward(ctx: Any, module: Any, how: tuple, *tensors: Tensor | None) -> Any:
        """`how`: what the operator takes after q, k and v. `tensors`: these, and all of `how` that may have a
        gradient, in the order of `module.gradients`.
        """
        ctx.module = module
        output = module.fwd_cuda(*tensors[:3], *how)
        module.keep(ctx, output, *tensors[:3], *how)
        return output

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> Any:
        return None, None, *ctx.module.gradients(ctx, *douts)
