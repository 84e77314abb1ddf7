"""A block map as the backward walks it: for every tile of keys, the blocks of queries of the heads that share
them, one after the other, each in one number.

    bit 0           partial: mask_mod decides; else full
    bit 1           the last one of its head
    from bit 2      the block of queries
    from bit 20     the head, of those that share the keys
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.score_mod.block_mask import EMPTY, PARTIAL, BlockMap
from cute_flash.score_mod.tensor_cache import Memo, versions

IS_PARTIAL, IS_LAST, ROW_SHIFT, HEAD_SHIFT = 1, 2, 2, 20
_known: Memo[list[Tensor]] = Memo(64)


def entries_of(
    tensors: list[Tensor],
    sizes: list[int],
    *,
    batch: int,
    heads: int,
    heads_kv: int,
    tile: tuple[int, int],
) -> list[Tensor]:
    """How many (B, Hkv, tiles of keys), and the entries (B, Hkv, tiles of keys, at most), for a tile of a
    kernel, which divides the blocks of the map that `BlockMap.of_tensors` makes of these. No sync; kept as
    long as the map is.
    """
    # The lists of keys, which tell all.
    own = tensors[:4]
    written = versions(own)
    if written is None:
        return _made(BlockMap.of_tensors(tensors, sizes), batch, heads, heads_kv, tile)
    more = written, tuple(sizes), tile, batch, heads, heads_kv
    found = _known.get(own, more)
    if found is None:
        made = _made(BlockMap.of_tensors(tensors, sizes), batch, heads, heads_kv, tile)
        found = _known.keep(own, more, made)
    return found


def _made(block_map: BlockMap, batch: int, heads: int, heads_kv: int, tile: tuple[int, int]) -> list[Tensor]:
    rows, columns = -(-block_map.seqlen_q // tile[0]), -(-block_map.seqlen_k // tile[1])
    group = heads // heads_kv
    if rows >= 1 << (HEAD_SHIFT - ROW_SHIFT) or group >= 1 << (31 - HEAD_SHIFT):
        raise UnsupportedError(
            f"block_map of {rows} blocks of queries and {group} heads that share keys: at most "
            f"{(1 << (HEAD_SHIFT - ROW_SHIFT)) - 1} and {(1 << (31 - HEAD_SHIFT)) - 1}"
        )
    status = block_map.status
    parts = block_map.tile_m // tile[0], block_map.tile_n // tile[1]
    status = status.repeat_interleave(parts[0], 2)[:, :, :rows].repeat_interleave(parts[1], 3)[..., :columns]
    if status.shape[1] == 1:
        by_group = status[:, :, None].expand(-1, -1, group, -1, -1)
    else:
        by_group = status.unflatten(1, (heads_kv, group))
    flat = by_group.permute(0, 1, 4, 2, 3).flatten(3)
    is_empty = flat == EMPTY
    order = torch.argsort(is_empty.to(torch.uint8), dim=-1, stable=True)
    num = (~is_empty).sum(dim=-1)
    row, head = order % rows, order // rows
    place = torch.arange(order.shape[-1], device=order.device)
    is_last = (place == num[..., None] - 1) | (head != head.roll(-1, -1))
    is_partial = flat.gather(-1, order) == PARTIAL
    entries = is_partial * IS_PARTIAL + is_last * IS_LAST + (row << ROW_SHIFT) + (head << HEAD_SHIFT)
    return [
        num.int().expand(batch, heads_kv, -1),
        entries.int().contiguous().expand(batch, heads_kv, -1, -1),
    ]
