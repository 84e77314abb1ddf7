"""Shared-memory layouts: what they are, why they are swizzled, and the ones the kernels use.

    swizzle   the XOR swizzle
    algebra   shape:stride layouts in plain Python
    smem      the tiles of the kernels
    banks     bank conflicts, counted
    draw      pictures in text and SVG

Nothing here needs a GPU, and only `SmemTile.cute`, `to_cute` and `byte_swizzle` need the CuTe DSL.
"""

from layouts.algebra import (
    AnyLayout,
    ComposedLayout,
    Layout,
    coalesce,
    complement,
    composition,
    crd2idx,
    idx2crd,
    logical_divide,
    tile_to_shape,
)
from layouts.banks import (
    ACCESSES,
    Access,
    Phase,
    Vector,
    cp_async_write,
    ldmatrix_a,
    ldmatrix_b,
    ldmatrix_v,
    load_rows,
    store_fragment,
    tile_report,
    warp_access,
)
from layouts.draw import conflict_table, svg_picture, text_picture
from layouts.smem import VARIANTS, SmemTile, byte_swizzle, to_cute
from layouts.swizzle import Swizzle

__all__ = [
    "ACCESSES",
    "VARIANTS",
    "Access",
    "AnyLayout",
    "ComposedLayout",
    "Layout",
    "Phase",
    "SmemTile",
    "Swizzle",
    "Vector",
    "byte_swizzle",
    "coalesce",
    "complement",
    "composition",
    "conflict_table",
    "cp_async_write",
    "crd2idx",
    "idx2crd",
    "ldmatrix_a",
    "ldmatrix_b",
    "ldmatrix_v",
    "load_rows",
    "logical_divide",
    "store_fragment",
    "svg_picture",
    "text_picture",
    "tile_report",
    "tile_to_shape",
    "to_cute",
    "warp_access",
]
