"""Block masks: which blocks of scores a kernel skips, computes with the mask, or computes without it.

A block is `tile_m` queries by `tile_n` keys. It is full if it has `tile_n` keys and every query sees all of them, empty
if no query sees a key, else partial. The mask is a `mask_mod` and a window. The batch or head dimension has size 1 if
the mask does not depend on it.

A block mask keeps its mask_mod, with copies of the tensors and numbers that it captured, and its window: `attn` applies
them inside partial blocks. It is a snapshot: `attn` raises a `ValueError` if a captured tensor was written to since. A
write through `.data` to a CUDA tensor is not detected; the snapshot is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    """The K/V blocks that each query block of a mask visits, and the mask."""

    tile_m: int
    tile_n: int
    seqlen_q: int
    seqlen_k: int
    partial_kv: BlockIndices
    full_kv: BlockIndices
    window: Window = (None, None)
    mask: BoundMod | None = None  # its captures are copies; None: the mask is the window alone, or is not known
    is_mask_known: bool = False
    captured: tuple[Tensor, ...] = ()  # the user's tensors; `mask.captures` are copies of them
    versions: tuple[int, ...] = ()  # of `captured`, when they were copied

    @staticmethod
    def of_status(status: Tensor, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int) -> BlockMask:
        """Build a block mask from the EMPTY, PARTIAL or FULL of each block.

        `status`: (B or 1, H or 1, query blocks, K/V blocks). Its mask is not known: give `attn` the mask_mod too.
        """
        _check_sizes((1, 1, seqlen_q, seqlen_k), (tile_m, tile_n))
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
        """The block mask of a mask_mod, within a window, for (B, H, Sq, Sk).

        It evaluates the mask for all pairs, so make it once for all layers. That of a mask_mod without captured tensors
        is cached.
        """
        _check_sizes(shape, tile)
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
        if not all(x is None or (isinstance(x, int) and x >= 0) for x in window):
            raise ValueError(
                f"window={window}: give whole numbers that are not negative, or None for an unbounded side"
            )
        versions = tuple(0 if x.is_inference() else x._version for x in captures)
        if mask is not None:
            mask = mask._replace(captures=tuple(x.detach().clone() for x in captures))

        def compute() -> BlockMask:
            of_blocks = BlockMask.of_status(_status(mask, shape, tile, window, device), *tile, *shape[2:])
            return replace(
                of_blocks, window=window, mask=mask, is_mask_known=True, captured=captures, versions=versions
            )

        if captures:
            return compute()
        key = None if mask is None else (mask.graph, mask.scalars), tuple(shape), tuple(tile), window, device
        return _cache.of_contents((), key, compute)

    def mask_for(self, mask_mod: Callable | None) -> Callable | BoundMod | None:
        """The mask to apply inside partial blocks. `mask_mod` is the argument of `attn` beside this block mask.

        Raises `ValueError` for another mask than that of the block mask, because full blocks would ignore it, and if a
        captured tensor was written to since. Writes through `.data` are noticed on the CPU only.
        """
        if torch.compiler.is_dynamo_compiling():
            if mask_mod is not None and self.is_mask_known:
                raise ValueError("mask_mod beside a block_mask in a compiled call: leave it out, block_mask carries it")
            return mask_mod if self.mask is None else self.mask
        for x, version, copy in zip(self.captured, self.versions, () if self.mask is None else self.mask.captures):
            is_written = not x.is_inference() and x._version != version
            if is_written or (_is_readable(x) and not _has_same_contents(x, copy)):
                raise ValueError(
                    f"block_mask: a captured tensor of its mask_mod, of shape {tuple(x.shape)}, was written to after "
                    "the block mask was made: make a new one"
                )
        if not self.is_mask_known or mask_mod is None:
            return mask_mod if mask_mod is not None else self.mask
        given = bind(mask_mod, "mask_mod")
        if self.mask is not None and given.graph == self.mask.graph and given.scalars == self.mask.scalars:
            if all(_is_same(x, y) for x, y in zip(given.captures, self.captured)):
                return self.mask
        raise ValueError(
            "mask_mod is not that of block_mask: leave mask_mod out, because a block mask carries its own, or make the "
            "block mask of both with masks.and_"
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """num_blocks and indices of partial_kv, then of full_kv."""
        return *self.partial_kv, *self.full_kv

    @staticmethod
    def of_tensors(tensors: Sequence[Tensor], sizes: Sequence[int]) -> BlockMask:
        """The inverse of `tensors` and `sizes`."""
        tile_m, tile_n, seqlen_q, seqlen_k = sizes
        partial, full = (BlockIndices(*tensors[i : i + 2]) for i in (0, 2))
        return BlockMask(tile_m, tile_n, seqlen_q, seqlen_k, partial, full)

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


def _is_readable(x: Tensor) -> bool:
    """Whether the host can read a tensor without a sync. Fake tensors have no contents."""
    is_plain = type(x) in (Tensor, torch.nn.Parameter) and torch._C._len_torch_dispatch_stack() == 0
    return is_plain and x.device.type == "cpu"


def _has_same_contents(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape are equal; NaN equals NaN."""
    return bool(((x == y) | ((x != x) & (y != y))).all())


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are views of the same elements."""
    return x is y or (x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride())


def _check_sizes(shape: tuple[int, ...], tile: tuple[int, ...]) -> None:
    if len(shape) != 4 or not all(isinstance(x, int) and x >= 0 for x in shape):
        raise ValueError(f"shape={shape}: give (B, H, Sq, Sk), whole numbers that are not negative")
    if len(tile) != 2 or not all(isinstance(x, int) and x > 0 for x in tile):
        raise ValueError(f"tile={tile}: give the queries and keys of a block, positive whole numbers")


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
