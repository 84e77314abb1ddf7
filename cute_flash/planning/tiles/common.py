"""Sizes and limits that tiles of all kernels share."""

from __future__ import annotations

from typing import Any

from cute_flash.spec.problem import BLOCK_MASK_MULTIPLE, Static, UnsupportedError

ELEMENT_BYTES = 2
SMEM_ALIGN = 1024  # of every tile in shared memory: the period of its swizzle
WARP_ROWS = 16  # rows of one mma.sync m16n8k16
WARPGROUP_ROWS = 64  # rows of one wgmma
WARP_KEYS = 16  # keys of one ldmatrix.x4 of K or V
# How much a row has registers for beside plain attention (`Features.weight`): a sink; a slope; softcap, or a
# slope and a sink; dropout, or one of a bias and functions; all but those; everything.
ONE, LIGHT, MEDIUM, HEAVY, MOST, ANY_WEIGHT = 1, 2, 3, 4, 11, 99


def copy_rows(head_dim: int, num_threads: int) -> int:
    """Rows that all threads copy at once: 16 bytes each, 128 or 64 bytes of a row side by side."""
    return num_threads * 16 // (128 if head_dim % 64 == 0 else 64)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // SMEM_ALIGN) * SMEM_ALIGN


def _check_layout(layout: str, possible: tuple[str, ...], why: str) -> None:
    if layout not in possible:
        raise UnsupportedError(f"{layout=}: {why}; choose one of {', '.join(possible)}")


def divides_map(tile: Any, static: Static) -> bool:
    divides = not (BLOCK_MASK_MULTIPLE % tile.tile_m or BLOCK_MASK_MULTIPLE % tile.tile_n)
    return divides or not static.features.block_map
