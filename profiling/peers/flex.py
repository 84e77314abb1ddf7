"""FlexAttention of torch, compiled."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from profiling.peers.peer import Forward, Library, MakeForward


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


def _load() -> MakeForward:
    # On a GPU it compiles to a Triton kernel.
    importlib.import_module("triton")
    return _make_forward


def _make_forward(q: Tensor, k: Tensor, causal: bool) -> Forward:
    attend, module = _compiled_flex(), importlib.import_module("torch.nn.attention.flex_attention")
    lengths, is_grouped = (q.shape[2], k.shape[2]), q.shape[1] != k.shape[1]
    mask = module.create_block_mask(_is_causal, None, None, *lengths, q.device) if causal else None
    return lambda q, k, v: attend(q, k, v, block_mask=mask, enable_gqa=is_grouped)


def flex_library() -> Library:
    """Compiled; making the block mask is not timed."""
    return Library("flex", _load)
