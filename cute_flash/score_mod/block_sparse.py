"""The index lists of a block mask for the backward, whose outer loop is over K/V tiles.

The list of a K/V tile has the query blocks that it visits, of all query heads that share the K/V head, head by head.
Within a head they ascend, or they begin at the position of the K/V tile and wrap around (`begins_apart`). An entry is
an int32 of bit fields:

    bit 0           partial: mask_mod is applied; else the block is full
    bit 1           the last entry of its head
    from bit 2      the query block (m_block)
    from bit 20     the query head, counted within the heads that share the K/V head

For deterministic gradients, the K/V tiles that list a query block add to its dQ in a fixed order, from the last tile to
the first. The rank of a tile is the number of tiles that add before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.score_mod.block_mask import EMPTY, PARTIAL, BlockMask
from cute_flash.score_mod.tensor_cache import TensorCache

IS_PARTIAL, IS_LAST, M_BLOCK_SHIFT, HEAD_SHIFT = 1, 2, 2, 20
_cache: TensorCache[list[Tensor]] = TensorCache(64)


def query_block_indices(
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    *,
    batch: int,
    heads: int,
    heads_kv: int,
    tile: tuple[int, int],
    has_ranks: bool = False,
    begins_apart: bool = False,
) -> list[Tensor]:
    """The index lists for the tile of a kernel, computed without a host sync.

    They are cached until the block mask is written to or freed.

    Args:
        tensors: `BlockMask.tensors`.
        sizes: `BlockMask.sizes`.
        batch: B of the call.
        heads: H of the call.
        heads_kv: Hkv of the call.
        tile: (tile_m, tile_n) of the kernel, which divides the tile of the block mask.
        has_ranks: Also return the ranks.
        begins_apart: Let K/V tiles that visit the same query blocks begin at different ones, so that they do not all
            add to one block of dQ at the same time.

    Returns:
        The number of entries (B, Hkv, K/V tiles), the entries (B, Hkv, K/V tiles, H / Hkv · query blocks), and the
            ranks (B, H, query blocks, K/V tiles), which are valid for listed blocks only.
    """
    key = tuple(sizes), tile, batch, heads, heads_kv, has_ranks, begins_apart

    def compute() -> list[Tensor]:
        mask = BlockMask.of_tensors(tensors, sizes)
        lists = _query_blocks(mask, batch, heads, heads_kv, tile, begins_apart)
        return [*lists, _ranks(mask, batch, heads, tile)] if has_ranks else lists

    return _cache.of_contents(tensors, key, compute)


def _status_of_tiles(mask: BlockMask, tile: tuple[int, int]) -> Tensor:
    """(B or 1, H or 1, query blocks, K/V tiles): EMPTY, PARTIAL or FULL for each tile of the kernel."""
    m_blocks, n_blocks = -(-mask.seqlen_q // tile[0]), -(-mask.seqlen_k // tile[1])
    status = mask.status.repeat_interleave(mask.tile_m // tile[0], 2)[:, :, :m_blocks]
    return status.repeat_interleave(mask.tile_n // tile[1], 3)[..., :n_blocks]


def _ranks(mask: BlockMask, batch: int, heads: int, tile: tuple[int, int]) -> Tensor:
    """For each query block and K/V tile, the number of later K/V tiles that list the query block."""
    is_listed = (_status_of_tiles(mask, tile) != EMPTY).int()
    upwards = is_listed.flip(3).cumsum(3, dtype=torch.int32).flip(3)
    return (upwards - is_listed).expand(batch, heads, -1, -1)


def _query_blocks(
    mask: BlockMask, batch: int, heads: int, heads_kv: int, tile: tuple[int, int], begins_apart: bool
) -> list[Tensor]:
    """The numbers of entries and the entries of all K/V tiles."""
    m_blocks, group = -(-mask.seqlen_q // tile[0]), heads // heads_kv
    if m_blocks >= 1 << (HEAD_SHIFT - M_BLOCK_SHIFT) or group >= 1 << (31 - HEAD_SHIFT):
        raise UnsupportedError(
            f"block_mask of {m_blocks} query blocks and {group} query heads per K/V head: at most "
            f"{(1 << (HEAD_SHIFT - M_BLOCK_SHIFT)) - 1} and {(1 << (31 - HEAD_SHIFT)) - 1}"
        )
    status = _status_of_tiles(mask, tile)
    if status.shape[1] == 1:
        by_group = status[:, :, None].expand(-1, -1, group, -1, -1)
    else:
        by_group = status.unflatten(1, (heads_kv, group))
    flat = by_group.permute(0, 1, 4, 2, 3).flatten(3)
    position = torch.arange(flat.shape[-1], device=flat.device)
    if begins_apart:
        # The order in which a tile visits the blocks of each head: it begins at its own position, and wraps around.
        n_blocks = flat.shape[2]
        first = torch.arange(n_blocks, device=flat.device)[:, None] * m_blocks // n_blocks
        visits = position - position % m_blocks + (position % m_blocks + first) % m_blocks
        visits = visits.expand(flat.shape)
        order = visits.gather(-1, _listed_first(flat.gather(-1, visits)))
    else:
        order = _listed_first(flat)
    num = (flat != EMPTY).sum(dim=-1)
    m_block, head = order % m_blocks, order // m_blocks
    is_last = (position == num[..., None] - 1) | (head != head.roll(-1, -1))
    is_partial = flat.gather(-1, order) == PARTIAL
    flags = is_partial * IS_PARTIAL + is_last * IS_LAST
    entries = flags + (m_block << M_BLOCK_SHIFT) + (head << HEAD_SHIFT)
    return [num.int().expand(batch, heads_kv, -1), entries.int().contiguous().expand(batch, heads_kv, -1, -1)]


def _listed_first(status: Tensor) -> Tensor:
    """The indices of the blocks that are not empty, then those of the others, each in ascending order."""
    return torch.argsort((status == EMPTY).to(torch.uint8), dim=-1, stable=True)
