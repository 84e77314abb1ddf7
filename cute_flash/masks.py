"""Ready-made mask_mods for `attn(mask_mod=...)`, and operators that combine them.

A mask is a function of (b, h, q_idx, kv_idx). The tensors and numbers that it captures are kernel arguments: a new
window size, new documents or a new tree do not recompile the kernel. `draw` shows a mask and its block mask as text or
as SVG.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_flash.score_mod.pictures import draw as draw

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
    """A query sees keys up to its position plus `offset`; an offset of Sk - Sq aligns the mask to the end."""

    def mask(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + offset

    return mask


def prefix_lm(prefix: int | Tensor) -> Mask:
    """Causal, and all queries see the first `prefix` keys. `prefix`: a length, or a tensor (B) of lengths."""
    lengths = prefix if isinstance(prefix, Tensor) and prefix.dim() == 1 else None

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) | (kv_idx < (prefix if lengths is None else lengths[b]))

    return mask


def document(ids: Tensor | None = None, *, offsets: Tensor | None = None) -> Mask:
    """A query sees only the keys of its document, in a sequence of concatenated documents.

    Args:
        ids: the document of each position, (S) or (B, S), ints.
        offsets: instead of ids, (N + 1): the first position of each document, and the end of the last one.
            Positions past the end form another document.
    """
    if offsets is not None and ids is None:
        return _documents_of_offsets(offsets)
    if ids is None or offsets is not None:
        raise ValueError("document: give either ids or offsets")
    _check_integers("ids", ids)
    if ids.dim() not in (1, 2):
        raise ValueError(f"ids have shape {tuple(ids.shape)}: expected (S) or (B, S)")
    is_per_batch = ids.dim() == 2

    def mask(b, h, q_idx, kv_idx):
        return ids[b, q_idx] == ids[b, kv_idx] if is_per_batch else ids[q_idx] == ids[kv_idx]

    return mask


def _documents_of_offsets(offsets: Tensor) -> Mask:
    _check_integers("offsets", offsets)
    if offsets.dim() != 1 or len(offsets) < 2:
        raise ValueError(f"offsets have shape {tuple(offsets.shape)}: expected (N + 1), N documents")
    if offsets[0] < 0 or (offsets.diff() < 0).any():
        raise ValueError("offsets fall, or start before 0: give the first position of each document, in order")
    end = int(offsets[-1])
    positions = torch.arange(end + 1, device=offsets.device, dtype=offsets.dtype)
    # The last of these ids is that of all positions past the end.
    ids = torch.bucketize(positions, offsets[1:].contiguous(), right=True).to(torch.int32)

    def mask(b, h, q_idx, kv_idx):
        return ids[torch.clamp(q_idx, max=end)] == ids[torch.clamp(kv_idx, max=end)]

    return mask


def _check_integers(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}: give a tensor of ints")
    if x.dtype.is_floating_point or x.dtype.is_complex:
        raise ValueError(f"{name} is {x.dtype}: give ints")


def tree(parents: Tensor, prefix: int = 0) -> Mask:
    """A tree of draft tokens: each token sees itself, its ancestors, and the first `prefix` keys.

    `parents`: (N), the parent of each node, -1 for a root; parents precede their children. Node i is query i and key
    `prefix` + i.
    """
    if parents.dim() != 1:
        raise ValueError(f"parents have shape {tuple(parents.shape)}: expected (N)")
    ancestors = _ancestors(parents.tolist()).to(parents.device)

    def mask(b, h, q_idx, kv_idx):
        # Where kv_idx < prefix the index is negative, and the loaded element does not matter.
        return (kv_idx < prefix) | ancestors[q_idx, kv_idx - prefix]

    return mask


def _ancestors(parents: list[int]) -> Tensor:
    """(N, N), true where the column's node is the row's node or one of its ancestors."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}]={parent}: expected -1 or a node before it")
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    return ancestors


def dilated(window: int, step: int) -> Mask:
    """A query sees `window` keys: every `step`-th one, counted back from its position."""
    if window < 1 or step < 1:
        raise ValueError(f"dilated: window={window} and step={step} must be positive")
    reach = window * step

    def mask(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < reach) & (distance % step == 0)

    return mask


def block_causal(block: int) -> Mask:
    """Causal by blocks of `block` positions: a query sees all keys of its block and of the blocks before it."""
    if block < 1:
        raise ValueError(f"block_causal: block={block} must be positive")

    def mask(b, h, q_idx, kv_idx):
        return kv_idx // block <= q_idx // block

    return mask


def sliding_window(window: int, num_global: int = 0) -> Mask:
    """Causal: a query sees the last `window` keys, and the first `num_global` keys of the sequence (global tokens)."""
    if window < 1 or num_global < 0:
        raise ValueError(f"sliding_window: window={window}, num_global={num_global}: at least 1 and 0")

    def mask(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & ((distance < window) | (kv_idx < num_global))

    return mask


def and_(*masks: Mask) -> Mask:
    """True where all masks are true."""
    if not masks:
        raise ValueError("and_: give at least one mask")

    def mask(b, h, q_idx, kv_idx):
        visible = masks[0](b, h, q_idx, kv_idx)
        for other in masks[1:]:
            visible = visible & other(b, h, q_idx, kv_idx)
        return visible

    return mask


def or_(*masks: Mask) -> Mask:
    """True where any mask is true."""
    if not masks:
        raise ValueError("or_: give at least one mask")

    def mask(b, h, q_idx, kv_idx):
        visible = masks[0](b, h, q_idx, kv_idx)
        for other in masks[1:]:
            visible = visible | other(b, h, q_idx, kv_idx)
        return visible

    return mask


def not_(one: Mask) -> Mask:
    """True where the mask is false."""

    def mask(b, h, q_idx, kv_idx):
        return ~one(b, h, q_idx, kv_idx)

    return mask
