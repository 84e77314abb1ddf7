"""Shared-memory layouts: what they are, why they are swizzled, and the ones the kernels use.

    swizzle   the XOR swizzle
    algebra   shape:stride layouts in plain Python
    variants  names of the layouts of tiles
    smem      the tiles of the kernels
    banks     bank conflicts, counted
    kernels   those of the forward kernels, of a tile and of a whole launch
    draw      pictures in text and SVG

Modules are imported when their names are asked for: `import cute_flash` needs few of them. Nothing here needs
a GPU, and only `SmemTile.cute`, `to_cute` and `byte_swizzle` need the CuTe DSL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from layouts.kernels import Count, Use, Work, predict, sm80_uses, sm90_uses
    from layouts.smem import HOPPER_VARIANTS, VARIANTS, SmemTile, byte_swizzle, to_cute
    from layouts.swizzle import Swizzle

__all__ = [
    "ACCESSES",
    "HOPPER_VARIANTS",
    "VARIANTS",
    "Access",
    "AnyLayout",
    "ComposedLayout",
    "Count",
    "Layout",
    "Phase",
    "SmemTile",
    "Swizzle",
    "Use",
    "Vector",
    "Work",
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
    "predict",
    "sm80_uses",
    "sm90_uses",
    "store_fragment",
    "svg_picture",
    "text_picture",
    "tile_report",
    "tile_to_shape",
    "to_cute",
    "warp_access",
]

# The names above, by the module that has them.
_NAMES = {
    "algebra": "AnyLayout ComposedLayout Layout coalesce complement composition crd2idx idx2crd "
    "logical_divide tile_to_shape",
    "banks": "ACCESSES Access Phase Vector cp_async_write ldmatrix_a ldmatrix_b ldmatrix_v load_rows "
    "store_fragment tile_report warp_access",
    "draw": "conflict_table svg_picture text_picture",
    "kernels": "Count Use Work predict sm80_uses sm90_uses",
    "smem": "HOPPER_VARIANTS VARIANTS SmemTile byte_swizzle to_cute",
    "swizzle": "Swizzle",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'layouts' has no attribute {name!r}")
    return getattr(import_module(f"layouts.{_HOMES[name]}"), name)
