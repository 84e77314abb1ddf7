"""cute_flash as the benchmark calls it, and the features of `attn` that studies measure."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profiling.peers.peer import MakeForward, Peer


def _load() -> MakeForward:
    attn = importlib.import_module("cute_flash").attn
    return lambda q, k, causal: lambda q, k, v: attn(q, k, v, causal=causal)


def _use_kernels(family: str) -> AbstractContextManager[Any]:
    return importlib.import_module("cute_flash").use_kernels(family)


def _tiles_of(gpu: str) -> AbstractContextManager[Any]:
    return importlib.import_module("profiling.measure.launches").tiles_of(gpu)


def peer_with_tiles_of(gpu: str) -> Peer:
    """`cute_flash.attn` with the tiles that another GPU takes, such as "A100"."""
    return replace(our_peer(f"cute_flash-{gpu}"), context=partial(_tiles_of, gpu))


def our_peer(name: str = "cute_flash", kernels: str = "auto") -> Peer:
    """`cute_flash.attn` with the kernels of a family; "auto": as the library chooses."""
    context = nullcontext if kernels == "auto" else partial(_use_kernels, kernels)
    return Peer(name, _load, context=context, is_ours=True)


def _later_keys(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score + 0.001 * (key - query)


def _bias(heads: int, seqlen: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(1, heads, seqlen, seqlen, generator=generator, device=device, dtype=torch.bfloat16)


# Name of a feature -> (heads, length, device) -> keyword arguments of `attn`.
OPTIONS: dict[str, Callable[[int, int, torch.device], dict[str, Any]]] = {
    "plain": lambda heads, seqlen, device: {},
    "dropout": lambda heads, seqlen, device: {"dropout": 0.1},
    "softcap": lambda heads, seqlen, device: {"softcap": 30.0},
    "alibi": lambda heads, seqlen, device: {"alibi": torch.linspace(0.5, 0.01, heads, device=device)},
    "sinks": lambda heads, seqlen, device: {"sinks": torch.zeros(heads, device=device)},
    "score_mod": lambda heads, seqlen, device: {"score_mod": _later_keys},
    "bias": lambda heads, seqlen, device: {"bias": _bias(heads, seqlen, device)},
    "bias_gradient": lambda heads, seqlen, device: {"bias": _bias(heads, seqlen, device).requires_grad_()},
    "deterministic": lambda heads, seqlen, device: {"deterministic": True},
}
