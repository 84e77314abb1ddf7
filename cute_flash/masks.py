"""Masks to give to `attn(mask_mod=...)`: functions of (b, h, q_idx, kv_idx), and ways to put them together.

What they capture are tensors and numbers, which are arguments to a kernel: a window of another size, other
documents or another tree compile nothing. `draw` shows a mask and its block map, as text or as SVG.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash.tools.pictures import draw as draw

Mask = Callable[[Any, Any, Any, Any], Any]

__all__ = [
    "and_",
    "block_causal",
    "causal",
    "dilated",
    "document",
    "draw",
    "not_",
    "or_",
    "prefix_lm",
    "sliding_window",
    "tree",
]


def causal(offset: int = 0) -> Mask:
    """Keys up to the query's own position, `offset` keys further on: Sk - Sq aligns the ends."""

    def mask(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + offset

    return mask


def prefix_lm(prefix: int | Tensor) -> Mask:
    """A prefix that everybody sees, causal after it. `prefix`: its length, or (B) lengths."""
    if isinstance(prefix, Tensor) and prefix.dim() == 1:

        def of_each(b, h, q_idx, kv_idx):
            return (kv_idx <= q_idx) | (kv_idx < prefix[b])

        return of_each

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) | (kv_idx < prefix)

    return mask


def document(ids: Tensor | None = None, *, offsets: Tensor | None = None) -> Mask:
    """Documents packed one after the other, none of which sees another.

    Args:
        ids: the document of each position, (S) or (B, S), ints. Or offsets: (N + 1), where each document
        begins, from 0, and where the last ends; positions after that are one document more.
    """
    if (ids is None) == (offsets is None):
        raise ValueError("document: give either ids or offsets")
    if ids is None:
        assert offsets is not None
        if offsets.dim() != 1 or len(offsets) < 2:
            raise ValueError(f"offsets have shape {tuple(offsets.shape)}: expected (N + 1), N documents")
        ids = _ids_of(offsets)
    if ids.dim() not in (1, 2):
        raise ValueError(f"ids have shape {tuple(ids.shape)}: expected (S) or (B, S)")
    if ids.dim() == 2:

        def of_each(b, h, q_idx, kv_idx):
            return ids[b, q_idx] == ids[b, kv_idx]

        return of_each

    def mask(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    return mask


def _ids_of(offsets: Tensor) -> Tensor:
    """The document of each position, and one more for all that follow."""
    positions = torch.arange(int(offsets[-1]) + 1, device=offsets.device, dtype=offsets.dtype)
    return torch.bucketize(positions, offsets[1:].contiguous(), right=True).to(torch.int32)


def tree(parents: Tensor, prefix: int = 0) -> Mask:
    """Drafted tokens that form a tree: each sees itself, its ancestors, and `prefix` keys before all of them.

    `parents`: (N), the parent of each node, -1 for a root; nodes come after their parents. Query i and key
    `prefix` + i are node i.
    """
    if parents.dim() != 1:
        raise ValueError(f"parents have shape {tuple(parents.shape)}: expected (N)")
    above = _ancestors(parents.tolist()).to(parents.device)

    def mask(b, h, q_idx, kv_idx):
        # An index outside a captured tensor reads its nearest element, which does not count here.
        return (kv_idx < prefix) | above[q_idx, kv_idx - prefix]

    return mask


def _ancestors(parents: list[int]) -> Tensor:
    """(N, N), true where the column is the row's node itself or above it."""
    found = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}]={parent}: expected -1 or a node before it")
        if parent >= 0:
            found[node] |= found[parent]
    return found


def dilated(window: int, step: int) -> Mask:
    """Every `step`-th key, back from the query's own, `window` of them."""
    if window < 1 or step < 1:
        raise ValueError(f"dilated: window={window} and step={step} must be positive")
    reach = window * step

    def mask(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < reach) & (distance % step == 0)

    return mask


def block_causal(block: int) -> Mask:
    """Causal by blocks of positions: each sees its own block and all before it."""
    if block < 1:
        raise ValueError(f"block_causal: block={block} must be positive")

    def mask(b, h, q_idx, kv_idx):
        return kv_idx // block <= q_idx // block

    return mask


def sliding_window(window: int, num_global: int = 0) -> Mask:
    """The last `window` keys up to the query's own, and the first `num_global` of all, causal."""
    if window < 1 or num_global < 0:
        raise ValueError(f"sliding_window: window={window}, num_global={num_global}: at least 1 and 0")

    def mask(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & ((distance < window) | (kv_idx < num_global))

    return mask


def and_(*masks: Mask) -> Mask:
    """Where all of them are true."""
    if not masks:
        raise ValueError("and_: give at least one mask")

    def mask(b, h, q_idx, kv_idx):
        found = masks[0](b, h, q_idx, kv_idx)
        for other in masks[1:]:
            found = found & other(b, h, q_idx, kv_idx)
        return found

    return mask


def or_(*masks: Mask) -> Mask:
    """Where any of them is true."""
    if not masks:
        raise ValueError("or_: give at least one mask")

    def mask(b, h, q_idx, kv_idx):
        found = masks[0](b, h, q_idx, kv_idx)
        for other in masks[1:]:
            found = found | other(b, h, q_idx, kv_idx)
        return found

    return mask


def not_(one: Mask) -> Mask:
    """Where it is false."""

    def mask(b, h, q_idx, kv_idx):
        return ~one(b, h, q_idx, kv_idx)

    return mask
