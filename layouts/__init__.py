"""Studies for learners and planners: shared-memory layouts, loop orders, tile sizes, context parallelism.

Shared-memory layouts are CuTe's layouts in plain Python, with their bank conflicts and pictures of both:

    layout    shape:stride layouts, with and without a swizzle, and the layouts of the kernels' tiles
    algebra   composition, complement and division of layouts
    banks     a counter of bank conflicts
    kernels   the accesses of the forward kernels, for one tile and for a launch
    backward  the same for the backward kernels
    draw      pictures in text and SVG
    studies   the other studies: commands of `cute-flash`, and models that docs/ and profiling/ use

The swizzle and the tiles come from `cute_flash.smem`, which the kernels use too. Nothing here needs a GPU or the CuTe
DSL.
"""

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
from layouts.layout import (
    AnyLayout,
    ComposedLayout,
    Layout,
    atom_of,
    crd2idx,
    layout_of,
    staged,
    tile_to_shape,
    transposed,
)

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
    "atom_of",
    "coalesce",
    "complement",
    "composition",
    "conflict_table",
    "cp_async_write",
    "crd2idx",
    "idx2crd",
    "layout_of",
    "ldmatrix_a",
    "ldmatrix_b",
    "ldmatrix_v",
    "load_rows",
    "logical_divide",
    "predict",
    "sm80_uses",
    "sm90_uses",
    "staged",
    "store_fragment",
    "svg_picture",
    "text_picture",
    "tile_report",
    "tile_to_shape",
    "transposed",
    "warp_access",
]
