"""Layouts of `layouts.layout` as CuTe layouts."""

from typing import Any

from cutlass import cute

from layouts import AnyLayout, ComposedLayout


def to_cute(layout: AnyLayout) -> Any:
    """The CuTe layout with this shape, stride and swizzle, for a `@cute.jit` function."""
    if isinstance(layout, ComposedLayout):
        swizzle = layout.swizzle
        outer = cute.make_swizzle(swizzle.bits, swizzle.base, swizzle.shift)
        return cute.make_composed_layout(outer, layout.offset, to_cute(layout.layout))
    return cute.make_layout(layout.shape, stride=layout.stride)
