"""Sizes, costs and limits that the tiles of all kernels share."""

from __future__ import annotations

from typing import Any

from cute_flash.errors import UnsupportedError
from cute_flash.score_mod.limits import BLOCK_MASK_MULTIPLE
from cute_flash.spec.problem import Static

SMEM_ALIGN = 1024  # of every tile in shared memory: the period of its swizzle
WARP_ROWS = 16  # rows of one mma.sync m16n8k16
WARPGROUP_ROWS = 64  # rows of one wgmma
WARP_KEYS = 16  # keys of one ldmatrix.x4 of K or V

# Feature cost: additional registers of a thread over plain attention (`spec.features.feature_cost`). The unit is the
# cost of an attention sink, the cheapest feature. Costs are estimates and add up; the rows of `spec.features.FEATURES`
# have the cost of each feature. A table row supports calls that cost at most its `max_feature_cost`; beyond it the
# kernel would spill.
COST_ALIBI = 2
COST_SOFTCAP = 3
COST_DROPOUT = 4
COST_USER_MOD = 4  # one of a bias, a score_mod and a mask_mod
COST_ALL_SCORE_FEATURES = 11  # softcap, ALiBi, a sink, dropout and max_logit together
COST_ANY = 99


def copy_rows(head_dim: int, num_threads: int) -> int:
    """Rows that all threads copy at once: 16 bytes per thread, 8 or 4 threads per 128 or 64 bytes of a row."""
    return num_threads * 16 // (128 if head_dim % 64 == 0 else 64)


def align_smem(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of `SMEM_ALIGN`."""
    return -(-num_bytes // SMEM_ALIGN) * SMEM_ALIGN


def check_layout(layout: str, possible: tuple[str, ...], why: str) -> None:
    """Raise `UnsupportedError` for a shared-memory layout that a kernel cannot be built with."""
    if layout not in possible:
        raise UnsupportedError(f"{layout=}: {why}; choose one of {', '.join(possible)}")


def divides_block_mask(tile: Any, static: Static) -> bool:
    """Whether tiles divide the blocks of a block mask; true without a block mask."""
    return not (static.block_sparse and (BLOCK_MASK_MULTIPLE % tile.tile_m or BLOCK_MASK_MULTIPLE % tile.tile_n))
