"""Parameters of score features: from the operands of a launch to what kernels read."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.bias_bwd import BwdBiasParams
from cute_flash.device.block_sparse import BlockIndices, BwdBlockIndices
from cute_flash.device.mods import HeadMods, ModParams
from cute_flash.device.mods_bwd import BwdGraphs, BwdModParams
from cute_flash.device.philox import Dropout
from cute_flash.device.score import Score
from cute_flash.device.score_bwd import BwdScoreParams
from cute_flash.device.softmax import LOG2_E
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90
from cute_flash.spec.problem import Static


@dataclass(frozen=True)
class ScoreParams:
    """The score features of a forward launch. None: absent."""

    score: Score | None = None  # scale and softcap; `for_head` adds the ALiBi slope
    alibi_slopes: cute.Tensor | None = None  # (B, H)
    sinks: cute.Tensor | None = None  # (H)
    rng: cute.Tensor | None = None  # (seed, offset)
    dropout_threshold: Int32 | None = None  # in both halves of the word; random numbers below it drop their score
    dropout_scale: Float32 | None = None  # 1 / (1 - dropout)
    max_logit: cute.Tensor | None = None  # (H), -inf before the launch
    mods: ModParams | None = None
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
            arguments = (None if x is None else tuple(x) for x in (captures, scalars))
            mods = ModParams(static.mods, bias, *arguments)
        # A bias and user mods take scores in natural units, not in units of log2.
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
        """The factor from the scores that the softmax gets to units of log2.

        Without a transform they are q·k; transformed scores are in units of log2, or in natural units.
        """
        if self.score is None:
            return scale * LOG2_E
        return Float32(LOG2_E if self.score.unit == 1.0 else 1.0)

    def dropout(self) -> Dropout | None:
        return None if self.rng is None else Dropout.read(self.rng, self.dropout_threshold)

    def batch_shares_bias(self) -> cutlass.Boolean | None:
        """Whether all of the batch have the same bias; None without a bias."""
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
) -> BwdScoreParams | None:
    """The score features of a backward launch, from its operands; None if there are none."""
    if not (static.features or static.block_sparse):
        return None
    mods = None
    if static.has_mods:
        spec = static.mods
        arguments = spec.graphs.split(*(() if x is None else tuple(x) for x in (captures, scalars)))
        mods = BwdModParams(
            graphs=BwdGraphs.of(spec.graphs, spec.captures_needing_grad),
            scale=scale,
            softcap=softcap,
            score=_or_none(arguments.score),
            mask=_or_none(arguments.mask),
            gradient=_or_none(arguments.gradient),
            bias=None if bias is None else BwdBiasParams(bias, dbias, spec.bias_varies, spec.dbias_accumulates),
            dcaptures=None if dcaptures is None else tuple(dcaptures),
            block_indices=None if block_indices is None else BwdBlockIndices(*block_indices),
            prefetches_bias=tile.prefetches_bias(spec.bwd_ops_per_score),
        )
    return BwdScoreParams(
        score=Score.of(scale, softcap, returns_tanh=True),
        heads=heads,
        alibi_slopes=alibi_slopes,
        dalibi_partial=dalibi_partial,
        dropout_threshold=dropout_threshold,
        dropout_scale=dropout_scale,
        rng=rng,
        mods=mods,
    )


def _or_none(arguments: tuple) -> tuple | None:
    """(captures, scalars) of a graph, with None for an empty tuple: kernels take no empty tuples."""
    nonempty = tuple(x or None for x in arguments)
    return None if nonempty == (None, None) else nonempty


def kernel_symbol(kernel: str, static: Static, tile: Any) -> str:
    """The symbol of a kernel. ptxas compiles kernels with "cutlass" in their name differently."""
    mask = ("l" if static.has_left else "") + ("r" if static.has_right else "") or "full"
    layout = getattr(tile, "layout", "swizzled")
    tags = "".join(f"_{tag}" for tag in (*static.tags, *(() if layout == "swizzled" else (layout,))))
    return f"cute_flash_{kernel}_d{static.widths}_{static.dtype}_{mask}_{tile.tile_m}x{tile.tile_n}{tags}"
