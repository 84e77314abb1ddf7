"""`AttentionArgs` from keywords of `attn`, and the CPU path as a differentiable function without an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.score_mod.block_mask import BlockMask
from cute_flash.score_mod.bound import BoundMods
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band


def call_args(
    q: Tensor,
    band: Band | None = None,
    scale: float | None = None,
    *,
    bias: Tensor | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    score_mod_bwd: Callable | None = None,
    block_mask: BlockMask | None = None,
    **fields: Any,
) -> AttentionArgs:
    """The `AttentionArgs` of keywords of `attn`. `fields` are other fields of `AttentionArgs`."""
    args = reference.plain_args(q, band, scale)._replace(**fields)
    if bias is not None:
        args = args._replace(bias=bias if bias.dim() == 4 else bias[(None,) * (4 - bias.dim())])
    mods = BoundMods.of(score_mod, mask_mod, score_mod_bwd)
    return args._replace(
        mod_graphs=mods.graphs.text,
        captures=mods.captures,
        scalars=mods.scalars,
        needs_grad=tuple(x is not None and x.requires_grad for x in (bias, *mods.captures)),
        block_mask=() if block_mask is None else block_mask.tensors,
        block_mask_sizes=() if block_mask is None else block_mask.sizes,
    )


def attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """out and LSE of `reference.forward`, with gradients from `reference.backward`."""
    return _Attention.apply(args, q, k, v, *args.differentiable)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor, *_: Tensor | None) -> Any:
        out, lse, _max_logit = reference.forward(q, k, v, args)
        ctx.args = args
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        dq, dk, dv, grads = reference.backward(dout, dlse, *ctx.saved_tensors, ctx.args)
        return None, dq, dk, dv, *grads
