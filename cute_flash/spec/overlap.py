"""Refuses an append to K/V caches whose rows overlap in memory: the call would write one row into another.

With a page table or `cache_batch_idx`, pages may overlap each other, because a call may use only some of them.
transformers, for example, gives K and V as views of one tensor, V one page after K, and tables of even pages.
"""

from __future__ import annotations

from torch import Tensor

from cute_flash.spec.decode import DecodeArgs


def check_append(k_cache: Tensor, v_cache: Tensor, args: DecodeArgs) -> None:
    """Raise `ValueError` if the call appends, and rows of the caches overlap. No element is read."""
    if args.k_new is None:
        return
    # Along dimension 0, the caller chooses the pages or sequences of the call.
    first = 0 if args.page_table is None and args.cache_batch_idx is None else 1
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if _has_overlapping_rows(cache, first):
            raise ValueError(
                f"k_new with a {name} of shape {tuple(cache.shape)} and strides {tuple(cache.stride())}, whose rows "
                f"overlap in memory: give every row its own memory, such as {name}.contiguous()"
            )
    if _overlap(k_cache, v_cache, first):
        raise ValueError("k_new with a k_cache and a v_cache that overlap in memory: give each cache its own memory")


def _outer_dims(x: Tensor, first: int) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions from `first` to the heads, by stride; those of size 1 are left out."""
    return sorted((stride, size) for stride, size in zip(x.stride()[first:-1], x.shape[first:-1]) if size > 1)


def _has_overlapping_rows(x: Tensor, first: int) -> bool:
    extent = x.shape[-1]  # elements from the first to the last of the dimensions so far
    for stride, size in _outer_dims(x, first):
        if stride < extent:
            return x.numel() > 0
        extent += stride * (size - 1)
    return x.shape[0] > 1 and x.stride(0) == 0 and x.numel() > 0


def _overlap(k_cache: Tensor, v_cache: Tensor, first: int) -> bool:
    """Whether a row of k_cache overlaps one of v_cache. Caches of different strides: only if they begin together."""
    if not (k_cache.numel() and v_cache.numel() and k_cache.data_ptr() and v_cache.data_ptr()):
        return False
    distance = (v_cache.data_ptr() - k_cache.data_ptr()) // k_cache.element_size()
    dims = _outer_dims(k_cache, first)
    if dims != _outer_dims(v_cache, first):
        return distance == 0
    return _rows_meet(distance, dims, k_cache.shape[-1], v_cache.shape[-1])


def _rows_meet(distance: int, dims: list[tuple[int, int]], width_k: int, width_v: int) -> bool:
    """Whether a row of k_cache and a row of v_cache overlap, whose first rows are `distance` elements apart."""
    if not dims:
        return -width_v < distance < width_k
    *inner, (stride, size) = dims
    # As far as the inner dimensions can move a row.
    reach = sum(s * (n - 1) for s, n in inner) + max(width_k, width_v)
    nearest, farthest = -((reach - distance) // stride), (distance + reach) // stride
    steps = range(max(nearest, 1 - size), min(farthest, size - 1) + 1)
    return any(_rows_meet(distance - i * stride, inner, width_k, width_v) for i in steps)
