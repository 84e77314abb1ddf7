"""Refuses calls that write to a tensor which overlaps another one in memory: appended rows, and `out`.

An append to K/V caches whose rows overlap would write one row into another.

With a page table or `cache_batch_idx`, pages may overlap each other, because a call may use only some of them.
transformers, for example, gives K and V as views of one tensor, V one page after K, and tables of even pages.
"""

from __future__ import annotations

from torch import Tensor

from cute_flash.spec.decode import DecodeArgs


def check_append(k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> None:
    """Raise `ValueError` if the call writes to rows that overlap others. No element is read."""
    caches = {"k_cache": k_cache} if v_cache is None else {"k_cache": k_cache, "v_cache": v_cache}
    if args.out is not None:
        _check_outside("out", args.out, caches, "give out its own memory")
    if args.k_new is None:
        return
    # Along dimension 0, the caller chooses the pages or sequences of the call.
    first = 0 if args.page_table is None and args.cache_batch_idx is None else 1
    for name, cache in caches.items():
        if _has_overlapping_rows(cache, first):
            raise ValueError(
                f"k_new with a {name} of shape {tuple(cache.shape)} and strides {tuple(cache.stride())}, whose rows "
                f"overlap in memory: give every row its own memory, such as {name}.contiguous()"
            )
    if v_cache is not None and _overlap(k_cache, v_cache, first):
        raise ValueError("k_new with a k_cache and a v_cache that overlap in memory: give each cache its own memory")
    if first == 0:
        _check_outside("k_new", args.k_new, caches, "pass k_new.clone()")
        _check_outside("v_new", args.v_new, caches, "pass v_new.clone()")


def _check_outside(name: str, x: Tensor | None, caches: dict[str, Tensor], remedy: str) -> None:
    for cache_name, cache in caches.items():
        if x is not None and _overlap(cache, x, 0):
            raise ValueError(f"{name} overlaps {cache_name} in memory: {remedy}")


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


def _overlap(a: Tensor, b: Tensor, first: int) -> bool:
    """Whether a row of a overlaps one of b. Tensors of different strides: only if they begin together."""
    if not (a.numel() and b.numel() and a.data_ptr() and b.data_ptr()):
        return False
    distance = (b.data_ptr() - a.data_ptr()) // a.element_size()
    if a.dtype != b.dtype or a.dim() != b.dim():
        return distance == 0
    sizes = list(zip(a.stride()[first:-1], b.stride()[first:-1], a.shape[first:-1], b.shape[first:-1]))
    if any(s != t for s, t, m, n in sizes if m > 1 and n > 1):
        return distance == 0
    # The stride of a dimension of size 1 has no effect, and a stride of 0 moves no row.
    strides = [(s if m > 1 else t, m, n) for s, t, m, n in sizes if m > 1 or n > 1]
    dims = sorted(dim for dim in strides if dim[0] > 0)
    return _rows_meet(distance, dims, a.shape[-1], b.shape[-1])


def _rows_meet(distance: int, dims: list[tuple[int, int, int]], width_a: int, width_b: int) -> bool:
    """Whether a row of a and a row of b overlap, whose first rows are `distance` elements apart.

    `dims` has the stride of each dimension, and its sizes in a and in b.
    """
    if not dims:
        return -width_b < distance < width_a
    *inner, (stride, size_a, size_b) = dims
    # As far as the inner dimensions can move a row.
    reach = sum(s * (max(m, n) - 1) for s, m, n in inner) + max(width_a, width_b)
    nearest, farthest = -((reach - distance) // stride), (distance + reach) // stride
    steps = range(max(nearest, 1 - size_b), min(farthest, size_a - 1) + 1)
    return any(_rows_meet(distance - i * stride, inner, width_a, width_b) for i in steps)
