"""What becomes of a block of scores in the Hopper forward between Q K^T and the softmax.

A tile is one of `fwd_sm90.Tile`, a block begins at a column.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.block_list import ListWalk
from cute_flash.device.views import as_mn


@cute.jit
def load_bias(tile, first_column: Int32, is_whole: cutlass.Constexpr):
    """On its way to registers while others multiply; None without one."""
    if cutlass.const_expr(tile.of_head.written is None):
        return None
    return tile.of_head.written.load_bias(tile.mask, first_column, is_whole)


@cute.jit
def transform(
    tile, acc_S: cute.Tensor, first_column: Int32, bias: cute.Tensor | None, looks_near: cutlass.Constexpr
):
    """Softcap, ALiBi, bias and score_mod, before the mask."""
    if cutlass.const_expr(tile.of_head.score is not None):
        tile.of_head.score.apply(as_mn(acc_S), tile.mask, first_column, looks_near)
    if cutlass.const_expr(tile.of_head.written is not None):
        tile.of_head.written.transform(as_mn(acc_S), tile.mask, first_column, bias)


@cute.jit
def hide(tile, acc_S: cute.Tensor, n_block: Int32, first_column: Int32, is_cut):
    """After the band: where mask_mod says so. A map's full blocks are whole to it, not to the band."""
    written = tile.of_head.written
    if cutlass.const_expr(isinstance(tile.walk, ListWalk)):
        if cutlass.const_expr(is_cut is True):
            written.hide(as_mn(acc_S), tile.mask, first_column)
        elif cutlass.const_expr(is_cut is False):
            hide_full(tile, acc_S, n_block, first_column)
        else:
            if is_cut:
                written.hide(as_mn(acc_S), tile.mask, first_column)
            else:
                hide_full(tile, acc_S, n_block, first_column)
    elif cutlass.const_expr(written is not None):
        written.hide(as_mn(acc_S), tile.mask, first_column)


@cute.jit
def hide_full(tile, acc_S: cute.Tensor, n_block: Int32, first_column: Int32):
    if cutlass.const_expr(tile.walk.blocks is not None):
        if tile.walk.blocks.cuts(n_block):
            tile.mask.apply(as_mn(acc_S), first_column)
