"""The cache format `fp8_ds_mla` of vLLM: rows of 656 bytes for the 576 columns of a latent cache (DeepSeek's models).

    bytes    0 ... 511   512 float8_e4m3fn, the latent columns, which are also the value
           512 ... 527   4 float32 scales, one for each 128 latent columns: a column is its e4m3 number times the scale
           528 ... 655   64 bfloat16, the rotary columns

A cache with this format has dtype uint8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cute_flash.spec.decode import DecodeArgs

# The name of the format, as in vLLM's `kv_cache_dtype`.
DS_MLA = "fp8_ds_mla"
LATENT_DIM, ROTARY_DIM = 512, 64
HEAD_DIM = LATENT_DIM + ROTARY_DIM
# Latent columns that share a scale, and the number of scales.
GROUP = 128
NUM_SCALES = LATENT_DIM // GROUP
# The first bytes of the scales and of the rotary columns, and the bytes of a row.
SCALES_BYTE = LATENT_DIM
ROTARY_BYTE = SCALES_BYTE + 4 * NUM_SCALES
ROW_BYTES = ROTARY_BYTE + 2 * ROTARY_DIM


def is_ds_mla(cache: Tensor) -> bool:
    """Whether a cache has the format. `check_ds_mla` refuses all other caches of bytes."""
    return cache.dtype == torch.uint8


def head_dim_of(cache: Tensor) -> int:
    """The columns of a cache's rows."""
    return HEAD_DIM if is_ds_mla(cache) else cache.shape[-1]


def check_ds_mla(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> None:
    """Raise `ValueError` if a cache consists of bytes, and the call does not fit the format.

    `describe_decode` raises an error for tensors with a wrong number of dimensions.
    """
    if v_cache is not None and is_ds_mla(v_cache):
        raise ValueError(f"v_cache is torch.uint8: leave it out, because rows of {DS_MLA} hold keys and values")
    if not is_ds_mla(k_cache) or 0 in (q.dim(), k_cache.dim()):
        return
    if v_cache is not None:
        raise ValueError(f"v_cache with a k_cache of torch.uint8: leave it out, and give value_dim={LATENT_DIM}")
    sizes = ("bytes in a row of k_cache", "columns of q", "value_dim"), (k_cache.shape[-1], q.shape[-1], args.value_dim)
    for name, size, expected in zip(*sizes, (ROW_BYTES, HEAD_DIM, LATENT_DIM)):
        if size != expected:
            raise ValueError(
                f"k_cache is torch.uint8, with {name}: {size} instead of {expected}. Rows of {DS_MLA} have "
                f"{LATENT_DIM} float8_e4m3fn, which are the value, {NUM_SCALES} float32 scales and {ROTARY_DIM} "
                f"bfloat16; q has {HEAD_DIM} columns, and value_dim is {LATENT_DIM}"
            )
    if args.k_scale is not None:
        raise ValueError("k_scale with a k_cache of torch.uint8: leave it out, because the rows have their own scales")
