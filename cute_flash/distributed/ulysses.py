"""Ulysses: an all-to-all exchanges all heads of a rank's own tokens for some heads of all tokens.

Rank i of n gets the query heads i H / n to (i + 1) H / n - 1 of the tokens of all n ranks, and the K/V heads that they
use. If there are fewer K/V heads than ranks, each one goes to n / Hkv ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cute_flash.distributed.comm import Axis, all_to_all
from cute_flash.distributed.sharding import join, split
from cute_flash.errors import UnsupportedError


def check_divides(heads: int, heads_kv: int, n: int) -> None:
    """Raise `UnsupportedError` if n ranks cannot share the heads."""
    if heads % n:
        raise UnsupportedError(
            f"method 'ulysses' with {heads} query heads on {n} ranks: the number of heads must be a multiple of the "
            "number of ranks; use method 'ring', or 'usp' with fewer ranks in the second dimension of the mesh"
        )
    if heads_kv % n and n % heads_kv:
        raise UnsupportedError(
            f"method 'ulysses' with {heads_kv} K/V heads on {n} ranks: one must be a multiple of the other; "
            "use method 'ring', or repeat K/V heads"
        )


def repeat_heads(x: Tensor, n: int) -> Tensor:
    """Repeat K/V heads if there are fewer heads than ranks."""
    heads = x.shape[1]
    return x if heads % n == 0 else x.repeat_interleave(n // heads, dim=1)


def head_slice(x: Tensor | None, axis: Axis) -> Tensor | None:
    """The part of slopes or sinks, (..., H), for the heads of this rank."""
    return x if x is None or axis.size == 1 else x.chunk(axis.size, dim=-1)[axis.index]


class ExchangeHeads(Function):
    """(B, H, S / n, ...) of each tensor to (B, H / n, S, ...), S in the order of positions; or back.

    `scatters` tells the direction. Each direction is the gradient of the other.
    """

    @staticmethod
    def forward(ctx: Any, axis: Axis, kind: str, scatters: bool, *tensors: Tensor) -> Any:
        ctx.axis, ctx.kind, ctx.scatters = axis, kind, scatters
        exchange = _scatter_heads if scatters else _gather_heads
        return tuple(exchange(x, axis, kind) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *ExchangeHeads.apply(ctx.axis, ctx.kind, not ctx.scatters, *grads)


def _scatter_heads(x: Tensor, axis: Axis, kind: str) -> Tensor:
    return join(all_to_all(torch.stack(x.chunk(axis.size, dim=1)), axis), 2, kind)


def _gather_heads(x: Tensor, axis: Axis, kind: str) -> Tensor:
    return torch.cat(all_to_all(split(x, axis.size, 2, kind), axis).unbind(0), dim=1)
