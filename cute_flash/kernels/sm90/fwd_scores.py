"""The scores of a block in the Hopper forward: transform and exponentials. `HeadScoreParams` has the masks.

*Further* blocks are those after the first block of a tile. The first block is transformed in place. With a speculative
row max, S of a further block is kept until the row sums are checked, and a fused pass can compute P from Q K^T
(`device/softmax/fused_exp2.py`). Other further blocks are transformed in place too. Without a bias, user mods and a
block mask, the transform of softcap and ALiBi then also subtracts the row max so far, the *reference*, at no cost;
such scores are *relative*.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.memory.views import as_mn, as_operand_a
from cute_flash.device.scheduling.block_sparse import AnyBlockIterator, BlockSparseIterator
from cute_flash.device.scheduling.pipeline import WarpgroupOrder
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.device.scores.alibi_step import AlibiStep
from cute_flash.device.scores.bias import BlockBias
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.mods import ModExp2
from cute_flash.device.softmax.fused_exp2 import FusedExp2
from cute_flash.device.softmax.softmax import Softmax
from cute_flash.kernels.common.params import HeadScoreParams
from cute_flash.kernels.sm90.fwd_storage import Config, SharedStorage
from cute_flash.planning.tiles.common import WARPGROUP_ROWS


@dataclass(frozen=True)
class MmaState:
    """The state that an MMA warpgroup keeps from tile to tile."""

    warpgroup: Int32
    thread: Int32
    storage: SharedStorage
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    rQ: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, q stage)
    rK: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, stage)
    rV: cute.Tensor
    rP: cute.Tensor  # (MMA, MMA_M, MMA_N) in the dtype of q
    acc_O: cute.Tensor
    softmax: Softmax
    lse: cute.Tensor  # (rows of this thread,), of the tile that is being finished
    inverse: cute.Tensor  # 1 / l of the same rows
    order: WarpgroupOrder
    tScS: cute.Tensor  # (row, column) of every element of S
    max_logit: cute.Tensor | None  # (1,), of the same rows
    alibi_step: AlibiStep | None  # None: no ALiBi, or its terms are added to the scores


@dataclass(frozen=True)
class MmaTile:
    """A warpgroup's 64 rows of a tile."""

    count: Int32  # tiles before this one
    iteration: Int32  # K/V blocks before this tile
    head: Int32
    seqlen: SeqlenInfo
    mask: Mask
    block_iter: AnyBlockIterator
    score_params: HeadScoreParams
    alibi_word: Int32 | None  # the operand of `alibi_step` before the diagonal

    def has_blocks(self):
        return self.block_iter.num > 0


@cute.jit
def load_bias(state: MmaState, tile: MmaTile, iteration: Int32, first_column: Int32, is_full: cutlass.Constexpr):
    """The bias of a block: its load to registers is started here, or TMA loads it; None without a bias."""
    if cutlass.const_expr(tile.score_params.mods is None):
        return None
    if cutlass.const_expr(state.storage.bias is not None):
        return state.storage.bias.block(state.warpgroup, state.thread, iteration)
    return tile.score_params.mods.load_bias(tile.mask, first_column, is_full, by_warp=True)


def reference_of(tile: MmaTile, softmax: Softmax) -> tuple | None:
    """The row max that the transform subtracts from the scores of a further block; None: scores are not relative."""
    is_relative = tile.score_params.score is not None and tile.score_params.mods is None
    return softmax.reference() if is_relative else None


@cute.jit
def transform_further(
    config: Config, softmax: Softmax, tile: MmaTile, acc_S: cute.Tensor, block: tuple, kind: cutlass.Constexpr
) -> FusedExp2 | None:
    """Transform a further block in place, or return the fused pass that transforms it later.

    `block`: (first column, bias). `kind`: (whether the row max is speculative, whether the block is masked).
    """
    (first_column, bias), (speculative_max, is_masked) = block, kind
    # The choice of softcap's polynomial depends on all rows of a warp.
    looks_near = not config.static.batch_invariant
    reference, fuses = reference_of(tile, softmax), speculative_max and config.fuses_exp2
    if cutlass.const_expr(tile.score_params.mods is not None):
        # The band may mask a block that a block mask lists as full.
        is_sparse = isinstance(tile.block_iter, BlockSparseIterator)
        is_full = is_masked is False and not (is_sparse and tile.block_iter.blocks is not None)
        if cutlass.const_expr(fuses and is_full):
            return _fused_mods(softmax, tile, first_column, bias)
        tile.score_params.transform(acc_S, tile.mask, first_column, bias, looks_near)
        return None
    if cutlass.const_expr(reference is None):
        return None
    area = (first_column, WARPGROUP_ROWS, config.tile.tile_n)
    if cutlass.const_expr(fuses):
        return tile.score_params.score.fused_exp2(as_mn(acc_S), tile.mask, area, config.has_alibi_step)
    tile.score_params.score.apply_relative(as_mn(acc_S), tile.mask, area, reference, looks_near)
    return None


def _fused_mods(softmax: Softmax, tile: MmaTile, first_column: Int32, bias: BlockBias | None) -> ModExp2:
    score, mods = tile.score_params.score, tile.score_params.mods
    if bias is not None:
        bias.wait()
    factors = None if score is None else score.scale_log2, softmax.scale_log2
    applies_mask = not isinstance(tile.block_iter, BlockSparseIterator)
    return mods.fused_exp2(tile.mask, first_column, factors, bias, applies_mask)


@cute.jit
def exponentiate(
    softmax: Softmax, views: tuple, steps: cutlass.Constexpr, fused: FusedExp2 | None, kind: cutlass.Constexpr
):
    """Compute P of some k-steps.

    `views`: see `Softmax.exponentiate_steps`. `kind`: (whether rows may have no keys so far, whether S is relative).
    """
    if cutlass.const_expr(fused is None):
        softmax.exponentiate_steps(views, steps, *kind)
    else:
        row_max = softmax.reference() if kind[0] else tuple(softmax.row_max[r] for r in range(2))
        fused.exponentiate(views, steps, row_max)


@cute.jit
def block_max(
    softmax: Softmax, acc_S: cute.Tensor, result: cute.Tensor, fused: FusedExp2 | None, reference: tuple | None
):
    """The largest score of each row over this thread's columns."""
    if cutlass.const_expr(fused is None):
        softmax.block_max(as_mn(acc_S), result, reference)
    else:
        fused.block_max(as_operand_a(acc_S), result)
