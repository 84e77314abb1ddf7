"""A study of shared-memory layouts: what they are, why they are swizzled, and the ones the kernels use.

    algebra   composition, complement and division of shape:stride layouts
    banks     bank conflicts, counted
    kernels   those of the forward kernels, of a tile and of a whole launch
    draw      pictures in text and SVG

The swizzle, the layouts and the tiles are those of `cute_flash.smem`, which the kernels use. Nothing here
needs a GPU. Names are imported on first use, because `to_cute` and `byte_swizzle` need the CuTe DSL, which
takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_flash.device.smem import byte_swizzle, to_cute
    from cute_flash.smem.layout import AnyLayout, ComposedLayout, Layout, crd2idx, tile_to_shape
    from cute_flash.smem.swizzle import Swizzle
    from cute_flash.smem.tile import HOPPER_VARIANTS, VARIANTS, SmemTile
    from layouts.algebra import coalesce, complement, composition, idx2crd, logical_divide
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
    "cute_flash.device.smem": "byte_swizzle to_cute",
    "cute_flash.smem.layout": "AnyLayout ComposedLayout Layout crd2idx tile_to_shape",
    "cute_flash.smem.swizzle": "Swizzle",
    "cute_flash.smem.tile": "HOPPER_VARIANTS VARIANTS SmemTile",
    "layouts.algebra": "coalesce complement composition idx2crd logical_divide",
    "layouts.banks": "ACCESSES Access Phase Vector cp_async_write ldmatrix_a ldmatrix_b ldmatrix_v load_rows "
    "store_fragment tile_report warp_access",
    "layouts.draw": "conflict_table svg_picture text_picture",
    "layouts.kernels": "Count Use Work predict sm80_uses sm90_uses",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'layouts' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
