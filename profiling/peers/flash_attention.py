"""Members of the flash-attn family: FlashAttention-2, -3 and -4, with (B, S, H, D) tensors in and out."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiling.peers.peer import UP_TO_256, BackwardCall, Gradients, MakeForward, Peer, PrepareBackward

FA4 = "fa4"
# With this variable FlashAttention-4 keeps compiled kernels in a folder.
FA4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
# q, k and v, (B, S, H, D), and whether the mask is causal -> the output.
BshdForward = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@cache
def fa3_ops() -> Any:
    """FlashAttention-3's ops, from the folder FA3_DIR (`_C.so`) or from its Python package."""
    folder = os.environ.get("FA3_DIR")
    if folder and not (Path(folder) / "_C.so").exists():
        raise FileNotFoundError(
            f"FA3_DIR={folder} holds no _C.so; name the folder of FlashAttention-3's library, or unset it"
        )
    if folder:
        # The op links the CUDA runtime that it was built with, which may not be torch's.
        runtime = Path(folder) / "libcudart.so.12"
        if runtime.exists():
            ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        torch.ops.load_library(str(Path(folder) / "_C.so"))
    else:
        importlib.import_module("flash_attn_interface")
    return torch.ops.flash_attn_3


def fa3_forward() -> BshdForward:
    op = fa3_ops().fwd

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return op(q, k, v, softmax_scale=q.shape[-1] ** -0.5, is_causal=causal, num_splits=1)[0]

    return forward


def fa3_latent(
    q: Tensor, cache: Tensor, value_dim: int, scale: float, causal: bool, page_table: Tensor | None = None
) -> Tensor:
    """Decoding over one full cache whose first columns are the values (MLA), with automatic splits.

    FlashAttention-3 computes the scores as q kᵀ + q_v vᵀ. So its keys are the columns that are not values.
    """
    return fa3_ops().fwd(
        q[..., value_dim:], cache[..., value_dim:], cache[..., :value_dim], q_v=q[..., :value_dim],
        page_table=page_table, softmax_scale=scale, is_causal=causal, num_splits=0,
    )[0]  # fmt: skip


def fa3_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any) -> Gradients:
    """dq, dk and dv. They are passed to the op, as its package does: its return values differ between versions."""
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    fa3_ops().bwd(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **options)
    return dq, dk, dv


def fa3_backward() -> PrepareBackward:
    """The backward op: the forward op has no autograd formula."""
    forward, _ = fa3_ops().fwd, fa3_ops().bwd  # raises an error if one is missing

    def prepare(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        options = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal}
        out, lse = forward(q, k, v, num_splits=1, **options)[:2]
        return partial(fa3_gradients, dout, q, k, v, out, lse, **options)

    return prepare


def fa4_module(name: str) -> Any:
    """A module of FlashAttention-4, which reads the environment when it is imported."""
    os.environ.setdefault(FA4_CACHE, "1")
    return importlib.import_module(name)


def fa4_forward() -> BshdForward:
    func = fa4_module("flash_attn.cute").flash_attn_func
    return lambda q, k, v, causal: func(q, k, v, causal=causal)[0]


def fa2_forward() -> BshdForward:
    func = importlib.import_module("flash_attn").flash_attn_func
    return lambda q, k, v, causal: func(q, k, v, causal=causal)


def bshd_peer(
    name: str, load: Callable[[], BshdForward], load_backward: Callable[[], PrepareBackward] | None = None
) -> Peer:
    """A member of the family: its function takes (B, S, H, D) tensors and whether the mask is causal."""

    def load_forward() -> MakeForward:
        forward = load()
        return lambda q, k, causal: lambda q, k, v: forward(q, k, v, causal)

    return Peer(name, load_forward, load_backward, is_bshd=True, head_dims=UP_TO_256)
