"""Block masks: which blocks of scores a kernel skips, computes with the mask, or computes without it.

A block is `tile_m` queries by `tile_n` keys. It is full if every query in it sees every key of the block and
no key is missing, empty if no query sees a key, else partial. The mask is a `mask_mod` within a window. A
dimension of batch or heads has size 1 if the mask does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_flash.score_mod.evaluate import evaluate
from cute_flash.score_mod.graph import B, H
from cute_flash.score_mod.tensor_cache import TensorCache, versions
from cute_flash.score_mod.trace import BoundMod, bind

EMPTY, PARTIAL, FULL = 0, 1, 2
# (query, key) pairs that are evaluated at a time.
MAX_PAIRS = 1 << 22

Window = tuple[int | None, int | None]  # keys to the left and right of a query that it sees; None: all


@dataclass(frozen=True, eq=False)
class BlockIndices:
    """For each block of one side, the blocks of the other side to visit, ascending; int32."""

    num_blocks: Tensor  # (B or 1, H or 1, blocks of this side)
    indices: Tensor  # (B or 1, H or 1, blocks of this side, blocks of the other); the first num_blocks count

    @staticmethod
    def of(chosen: Tensor) -> BlockIndices:
        order = torch.argsort((~chosen).to(torch.uint8), dim=-1, stable=True)
        return BlockIndices(chosen.sum(dim=-1, dtype=torch.int32), order.to(torch.int32).contiguous())


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The blocks of a mask, in both directions: K/V blocks of a query block, for the forward, and query
    blocks of a K/V block, for the backward.
    """

    tile_m: int
    tile_n: int
    seqlen_q: int
    seqlen_k: int
    partial_kv: BlockIndices
    full_kv: BlockIndices
    partial_q: BlockIndices
    full_q: BlockIndices

    @staticmethod
    def of_status(status: Tensor, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int) -> BlockMask:
        """From EMPTY, PARTIAL or FULL of each block: (B or 1, H or 1, query blocks, K/V blocks)."""
        blocks = _ceil_div(seqlen_q, tile_m), _ceil_div(seqlen_k, tile_n)
        if status.dim() != 4 or tuple(status.shape[2:]) != blocks:
            raise ValueError(f"status has shape {tuple(status.shape)}: expected (B or 1, H or 1, *{blocks})")
        if seqlen_k % tile_n and bool((status[..., -1] == FULL).any()):
            raise ValueError("the last block of keys is not whole: it cannot be full, call it partial")
        indices = [BlockIndices.of(x == one) for x in (status, status.mT) for one in (PARTIAL, FULL)]
        return BlockMask(tile_m, tile_n, seqlen_q, seqlen_k, *indices)

    @staticmethod
    def of(
        mask_mod: Callable | None,
        shape: tuple[int, int, int, int],
        *,
        tile: tuple[int, int] = (128, 128),
        causal: bool = False,
        window: Window = (None, None),
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """The block mask of a mask_mod for (B, H, Sq, Sk).

        It is cached until a tensor that the mask_mod captures is written to.
        """
        mask = None if mask_mod is None else bind(mask_mod, "mask_mod")
        if device is None:
            device = mask.captures[0].device if mask is not None and mask.captures else "cpu"
        # With an index, as the devices of tensors have.
        device = torch.empty(0, device=device).device
        left, right = window
        return _cached(mask, shape, tile, (left, 0 if causal else right), device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        indices = self.partial_kv, self.full_kv, self.partial_q, self.full_q
        return tuple(x for one in indices for x in (one.num_blocks, one.indices))

    @staticmethod
    def of_tensors(tensors: Sequence[Tensor], sizes: Sequence[int]) -> BlockMask:
        """The inverse of `tensors` and `sizes`."""
        tile_m, tile_n, seqlen_q, seqlen_k = sizes
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return BlockMask(tile_m, tile_n, seqlen_q, seqlen_k, *(BlockIndices(*pair) for pair in pairs))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.tile_m, self.tile_n, self.seqlen_q, self.seqlen_k

    @property
    def status(self) -> Tensor:
        """(B or 1, H or 1, query blocks, K/V blocks), uint8: EMPTY, PARTIAL or FULL."""
        shape, device = self.partial_kv.indices.shape, self.partial_kv.num_blocks.device
        found = torch.zeros(shape, dtype=torch.uint8, device=device)
        for value, blocks in ((PARTIAL, self.partial_kv), (FULL, self.full_kv)):
            counts = torch.arange(shape[-1], device=device) < blocks.num_blocks[..., None]
            found.scatter_add_(-1, blocks.indices.long(), counts.to(torch.uint8) * value)
        return found

    @property
    def density(self) -> float:
        """The fraction of blocks that are not empty."""
        visited = self.partial_kv.num_blocks.sum() + self.full_kv.num_blocks.sum()
        return float(visited) / max(1, self.partial_kv.indices.numel())

    # The former name, for one release.
    share = density

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> None:
        """Raise `ValueError` unless the block mask belongs to a call of these sizes."""
        if (self.seqlen_q, self.seqlen_k) != (seqlen_q, seqlen_k):
            raise ValueError(
                f"block_mask is of {self.seqlen_q} queries and {self.seqlen_k} keys: the call has {seqlen_q} "
                f"and {seqlen_k}"
            )
        for name, size, own in (("batch", batch, 0), ("heads", heads, 1)):
            found = self.partial_kv.num_blocks.shape[own]
            if found not in (1, size):
                raise ValueError(f"block_mask has {name}={found}: expected 1 or {size}")
        found_device = self.partial_kv.num_blocks.device
        if found_device != device:
            raise ValueError(f"block_mask is on {found_device} and q is on {device}: they must agree")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def visible_pairs(
    mask: BoundMod | None,
    window: Window,
    rows: Tensor,
    keys: Tensor,
    seqlens: tuple[int, int],
    head: tuple[int, int],
) -> Tensor:
    """(rows, keys): which keys each query of a (batch, head) sees."""
    (seqlen_q, seqlen_k), (left, right) = seqlens, window
    distance = keys - (rows[:, None] + (seqlen_k - seqlen_q))
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    if mask is not None:
        b, h = (torch.tensor(x, device=rows.device) for x in head)
        arguments = mask.captures, mask.scalars
        (found,) = evaluate(mask.graph, arguments, torch.float32, (b, h, rows[:, None], keys))
        visible &= found
    return visible


def _status(
    mask: BoundMod | None,
    shape: tuple[int, int, int, int],
    tile: tuple[int, int],
    window: Window,
    device: torch.device,
) -> Tensor:
    batch, heads, sq, sk = shape
    bits = 0 if mask is None else mask.graph.output_depends
    batch, heads = batch if bits & B else 1, heads if bits & H else 1
    tile_m, tile_n = tile
    blocks = _ceil_div(sq, tile_m), _ceil_div(sk, tile_n)
    status = torch.zeros(batch, heads, *blocks, dtype=torch.uint8, device=device)
    # Keys past the last are padded as invisible, so that the last block is partial or empty.
    width = blocks[1] * tile_n
    keys = torch.arange(sk, device=device)
    step = max(1, MAX_PAIRS // max(1, tile_m * width)) * tile_m
    for b in range(batch):
        for h in range(heads):
            for first in range(0, sq, step):
                rows = torch.arange(first, min(first + step, sq), device=device)
                visible = visible_pairs(mask, window, rows, keys, (sq, sk), (b, h))
                num = _ceil_div(len(rows), tile_m)
                padded = visible.new_zeros(num * tile_m, width)
                padded[: len(rows), :sk] = visible
                some = padded.view(num, tile_m, -1, tile_n).any(dim=3).any(dim=1)
                # Queries past the last do not exist: they must not make a block partial.
                padded[len(rows) :] = True
                every = padded.view(num, tile_m, -1, tile_n).all(dim=3).all(dim=1)
                m_block = first // tile_m
                status[b, h, m_block : m_block + num] = some.to(torch.uint8) + (every & some).to(torch.uint8)
    return status


_cache: TensorCache[BlockMask] = TensorCache(64)


def _cached(mask: BoundMod | None, shape: Any, tile: Any, window: Window, device: torch.device) -> BlockMask:
    captures = () if mask is None else mask.captures
    if any(x.device != device for x in captures):
        raise ValueError(f"mask_mod captures a tensor on {captures[0].device}: expected {device}")
    written = versions(captures)
    graph = None if mask is None else (mask.graph, mask.scalars)
    key = graph, written, tuple(shape), tuple(tile), window, device
    found = None if written is None else _cache.get(captures, key)
    if found is not None:
        return found
    made = BlockMask.of_status(_status(mask, shape, tile, window, device), *tile, *shape[2:])
    return made if written is None else _cache.put(captures, key, made)
