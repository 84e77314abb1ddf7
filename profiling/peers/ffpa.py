"""FFPA, a library for head dims above 256, through its CuTe DSL backend."""

from __future__ import annotations

import importlib
from functools import partial

from torch import Tensor

from profiling.peers.peer import Forward, MakeForward, Peer

# Narrower heads, and wider ones, would silently run torch's SDPA, or raise an error.
HEAD_DIMS = range(320, 1025)


def _load() -> MakeForward:
    ffpa = importlib.import_module("ffpa_attn")
    backend = ffpa.CuTeDSLBackend()

    def make(q: Tensor, k: Tensor, causal: bool) -> Forward:
        is_grouped = q.shape[1] != k.shape[1]
        return partial(ffpa.ffpa_attn_func, is_causal=causal, enable_gqa=is_grouped, backend=backend)

    return make


def ffpa_peer() -> Peer:
    """Its kernels read (B, S, H, D) memory, as views (B, H, S, D); it copies tensors in another order."""
    return Peer("ffpa", _load, head_dims=HEAD_DIMS)
