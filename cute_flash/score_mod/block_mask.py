"""Which blocks of scores a mask leaves empty, leaves whole, or cuts: what a kernel skips, and where it masks.

A block is `tile_m` queries by `tile_n` keys. It is full when every query of it that exists sees every key and
no key of it is missing, empty when no pair is visible, else partial. The mask is that of a `mask_mod` within
a band. Batch and heads that a mask does not tell apart have a dimension of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_flash.score_mod.evaluate import evaluate
from cute_flash.score_mod.graph import B, H
from cute_flash.score_mod.tensor_cache import Memo, versions
from cute_flash.score_mod.trace import Bound, bound

EMPTY, PARTIAL, FULL = 0, 1, 2
# Pairs of queries and keys that are looked at together.
MAX_PAIRS = 1 << 22

Bounds = tuple[int | None, int | None]  # keys before and after a query's own that it sees; None: all


@dataclass(frozen=True, eq=False)
class BlockList:
    """For every block of one side, how many blocks of the other side, and which: int32, ascending."""

    num: Tensor  # (B or 1, H or 1, blocks of this side)
    index: Tensor  # (B or 1, H or 1, blocks of this side, blocks of the other): the first `num` count

    @staticmethod
    def of(chosen: Tensor) -> BlockList:
        index = torch.argsort((~chosen).to(torch.uint8), dim=-1, stable=True)
        return BlockList(chosen.sum(dim=-1, dtype=torch.int32), index.to(torch.int32).contiguous())


@dataclass(frozen=True, eq=False)
class BlockMap:
    tile_m: int
    tile_n: int
    seqlen_q: int
    seqlen_k: int
    partial: BlockList  # key blocks of a block of queries
    full: BlockList
    partial_queries: BlockList  # blocks of queries of a key block, for the backward
    full_queries: BlockList

    @staticmethod
    def of_status(status: Tensor, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int) -> BlockMap:
        """From EMPTY, PARTIAL or FULL of every block: (B or 1, H or 1, blocks of queries, of keys)."""
        blocks = _ceil_div(seqlen_q, tile_m), _ceil_div(seqlen_k, tile_n)
        if status.dim() != 4 or tuple(status.shape[2:]) != blocks:
            raise ValueError(f"status has shape {tuple(status.shape)}: expected (B or 1, H or 1, *{blocks})")
        if seqlen_k % tile_n and bool((status[..., -1] == FULL).any()):
            raise ValueError("the last block of keys is not whole: it cannot be full, call it partial")
        lists = [BlockList.of(x == one) for x in (status, status.mT) for one in (PARTIAL, FULL)]
        return BlockMap(tile_m, tile_n, seqlen_q, seqlen_k, *lists)

    @staticmethod
    def of(
        mask_mod: Callable | None,
        shape: tuple[int, int, int, int],
        *,
        tile: tuple[int, int] = (128, 128),
        causal: bool = False,
        window: Bounds = (None, None),
        device: torch.device | str | None = None,
    ) -> BlockMap:
        """The map of a mask for (B, H, Sq, Sk), kept as long as what the mask captures stays as it is."""
        mask = None if mask_mod is None else bound(mask_mod, "mask_mod")
        if device is None:
            device = mask.tables[0].device if mask is not None and mask.tables else "cpu"
        # With its index, which tensors have.
        device = torch.empty(0, device=device).device
        left, right = window
        return _map_of(mask, shape, tile, (left, 0 if causal else right), device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        lists = self.partial, self.full, self.partial_queries, self.full_queries
        return tuple(x for one in lists for x in (one.num, one.index))

    @staticmethod
    def of_tensors(tensors: list[Tensor], sizes: list[int]) -> BlockMap:
        tile_m, tile_n, seqlen_q, seqlen_k = sizes
        lists = (BlockList(num, index) for num, index in zip(tensors[::2], tensors[1::2], strict=True))
        return BlockMap(tile_m, tile_n, seqlen_q, seqlen_k, *lists)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.tile_m, self.tile_n, self.seqlen_q, self.seqlen_k

    @property
    def status(self) -> Tensor:
        """(B or 1, H or 1, blocks of queries, blocks of keys), uint8: EMPTY, PARTIAL or FULL."""
        found = torch.zeros(self.partial.index.shape, dtype=torch.uint8, device=self.partial.num.device)
        for value, blocks in ((PARTIAL, self.partial), (FULL, self.full)):
            place = torch.arange(found.shape[-1], device=found.device)
            counts = (place < blocks.num[..., None]).to(torch.uint8) * value
            found.scatter_add_(-1, blocks.index.long(), counts)
        return found

    @property
    def share(self) -> float:
        """Of all blocks, those that are not empty."""
        visited = self.partial.num.sum() + self.full.num.sum()
        return float(visited) / max(1, self.partial.index.numel())

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> None:
        if (self.seqlen_q, self.seqlen_k) != (seqlen_q, seqlen_k):
            raise ValueError(
                f"block_map is of {self.seqlen_q} queries and {self.seqlen_k} keys: the call has {seqlen_q} "
                f"and {seqlen_k}"
            )
        for name, size, own in (("batch", batch, 0), ("heads", heads, 1)):
            if self.partial.num.shape[own] not in (1, size):
                raise ValueError(f"block_map has {name}={self.partial.num.shape[own]}: expected 1 or {size}")
        if self.partial.num.device != device:
            raise ValueError(
                f"block_map is on {self.partial.num.device} and q is on {device}: they must agree"
            )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def visible(bounds: Bounds, rows: Tensor, keys: Tensor, sq: int, sk: int) -> Tensor:
    """(rows, keys), of a band."""
    left, right = bounds
    distance = keys - (rows[:, None] + (sk - sq))
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def seen_by(
    mask: Bound | None,
    bounds: Bounds,
    rows: Tensor,
    keys: Tensor,
    sizes: tuple[int, int],
    place: tuple[int, int],
) -> Tensor:
    """(rows, keys): which pairs of a head are visible."""
    seen = visible(bounds, rows, keys, *sizes)
    if mask is not None:
        b, h = (torch.tensor(x, device=rows.device) for x in place)
        arguments = mask.tables, mask.numbers
        (found,) = evaluate(mask.graph, arguments, torch.float32, (b, h, rows[:, None], keys))
        seen &= found
    return seen


def _status(
    mask: Bound | None, shape: tuple[int, int, int, int], tile: tuple[int, int], bounds: Bounds, device: Any
) -> Tensor:
    batch, heads, sq, sk = shape
    bits = 0 if mask is None else mask.graph.output_depends
    batch, heads = batch if bits & B else 1, heads if bits & H else 1
    tile_m, tile_n = tile
    blocks = _ceil_div(sq, tile_m), _ceil_div(sk, tile_n)
    status = torch.zeros(batch, heads, *blocks, dtype=torch.uint8, device=device)
    # Past the last key: pairs that nobody sees, so that the last block is partial or empty.
    width = blocks[1] * tile_n
    keys = torch.arange(sk, device=device)
    step = max(1, MAX_PAIRS // max(1, tile_m * width)) * tile_m
    for b in range(batch):
        for h in range(heads):
            for first in range(0, sq, step):
                rows = torch.arange(first, min(first + step, sq), device=device)
                seen = seen_by(mask, bounds, rows, keys, (sq, sk), (b, h))
                num = _ceil_div(len(rows), tile_m)
                whole = seen.new_zeros(num * tile_m, width)
                whole[: len(rows), :sk] = seen
                some = whole.view(num, tile_m, -1, tile_n).any(dim=3).any(dim=1)
                # Past the last query: pairs that do not matter.
                whole[len(rows) :] = True
                every = whole.view(num, tile_m, -1, tile_n).all(dim=3).all(dim=1)
                at = first // tile_m
                status[b, h, at : at + num] = some.to(torch.uint8) + (every & some).to(torch.uint8)
    return status


# Maps that were made, for the values of what their masks captured.
_known: Memo[BlockMap] = Memo(64)


def _map_of(mask: Bound | None, shape: Any, tile: Any, bounds: Bounds, device: torch.device) -> BlockMap:
    tables = () if mask is None else mask.tables
    if any(x.device != device for x in tables):
        raise ValueError(f"mask_mod captures a tensor on {tables[0].device}: expected {device}")
    written = versions(tables)
    graph = None if mask is None else (mask.graph, mask.numbers)
    more = graph, written, tuple(shape), tuple(tile), bounds, device
    found = None if written is None else _known.get(tables, more)
    if found is not None:
        return found
    made = BlockMap.of_status(_status(mask, shape, tile, bounds, device), *tile, *shape[2:])
    return made if written is None else _known.keep(tables, more, made)
