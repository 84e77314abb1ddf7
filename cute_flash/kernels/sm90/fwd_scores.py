"""The scores of a block in the Hopper forward: from Q K^T to the pass that computes P (`device/softmax/exp2.py`).

*Further* blocks are those after the first block of a tile. The first block is transformed in place. With a speculative
row max, S of a further block is kept until the row sums are checked, and a fused pass can compute P from Q K^T
(`device/softmax/fused_exp2.py`). Other further blocks are transformed in place too. Without a bias, user mods and a
block mask, the transform of softcap and ALiBi then also subtracts the row max so far, the *reference*, at no cost;
such scores are *relative*. `device/scores/formula.py` has the table of these paths.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.memory.views import as_mn
from cute_flash.device.scheduling.block_sparse import AnyBlockIterator, BlockSparseIterator
from cute_flash.device.scheduling.pipeline import WarpgroupOrder
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.device.scores.alibi_step import AlibiStep
from cute_flash.device.scores.bias import BlockBias
from cute_flash.device.scores.formula import ScoreTile
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.mods import ScoreFactors
from cute_flash.device.softmax.exp2 import PlainExp2
from cute_flash.device.softmax.fused_exp2 import FusedExp2
from cute_flash.device.softmax.softmax import Softmax
from cute_flash.kernels.common.params import HeadScoreParams
from cute_flash.kernels.sm90.fwd_storage import Config, SharedStorage
from cute_flash.planning.tiles.common import WARPGROUP_ROWS

# Value of `masked` besides True and False: a run-time condition decides whether the block is masked.
MAYBE = "maybe"


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
    block_iter: AnyBlockIterator  # the blocks that the warpgroup visits
    score_params: HeadScoreParams
    alibi_word: Int32 | None  # the operand of `alibi_step` before the diagonal
    num_with_skipped: Int32 | None = None  # the blocks of all warpgroups, which begin with those of `block_iter`

    def has_blocks(self):
        return self.block_iter.num > 0

    @property
    def num_blocks(self) -> Int32:
        """The blocks that the producer loads."""
        return self.block_iter.num if self.num_with_skipped is None else self.num_with_skipped


class KvBlock(NamedTuple):
    """A K/V block of a tile."""

    index: Int32  # n_block
    keys: int  # of a block
    bias: BlockBias | None

    @property
    def column(self) -> Int32:
        """The first key. Computed at each use: kept over the products, it would take a register."""
        return self.index * self.keys


@cute.jit
def kv_block(state: MmaState, tile: MmaTile, iteration: Int32, n_block: Int32, is_full: cutlass.Constexpr) -> KvBlock:
    """A block with its bias, whose load to registers is started here, or which TMA loads.

    `is_full`: all keys of the block exist.
    """
    keys, bias = state.storage.config.tile.tile_n, None
    if cutlass.const_expr(tile.score_params.mods is not None):
        if cutlass.const_expr(state.storage.bias is not None):
            bias = state.storage.bias.block(state.warpgroup, state.thread, iteration)
        else:
            bias = tile.score_params.mods.load_bias(tile.mask, n_block * keys, is_full, warp_column=0)
    return KvBlock(n_block, keys, bias)


@cute.jit
def transform_first(config: Config, tile: MmaTile, acc_S: cute.Tensor, block: KvBlock):
    """Transform and mask the scores of a tile's first block, in place."""
    looks_near = not (config.static.has_mods or config.static.batch_invariant)
    score_params, column = tile.score_params, block.column
    score_params.transform(acc_S, tile.mask, column, block.bias, looks_near)
    score_params.apply_mask(acc_S, tile.mask, tile.block_iter, block.index, column, tile.block_iter.starts_masked())


@cute.jit
def transform_further(
    config: Config,
    softmax: Softmax,
    tile: MmaTile,
    acc_S: cute.Tensor,
    block: KvBlock,
    i: Int32,
    masked: cutlass.Constexpr,
    speculates: cutlass.Constexpr,
) -> PlainExp2 | FusedExp2:
    """Transform and mask the scores of the tile's i-th block, i > 0, or leave it to the pass that is returned.

    `masked`: True, False or MAYBE. `speculates`: the row max is speculative.
    """
    column = block.column
    exp2 = _transform(config, softmax, tile, acc_S, block, masked, speculates)
    if cutlass.const_expr(not exp2.applies_mask):
        is_masked = tile.block_iter.is_masked(i) if masked == MAYBE else masked
        tile.score_params.apply_mask(acc_S, tile.mask, tile.block_iter, block.index, column, is_masked)
    return exp2


def _transform(
    config: Config,
    softmax: Softmax,
    tile: MmaTile,
    acc_S: cute.Tensor,
    block: KvBlock,
    masked: bool | str,
    speculates: bool,
) -> PlainExp2 | FusedExp2:
    score, mods = tile.score_params.score, tile.score_params.mods
    fuses = speculates and config.fuses_exp2
    if mods is not None:
        # The band may mask a block that a block mask lists as full.
        is_sparse = isinstance(tile.block_iter, BlockSparseIterator)
        is_full = masked is False and not (is_sparse and tile.block_iter.blocks is not None)
        if fuses and is_full and (score is None or score.is_scale_only):
            if block.bias is not None:
                block.bias.wait()
            factors = ScoreFactors(None if score is None else score.scale_log2, softmax.scale_log2)
            return mods.fused_exp2(tile.mask, block.column, factors, block.bias, applies_mask=not is_sparse)
        tile.score_params.transform(acc_S, tile.mask, block.column, block.bias, not config.static.batch_invariant)
        return PlainExp2()
    if score is None:
        return PlainExp2()
    area = score_tile(config, tile, block)
    if fuses:
        return score.fused_exp2(as_mn(acc_S), area)
    reference = softmax.reference()
    score.apply_relative(as_mn(acc_S), area, reference)
    return PlainExp2(reference)


def score_tile(config: Config, tile: MmaTile, block: KvBlock) -> ScoreTile:
    # The choice of softcap's polynomial depends on all rows of a warp.
    looks_near = not config.static.batch_invariant
    return ScoreTile(tile.mask, block.column, WARPGROUP_ROWS, config.tile.tile_n, looks_near, config.has_alibi_step)
