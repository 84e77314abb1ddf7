"""Rows of the cache format `fp8_ds_mla` (`spec/ds_mla.py`), from and to numbers.

The scale of 128 columns is the largest of their magnitudes / 448, but at least the smallest normal fp32 number; a
column is divided by it, rounded and saturated. Both are divisions in fp32. These are the operations of vLLM's
`concat_and_cache_ds_mla`, which also skips NaN in the maximum, so the bytes are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_flash.spec.decode import FP8
from cute_flash.spec.ds_mla import GROUP, LATENT_DIM, NUM_SCALES, ROTARY_BYTE, ROTARY_DIM, SCALES_BYTE


def stored(x: Tensor) -> Tensor:
    """Rows (..., 576) as bytes, (..., 656)."""
    latent, rotary = x.float().split((LATENT_DIM, ROTARY_DIM), dim=-1)
    groups, largest = latent.unflatten(-1, (NUM_SCALES, GROUP)), torch.finfo(FP8).max
    magnitudes = groups.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=-1, keepdim=True)
    # By a tensor: on CUDA, torch divides by a number as it multiplies by the reciprocal.
    scales = (magnitudes / torch.full_like(magnitudes, largest)).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (groups / scales).clamp(-largest, largest).to(FP8)
    parts = numbers.flatten(-2), scales.flatten(-2), rotary.to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def loaded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes (..., 656) as rows (..., 576) in `dtype`, fp32 or wider."""
    numbers = rows[..., :SCALES_BYTE].contiguous().view(FP8).to(dtype)
    scales = rows[..., SCALES_BYTE:ROTARY_BYTE].contiguous().view(torch.float32).to(dtype)
    rotary = rows[..., ROTARY_BYTE:].contiguous().view(torch.bfloat16).to(dtype)
    groups = numbers.unflatten(-1, (NUM_SCALES, GROUP)) * scales[..., None]
    return torch.cat((groups.flatten(-2), rotary), dim=-1)


def rounded_queries(q: Tensor) -> Tensor:
    """Queries (..., 576) as kernels multiply them: the latent columns in fp16, as for FP8, the rotary ones in bf16."""
    latent, rotary = q.split((LATENT_DIM, ROTARY_DIM), dim=-1)
    return torch.cat((latent.to(torch.float16).to(q.dtype), rotary.to(torch.bfloat16).to(q.dtype)), dim=-1)
