"""What softcap, ALiBi and dropout make of a block of the backward, between S and dS.

    t   = tanh(scale q·k / softcap)
    P   = exp(softcap t - slope |distance| - LSE)
    dS' = P (Z dP - D),  Z = 0 or 1 / (1 - dropout)     its sum with the distances: the gradient of the slope
    dS  = dS' (1 - t²)

by those parts that a kernel has. In the place of S stands P (1 - t²) until dP is there: softcap needs no
registers of its own. With a slope beside it t stands there instead and P is computed twice, for the gradient
of the slope is made of dS'. dV takes its factor of 1 / (1 - dropout) at the end: P is kept or not.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_flash.device.kept import Kept
from cute_flash.device.mask import Mask, column_offset
from cute_flash.device.philox import Dropout, TilePlace
from cute_flash.device.ptx import pack, rederived
from cute_flash.device.score import Score
from cute_flash.device.sequence import Sequence
from cute_flash.device.views import as_mn


@dataclass(frozen=True)
class Terms:
    """Of a launch. None: not asked for."""

    score: Score  # without the slopes; of a cap, the tangent
    heads: Int32
    slopes: cute.Tensor | None  # (B, H)
    dslopes: cute.Tensor | None  # (B, H, parts of the sums); of a packed batch (1, H, those of all)
    threshold: Int32 | None  # in both halves: draws below it are dropped
    keep_scale: Float32 | None  # 1 / (1 - dropout)
    rng: cute.Tensor | None  # (seed, offset)
    written: Any = None  # WrittenTerms: a bias, and users' functions

    def block(self, mask: Mask, head: Int32, batch: Int32, first_col: Int32, turned: bool, row_step: int = 16) -> Any:
        """The scores of a mask's rows, from a column on; `turned`: rows are keys. `row_step`: from one m16
        tile of a thread to the next.
        """
        score, kept, distance = self.score, None, None
        if self.slopes is not None:
            score = score.of_head(self.slopes[batch, head])
            distance = score.first_distance(mask, 0, first_col)
        if self.rng is not None:
            dropout = Dropout.read(self.rng, Uint32(self.threshold), self.keep_scale)
            place = TilePlace(batch * self.heads + head, mask.first_row, first_col, mask.tScS)
            kept = Kept.draw(dropout, place, score.rate is None and score.slope_log2 is None)
        scores = BlockScores(score, distance, self.heads, kept, self.keep_scale, turned, row_step)
        return scores if self.written is None else self.written.block(scores, mask, head, batch, first_col)

    @cute.jit
    def store_dslope(self, dslope: cute.Tensor, head: Int32, span: Sequence, part: Int32):
        """A warp's part of the gradient of a head's slope; `dslope` begins anew."""
        whole = cute.arch.warp_reduction_sum(dslope[0])
        if cute.arch.lane_idx() == 0:
            span.of(self.dslopes, head)[part] = whole
        dslope.fill(0.0)


@dataclass(frozen=True)
class BlockScores:
    """A block of scores in one thread. Rows are keys or queries, and the mask's; so are distances."""

    score: Score  # of its head
    first_distance: Float32 | None  # of the first element
    heads: Int32
    kept: Kept | None
    keep_scale: Float32 | None  # 1 / (1 - dropout)
    turned: cutlass.Constexpr  # rows are keys: LSE and D are of columns
    row_step: cutlass.Constexpr

    @property
    def is_alone(self) -> bool:
        """Neither a cap nor slopes."""
        return self.score.rate is None and self.score.slope_log2 is None

    @property
    def keeps_tangent(self) -> bool:
        return self.score.rate is not None and self.score.slope_log2 is not None

    @cute.jit
    def cap(self, acc_S: cute.Tensor):
        """S -> t, before the mask"""
        if cutlass.const_expr(self.score.rate is not None):
            # Beside slopes or draws there are no registers for both ways.
            is_alone = self.score.slope_log2 is None and self.kept is None
            self.score.apply_cap(acc_S, is_alone)

    @cute.jit
    def weigh(self, acc_S: cute.Tensor, rP: cute.Tensor, rLSE: cute.Tensor):
        """S or t -> P, kept or dropped, in rP; what dS will need of it stays."""
        S_mn, packed = as_mn(acc_S), cute.recast_tensor(rP, Int32)
        for c in cutlass.range_constexpr(0, cute.size(S_mn, mode=[1]), 2):
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                pair = pack(*(self.weighed(S_mn, r, c + j, rLSE) for j in range(2)), rP.element_type)
                if cutlass.const_expr(self.kept is not None and self.is_alone):
                    pair = pair & self.kept.mask(r, c)
                # Neighbours in a row are neighbours in registers.
                packed[cute.crd2idx((r, c), S_mn.layout) // 2] = pair

    def weighed(self, S_mn: cute.Tensor, r: int, c: int, rLSE: cute.Tensor) -> Float32:
        x = S_mn[r, c]
        P = self.weight(x, r, c, rLSE)
        if not self.keeps_tangent:
            S_mn[r, c] = P if self.score.rate is None else P * derivative(x)
        # Beside a cap or slopes the masks of pairs would spill.
        return P if self.kept is None or self.is_alone else self.kept.choose(P, r, c)

    @cute.jit
    def differentiate(self, acc_S: cute.Tensor, acc_dP: cute.Tensor, rLSE, rD: cute.Tensor, dslope):
        """What `weigh` left -> dS; the gradient of the slope is added to `dslope` (1)."""
        S_mn, dP_mn = as_mn(acc_S), as_mn(acc_dP)
        again = self.again(dP_mn)
        for c in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(S_mn, mode=[0])):
                x, dP = S_mn[r, c], dP_mn[r, c]
                if cutlass.const_expr(self.kept is not None):
                    dP = self.kept.choose(dP, r, c) * self.keep_scale
                P = again.weight(x, r, c, rLSE) if cutlass.const_expr(self.keeps_tangent) else x
                dS = P * (dP - self.of_query(rD, r, c))
                if cutlass.const_expr(self.score.slope_log2 is not None):
                    dslope[0] = dslope[0] - dS * again.distance(r, c)
                S_mn[r, c] = dS * derivative(x) if cutlass.const_expr(self.keeps_tangent) else dS

    def again(self, dP_mn: cute.Tensor) -> "BlockScores":
        """The same distances, of which the compiler does not know it: what is computed of them twice would
        else be computed once, or too early, and be kept for all elements.
        """
        distance = self.first_distance
        if distance is None:
            return self
        if self.kept is not None:
            return replace(self, first_distance=rederived(distance))
        # ptxas sees through that, and has other things to do only where bits are drawn.
        zero = self.heads >> 24  # to those who know how many there may be
        return replace(self, first_distance=distance + Float32(bits_and(dP_mn[0, 0], zero)))

    def weight(self, x: Float32, r: int, c: int, rLSE: cute.Tensor) -> Float32:
        """exp(S - LSE) of S, or of t where there is a cap"""
        unit = self.score.scale_log2 if self.score.rate is None else self.score.softcap_log2
        x = x * unit - self.of_query(rLSE, r, c)
        if self.score.slope_log2 is not None:
            x = x - self.score.slope_log2 * self.distance(r, c)
        return cute.math.exp2(x, fastmath=True)

    def distance(self, r: int, c: int) -> Float32:
        offset = r // 2 * self.row_step + r % 2 * 8 - column_offset(c)
        return cute.math.absf(self.first_distance + Float32(offset))

    def of_query(self, rX: cute.Tensor, r: int, c: int) -> Float32:
        return rX[c if self.turned else r]


def derivative(t: Float32) -> Float32:
    """1 - t², and 0 for the -inf of the mask"""
    return cute.arch.inline_ptx(
        "fma.rn.sat.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[-t, t, Float32(1.0)],
    )


def bits_and(x: Float32, bits: Int32) -> Int32:
    return cute.arch.inline_ptx("and.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[x, bits])
