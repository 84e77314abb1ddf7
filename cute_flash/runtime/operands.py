"""What a launch makes of a call's tensors and numbers: alignment, signs, clamps, views, outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_flash.planning.plan import MAX_SEQLEN
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.problem import check_window

# A tile spans less than 2^31 elements.
MAX_ROW_STRIDE = (1 << 31) // 512
# Wider windows than any sequence are the same to the mask, and stay clear of 32-bit overflow.
MAX_WINDOW = MAX_SEQLEN
# Smallest |scale| the kernels see: at 0 a masked score would be 0 * -inf. Scores times 1e-30 are 0 to the
# softmax.
MIN_SCALE = 1e-30


# ---- alignment
# ----------------------------------------------------------------------------------------------------------


def has_aligned_strides(tensor: Tensor) -> bool:
    """Whether rows are contiguous, strides multiples of 16 bytes, and tiles within reach of 32-bit offsets.

    For (B, H, S, D) and (T, H, D).
    """
    *outer, element = tensor.stride()
    row = outer[0] if len(outer) == 2 else outer[2]
    step = ROW_ALIGN_BYTES // tensor.element_size()
    return element == 1 and not any(x % step for x in outer) and 0 <= row < MAX_ROW_STRIDE


def ensure_aligned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a contiguous copy of what the kernels cannot read in place.

    Among the latter are tensors that torch negates lazily: imaginary parts, whose elements lie two apart.
    """
    if has_aligned_strides(tensor) and tensor.data_ptr() % ROW_ALIGN_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def aligned_like(tensor: Tensor) -> Tensor:
    """Memory that kernels can store to: the tensor itself, or a contiguous one of its shape."""
    if has_aligned_strides(tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


# ---- numbers
# ----------------------------------------------------------------------------------------------------------


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernels take the maximum of the raw scores, which a negative scale would turn into a minimum: the sign
    goes to q.
    """
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} is not finite")
    return (-q if scale < 0 else q), max(abs(scale), MIN_SCALE)


def clamp_window(bound: int) -> int:
    if bound < 0:
        check_window((bound, None))
    return min(bound, MAX_WINDOW)


def scalar_operands(kinds: tuple[str, ...], scalars: tuple[float, ...]) -> list[int | float] | None:
    """Numbers that user functions captured, as ints or floats; None if there are none."""
    return [int(x) if kind == "int" else float(x) for kind, x in zip(kinds, scalars)] or None


# ---- views
# ----------------------------------------------------------------------------------------------------------


def can_pack_gqa(tensor: Tensor) -> bool:
    """Whether the rows of neighbouring heads follow each other at the stride of rows."""
    if tensor.dim() != 4:
        return False
    if tensor.shape[2] == 1:
        return tensor.stride(1) < MAX_ROW_STRIDE
    return tensor.stride(1) == tensor.shape[2] * tensor.stride(2)


def pack_gqa(tensor: Tensor, group: int) -> Tensor:
    """(B, H, S, D) as (B, H / group, group S, D)."""
    batch, heads, seqlen, width = tensor.shape
    row_stride = tensor.stride(2) if seqlen > 1 else tensor.stride(1)
    shape = (batch, heads // group, group * seqlen, width)
    return tensor.as_strided(shape, (tensor.stride(0), group * tensor.stride(1), row_stride, 1))


def capture_operands(captures: tuple[Tensor, ...]) -> list[Tensor] | None:
    """As kernels read captured tensors: bools as bytes, fp64 as fp32, a single value as one of a row."""
    return [_capture(x) for x in captures] or None


def _capture(x: Tensor) -> Tensor:
    if 0 in x.shape:
        raise ValueError(f"a captured tensor has shape {tuple(x.shape)}: there is nothing to read")
    if x.is_neg():
        # The dispatcher resolves arguments, but not in optional lists.
        x = x.resolve_neg()
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    elif x.dtype == torch.float64:
        x = x.float()
    return x if x.dim() else x.view(1)
