"""Shared-memory layouts of `cute_flash/smem` as CuTe layouts."""

from __future__ import annotations

from typing import Any

from cutlass import cute

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
