"""Ready-made mask_mods for `attn(mask_mod=...)` and `BlockMask.of`, and functions that combine or draw them.

A mask is a function of (b, h, q_idx, kv_idx) that returns whether query q_idx sees key kv_idx. Both positions count
from 0: unlike `attn(causal=True)`, these masks align the first query with the first key. Tensors and numbers of a mask
are kernel arguments: a new window size, new documents or a new tree do not recompile the kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
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
    """A query sees the keys up to its own position.

    Args:
        offset: Number of keys after its position that a query also sees. Sk - Sq aligns the last query with the last
            key, as `attn(causal=True)` does.

    Returns:
        The mask.

    Examples:
        >>> from cute_flash import masks
        >>> print(masks.draw(masks.causal(), 4, tile=(2, 2)), end="")
        causal: 4 queries x 4 keys, blocks of 2 x 2: 1 full, 2 partial, 1 empty; 62% visible
           0 +.
             ++
           2 ##+.
             ##++
    """

    def mask(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + offset

    return mask


def prefix_lm(prefix: int | Tensor) -> Mask:
    """Causal, and all queries see the first `prefix` keys.

    Args:
        prefix: The length of the prefix, or an integer tensor (B) with the length for each batch index.

    Returns:
        The mask.

    Examples:
        >>> import torch
        >>> from cute_flash import attn, masks
        >>> q, k, v = (torch.randn(2, 1, 8, 16) for _ in range(3))
        >>> out = attn(q, k, v, mask_mod=masks.prefix_lm(torch.tensor([3, 5])))
    """
    lengths = prefix if isinstance(prefix, Tensor) and prefix.dim() == 1 else None

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) | (kv_idx < (prefix if lengths is None else lengths[b]))

    return mask


def document(ids: Tensor | None = None, *, offsets: Tensor | None = None) -> Mask:
    """A query sees only the keys of its own document, in a sequence of concatenated documents.

    Give either `ids` or `offsets`.

    Args:
        ids: The document of each position, (S) or (B, S), integers.
        offsets: (N + 1), integers: the first position of each of N documents, beginning with 0, and the end of the last
            one. Positions past the end form another document.

    Returns:
        The mask.

    Raises:
        ValueError: Neither or both are given, or shape, dtype or order are wrong.

    Examples:
        >>> import torch
        >>> from cute_flash import attn, masks
        >>> q, k, v = (torch.randn(1, 1, 6, 16) for _ in range(3))
        >>> ids = torch.tensor([0, 0, 0, 0, 1, 1])
        >>> by_ids = attn(q, k, v, mask_mod=masks.document(ids))
        >>> by_offsets = attn(q, k, v, mask_mod=masks.document(offsets=torch.tensor([0, 4, 6])))
        >>> torch.equal(by_ids, by_offsets)
        True
    """
    if offsets is not None and ids is None:
        return _documents_of_offsets(offsets)
    if ids is None or offsets is not None:
        raise ValueError("document: give either ids or offsets, not both")
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
    if offsets[0] != 0 or (offsets.diff() < 0).any():
        raise ValueError(
            "offsets decrease, or do not start at 0: give the first position of each document, in ascending order"
        )
    end = int(offsets[-1])
    positions = torch.arange(end + 1, device=offsets.device, dtype=offsets.dtype)
    # The last id belongs to all positions past the end.
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
    """A tree of draft tokens, for speculative decoding: a token sees itself, its ancestors, and the prefix.

    Args:
        parents: (N), integers: the parent of each token, or -1 for a root. Parents precede their children. Token i is
            query i and key prefix + i.
        prefix: The number of keys before the tree, which all tokens see.

    Returns:
        The mask, for N queries and prefix + N keys.

    Raises:
        ValueError: `parents` has the wrong shape, or a parent does not precede its child.

    Examples:
        >>> import torch
        >>> from cute_flash import attn, masks
        >>> parents = torch.tensor([-1, 0, 0, 1])  # two branches after token 0
        >>> q, k, v = torch.randn(1, 1, 4, 16), torch.randn(1, 1, 14, 16), torch.randn(1, 1, 14, 16)
        >>> out = attn(q, k, v, mask_mod=masks.tree(parents, prefix=10))
    """
    if parents.dim() != 1:
        raise ValueError(f"parents have shape {tuple(parents.shape)}: expected (N)")
    ancestors = _ancestors(parents.tolist()).to(parents.device)

    def mask(b, h, q_idx, kv_idx):
        # If kv_idx < prefix, the index is negative; any element may be loaded, because the first operand is true.
        return (kv_idx < prefix) | ancestors[q_idx, kv_idx - prefix]

    return mask


def _ancestors(parents: list[int]) -> Tensor:
    """(N, N), true where the column's token is the row's token or one of its ancestors."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}]={parent}: expected -1, or the index of an earlier token")
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    return ancestors


def dilated(window: int, step: int) -> Mask:
    """A query sees every `step`-th key, counted back from its own position.

    Args:
        window: The number of keys that a query sees, including its own.
        step: The distance between these keys, in positions.

    Returns:
        The mask.

    Raises:
        ValueError: A number is not positive.

    Examples:
        >>> from cute_flash import masks
        >>> print(masks.draw(masks.dilated(2, 3), 6, tile=(6, 6)), end="")
        dilated: 6 queries x 6 keys, blocks of 6 x 6: 0 full, 1 partial, 0 empty; 25% visible
           0 +.....
             .+....
             ..+...
             +..+..
             .+..+.
             ..+..+
    """
    if window < 1 or step < 1:
        raise ValueError(f"dilated: window={window} and step={step} must be positive")
    reach = window * step

    def mask(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < reach) & (distance % step == 0)

    return mask


def block_causal(block: int) -> Mask:
    """Causal in units of blocks: a query sees all keys of its block and of the blocks before it.

    Args:
        block: The number of positions in a block.

    Returns:
        The mask.

    Raises:
        ValueError: `block` is not positive.

    Examples:
        >>> from cute_flash import masks
        >>> print(masks.draw(masks.block_causal(2), 4, tile=(4, 4)), end="")
        block_causal: 4 queries x 4 keys, blocks of 4 x 4: 0 full, 1 partial, 0 empty; 75% visible
           0 ++..
             ++..
             ++++
             ++++
    """
    if block < 1:
        raise ValueError(f"block_causal: block={block} must be positive")

    def mask(b, h, q_idx, kv_idx):
        return kv_idx // block <= q_idx // block

    return mask


def sliding_window(window: int, num_global: int = 0) -> Mask:
    """Causal: a query sees the last `window` keys, and the first keys of the sequence (global tokens).

    Args:
        window: The number of keys that a query sees: its own and those before it.
        num_global: The number of keys at the start of the sequence that all later queries see too.

    Returns:
        The mask.

    Raises:
        ValueError: `window` is less than 1, or `num_global` is negative.

    Examples:
        >>> from cute_flash import masks
        >>> print(masks.draw(masks.sliding_window(2, num_global=1), 5, tile=(5, 5)), end="")
        sliding_window: 5 queries x 5 keys, blocks of 5 x 5: 0 full, 1 partial, 0 empty; 48% visible
           0 +....
             ++...
             +++..
             +.++.
             +..++
    """
    if window < 1 or num_global < 0:
        raise ValueError(f"sliding_window: window={window} must be at least 1, and num_global={num_global} at least 0")

    def mask(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & ((distance < window) | (kv_idx < num_global))

    return mask


def and_(*masks: Mask) -> Mask:
    """A query sees the keys that it sees in all masks.

    Args:
        *masks: One or more mask_mods.

    Returns:
        The mask.

    Raises:
        ValueError: There is no mask.

    Examples:
        >>> import torch
        >>> from cute_flash import masks
        >>> causal_documents = masks.and_(masks.causal(), masks.document(torch.tensor([0, 0, 1, 1])))
    """
    if not masks:
        raise ValueError("and_: give at least one mask")

    def mask(b, h, q_idx, kv_idx):
        return reduce(operator.and_, (one(b, h, q_idx, kv_idx) for one in masks))

    return mask


def or_(*masks: Mask) -> Mask:
    """A query sees the keys that it sees in at least one of the masks.

    Args:
        *masks: One or more mask_mods.

    Returns:
        The mask.

    Raises:
        ValueError: There is no mask.

    Examples:
        >>> from cute_flash import masks
        >>> causal_or_prefix = masks.or_(masks.causal(), lambda b, h, q_idx, kv_idx: kv_idx < 4)
    """
    if not masks:
        raise ValueError("or_: give at least one mask")

    def mask(b, h, q_idx, kv_idx):
        return reduce(operator.or_, (one(b, h, q_idx, kv_idx) for one in masks))

    return mask


def not_(one: Mask) -> Mask:
    """The complement: a query sees the keys that it does not see with the mask `one`.

    Args:
        one: A mask_mod.

    Returns:
        The mask.

    Examples:
        >>> from cute_flash import masks
        >>> anticausal = masks.not_(masks.causal())
    """

    def mask(b, h, q_idx, kv_idx):
        return ~one(b, h, q_idx, kv_idx)

    return mask
