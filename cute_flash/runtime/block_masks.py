"""The index lists of a block mask as kernels take them."""

from __future__ import annotations

from torch import Tensor

from cute_flash.score_mod.block_sparse import query_block_indices
from cute_flash.score_mod.tensor_cache import TensorCache
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.problem import Problem

_forward_lists: TensorCache[list[Tensor]] = TensorCache(64)


def forward_block_indices(args: AttentionArgs, problem: Problem) -> list[Tensor]:
    """Of `BlockMask.tensors`: the counts and indices of full blocks, then of partial ones, for every head."""
    heads = problem.batch, problem.heads
    partial, full = args.block_mask[:2], args.block_mask[2:4]
    own = [*full, *partial]
    lists = _forward_lists.get(own, heads)
    if lists is None:
        # Detached: a view would keep the block mask alive.
        lists = [x.contiguous().expand(*heads, *(-1,) * (x.dim() - 2)).detach() for x in own]
        if all(x.is_contiguous() for x in own):
            # Views: they show whatever is written into the block mask.
            _forward_lists.put(own, heads, lists)
    return lists


def backward_block_indices(args: AttentionArgs, problem: Problem, tile_m: int, tile_n: int) -> list[Tensor]:
    """For every K/V tile, the query blocks of the heads that share it; see `score_mod.block_sparse`."""
    return query_block_indices(
        list(args.block_mask),
        list(args.block_mask_sizes),
        batch=problem.batch,
        heads=problem.heads,
        heads_kv=problem.heads_kv,
        tile=(tile_m, tile_n),
    )
