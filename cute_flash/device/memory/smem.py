"""The tiles of `cute_flash/smem` as CuTe layouts, and their allocation in shared memory."""

from typing import Any

from cutlass import cute
from cutlass.memory import SmemAllocator

from cute_flash.planning.tiles.common import SMEM_ALIGN
from cute_flash.smem.tile import SmemTile


def byte_swizzle(tile: SmemTile) -> Any:
    """The tile's swizzle as a CuTe swizzle of byte addresses, for a pointer or a TMA descriptor; None: no swizzle."""
    swizzle = tile.swizzle
    if swizzle is None:
        return None
    return cute.make_swizzle(swizzle.bits, swizzle.base + tile.element_bytes.bit_length() - 1, swizzle.shift)


def affine_layout(tile: SmemTile) -> cute.Layout:
    """The layout of a tile without its swizzle, which the pointer or the TMA descriptor applies."""
    shape, stride = tile.affine
    return cute.make_layout(shape, stride=stride)


def allocate_stages(smem: SmemAllocator, dtype: type, tile: SmemTile, stages: int) -> cute.Tensor:
    """Allocate a tile per stage: (rows, columns, stage). The pointer carries the swizzle; the layout stays affine."""
    shape, stride = tile.staged(stages)
    layout = cute.make_layout(shape, stride=stride)
    return smem.allocate_tensor(dtype, layout, SMEM_ALIGN, swizzle=byte_swizzle(tile))
