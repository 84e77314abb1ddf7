"""What the launches of both directions make of a call's tensors and numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_flash.planning import plan as planning
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem

# cp.async and 16-byte stores: rows must start at multiples of 8 elements, and a tile must span less than 2^31
# elements.
ROW_ALIGN_ELEMENTS = 8
ROW_ALIGN_BYTES = 16
MAX_ROW_STRIDE = (1 << 31) // 512
# Wider windows than any sequence are the same to the mask, and stay clear of 32-bit overflow.
MAX_WINDOW = planning.MAX_SEQLEN
# Smallest |scale| the kernels see: at 0 a masked score would be 0 * -inf. Scores times 1e-30 are 0 to the
# softmax.
MIN_SCALE = 1e-30
# Known call signatures; a program that never repeats a shape must not grow without bound.
MAX_LAUNCHES = 4096
# There is a CUDA tensor, so torch has set up CUDA: what `torch.cuda.current_device` would make sure of.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def problem_of(q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None]) -> Problem:
    """Describe a call, refusing shapes, dtypes and devices that contradict each other."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected (B, H, S, D)")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and q is {q.dtype}: they must agree")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q is on {q.device}: they must agree")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v has {tuple(v.shape)}: all but the last must agree"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k has {tuple(k.shape)}: batch and head dim must agree"
        )
    batch, heads, seqlen_q, head_dim = q.shape
    dtype = str(q.dtype).removeprefix("torch.")
    head_dim_v = None if v.shape[3] == head_dim else v.shape[3]
    return Problem(batch, heads, k.shape[1], seqlen_q, k.shape[2], head_dim, dtype, Band(*window), head_dim_v)


def described(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """All that a check of it asks about, to look up by."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def is_launchable(tensor: Tensor) -> bool:
    """Rows contiguous, strides multiples of 16 bytes, tiles within reach of 32-bit offsets."""
    batch, head, row, element = tensor.stride()
    return element == 1 and not (batch | head | row) % ROW_ALIGN_ELEMENTS and 0 <= row < MAX_ROW_STRIDE


def launchable(tensor: Tensor) -> Tensor:
    """The tensor itself, or a contiguous copy of what the kernels cannot read in place.

    Among the latter are tensors that torch negates lazily: imaginary parts, whose elements lie two apart.
    """
    if is_launchable(tensor) and tensor.data_ptr() % ROW_ALIGN_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def remember(launches: dict[tuple, Any], signature: tuple, launch: Any) -> None:
    """Keep what was prepared for a call signature, and not too many."""
    if len(launches) >= MAX_LAUNCHES:
        launches.clear()
    launches[signature] = launch
