"""FlexAttention of torch, compiled."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from profiling.peers.peer import Forward, MakeForward, Peer


def is_causal(batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """FlexAttention's mask_mod; as many keys as queries."""
    return row >= col


def compiled_flex() -> Callable[..., Any]:
    importlib.import_module("triton")  # FlexAttention compiles to Triton kernels
    # Every function and size is a compilation; past the limit torch would silently run it uncompiled.
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(flex_attention, dynamic=False)


# For all cells of a study.
shared_compiled_flex = cache(compiled_flex)


def _make_forward(q: Tensor, k: Tensor, causal: bool) -> Forward:
    # Compilations of earlier cells are dropped.
    torch._dynamo.reset()
    attend, lengths, is_grouped = compiled_flex(), (q.shape[2], k.shape[2]), q.shape[1] != k.shape[1]
    mask = create_block_mask(is_causal, None, None, *lengths, q.device) if causal else None
    return lambda q, k, v: attend(q, k, v, block_mask=mask, enable_gqa=is_grouped)


def _load() -> MakeForward:
    importlib.import_module("triton")
    return _make_forward


def flex_peer() -> Peer:
    """Compiled; making the block mask is not timed."""
    return Peer("flex", _load)
