"""Backends of `torch.nn.functional.scaled_dot_product_attention`: FlashAttention-2, cuDNN, memory-efficient, math."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiling.peers.peer import Forward, MakeForward, Peer


def _load() -> MakeForward:
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def make(q: Tensor, k: Tensor, causal: bool) -> Forward:
        is_grouped = q.shape[1] != k.shape[1]
        return lambda q, k, v: sdpa(q, k, v, is_causal=causal, enable_gqa=is_grouped)

    return make


def sdpa_peer(name: str, backend: SDPBackend, head_dims: range | None = None) -> Peer:
    """One backend, called as users call it."""
    return Peer(name, _load, context=partial(sdpa_kernel, backend), head_dims=head_dims)
