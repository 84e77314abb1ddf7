"""The score features (softcap, ALiBi, sinks, ...) of a launch, from its operands. `HeadScoreParams` applies them."""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.gradients.bias_bwd import BwdBiasParams
from cute_flash.device.gradients.mods_bwd import BwdGraphs, BwdModParams, CaptureTerms, ModArguments
from cute_flash.device.gradients.score_bwd import BwdScoreParams
from cute_flash.device.memory.views import as_mn
from cute_flash.device.scheduling.block_sparse import (
    AnyBlockIterator,
    BlockIndices,
    BlockSparseIterator,
    BwdBlockIndices,
)
from cute_flash.device.scores.bias import BlockBias
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.mods import HeadMods, ModParams
from cute_flash.device.scores.philox import Dropout, DropoutOrigin
from cute_flash.device.scores.score import Score
from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90
from cute_flash.score_mod.graphs import GraphValues
from cute_flash.spec.features import MAPS, formulas_of
from cute_flash.spec.problem import Static


@dataclass(frozen=True)
class ScoreParams:
    """The score features of a forward launch. None: absent."""

    score: Score | None = None  # scale and softcap; `for_head` adds the ALiBi slope
    alibi_slopes: cute.Tensor | None = None  # (B, H)
    sinks: cute.Tensor | None = None  # (H)
    rng: cute.Tensor | None = None  # (seed, offset)
    dropout_threshold: Int32 | None = None  # in both 16-bit halves; scores with a smaller random number are dropped
    dropout_scale: Float32 | None = None  # 1 / (1 - dropout)
    dropout_origin: DropoutOrigin | None = None
    max_logit: cute.Tensor | None = None  # (H), -inf before the launch
    mods: ModParams | None = None
    block_indices: BlockIndices | None = None  # of a block mask

    @staticmethod
    def of(static: Static, args: SimpleNamespace) -> "ScoreParams":
        """Build the parameters from the operands of a launch."""
        mods = None
        if static.has_mods:
            arguments = (None if x is None else tuple(x) for x in (args.captures, args.scalars))
            mods = ModParams(static.mods, args.bias, *arguments, is_exact=static.is_fp32)
        # A bias and a score_mod need scores in natural units (base e), not in units of log2.
        is_natural = mods is not None and mods.changes_scores
        score = None
        if formulas_of(static.features) or is_natural:
            unit = 1.0 if is_natural else LOG2_E
            score = Score.of(args.scale, args.softcap, unit=unit, is_exact=static.is_fp32)
        return ScoreParams(
            score=score,
            alibi_slopes=args.alibi_slopes,
            sinks=args.sinks,
            rng=args.rng,
            dropout_threshold=args.dropout_threshold,
            dropout_scale=args.dropout_scale,
            dropout_origin=_dropout_origin(static, args),
            max_logit=args.max_logit,
            mods=mods,
            block_indices=None if args.block_indices is None else BlockIndices(*args.block_indices),
        )

    def softmax_scale(self, scale: Float32) -> Float32:
        """The factor that converts the input of the softmax to units of log2.

        Without a score transform the input is q·k. Transformed scores are in units of log2, or in natural units.
        """
        if self.score is None:
            return scale * LOG2_E
        return Float32(LOG2_E if self.score.unit == 1.0 else 1.0)

    def dropout(self) -> Dropout | None:
        return None if self.rng is None else Dropout.read(self.rng, self.dropout_threshold, self.dropout_origin)

    def batch_shares_bias(self) -> cutlass.Boolean | None:
        """Whether all batch entries share one bias; None without a bias."""
        return None if self.mods is None or self.mods.bias is None else self.mods.bias.stride[0] == 0

    def for_head(self, head: Int32, batch: Int32) -> "HeadScoreParams":
        score = self.score
        if self.alibi_slopes is not None:
            score = score.for_head(self.alibi_slopes[batch, head])
        mods = None if self.mods is None else self.mods.for_head(head, batch)
        sink = None if self.sinks is None else self.sinks[head]
        return HeadScoreParams(score, sink, self.dropout_scale, mods)


@dataclass(frozen=True)
class HeadScoreParams:
    """The score features of one head. None: absent."""

    score: Score | None
    sink: Float32 | None
    dropout_scale: Float32 | None
    mods: HeadMods | None = None

    @cute.jit
    def transform(
        self, acc_S: cute.Tensor, mask: Mask, first_column: Int32, bias: BlockBias | None, looks_near: cutlass.Constexpr
    ):
        """Apply softcap, ALiBi, bias and score_mod to scores in place, before the mask.

        `looks_near`: see `Score.apply`.
        """
        if cutlass.const_expr(self.score is not None):
            self.score.apply(as_mn(acc_S), mask, first_column, looks_near)
        if cutlass.const_expr(self.mods is not None):
            self.mods.transform(as_mn(acc_S), mask, first_column, bias)

    @cute.jit
    def apply_mask(
        self,
        acc_S: cute.Tensor,
        mask: Mask,
        block_iter: AnyBlockIterator | None,
        n_block: Int32,
        first_column: Int32,
        is_masked: bool | cutlass.Boolean,
    ):
        """Set scores outside the band, and where mask_mod is false, to -inf.

        `is_masked`: whether the band masks the block or, with a block mask, whether the block is partial. Without a
        block mask, mask_mod applies to every block. With one, it applies to partial blocks, and the band may mask full
        blocks too. `block_iter`: may be None without a block mask.
        """
        if cutlass.const_expr(not isinstance(is_masked, bool)):
            if is_masked:
                mask.apply(as_mn(acc_S), first_column)
        elif cutlass.const_expr(is_masked):
            mask.apply(as_mn(acc_S), first_column)
        if cutlass.const_expr(isinstance(block_iter, BlockSparseIterator)):
            if cutlass.const_expr(is_masked is True):
                self.mods.apply_mask(as_mn(acc_S), mask, first_column)
            elif cutlass.const_expr(is_masked is False):
                block_iter.apply_band_to_full_block(acc_S, mask, n_block, first_column)
            else:
                if is_masked:
                    self.mods.apply_mask(as_mn(acc_S), mask, first_column)
                else:
                    block_iter.apply_band_to_full_block(acc_S, mask, n_block, first_column)
        elif cutlass.const_expr(self.mods is not None):
            self.mods.apply_mask(as_mn(acc_S), mask, first_column)


def bwd_score_params(static: Static, tile: BwdTileSm80 | BwdTileSm90, args: SimpleNamespace) -> BwdScoreParams | None:
    """The score features of a backward launch, from its operands; None if there are none."""
    if not (static.features or static.block_sparse):
        return None
    mods = None
    if static.has_mods:
        spec = static.mods
        arguments = spec.graphs.split(*(() if x is None else tuple(x) for x in (args.captures, args.scalars)))
        bias = None
        if args.bias is not None:
            bias = BwdBiasParams(
                mBias=args.bias,
                mdBias=args.dbias,
                varies=spec.bias_varies,
                accumulates=spec.dbias_accumulates,
                tma_stores_gradient=spec.dbias_tma,
            )
        mods = BwdModParams(
            graphs=BwdGraphs.of(spec.graphs, spec.captures_needing_grad),
            scale=args.scale,
            softcap=args.softcap,
            score=_mod_arguments(arguments.score),
            mask=_mod_arguments(arguments.mask),
            gradient=_mod_arguments(arguments.gradient),
            bias=bias,
            dcaptures=None if args.dcaptures is None else tuple(args.dcaptures),
            block_indices=None if args.block_indices is None else BwdBlockIndices(*args.block_indices),
            prefetches_bias=tile.prefetches_bias(spec.bwd_ops_per_score, MAPS in formulas_of(static.features)),
            dcapture_terms=None if args.dcapture_terms is None else CaptureTerms(*args.dcapture_terms),
            is_exact=static.is_fp32,
        )
    return BwdScoreParams(
        score=Score.of(args.scale, args.softcap, returns_tanh=True, is_exact=static.is_fp32),
        heads=args.q.shape[1],
        alibi_slopes=args.alibi_slopes,
        dalibi_partial=args.dalibi_partial,
        dropout_threshold=args.dropout_threshold,
        dropout_scale=args.dropout_scale,
        rng=args.rng,
        mods=mods,
        dropout_origin=_dropout_origin(static, args),
    )


def _dropout_origin(static: Static, args: SimpleNamespace) -> DropoutOrigin | None:
    if not static.dropout_origin:
        return None
    return DropoutOrigin(args.dropout_first_query, args.dropout_first_key, args.dropout_first_head, args.dropout_heads)


def _mod_arguments(values: GraphValues) -> ModArguments | None:
    """The captures and scalars of a graph, None for none; None if it has neither."""
    return ModArguments(*(x or None for x in values)) if any(values) else None
