"""Block masks: which blocks of scores a kernel skips, computes with the mask, or computes without it.

A block is `tile_m` queries by `tile_n` keys. It is full if it has `tile_n` keys and every query sees all of them, empty
if no query sees a key, else partial. The mask is a `mask_mod` and a window. The batch or head dimension has size 1 if
the mask does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from cute_flash.score_mod.evaluate import evaluate
from cute_flash.score_mod.graph import B, H
from cute_flash.score_mod.tensor_cache import TensorCache
from cute_flash.score_mod.trace import BoundMod, bind

EMPTY, PARTIAL, FULL = 0, 1, 2
# The most (query, key) pairs that are evaluated at a time.
MAX_PAIRS = 1 << 22

Window = tuple[int | None, int | None]  # keys before and after its position that a query sees; None: all


class BlockIndices(NamedTuple):
    """For each block of queries, the blocks of keys to visit, ascending; int32."""

    num_blocks: Tensor  # (B or 1, H or 1, blocks)
    indices: Tensor  # (B or 1, H or 1, blocks, K/V blocks); only the first num_blocks are valid

    @staticmethod
    def of(chosen: Tensor) -> BlockIndices:
        order = torch.argsort((~chosen).to(torch.uint8), dim=-1, stable=True)
        return BlockIndices(chosen.sum(dim=-1, dtype=torch.int32), order.to(torch.int32).contiguous())


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The K/V blocks that each query block of a mask visits."""

    tile_m: int
    tile_n: int
    seqlen_q: int
    seqlen_k: int
    partial_kv: BlockIndices
    full_kv: BlockIndices

    @staticmethod
    def of_status(status: Tensor, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int) -> BlockMask:
        """Build a block mask from the EMPTY, PARTIAL or FULL of each block.

        `status`: (B or 1, H or 1, query blocks, K/V blocks).
        """
        blocks = _ceil_div(seqlen_q, tile_m), _ceil_div(seqlen_k, tile_n)
        if status.dim() != 4 or tuple(status.shape[2:]) != blocks:
            raise ValueError(f"status has shape {tuple(status.shape)}: expected (B or 1, H or 1, *{blocks})")
        if seqlen_k % tile_n and bool((status[..., -1] == FULL).any()):
            raise ValueError("the last block of keys is not whole: it cannot be full, call it partial")
        partial, full = (BlockIndices.of(status == kind) for kind in (PARTIAL, FULL))
        return BlockMask(tile_m, tile_n, seqlen_q, seqlen_k, partial, full)

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
        captures = () if mask is None else mask.captures
        if device is None:
            device = captures[0].device if captures else "cpu"
        # The device of a tensor has an index, which "cuda" has not.
        device = torch.empty(0, device=device).device
        for x in captures:
            if x.device != device:
                raise ValueError(f"mask_mod captures a tensor on {x.device}: expected {device}")
        left, right = window
        window = left, 0 if causal else right
        key = None if mask is None else (mask.graph, mask.scalars), tuple(shape), tuple(tile), window, device

        def compute() -> BlockMask:
            return BlockMask.of_status(_status(mask, shape, tile, window, device), *tile, *shape[2:])

        return _cache.of_contents(captures, key, compute)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """num_blocks and indices of partial_kv, then of full_kv."""
        return *self.partial_kv, *self.full_kv

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
        status = torch.zeros(shape, dtype=torch.uint8, device=device)
        for value, blocks in ((PARTIAL, self.partial_kv), (FULL, self.full_kv)):
            is_valid = torch.arange(shape[-1], device=device) < blocks.num_blocks[..., None]
            status.scatter_add_(-1, blocks.indices.long(), is_valid.to(torch.uint8) * value)
        return status

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
        for dim, name, size in ((0, "batch", batch), (1, "heads", heads)):
            mask_size = self.partial_kv.num_blocks.shape[dim]
            if mask_size not in (1, size):
                raise ValueError(f"block_mask has {name}={mask_size}: expected 1 or {size}")
        mask_device = self.partial_kv.num_blocks.device
        if mask_device != device:
            raise ValueError(f"block_mask is on {mask_device} and q is on {device}: they must agree")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def visible_pairs(
    mask: BoundMod | None, window: Window, rows: Tensor, keys: Tensor, seqlens: tuple[int, int], head: tuple[int, int]
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
        (mod_mask,) = evaluate(mask.graph, arguments, torch.float32, (b, h, rows[:, None], keys))
        visible &= mod_mask
    return visible


def _status(
    mask: BoundMod | None, shape: tuple[int, int, int, int], tile: tuple[int, int], window: Window, device: torch.device
) -> Tensor:
    batch, heads, sq, sk = shape
    bits = 0 if mask is None else mask.graph.output_depends
    batch, heads = batch if bits & B else 1, heads if bits & H else 1
    tile_m, tile_n = tile
    blocks = _ceil_div(sq, tile_m), _ceil_div(sk, tile_n)
    status = torch.zeros(batch, heads, *blocks, dtype=torch.uint8, device=device)
    keys = torch.arange(sk, device=device)
    step = max(1, MAX_PAIRS // max(1, tile_m * blocks[1] * tile_n)) * tile_m
    for b, h, first in product(range(batch), range(heads), range(0, sq, step)):
        rows = torch.arange(first, min(first + step, sq), device=device)
        visible = visible_pairs(mask, window, rows, keys, (sq, sk), (b, h))
        # Keys past the last are padded as masked, so that the last block is partial or empty.
        padded = torch.nn.functional.pad(visible, (0, -sk % tile_n, 0, -len(rows) % tile_m))
        by_block = padded.view(_ceil_div(len(rows), tile_m), tile_m, blocks[1], tile_n)
        some = by_block.any(dim=3).any(dim=1)
        # Queries past the last do not exist, and must not make a block partial.
        padded[len(rows) :] = True
        every = by_block.all(dim=3).all(dim=1)
        m_block = first // tile_m
        status[b, h, m_block : m_block + len(some)] = some.to(torch.uint8) + (every & some)
    return status


_cache: TensorCache[BlockMask] = TensorCache(64)
