"""What becomes of a block of scores in the Hopper forward between Q K^T and the sums of P.

A block begins at a column. The first block of a tile is transformed as it
stands, and so are those that are cut where users' functions are asked for. Softcap and ALiBi take further
ones relative to what their rows have seen, which costs nothing; where S is kept until sums were checked, P is
made of products by a formula (`device/exponents.py`).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.barriers import Turns
from cute_flash.device.bias import Bias
from cute_flash.device.block_iterator import AnyBlockIterator, BlockSparseIterator
from cute_flash.device.exponents import Formula
from cute_flash.device.mask import Mask
from cute_flash.device.sequence import Sequence
from cute_flash.device.softmax import Softmax
from cute_flash.device.views import as_mn, as_operand_a
from cute_flash.device.written import WrittenFormula
from cute_flash.kernels.common.params import HeadScoreParams
from cute_flash.kernels.sm90.fwd_storage import Shapes, Shared
from cute_flash.planning.tiles.common import WARPGROUP_ROWS


@dataclass(frozen=True)
class Main:
    """What a warpgroup works with."""

    warpgroup: Int32
    thread: Int32
    shared: Shared
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    rQ: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, q stage)
    rK: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, stage)
    rV: cute.Tensor
    rP: cute.Tensor  # (MMA, MMA_M, MMA_N) in the inputs' type
    acc_O: cute.Tensor
    softmax: Softmax
    lse: cute.Tensor  # (rows of this thread,), of the tile that ends
    inverse: cute.Tensor  # 1 / l
    turns: Turns
    tScS: cute.Tensor  # (row, column) of every element of S
    largest: cute.Tensor | None  # (1,), the largest score of the tile that ends, of this thread


@dataclass(frozen=True)
class Tile:
    """What a warpgroup works on: its rows of one tile."""

    count: Int32  # tiles before this one
    fill: Int32  # blocks of K and V before this tile's
    head: Int32
    span: Sequence
    mask: Mask
    block_iter: AnyBlockIterator  # over its key blocks
    of_head: HeadScoreParams

    def has_blocks(self):
        return self.block_iter.num > 0


@cute.jit
def load_bias(main: Main, tile: Tile, fill: Int32, first_column: Int32, is_whole: cutlass.Constexpr):
    """On its way to registers while others multiply, or where it will be in shared memory; None without."""
    if cutlass.const_expr(tile.of_head.mods is None):
        return None
    if cutlass.const_expr(main.shared.bias is not None):
        return main.shared.bias.at(main.warpgroup, main.thread, fill)
    return tile.of_head.mods.load_bias(tile.mask, first_column, is_whole, by_warp=True)


@cute.jit
def transform(
    tile: Tile,
    acc_S: cute.Tensor,
    first_column: Int32,
    bias: Bias | None,
    looks_near: cutlass.Constexpr,
):
    """Softcap, ALiBi, bias and score_mod, before the mask."""
    if cutlass.const_expr(tile.of_head.score is not None):
        tile.of_head.score.apply(as_mn(acc_S), tile.mask, first_column, looks_near)
    if cutlass.const_expr(tile.of_head.mods is not None):
        tile.of_head.mods.transform(as_mn(acc_S), tile.mask, first_column, bias)


def reference_of(tile: Tile, softmax: Softmax) -> tuple | None:
    """What scores of a further block are taken relative to; None: they stand as they are."""
    is_alone = tile.of_head.score is not None and tile.of_head.mods is None
    return softmax.reference() if is_alone else None


@cute.jit
def transform_from(
    shapes: Shapes, softmax: Softmax, tile: Tile, acc_S: cute.Tensor, block: tuple, how: cutlass.Constexpr
) -> Formula | None:
    """The same, less what `reference_of` says; or the formula to do it by. `block`: its first column, and its
    bias; `how`: whether sums are checked, and whether the band cuts it.
    """
    (first_column, bias), (speculative_max, is_cut) = block, how
    # Whether all are near 0 is asked of a warp's rows together.
    looks_near = not shapes.static.batch_invariant
    reference, has_formula = reference_of(tile, softmax), speculative_max and shapes.has_formula
    if cutlass.const_expr(tile.of_head.mods is not None):
        # A full block of a map may be cut by the band as well.
        is_whole = is_cut is False and not (
            isinstance(tile.block_iter, BlockSparseIterator) and tile.block_iter.blocks is not None
        )
        if cutlass.const_expr(has_formula and is_whole):
            return _written_formula(softmax, tile, first_column, bias)
        transform(tile, acc_S, first_column, bias, looks_near)
        return None
    if cutlass.const_expr(reference is None):
        return None
    place = (first_column, WARPGROUP_ROWS, shapes.tile.tile_n)
    if cutlass.const_expr(has_formula):
        return tile.of_head.score.begin(as_mn(acc_S), tile.mask, place)
    tile.of_head.score.apply_from(as_mn(acc_S), tile.mask, place, reference, looks_near)
    return None


def _written_formula(softmax: Softmax, tile: Tile, first_column: Int32, bias: Bias | None) -> WrittenFormula:
    score, written = tile.of_head.score, tile.of_head.mods
    if bias is not None:
        bias.wait()
    factors = None if score is None else score.scale_log2, softmax.scale_log2
    return written.formula(tile.mask, first_column, factors, bias, not isinstance(tile.block_iter, BlockSparseIterator))


@cute.jit
def hide(tile: Tile, acc_S: cute.Tensor, n_block: Int32, first_column: Int32, is_cut):
    """The band, and after it where mask_mod says so. A map's full blocks are whole to it, not to the band."""
    if cutlass.const_expr(not isinstance(is_cut, bool)):
        if is_cut:
            tile.mask.apply(as_mn(acc_S), first_column)
    elif cutlass.const_expr(is_cut):
        tile.mask.apply(as_mn(acc_S), first_column)
    written = tile.of_head.mods
    if cutlass.const_expr(isinstance(tile.block_iter, BlockSparseIterator)):
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
def hide_full(tile: Tile, acc_S: cute.Tensor, n_block: Int32, first_column: Int32):
    if cutlass.const_expr(tile.block_iter.blocks is not None):
        if tile.block_iter.blocks.is_masked(n_block):
            tile.mask.apply(as_mn(acc_S), first_column)


@cute.jit
def exponentiate(
    softmax: Softmax, views: tuple, steps: cutlass.Constexpr, formula: Formula | None, how: cutlass.Constexpr
):
    """P of some steps. `how`: whether a row may have seen no key, and whether S is relative to m."""
    if cutlass.const_expr(formula is None):
        softmax.exponentiate_steps(*views, steps, *how)
    else:
        row_max = softmax.reference() if how[0] else tuple(softmax.row_max[r] for r in range(2))
        formula.exponentiate(views, steps, row_max)


@cute.jit
def block_max(
    softmax: Softmax,
    acc_S: cute.Tensor,
    found: cute.Tensor,
    formula: Formula | None,
    reference: tuple | None,
):
    """The largest score of each row over this thread's columns."""
    if cutlass.const_expr(formula is None):
        softmax.block_max(as_mn(acc_S), found, reference)
    else:
        formula.block_max(as_operand_a(acc_S), found)
