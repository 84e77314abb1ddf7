"""Layouts of `layouts.layout` as CuTe layouts, and a jit function that evaluates a CuTe layout."""

from typing import Any

import cutlass
from cutlass import Int32, cute

from layouts import AnyLayout, ComposedLayout


def to_cute(layout: AnyLayout) -> Any:
    """The CuTe layout with this shape, stride and swizzle, for a `@cute.jit` function."""
    if isinstance(layout, ComposedLayout):
        swizzle = layout.swizzle
        outer = cute.make_swizzle(swizzle.bits, swizzle.base, swizzle.shift)
        return cute.make_composed_layout(outer, layout.offset, to_cute(layout.layout))
    return cute.make_layout(layout.shape, stride=layout.stride)


@cute.jit
def write_indices(out: cute.Tensor, build: cutlass.Constexpr):
    layout = build()
    for i in range(out.shape[0]):
        out[i] = Int32(cute.crd2idx(i, layout))
