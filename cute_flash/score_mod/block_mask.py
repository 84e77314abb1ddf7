"""Block masks, as in FlexAttention: the blocks of scores that a kernel skips, masks, or computes without a mask.

A block has `tile_m` queries and `tile_n` keys. It is *empty* if no query sees a key of it, *full* if every query sees
all `tile_n` keys, and otherwise *partial*. A last K/V block with fewer than `tile_n` keys is never full.

A `BlockMask` is a snapshot of its mask: it holds copies of the tensors and numbers that the mask_mod captured. `attn`
uses the copies, and raises a `ValueError` if a captured tensor was written to since. A write through `.data` to a CUDA
tensor is not detected, and a call inside `torch.compile` detects no write. A copy of a block mask (`copy.deepcopy`,
`pickle`, `torch.save`) is a block mask of the copied tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash.score_mod.evaluate import evaluate
from cute_flash.score_mod.graph import B, Graph, H
from cute_flash.score_mod.tensor_cache import TensorCache
from cute_flash.score_mod.trace import BoundMod, bind

EMPTY, PARTIAL, FULL = 0, 1, 2
# The version of a captured tensor in a copy of a block mask, if the tensor was written to before the copy. It differs
# from all versions, so the copy is refused too.
_STALE = -1
# The largest number of (query, key) pairs that are evaluated at a time.
MAX_PAIRS = 1 << 22

Window = tuple[int | None, int | None]  # (left, right), as for `attn`


class BlockIndices(NamedTuple):
    """For each query block, the K/V blocks to visit, in ascending order; int32.

    Attributes:
        num_blocks: (B or 1, H or 1, query blocks): the number of K/V blocks to visit.
        indices: (B or 1, H or 1, query blocks, K/V blocks): their indices. Only the first `num_blocks` are valid.
    """

    num_blocks: Tensor
    indices: Tensor

    @staticmethod
    def of(chosen: Tensor) -> BlockIndices:
        """Build the indices from a bool for each block: whether to visit it."""
        order = torch.argsort((~chosen).to(torch.uint8), dim=-1, stable=True)
        return BlockIndices(chosen.sum(dim=-1, dtype=torch.int32), order.to(torch.int32).contiguous())


def is_listed(num_blocks: Tensor, indices: Tensor, n_blocks: int) -> Tensor:
    """Whether each query block lists each of `n_blocks` K/V blocks: the inverse of `BlockIndices.of`."""
    is_valid = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    # Indices after the first num_blocks may have any value. They are replaced by `n_blocks`, an additional column.
    columns = torch.where(is_valid & (indices < n_blocks), indices, n_blocks).long()
    listed = torch.zeros(*indices.shape[:-1], n_blocks + 1, dtype=torch.bool, device=indices.device)
    return listed.scatter(-1, columns, True)[..., :n_blocks]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask and the K/V blocks that each query block visits, for `attn(block_mask=...)`. Build one with `of`.

    Attributes:
        tile_m: The number of queries of a block.
        tile_n: The number of keys of a block.
        seqlen_q: The number of queries.
        seqlen_k: The number of keys.
        partial_kv: The partial blocks, in which the mask is applied.
        full_kv: The full blocks, which need no mask.
        window: (left, right), as for `attn`.
        mask: The traced mask_mod with copies of its captured values; None: there is none, or it is unknown.
        is_mask_known: Whether `mask` and `window` are the whole mask; false for `of_status`.
        captured: The tensors that the mask_mod captured; `mask` holds copies of them.
        versions: Their version counters when they were copied.

    Examples:
        >>> import torch
        >>> from cute_flash import BlockMask, attn, masks
        >>> q, k, v = (torch.randn(2, 4, 512, 16) for _ in range(3))
        >>> block_mask = BlockMask.of(masks.sliding_window(100), (2, 4, 512, 512))
        >>> block_mask.density
        0.4375
        >>> out = attn(q, k, v, block_mask=block_mask)
    """

    tile_m: int
    tile_n: int
    seqlen_q: int
    seqlen_k: int
    partial_kv: BlockIndices
    full_kv: BlockIndices
    window: Window = (None, None)
    mask: BoundMod | None = None
    is_mask_known: bool = False
    captured: tuple[Tensor, ...] = ()
    versions: tuple[int, ...] = ()

    @staticmethod
    def of_status(status: Tensor, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int) -> BlockMask:
        """Build a block mask from the status of each block. Pass `attn` the mask_mod of its partial blocks too.

        Args:
            status: (B or 1, H or 1, query blocks, K/V blocks): EMPTY (0), PARTIAL (1) or FULL (2).
            tile_m: The number of queries of a block.
            tile_n: The number of keys of a block.
            seqlen_q: The number of queries.
            seqlen_k: The number of keys.

        Returns:
            The block mask. It has no window and no mask_mod.

        Raises:
            ValueError: Sizes do not fit, or the last block has fewer than `tile_n` keys and is full.
        """
        _check_sizes((1, 1, seqlen_q, seqlen_k), (tile_m, tile_n))
        blocks = _ceil_div(seqlen_q, tile_m), _ceil_div(seqlen_k, tile_n)
        if status.dim() != 4 or tuple(status.shape[2:]) != blocks:
            raise ValueError(
                f"status has shape {tuple(status.shape)}: expected (B or 1, H or 1, {blocks[0]}, {blocks[1]})"
            )
        if seqlen_k % tile_n and bool((status[..., -1] == FULL).any()):
            raise ValueError(
                f"status is FULL for the last K/V block, which has {seqlen_k % tile_n} keys, not tile_n={tile_n}: "
                "use PARTIAL"
            )
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
        """Build the block mask of a mask_mod and a window, as FlexAttention's `create_block_mask` does.

        The mask is evaluated for all (query, key) pairs, so build it once for all layers. The result is cached if the
        mask_mod captures no tensor.

        Args:
            mask_mod: A function mask_mod(b, h, q_idx, kv_idx), as for `attn`; None: the window alone.
            shape: (B, H, Sq, Sk). The block mask has a batch or head dimension of 1 if the mask does not depend on it.
            tile: The queries and keys of a block; on CUDA, multiples of 128.
            causal: As for `attn`.
            window: As for `attn`.
            device: The device of the calls; by default that of the first captured tensor, or the CPU.

        Returns:
            The block mask.

        Raises:
            ValueError: Sizes or the window are invalid, or a captured tensor is on another device.
            TraceError: The mask_mod cannot be traced.
        """
        _check_sizes(shape, tile)
        mask = None if mask_mod is None else bind(mask_mod, "mask_mod")
        captures = () if mask is None else mask.captures
        if device is None:
            device = captures[0].device if captures else "cpu"
        # The device of a tensor has an index; `torch.device("cuda")` has none.
        device = torch.empty(0, device=device).device
        for x in captures:
            if x.device != device:
                raise ValueError(f"mask_mod captures a tensor on {x.device}: expected {device}")
        left, right = window
        window = left, 0 if causal else right
        if not all(x is None or (isinstance(x, int) and 0 <= x < 1 << 63) for x in window):
            raise ValueError(f"window={window}: give whole numbers from 0 to 2^63 - 1, or None for an unbounded side")
        versions = tuple(map(_version, captures))
        if mask is not None:
            mask = mask._replace(captures=tuple(x.detach().clone() for x in captures))

        def compute() -> BlockMask:
            block_mask = BlockMask.of_status(_status(mask, shape, tile, window, device), *tile, *shape[2:])
            return replace(
                block_mask, window=window, mask=mask, is_mask_known=True, captured=captures, versions=versions
            )

        if captures:
            return compute()
        key = None if mask is None else (mask.graph, mask.scalars), tuple(shape), tuple(tile), window, device
        return _cache.of_contents((), key, compute)

    def mask_for(self, mask_mod: Callable | None) -> Callable | BoundMod | None:
        """The mask to apply inside partial blocks of a call of `attn`.

        Args:
            mask_mod: The mask_mod that was passed to `attn` together with this block mask, or None.

        Raises:
            ValueError: `mask_mod` differs from the block mask's own mask_mod, so that full blocks would ignore it; or a
                captured tensor was written to since the block mask was built.
        """
        if torch.compiler.is_dynamo_compiling():
            if mask_mod is not None and self.is_mask_known:
                raise ValueError(
                    "mask_mod and block_mask in a compiled call: leave mask_mod out, because block_mask carries it"
                )
            return mask_mod if self.mask is None else self.mask
        for x, version, copy in zip(self.captured, self.versions, () if self.mask is None else self.mask.captures):
            if _version(x) != version or (_is_readable(x) and not _has_same_contents(x, copy)):
                raise ValueError(
                    f"block_mask: a captured tensor of its mask_mod, of shape {tuple(x.shape)}, was written to after "
                    "the block mask was built: build a new one"
                )
        if not self.is_mask_known or mask_mod is None:
            return mask_mod if mask_mod is not None else self.mask
        other = bind(mask_mod, "mask_mod")
        if self.mask is not None and other.graph == self.mask.graph and other.scalars == self.mask.scalars:
            if all(_is_same(x, y) for x, y in zip(other.captures, self.captured)):
                return self.mask
        raise ValueError(
            "mask_mod differs from the mask_mod of block_mask: leave mask_mod out, because a block mask carries its "
            "own, or build the block mask of both with masks.and_"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state that `copy` and `pickle` copy.

        A copied tensor has a new version counter. So the version of a captured tensor is None if the tensor was not
        written to, and `_STALE` if it was.
        """
        versions = (None if _version(x) == version else _STALE for x, version in zip(self.captured, self.versions))
        # `copy.deepcopy` copies no tensor that autograd computed.
        captured = tuple(x if x.is_leaf else x.detach() for x in self.captured)
        return self.__dict__ | {"captured": captured, "versions": tuple(versions)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        versions = zip(state["captured"], state["versions"])
        copied = tuple(_version(x) if version is None else version for x, version in versions)
        self.__dict__.update(state, versions=copied)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The num_blocks and indices of `partial_kv`, then those of `full_kv`."""
        return *self.partial_kv, *self.full_kv

    @staticmethod
    def of_tensors(tensors: Sequence[Tensor], sizes: Sequence[int]) -> BlockMask:
        """Rebuild a block mask, without its window and mask_mod, from its `tensors` and `sizes`."""
        tile_m, tile_n, seqlen_q, seqlen_k, is_mask_known = sizes
        partial, full = (BlockIndices(*tensors[i : i + 2]) for i in (0, 2))
        return BlockMask(tile_m, tile_n, seqlen_q, seqlen_k, partial, full, is_mask_known=bool(is_mask_known))

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(tile_m, tile_n, seqlen_q, seqlen_k, 1 if `is_mask_known`)."""
        return self.tile_m, self.tile_n, self.seqlen_q, self.seqlen_k, int(self.is_mask_known)

    @property
    def status(self) -> Tensor:
        """The status of each block, (B or 1, H or 1, query blocks, K/V blocks), uint8: EMPTY, PARTIAL or FULL."""
        n_blocks = _ceil_div(self.seqlen_k, self.tile_n)
        is_partial, is_full = (
            is_listed(*blocks, n_blocks).to(torch.uint8) for blocks in (self.partial_kv, self.full_kv)
        )
        return is_partial * PARTIAL + is_full * FULL

    @property
    def density(self) -> float:
        """The fraction of blocks that are not empty."""
        visited = self.partial_kv.num_blocks.sum() + self.full_kv.num_blocks.sum()
        return float(visited) / max(1, self.partial_kv.indices.numel())

    # The former name of `density`, kept for one release.
    share = density

    def check(
        self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device, mask: Graph | None
    ) -> None:
        """Raise `ValueError` unless the block mask fits a call of these sizes, on this device, with this mask_mod."""
        if (self.seqlen_q, self.seqlen_k) != (seqlen_q, seqlen_k):
            raise ValueError(
                f"block_mask has {self.seqlen_q} queries and {self.seqlen_k} keys, and the call has {seqlen_q} "
                f"and {seqlen_k}: build it for the sizes of the call"
            )
        for dim, (name, size, bit) in enumerate((("batch", batch, B), ("heads", heads, H))):
            mask_size = self.partial_kv.num_blocks.shape[dim]
            if mask_size not in (1, size):
                raise ValueError(f"block_mask has {name}={mask_size}: expected 1 or {size}")
            # `of` evaluated the mask_mod for index 0 alone. Lists that the user made may hold for all.
            if self.is_mask_known and mask_size < size and mask is not None and mask.output_depends & bit:
                raise ValueError(
                    f"block_mask was built for {name}=1, and its mask_mod depends on {'bh'[dim]}: build it for "
                    f"{name}={size}"
                )
        mask_device = self.partial_kv.num_blocks.device
        if mask_device != device:
            raise ValueError(f"block_mask is on {mask_device} and q is on {device}: they must agree")


def _version(x: Tensor) -> int:
    """The number of writes to a tensor; 0 for an inference tensor, which does not count them."""
    return 0 if x.is_inference() else x._version


def _is_readable(x: Tensor) -> bool:
    """Whether the host can read a tensor without a sync: a CPU tensor that is not fake."""
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
    """(rows, keys): true where a query of `rows` sees a key of `keys`, for one `head`, (b, h)."""
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
        # Calls with fp32 arithmetic refuse masks that need fp64 (`Graph.rounded_operation`).
        dtype = torch.float32 if mask.graph.rounded_operation is None else torch.float64
        (mod_mask,) = evaluate(mask.graph, arguments, dtype, (b, h, rows[:, None], keys))
        visible &= mod_mask
    return visible


def _status(
    mask: BoundMod | None, shape: tuple[int, int, int, int], tile: tuple[int, int], window: Window, device: torch.device
) -> Tensor:
    """(B or 1, H or 1, query blocks, K/V blocks): EMPTY, PARTIAL or FULL for each block."""
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
        # Padding keys are masked, so that a last block of fewer keys is partial or empty.
        padded = torch.nn.functional.pad(visible, (0, -sk % tile_n, 0, -len(rows) % tile_m))
        by_block = padded.view(_ceil_div(len(rows), tile_m), tile_m, blocks[1], tile_n)
        some = by_block.any(dim=3).any(dim=1)
        # Padding queries see all keys, so that they do not make a full block partial.
        padded[len(rows) :] = True
        every = by_block.all(dim=3).all(dim=1)
        m_block = first // tile_m
        status[b, h, m_block : m_block + len(some)] = some.to(torch.uint8) + (every & some)
    return status


_cache: TensorCache[BlockMask] = TensorCache(64)
