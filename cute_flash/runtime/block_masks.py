"""The index lists of a block mask as operands of kernels, cached for each block mask."""

from __future__ import annotations

from torch import Tensor

from cute_flash.score_mod.tensor_cache import TensorCache
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.problem import Problem

_forward_lists: TensorCache[list[Tensor]] = TensorCache(64)


def forward_block_indices(args: AttentionArgs, problem: Problem) -> list[Tensor]:
    """The counts and indices of full blocks, then those of partial blocks, expanded to (B, H, ...)."""
    heads = problem.batch, problem.heads
    tensors = [*args.block_mask[2:], *args.block_mask[:2]]
    lists = _forward_lists.get(tensors, heads)
    if lists is None:
        # Detached, because a view that autograd tracks would keep the block mask alive.
        lists = [x.contiguous().expand(*heads, *(-1,) * (x.dim() - 2)).detach() for x in tensors]
        if all(x.is_contiguous() for x in tensors):
            # Only views of the block mask are cached: they stay valid if it is written to.
            _forward_lists.put(tensors, heads, lists)
    return lists


def backward_block_indices(
    args: AttentionArgs, problem: Problem, tile_m: int, tile_n: int, deterministic: bool, begins_apart: bool
) -> list[Tensor]:
    """For each K/V tile, the query blocks of all query heads that share the K/V head; see `score_mod.block_sparse`."""
    # Imported here, because it takes 10 ms of the first call, and few calls have a block mask.
    from cute_flash.score_mod.block_sparse import query_block_indices

    return query_block_indices(
        list(args.block_mask),
        list(args.block_mask_sizes),
        batch=problem.batch,
        heads=problem.heads,
        heads_kv=problem.heads_kv,
        tile=(tile_m, tile_n),
        has_ranks=deterministic,
        begins_apart=begins_apart,
    )
