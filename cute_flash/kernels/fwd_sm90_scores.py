"""What becomes of a block of scores in the Hopper forward between Q K^T and the sums of P.

A tile is one of `fwd_sm90.Tile`, a block begins at a column. The first block of a tile is transformed as it
stands. Further ones are taken relative to what their rows have seen, which costs nothing; where S is kept
until sums were checked, P is made of products by a formula (`device/exponents.py`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.exponents import Curve, Line
from cute_flash.device.softmax import Softmax
from cute_flash.device.views import as_mn
from cute_flash.kernels.fwd_sm90_shared import Shapes
from cute_flash.tiles import WARPGROUP_ROWS


@cute.jit
def transform(tile, acc_S: cute.Tensor, first_column: Int32):
    """Softcap and ALiBi, before the mask."""
    if cutlass.const_expr(tile.of_head.score is not None):
        tile.of_head.score.apply(as_mn(acc_S), tile.mask, first_column)


@cute.jit
def transform_from(
    shapes: Shapes,
    tile,
    acc_S: cute.Tensor,
    first_column: Int32,
    reference: tuple | None,
    checks_sums: cutlass.Constexpr,
) -> Line | Curve | None:
    """The same, less a reference of each row; or the formula to do it by."""
    score = tile.of_head.score
    if cutlass.const_expr(score is None):
        return None
    block = (first_column, WARPGROUP_ROWS, shapes.tile.tile_n)
    if cutlass.const_expr(checks_sums and shapes.has_formula):
        return score.begin(as_mn(acc_S), tile.mask, block)
    score.apply_from(as_mn(acc_S), tile.mask, block, reference)
    return None


@cute.jit
def exponentiate(
    softmax: Softmax,
    views: tuple,
    steps: cutlass.Constexpr,
    formula: Line | Curve | None,
    how: cutlass.Constexpr,
):
    """P of some steps. `how`: whether a row may have seen no key, and whether S is relative to m."""
    if cutlass.const_expr(formula is None):
        softmax.exponentiate_steps(*views, steps, *how)
    else:
        row_max = softmax.reference() if how[0] else tuple(softmax.row_max[r] for r in range(2))
        formula.exponentiate(*views, steps, row_max)


@cute.jit
def block_max(
    softmax: Softmax,
    acc_S: cute.Tensor,
    found: cute.Tensor,
    formula: Line | Curve | None,
    reference: tuple | None,
):
    """The largest score of each row over this thread's columns."""
    if cutlass.const_expr(formula is None):
        softmax.block_max(as_mn(acc_S), found, reference)
    else:
        formula.block_max(as_mn(acc_S), found)
