"""Converts tensors and numbers of a call to operands of kernels: alignment, signs, clamps, views."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.planning.plan import MAX_SEQLEN
from cute_flash.spec.decode import DecodeArgs, DecodeProblem
from cute_flash.spec.dropout import CALL_STRIDE, RECT_KEYS, RECT_ROWS
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.overlap import check_append

# Keeps 512 rows below 2^31 elements, because kernels compute offsets within a tile in 32 bits.
MAX_ROW_STRIDE = (1 << 31) // 512
# Bounds are clamped to the longest sequence, so that sums of positions and bounds do not overflow 32 bits.
MAX_WINDOW = MAX_SEQLEN
# The smallest scale of a kernel: with 0, a masked score would be 0 * -inf = NaN. Scores times 1e-30 have the same
# softmax as zeros.
MIN_SCALE = 1e-30


# ---- alignment
# ----------------------------------------------------------------------------------------------------------


def has_aligned_strides(tensor: Tensor) -> bool:
    """Whether kernels can access a (B, H, S, D) or (T, H, D) tensor with these strides.

    Rows must be contiguous, strides multiples of 16 bytes, and offsets within a tile must fit into 32 bits.
    """
    *outer, element = tensor.stride()
    row = outer[0] if len(outer) == 2 else outer[2]
    step = ROW_ALIGN_BYTES // tensor.element_size()
    return element == 1 and not any(x % step for x in outer) and 0 <= row < MAX_ROW_STRIDE


def ensure_aligned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a contiguous copy if kernels cannot read it in place.

    Tensors with the negative bit (torch's lazy negation) are copied too, because their elements have a stride of 2.
    """
    if has_aligned_strides(tensor) and tensor.data_ptr() % ROW_ALIGN_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def aligned_like(tensor: Tensor) -> Tensor:
    """The tensor itself, or an empty contiguous tensor of its shape if kernels cannot write it."""
    if has_aligned_strides(tensor) and tensor.data_ptr() % ROW_ALIGN_BYTES == 0:
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


# ---- numbers
# ----------------------------------------------------------------------------------------------------------


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Move the sign of the scale to q, and clamp the scale to `MIN_SCALE`.

    Kernels take the maximum of q·k before they scale it, which needs a positive scale.
    """
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} is not finite: use a finite number")
    return (-q if scale < 0 else q), max(abs(scale), MIN_SCALE)


# ---- views
# ----------------------------------------------------------------------------------------------------------


def dropout_origin_operands(origin: tuple[int, ...]) -> tuple[int, ...]:
    """The operands `registry.DROPOUT_ORIGIN`: the Philox counter words of the first row and key, and the head numbers.

    A shard begins with a complete Philox rectangle, so the words are those of `spec.dropout`.
    """
    row, key, head, heads = origin
    return row // RECT_ROWS * CALL_STRIDE, key // RECT_KEYS * (CALL_STRIDE // 2), head, heads


def can_pack_gqa(tensor: Tensor) -> bool:
    """Whether (head, row) of a (B, H, S, D) tensor can be viewed as one dimension with one stride."""
    if tensor.dim() != 4:
        return False
    if tensor.shape[2] == 1:
        return tensor.stride(1) < MAX_ROW_STRIDE
    return tensor.stride(1) == tensor.shape[2] * tensor.stride(2)


def pack_gqa(tensor: Tensor, group: int) -> Tensor:
    """A view of (B, H, S, D) as (B, H / group, group · S, D)."""
    batch, heads, seqlen, width = tensor.shape
    row_stride = tensor.stride(2) if seqlen > 1 else tensor.stride(1)
    shape = (batch, heads // group, group * seqlen, width)
    return tensor.as_strided(shape, (tensor.stride(0), group * tensor.stride(1), row_stride, 1))


# ---- K/V caches
# ----------------------------------------------------------------------------------------------------------


def check_caches(k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> None:
    """Raise `UnsupportedError` for caches that the kernel cannot address, and `ValueError` if it cannot append to them.

    Caches are never copied.
    """
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache is None:
            continue
        step = ROW_ALIGN_BYTES // cache.element_size()
        if cache.shape[-1] % step:
            raise UnsupportedError(f"{name} in FP8 with head dim {cache.shape[-1]} on cuda: use a multiple of {step}")
        strides = [stride for stride, size in zip(cache.stride()[:-1], cache.shape[:-1]) if size > 1]
        if cache.stride(-1) != 1 or any(x % step for x in strides) or cache.data_ptr() % ROW_ALIGN_BYTES:
            raise UnsupportedError(
                f"{name} with strides {tuple(cache.stride())} of {cache.element_size()}-byte elements on cuda: rows "
                f"must be contiguous and start at multiples of {ROW_ALIGN_BYTES} bytes"
            )
    check_append(k_cache, v_cache, args)


def cache_operand(x: Tensor) -> Tensor:
    """A cache, with FP8 as bytes. Strides of dimensions of size 1, which have no effect, become aligned ones."""
    x = x.view(torch.uint8) if x.element_size() == 1 else x
    step = ROW_ALIGN_BYTES // x.element_size()
    strides = x.stride()
    if any(s % step for s in strides[:-1]):
        x = x.as_strided(x.shape, (*(s if s % step == 0 else step for s in strides[:-1]), 1))
    return x


def rows_of_table(page_table: Tensor, batch_idx: Tensor) -> Tensor:
    """The rows of the page table at `batch_idx`, clamped, so that an invalid index stays within the table."""
    return page_table.index_select(0, batch_idx.clamp(0, page_table.shape[0] - 1))


def rotary_operand(x: Tensor, problem: DecodeProblem) -> Tensor:
    """A table of cosines or sines, in the dtype that the kernel reads."""
    return x.to(getattr(torch, problem.rotary_dtype)).contiguous()


def cache_scale(x: Tensor | None, heads_kv: int, device: torch.device) -> Tensor:
    """The scale of each K/V head of an FP8 cache."""
    return torch.ones(heads_kv, dtype=torch.float32, device=device) if x is None else x.float().expand(heads_kv)
