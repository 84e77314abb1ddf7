"""Tiles of `cute_flash/smem` in the shared memory of a kernel."""

from typing import Any

from cutlass import cute
from cutlass.memory import SmemAllocator

from cute_flash.planning.tiles.common import SMEM_ALIGN
from cute_flash.smem.tile import SmemTile


def byte_swizzle(tile: SmemTile) -> Any:
    """The tile's swizzle as a CuTe swizzle of byte addresses, which a pointer applies; or None."""
    swizzle = tile.swizzle
    if swizzle is None:
        return None
    return cute.make_swizzle(swizzle.bits, swizzle.base + tile.element_bytes.bit_length() - 1, swizzle.shift)


def affine_layout(tile: SmemTile) -> cute.Layout:
    """The layout of a tile without its swizzle, for a pointer or a descriptor that swizzles."""
    shape, stride = tile.affine
    return cute.make_layout(shape, stride=stride)


def allocate_stages(smem: SmemAllocator, dtype, tile: SmemTile, stages: int) -> cute.Tensor:
    """A tile for every stage: (rows, columns, stage). The pointer carries the swizzle, the layout stays affine."""
    shape, stride = tile.staged(stages)
    layout = cute.make_layout(shape, stride=stride)
    return smem.allocate_tensor(dtype, layout, SMEM_ALIGN, swizzle=byte_swizzle(tile))
