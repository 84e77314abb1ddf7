"""FlexAttention of torch, compiled."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from profiling.peers.peer import BackwardCall, Call, Forward, missing, through_autograd


def _is_causal(batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """FlexAttention's mask_mod; as many keys as queries."""
    return row >= col


def _compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention compiled for the shapes of one cell.

    Compilations of earlier cells are dropped, because torch runs a function uncompiled after eight recompilations.
    """
    flex_attention = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True)
class Flex:
    """FlexAttention of torch, compiled; making the block mask is not timed."""

    name: str = "flex"
    is_ours: ClassVar[bool] = False
    is_bshd: ClassVar[bool] = False

    def available(self, direction: str = "fwd") -> str | None:
        # On a GPU it compiles to a Triton kernel.
        return missing(lambda: importlib.import_module("triton"))

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        forward = self._forward(q, k, causal)
        return lambda: forward(q, k, v)

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        return through_autograd(self._forward(q, k, causal), (q, k, v), dout)

    def _forward(self, q: Tensor, k: Tensor, causal: bool) -> Forward:
        flex, module = _compiled_flex(), importlib.import_module("torch.nn.attention.flex_attention")
        lengths, is_grouped = (q.shape[2], k.shape[2]), q.shape[1] != k.shape[1]
        mask = module.create_block_mask(_is_causal, None, None, *lengths, q.device) if causal else None
        return lambda q, k, v: flex(q, k, v, block_mask=mask, enable_gqa=is_grouped)
