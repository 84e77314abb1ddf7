"""Tiles of `cute_flash/smem` in the shared memory of a kernel."""

from typing import Any

from cutlass import cute
from cutlass.memory import SmemAllocator

from cute_flash.planning.tiles.common import SMEM_ALIGN
from cute_flash.smem.layout import AnyLayout, ComposedLayout
from cute_flash.smem.tile import SmemTile


def to_cute(layout: AnyLayout) -> Any:
    """The CuTe layout with this shape, stride and swizzle, for a `@cute.jit` or `@cute.kernel` function."""
    if isinstance(layout, ComposedLayout):
        swizzle = layout.swizzle
        outer = cute.make_swizzle(swizzle.bits, swizzle.base, swizzle.shift)
        return cute.make_composed_layout(outer, layout.offset, to_cute(layout.layout))
    return cute.make_layout(layout.shape, stride=layout.stride)


def byte_swizzle(tile: SmemTile) -> Any:
    """The tile's swizzle as a CuTe swizzle of byte addresses, which a pointer applies; or None."""
    swizzle = tile.swizzle
    if swizzle is None:
        return None
    return cute.make_swizzle(swizzle.bits, swizzle.base + tile.element_bytes.bit_length() - 1, swizzle.shift)


def allocate_stages(smem: SmemAllocator, dtype, tile: SmemTile, stages: int) -> cute.Tensor:
    """A tile for every stage: (rows, columns, stage). The pointer carries the swizzle, the layout stays affine."""
    return smem.allocate_tensor(dtype, to_cute(tile.affine(stages)), SMEM_ALIGN, swizzle=byte_swizzle(tile))
