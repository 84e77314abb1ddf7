"""The steps of a block from Q K^T to dS in the backward, with softcap, ALiBi and dropout.

| class         | scores                                                           |
|---------------|------------------------------------------------------------------|
| `PlainScores` | no features: P = exp(scale q·k - LSE),  dS = P (dP - Δ)           |
| `BlockScores` | softcap, ALiBi, dropout: below                                   |
| `ModScores`   | a bias, user mods, a block mask: `device/gradients/mods_bwd.py`            |

The three backward kernels run the same steps for each block: `prefetch`, the function `compute_probs`, `differentiate`,
`finish`. All classes have the methods that they need; `pack_probs` is called only if `masks_probs`.

The formulas of `BlockScores`:

    t   = tanh(scale q·k / softcap)
    P   = exp(softcap t - slope |distance| - LSE)
    dS' = P (Z dP - Δ),  Z = 0 or 1 / (1 - dropout)     the gradient of the slope is the sum of -dS' |distance|
    dS  = dS' (1 - t²),  Δ = rowsum(dO O) - dLSE

A kernel contains only the code of its features. The registers of S hold P (1 - t²) until dP is computed, so softcap
needs no registers of its own. With ALiBi and softcap they hold t instead, and P is computed twice, because the gradient
of the slope needs dS'. P is not scaled by 1 / (1 - dropout); dV is scaled at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_flash.device.memory.views import as_mn
from cute_flash.device.mma.wgmma import convert
from cute_flash.device.ptx import bits_and, pack, rederived, tanh_derivative
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.device.scores.alibi import Alibi
from cute_flash.device.scores.dropout_bits import DropoutBits, KeepBits, RowDropoutBits
from cute_flash.device.scores.mask import Mask, column_offset
from cute_flash.device.scores.philox import Dropout, DropoutOrigin, batch_head_index
from cute_flash.device.scores.position import TilePosition
from cute_flash.device.scores.score import Score
from cute_flash.device.scores.softcap import ExactSoftcap, Softcap
from cute_flash.device.softmax.softmax import LOG2_E

# The formulas of `Score` whose derivatives are here and in `ModScores`.
DIFFERENTIATED = (Softcap, ExactSoftcap, Alibi)


@dataclass(frozen=True)
class BwdScoreParams:
    """The score features of a backward launch. None: absent."""

    score: Score  # without the slopes; `Softcap.apply_cap` gives tanh
    heads: Int32
    alibi_slopes: cute.Tensor | None  # (B, H)
    dalibi_partial: cute.Tensor | None  # (B, H, partial sums), or (1, H, partial sums) in a varlen batch
    dropout_threshold: Int32 | None  # in both 16-bit halves; scores with a smaller random number are dropped
    dropout_scale: Float32 | None  # 1 / (1 - dropout)
    rng: cute.Tensor | None  # (seed, offset)
    mods: Any = None  # BwdModParams: a bias and user mods
    dropout_origin: DropoutOrigin | None = None

    def block(
        self, mask: Mask, head: Int32, batch: Int32, first_col: Int32, is_transposed: bool, row_step: int = 16
    ) -> Any:
        """The scores of the rows of `mask` from `first_col` on.

        `is_transposed`: rows are keys. `row_step`: rows from one m16 tile of a thread to the next.
        """
        score, bits, distance = self.score, None, None
        for formula in score.formulas:
            if not isinstance(formula, DIFFERENTIATED):
                raise NotImplementedError(f"`BlockScores` has no derivative of {type(formula).__name__}")
        if self.alibi_slopes is not None:
            score = score.for_head(self.alibi_slopes[batch, head])
            distance = score.alibi.first_distance(mask, 0, first_col)
        if self.rng is not None:
            dropout = Dropout.read(self.rng, self.dropout_threshold, self.dropout_origin)
            position = TilePosition(
                batch_head_index(self.dropout_origin, batch, head, self.heads), mask.first_row, first_col, mask.tScS
            )
            if is_transposed:
                bits = DropoutBits.compute(dropout, position, score.is_scale_only)
            else:
                bits = RowDropoutBits.compute(dropout, position)
        scores = BlockScores(score, distance, self.heads, bits, self.dropout_scale, is_transposed, row_step)
        return scores if self.mods is None else self.mods.block(scores, mask, head, batch, first_col)

    @cute.jit
    def store_dalibi(self, dalibi: cute.Tensor, head: Int32, seqlen: SeqlenInfo, part: Int32):
        """Store a warp's partial sum of the gradient of a head's slope at index `part`, and reset `dalibi`."""
        total = cute.arch.warp_reduction_sum(dalibi[0])
        if cute.arch.lane_idx() == 0:
            seqlen.slice_head(self.dalibi_partial, head)[part] = total
        dalibi.fill(0.0)


@cute.jit
def compute_probs(
    scores: Any,  # `AnyScores` of `device.gradients.mods_bwd`
    acc_S: cute.Tensor,
    rP: cute.Tensor | None,
    lse: cute.Tensor | Callable[[], cute.Tensor],
    apply_mask: Callable[[], None],
):
    """P = exp(S - LSE) of a block from Q K^T, with score features and masks; after dropout, in rP.

    The registers of S keep the values for `differentiate`.

    Args:
        rP: None if plain scores need P in these registers only.
        lse: The LSE of this thread's queries, or a function that loads it when the exponentials need it.
        apply_mask: Masks S, or P if one pass computes P from Q K^T.
    """
    scores.apply_before_mask(acc_S)
    if cutlass.const_expr(not scores.masks_probs):
        apply_mask()
    scores.exponentiate(acc_S, rP, lse() if callable(lse) else lse)
    if cutlass.const_expr(scores.masks_probs):
        apply_mask()
        scores.pack_probs(acc_S, rP)


class GradientBlock(NamedTuple):
    """The registers of a block in `differentiate`."""

    acc_S: cute.Tensor  # the values that `exponentiate` kept, which dS replaces
    acc_dP: cute.Tensor
    rLSE: cute.Tensor | None  # of this thread's queries; None: P is not computed again
    rDelta: cute.Tensor
    dalibi: cute.Tensor | None  # (1): the gradient of the head's slope


class NoMods:
    """The steps of a block of scores without a bias, user mods and a block mask."""

    masks_probs = False

    def prefetch(self) -> None:
        """Nothing: there is no bias."""

    def apply_band(self, acc_S: cute.Tensor, mask: Mask, first_col: Int32) -> None:
        apply_band(acc_S, mask, first_col, self.is_transposed)

    def apply_mask(self, acc_S: cute.Tensor, is_partial: Boolean | None = None) -> None:
        """Nothing: there is no mask_mod."""

    def finish_bias(self, rdS: cute.Tensor) -> None:
        """Nothing: there is no bias."""

    def finish(self, sums: None) -> None:
        """Nothing: there is no bias and no captured tensor."""

    def of_query(self, rX: cute.Tensor, r: int, c: int) -> Float32:
        """LSE or Δ of the query of an element."""
        return rX[c if self.is_transposed else r]


@dataclass(frozen=True)
class PlainScores(NoMods):
    """This thread's scores of one block, without score features."""

    scale: Float32  # the softmax scale; if `by_vectors`, times LOG2_E
    is_transposed: cutlass.Constexpr  # rows are keys: LSE and Δ belong to columns
    by_vectors: cutlass.Constexpr = False  # operate on whole rows, in mma.sync kernels; requires `is_transposed` and rP
    keeps_score = False

    def apply_before_mask(self, acc_S: cute.Tensor) -> None:
        """Nothing: there is no softcap."""

    @cute.jit
    def exponentiate(self, acc_S: cute.Tensor, rP: cute.Tensor | None, rLSE: cute.Tensor):
        """S -> P = exp(scale S - LSE), in place, and in rP, which may be None unless `by_vectors`."""
        S_mn = as_mn(acc_S)
        if cutlass.const_expr(self.by_vectors):
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                S_mn[r, None].store(cute.math.exp2(S_mn[r, None].load() * self.scale - rLSE.load(), fastmath=True))
            rP.store(acc_S.load().to(rP.element_type))
        else:
            scale_log2 = self.scale * LOG2_E
            for r, c in self.elements(S_mn):
                S_mn[r, c] = cute.math.exp2(S_mn[r, c] * scale_log2 - self.of_query(rLSE, r, c), fastmath=True)
            if cutlass.const_expr(rP is not None):
                convert(acc_S, rP)

    @cute.jit
    def differentiate(self, block: GradientBlock):
        """P -> dS = P (dP - Δ), in place."""
        P_mn, dP_mn, rDelta = as_mn(block.acc_S), as_mn(block.acc_dP), block.rDelta
        if cutlass.const_expr(self.by_vectors):
            for r in cutlass.range_constexpr(cute.size(P_mn, mode=[0])):
                P_mn[r, None].store(P_mn[r, None].load() * (dP_mn[r, None].load() - rDelta.load()))
        else:
            for r, c in self.elements(P_mn):
                P_mn[r, c] = P_mn[r, c] * (dP_mn[r, c] - self.of_query(rDelta, r, c))

    def elements(self, S_mn: cute.Tensor) -> list[tuple[int, int]]:
        """(row, column) of each element, query by query."""
        rows, columns = (range(cute.size(S_mn, mode=[i])) for i in range(2))
        by_column = self.is_transposed
        return [(r, c) for c in columns for r in rows] if by_column else [(r, c) for r in rows for c in columns]


@cute.jit
def apply_band(acc_S: cute.Tensor, mask: Mask, first_col: Int32, is_transposed: cutlass.Constexpr):
    """Set scores to -inf outside the band and for keys past the end, which must not contribute to dQ.

    `Mask.apply` masks columns past the end. If rows are keys (`is_transposed`), `apply_to_tail_rows` masks keys past
    the end. Queries past the end need no mask: their LSE is +inf.
    """
    mask.apply(as_mn(acc_S), first_col)
    if cutlass.const_expr(is_transposed):
        mask.apply_to_tail_rows(as_mn(acc_S))


class ProbPair(NamedTuple):
    """P of two neighbouring columns, which are neighbouring registers."""

    first: Float32
    second: Float32


def store_pair(rP: cute.Tensor, pair: ProbPair, index: int, mask: Callable[[], Int32] | None = None) -> None:
    """Store a pair in the type of rP.

    `mask`: computes the bits to keep of a packed pair.
    """
    if rP.element_type is Float32:
        rP[index], rP[index + 1] = pair
        return
    packed = pack(*pair, rP.element_type)
    cute.recast_tensor(rP, Int32)[index // 2] = packed if mask is None else packed & mask()


@dataclass(frozen=True)
class BlockScores(NoMods):
    """This thread's scores of one block. Rows are keys if `is_transposed`, else queries."""

    score: Score  # of the block's head
    first_distance: Float32 | None  # of this thread's first element
    heads: Int32
    dropout_bits: KeepBits | None
    dropout_scale: Float32 | None  # 1 / (1 - dropout)
    is_transposed: cutlass.Constexpr  # rows are keys: LSE and Δ belong to columns
    row_step: cutlass.Constexpr

    @property
    def has_softcap(self) -> bool:
        return self.score.softcap is not None

    @property
    def has_alibi(self) -> bool:
        return self.score.alibi is not None

    @property
    def keeps_score(self) -> bool:
        """Whether the registers of S hold t, not P, until dS is computed: `differentiate` computes P again."""
        return self.has_softcap and self.has_alibi

    @cute.jit
    def apply_before_mask(self, acc_S: cute.Tensor):
        """Replace Q K^T by t. Called before the mask."""
        if cutlass.const_expr(self.has_softcap):
            # With ALiBi or dropout there are not enough registers for both methods of tanh.
            looks_near = not self.has_alibi and self.dropout_bits is None
            self.score.softcap.apply_cap(acc_S, looks_near)

    @cute.jit
    def exponentiate(self, acc_S: cute.Tensor, rP: cute.Tensor, rLSE: cute.Tensor):
        """Compute P, and store it after dropout in rP. The registers of S keep the values for `differentiate`."""
        S_mn = as_mn(acc_S)
        for c in cutlass.range_constexpr(0, cute.size(S_mn, mode=[1]), 2):
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                pair = [self.prob_after_dropout(S_mn, r, c + j, rLSE) for j in range(2)]
                mask = None
                if cutlass.const_expr(self.dropout_bits is not None and self.score.is_scale_only):
                    mask = partial(self.dropout_bits.pair_mask, r, c)
                    if cutlass.const_expr(rP.element_type is Float32):
                        pair = [self.dropout_bits.select(P, r, c + j) for j, P in enumerate(pair)]
                store_pair(rP, ProbPair(*pair), cute.crd2idx((r, c), S_mn.layout), mask)

    def prob_after_dropout(self, S_mn: cute.Tensor, r: int, c: int, rLSE: cute.Tensor) -> Float32:
        """P of one element. With softcap or ALiBi, it is P after dropout; otherwise `exponentiate` applies dropout.

        The register of S then holds P, P (1 - t²) or t.
        """
        x = S_mn[r, c]
        P = self.prob(x, r, c, rLSE)
        if not self.keeps_score:
            S_mn[r, c] = P * tanh_derivative(x) if self.has_softcap else P
        # With softcap or ALiBi, `DropoutBits.pair_mask` would spill registers.
        return P if self.dropout_bits is None or self.score.is_scale_only else self.dropout_bits.select(P, r, c)

    @cute.jit
    def differentiate(self, block: GradientBlock):
        """Replace the values that `exponentiate` kept by dS, and add the gradient of the slope to dalibi[0]."""
        S_mn, dP_mn, dalibi = as_mn(block.acc_S), as_mn(block.acc_dP), block.dalibi
        opaque = self.opaque(dP_mn)
        for c in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                x, dP = S_mn[r, c], dP_mn[r, c]
                if cutlass.const_expr(self.dropout_bits is not None):
                    dP = self.dropout_bits.select(dP, r, c) * self.dropout_scale
                P = opaque.prob(x, r, c, block.rLSE) if cutlass.const_expr(self.keeps_score) else x
                dS = P * (dP - self.of_query(block.rDelta, r, c))
                if cutlass.const_expr(self.has_alibi):
                    dalibi[0] = dalibi[0] - dS * opaque.distance(r, c)
                S_mn[r, c] = dS * tanh_derivative(x) if cutlass.const_expr(self.keeps_score) else dS

    def opaque(self, dP_mn: cute.Tensor) -> "BlockScores":
        """The same scores with distances that the compiler cannot recognise.

        Otherwise the compiler would merge them with the distances of the first pass, or compute them too early, and
        keep the values of all elements in registers.
        """
        distance = self.first_distance
        if distance is None:
            return self
        if self.dropout_bits is not None and self.is_transposed:
            return replace(self, first_distance=rederived(distance))
        # In other kernels ptxas optimizes `rederived` away. `heads >> 24` is 0, because there are less than 2^24 heads,
        # but ptxas cannot prove it.
        zero = self.heads >> 24
        return replace(self, first_distance=distance + Float32(bits_and(dP_mn[0, 0], zero)))

    def prob(self, x: Float32, r: int, c: int, rLSE: cute.Tensor) -> Float32:
        """P = exp(S - LSE). `x`: Q K^T, or t with softcap."""
        unit = self.score.softcap.softcap_log2 if self.has_softcap else self.score.scale_log2
        x = x * unit - self.of_query(rLSE, r, c)
        if self.has_alibi:
            x = x - self.score.alibi.slope_log2 * self.distance(r, c)
        return cute.math.exp2(x, fastmath=True)

    def distance(self, r: int, c: int) -> Float32:
        """The absolute distance of query and key, for ALiBi."""
        offset = r // 2 * self.row_step + r % 2 * 8 - column_offset(c)
        return cute.math.absf(self.first_distance + Float32(offset))
