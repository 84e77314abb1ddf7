"""What score features add to the parameters of a kernel, and what of it concerns one head."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_flash.device.bias_bwd import BiasTerms
from cute_flash.device.block_iterator import BlockIndices
from cute_flash.device.entry_list import EntryLists
from cute_flash.device.mods_bwd import Code, WrittenTerms
from cute_flash.device.philox import Dropout
from cute_flash.device.score import Score
from cute_flash.device.score_bwd import Terms
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.written import Written, WrittenOfHead
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90
from cute_flash.spec.problem import Static


@dataclass(frozen=True)
class ScoreParams:
    """The score features of a forward launch. None: absent."""

    score: Score | None = None  # without the slopes
    alibi_slopes: cute.Tensor | None = None  # (B, H)
    sinks: cute.Tensor | None = None  # (H)
    rng: cute.Tensor | None = None  # (seed, offset)
    dropout_threshold: Int32 | None = None  # in both halves: draws below it are dropped
    dropout_scale: Float32 | None = None  # 1 / (1 - dropout)
    max_logit: cute.Tensor | None = None  # (H), -inf before the launch
    mods: Written | None = None
    block_indices: BlockIndices | None = None  # of a block mask

    @staticmethod
    def of(
        static: Static,
        scale: Float32,
        *,
        softcap: Float32 | None,
        alibi_slopes: cute.Tensor | None,
        sinks: cute.Tensor | None,
        dropout_threshold: Int32 | None,
        dropout_scale: Float32 | None,
        rng: cute.Tensor | None,
        max_logit: cute.Tensor | None,
        bias: cute.Tensor | None,
        captures: list | None,
        scalars: list | None,
        block_indices: list | None,
    ) -> "ScoreParams":
        """From the operands of a launch."""
        mods = None
        if static.has_mods:
            mods = Written(static.mods, bias, *(None if x is None else tuple(x) for x in (captures, scalars)))
        # A bias and user mods see natural scores.
        is_natural = mods is not None and mods.changes_scores
        transforms = softcap is not None or alibi_slopes is not None or is_natural
        return ScoreParams(
            score=Score.of(scale, softcap, unit=1.0 if is_natural else LOG2_E) if transforms else None,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            rng=rng,
            dropout_threshold=dropout_threshold,
            dropout_scale=dropout_scale,
            max_logit=max_logit,
            mods=mods,
            block_indices=None if block_indices is None else BlockIndices(*block_indices),
        )

    def softmax_scale(self, scale: Float32) -> Float32:
        """Of the scores that the softmax sees. Transformed ones are in units of log2 already, or natural."""
        if self.score is None:
            return scale * LOG2_E
        return Float32(LOG2_E if self.score.unit == 1.0 else 1.0)

    def dropout(self) -> Dropout | None:
        if self.rng is None:
            return None
        return Dropout.read(self.rng, Uint32(self.dropout_threshold), self.dropout_scale)

    def shares_batch(self) -> cutlass.Boolean | None:
        """Whether all of the batch have the same bias; None without one."""
        return None if self.mods is None or self.mods.bias is None else self.mods.bias.stride[0] == 0

    def of_head(self, head: Int32, batch: Int32) -> "HeadScoreParams":
        score = self.score
        if self.alibi_slopes is not None:
            score = score.of_head(self.alibi_slopes[batch, head])
        mods = None if self.mods is None else self.mods.of_head(head, batch)
        return HeadScoreParams(score, None if self.sinks is None else self.sinks[head], self.dropout_scale, mods)


@dataclass(frozen=True)
class HeadScoreParams:
    score: Score | None
    sink: Float32 | None
    dropout_scale: Float32 | None
    mods: WrittenOfHead | None = None


def bwd_score_params(
    static: Static,
    tile: BwdTileSm80 | BwdTileSm90,
    heads: Int32,
    scale: Float32,
    *,
    softcap: Float32 | None,
    alibi_slopes: cute.Tensor | None,
    dalibi_partial: cute.Tensor | None,
    dropout_threshold: Int32 | None,
    dropout_scale: Float32 | None,
    rng: cute.Tensor | None,
    bias: cute.Tensor | None,
    dbias: cute.Tensor | None,
    captures: list | None,
    scalars: list | None,
    dcaptures: list | None,
    block_indices: list | None,
) -> Terms | None:
    """The score features of a backward launch, from its operands; None if scores are products only."""
    if not (static.features or static.block_sparse):
        return None
    written = None
    if static.has_mods:
        mods = static.mods
        parts = mods.graphs.split(*(() if x is None else tuple(x) for x in (captures, scalars)))
        written = WrittenTerms(
            Code.of(mods.graphs, mods.captures_needing_grad),
            scale,
            softcap,
            *(_or_none(part) for part in (parts.score, parts.mask, parts.gradient)),
            None if bias is None else BiasTerms(bias, dbias, mods.bias_varies, mods.dbias_accumulates),
            None if dcaptures is None else tuple(dcaptures),
            None if block_indices is None else EntryLists(*block_indices),
            tile.prefetches_bias(mods.bwd_ops_per_score),
        )
    return Terms(
        score=Score.of(scale, softcap, gives_tangent=True),
        heads=heads,
        slopes=alibi_slopes,
        dslopes=dalibi_partial,
        threshold=dropout_threshold,
        keep_scale=dropout_scale,
        rng=rng,
        written=written,
    )


def _or_none(part: tuple) -> tuple | None:
    """(captures, scalars) of a graph, with None for what is empty: kernels take no empty tuples."""
    found = tuple(x or None for x in part)
    return None if found == (None, None) else found
