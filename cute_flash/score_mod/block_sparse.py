"""The index lists of a block mask for the backward.

The list of a K/V tile has the query blocks to visit, of all query heads that share the K/V head, head by head. An entry
is an int32 of bit fields:

    bit 0           partial: mask_mod is applied; else the block is full
    bit 1           the last entry of its head
    from bit 2      the query block (m_block)
    from bit 20     the query head, counted within those that share the K/V head
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
    tensors: Sequence[Tensor], sizes: Sequence[int], *, batch: int, heads: int, heads_kv: int, tile: tuple[int, int]
) -> list[Tensor]:
    """The number of entries (B, Hkv, K/V tiles), and the entries (B, Hkv, K/V tiles, maximal number).

    `tensors` and `sizes` are those of a `BlockMask`; `tile` is the kernel's and divides the mask's. The result is
    computed without a host sync, and cached until the block mask is written to or freed.
    """
    key = tuple(sizes), tile, batch, heads, heads_kv

    def compute() -> list[Tensor]:
        return _query_blocks(BlockMask.of_tensors(tensors, sizes), batch, heads, heads_kv, tile)

    return _cache.of_contents(tensors, key, compute)


def _query_blocks(mask: BlockMask, batch: int, heads: int, heads_kv: int, tile: tuple[int, int]) -> list[Tensor]:
    m_blocks, n_blocks = -(-mask.seqlen_q // tile[0]), -(-mask.seqlen_k // tile[1])
    group = heads // heads_kv
    if m_blocks >= 1 << (HEAD_SHIFT - M_BLOCK_SHIFT) or group >= 1 << (31 - HEAD_SHIFT):
        raise UnsupportedError(
            f"block_mask of {m_blocks} query blocks and {group} query heads per K/V head: at most "
            f"{(1 << (HEAD_SHIFT - M_BLOCK_SHIFT)) - 1} and {(1 << (31 - HEAD_SHIFT)) - 1}"
        )
    # From blocks of the mask to tiles of the kernel.
    status, parts = mask.status, (mask.tile_m // tile[0], mask.tile_n // tile[1])
    status = status.repeat_interleave(parts[0], 2)[:, :, :m_blocks]
    status = status.repeat_interleave(parts[1], 3)[..., :n_blocks]
    if status.shape[1] == 1:
        by_group = status[:, :, None].expand(-1, -1, group, -1, -1)
    else:
        by_group = status.unflatten(1, (heads_kv, group))
    flat = by_group.permute(0, 1, 4, 2, 3).flatten(3)
    is_empty = flat == EMPTY
    order = torch.argsort(is_empty.to(torch.uint8), dim=-1, stable=True)
    num = (~is_empty).sum(dim=-1)
    m_block, head = order % m_blocks, order // m_blocks
    position = torch.arange(order.shape[-1], device=order.device)
    is_last = (position == num[..., None] - 1) | (head != head.roll(-1, -1))
    is_partial = flat.gather(-1, order) == PARTIAL
    flags = is_partial * IS_PARTIAL + is_last * IS_LAST
    entries = flags + (m_block << M_BLOCK_SHIFT) + (head << HEAD_SHIFT)
    return [num.int().expand(batch, heads_kv, -1), entries.int().contiguous().expand(batch, heads_kv, -1, -1)]
