"""Converts FlexAttention's block masks, `torch.nn.attention.flex_attention.BlockMask`, into `BlockMask`.

torch's block mask has lists of K/V blocks like `BlockMask`, and an untraced mask_mod. The conversion reads only the
lists; `attn` traces the mask_mod and reads its captured values at each call, as torch does.

This module imports torch's flex_attention module. `api.py` imports it at the first call with a torch block mask.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import noop_mask

from cute_flash.score_mod.block_mask import BlockIndices, BlockMask, is_listed
from cute_flash.score_mod.tensor_cache import TensorCache

# torch's block size can exceed the sequence (up to 2³⁰). It is then reduced to the length, rounded up to a multiple of
# this.
MULTIPLE = 128


def convert(block_mask: TorchBlockMask, mask_mod: Callable | None) -> tuple[BlockMask, Callable | None]:
    """The block mask and the mask_mod of its partial blocks, computed without a host sync.

    The block mask is cached until a list of torch's block mask is written to or freed. Lists that are inference tensors
    are converted at each call.

    Args:
        block_mask: torch's block mask.
        mask_mod: The mask_mod that was passed to `attn` together with it, or None.

    Raises:
        ValueError: `mask_mod` is not the block mask's own, or the lists do not fit `seq_lengths` and `BLOCK_SIZE`.
    """
    own = block_mask.mask_mod
    if mask_mod is not None and mask_mod is not own:
        raise ValueError(
            "mask_mod differs from the mask_mod of block_mask: leave mask_mod out, because a block mask carries its "
            "own, or build the block mask of both with torch's and_masks"
        )
    seqlens, block_size = tuple(block_mask.seq_lengths), tuple(block_mask.BLOCK_SIZE)
    lists = [block_mask.kv_num_blocks, block_mask.kv_indices]
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        lists += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
    if torch.compiler.is_dynamo_compiling():
        converted = _converted(lists, seqlens, block_size)
    else:
        converted = _cache.of_contents(lists, (seqlens, block_size), lambda: _converted(lists, seqlens, block_size))
    return converted, None if own is noop_mask else own


def _converted(lists: list[Tensor], seqlens: tuple[int, ...], block_size: tuple[int, ...]) -> BlockMask:
    (seqlen_q, seqlen_k), (tile_m, tile_n) = seqlens, block_size
    blocks = -(-seqlen_q // tile_m), -(-seqlen_k // tile_n)
    if lists[1].shape[-2] != blocks[0]:
        raise ValueError(
            f"block_mask has {lists[1].shape[-2]} rows of blocks, and seq_lengths={seqlens} with "
            f"BLOCK_SIZE={block_size} have {blocks[0]}: set seq_lengths of a sliced block mask to the lengths of the "
            "call, or build the block mask with create_block_mask"
        )
    # torch's lists may lack the batch and the head dimension.
    lists = [x.reshape((1,) * (dims - x.dim()) + x.shape) for x, dims in zip(lists, (3, 4, 3, 4))]
    is_partial = is_listed(lists[0], lists[1], blocks[1])
    is_full = is_listed(lists[2], lists[3], blocks[1]) if len(lists) > 2 else torch.zeros_like(is_partial)
    tile_m, tile_n = (min(tile, max(1, -(-size // MULTIPLE)) * MULTIPLE) for tile, size in zip(block_size, seqlens))
    if seqlen_k % tile_n:
        # A last block of fewer than tile_n keys is never full.
        is_last = torch.arange(blocks[1], device=is_full.device) == blocks[1] - 1
        is_partial, is_full = is_partial | (is_full & is_last), is_full & ~is_last
    partial, full = BlockIndices.of(is_partial & ~is_full), BlockIndices.of(is_full)
    return BlockMask(tile_m, tile_n, seqlen_q, seqlen_k, partial, full)


_cache: TensorCache[BlockMask] = TensorCache(64)
