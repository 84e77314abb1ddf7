"""Calls of `attn_decode` with `value_dim`: one cache, whose first columns are the values (MLA).

DeepSeek's models cache one row of 576 numbers for each token, for all heads: 512 that were compressed, and 64 that are
rotated. Queries are multiplied into the space of these rows before the call, so the row is the key of every head, and
its first 512 numbers are the value.

Such a cache may have the format `fp8_ds_mla` (`spec/ds_mla.py`).

With a page table for each query, (B, T, max_pages), every query sees the rows of its own table, as in DeepSeek's sparse
attention. These rows have no positions, so masks by position are excluded. Pages -1 have no rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.spec.ds_mla import head_dim_of
from cute_flash.spec.problem import HEAD_DIM_STEP

if TYPE_CHECKING:
    from cute_flash.spec.decode import DecodeArgs

# The widest rows and values that the CUDA kernel takes.
MAX_LATENT_DIM, MAX_VALUE_DIM = 576, 512

# Arguments that a call with value_dim excludes, and what to do instead.
_EXCLUDED = {
    "v_new": "leave it out, because the rows of k_new hold the values",
    "v_scale": "leave it out, because k_scale is the scale of the whole row",
}
# The same of a call with a page table for each query.
_NO_POSITIONS = "leave it out, because the rows of such a table have no positions"
_EXCLUDED_WITH_TABLES = {
    "window_left": _NO_POSITIONS,
    "attention_chunk": _NO_POSITIONS,
    "alibi": _NO_POSITIONS,
    "leftpad": "leave it out, and set the entries of pages to skip to -1",
    "cache_batch_idx": "leave it out, because the tables name the pages",
    "cu_seqlens_q": "give q as (B, T, H, D)",
    "k_new": "append in a call before",
}


def has_query_tables(args: DecodeArgs) -> bool:
    """Whether the call has a page table for each query."""
    return args.page_table is not None and args.page_table.dim() == 3


def check_latent(k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs, device: str) -> None:
    """Check the arguments that `value_dim` requires or excludes.

    Raises:
        ValueError: Arguments contradict each other.
        UnsupportedError: The device has no kernel for the call.
    """
    if args.value_dim is None:
        if v_cache is None:
            raise ValueError("no v_cache: give v_cache, or value_dim if the values are the first columns of k_cache")
        if has_query_tables(args):
            raise UnsupportedError(
                f"page_table has shape {tuple(args.page_table.shape)}: a table for each query needs value_dim"  # type: ignore[union-attr]
            )
        return
    if v_cache is not None:
        raise ValueError(f"v_cache with value_dim={args.value_dim}: leave out v_cache, or value_dim if V is not in K")
    for name, remedy in _EXCLUDED.items():
        if getattr(args, name) is not None:
            raise ValueError(f"{name} with value_dim={args.value_dim}: {remedy}")
    # `describe_decode` raises an error for a cache that is not 4-D.
    if k_cache.dim() == 4 and not 1 <= args.value_dim <= head_dim_of(k_cache):
        raise ValueError(
            f"value_dim={args.value_dim}: give a number of columns from 1 to {head_dim_of(k_cache)}, the head dim"
        )
    if args.rotary_cos is not None or args.rotary_sin is not None:
        raise UnsupportedError(
            f"rotary_cos with value_dim={args.value_dim}: rotate the last columns of q and k_new before the call"
        )
    if args.page_table is not None and args.page_table.dim() not in (2, 3):
        raise ValueError(
            f"page_table has shape {tuple(args.page_table.shape)}: expected (B, max_pages) or (B, T, max_pages)"
        )
    if has_query_tables(args):
        _check_tables(args)
    if device == "cuda" and k_cache.dim() == 4:
        _check_kernel(k_cache, args)


def _check_kernel(k_cache: Tensor, args: DecodeArgs) -> None:
    """Raise `UnsupportedError` if the CUDA kernel does not take the widths or the dtype."""
    widths = (("head_dim", head_dim_of(k_cache), MAX_LATENT_DIM), ("value_dim", args.value_dim, MAX_VALUE_DIM))
    for name, width, most in widths:
        if width is not None and (width % HEAD_DIM_STEP or width > most):
            raise UnsupportedError(
                f"{name}={width} with one cache on cuda: kernels take multiples of {HEAD_DIM_STEP} up to {most}; pad "
                "the columns of q and the cache with zeros"
            )


def _check_tables(args: DecodeArgs) -> None:
    for name, remedy in _EXCLUDED_WITH_TABLES.items():
        if getattr(args, name) is not None:
            raise ValueError(f"{name.removesuffix('_left')} with a page table for each query: {remedy}")
    if args.window_right not in (None, 0):
        raise ValueError(f"window with a page table for each query: {_NO_POSITIONS}")
