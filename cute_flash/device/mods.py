"""A bias and user mods in the forward: what they do to a block of natural scores.

    s = score_mod(s + bias[b, h, i, j], b, h, i, j)
    s = -inf where mask_mod(b, h, i, j) is false

Subexpressions that depend on the head are computed once per tile, those that depend on a row or a column once per
block. The mods are also evaluated at positions past the last row and key; nothing is read there, and the results do
not count.

`ModExp2` does the same in the fused score-to-exp2 pass (`device/fused_exp2.py`).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_flash.device.bias import KEYS_PER_WARP_LOAD, BlockBias, RegisterBias, WarpBias
from cute_flash.device.fused_exp2 import FusedExp2
from cute_flash.device.mask import Mask, column_offset
from cute_flash.device.mod_arithmetic import CuteArithmetic
from cute_flash.device.views import as_mn
from cute_flash.score_mod.evaluate import Evaluator, Part
from cute_flash.score_mod.lower import lowered


@dataclass(frozen=True)
class ModParams:
    """The bias and the user mods of a launch. None: absent."""

    spec: cutlass.Constexpr  # ModSpec
    bias: cute.Tensor | None  # (B, H, Sq, Sk), of any strides
    captures: tuple | None  # tensors that score_mod captured, then those of mask_mod
    scalars: tuple | None

    def score_evaluator(self) -> Evaluator | None:
        return self._evaluator(self.spec.graphs.score, "score")

    def mask_evaluator(self) -> Evaluator | None:
        return self._evaluator(self.spec.graphs.mask, "mask")

    def _evaluator(self, graph, name: str) -> Evaluator | None:
        if graph is None:
            return None
        arguments = self.spec.graphs.split(self.captures or (), self.scalars or ())
        return Evaluator(lowered(graph), CuteArithmetic(), *getattr(arguments, name))

    @property
    def changes_scores(self) -> bool:
        return bool(self.spec.bias_dtype) or self.spec.graphs.score is not None

    def for_head(self, head: Int32, batch: Int32) -> "HeadMods":
        score, mask = self.score_evaluator(), self.mask_evaluator()
        return HeadMods(
            self,
            None if self.bias is None else self.bias[batch, head, None, None],
            None if score is None else score.at_head(batch, head),
            None if mask is None else mask.at_head(batch, head),
        )


@dataclass(frozen=True)
class HeadMods:
    """The bias and the user mods of one head."""

    params: ModParams
    bias: cute.Tensor | None  # (Sq, Sk)
    score_part: Part | None  # subexpressions of score_mod that depend on the head
    mask_part: Part | None  # subexpressions of mask_mod that depend on the head

    @cute.jit
    def load_bias(self, mask: Mask, first_col: Int32, is_full: cutlass.Constexpr, by_warp: cutlass.Constexpr = False):
        """Start to load the bias of the block that begins at a column; None without a bias.

        To be called before waiting for the scores. `is_full`: all keys of the block exist; `by_warp`: all lanes call it
        together.
        """
        if cutlass.const_expr(self.bias is None):
            return None
        coords = as_mn(mask.tScS)
        rows, columns = (cute.size(coords, mode=[i]) for i in range(2))
        tile_n = 4 * columns
        first = first_col + coords[0, 0][1]
        if cutlass.const_expr(by_warp and self.params.spec.bias_pairs_are_shared):
            ends_within = is_full and tile_n % KEYS_PER_WARP_LOAD == 0
            last = None if ends_within else mask.seqlen_k - 2
            return WarpBias.load(self.bias[0, None], first_col, tile_n, last)
        rows = rows if self.params.spec.bias_varies_by_row else 1
        rBias = cute.make_rmem_tensor((2, columns // 2, rows), self.bias.element_type)
        for r in cutlass.range_constexpr(rows):
            row = cutlass.min(mask.first_row + coords[r, 0][0], mask.seqlen_q - 1)
            source = self.bias.iterator + Int64(row) * self.bias.stride[0]
            for pair in cutlass.range_constexpr(columns // 2):
                self._load_pair(rBias[None, pair, r], source, (first, column_offset(2 * pair)), mask.seqlen_k, is_full)
        return RegisterBias(rBias)

    @cute.jit
    def _load_pair(
        self, target: cute.Tensor, row: cute.Pointer, column: tuple, seqlen_k: Int32, is_full: cutlass.Constexpr
    ):
        """Load two neighbouring keys, the first of which is even. With paired loads both exist, or none."""
        first, offset = column
        if cutlass.const_expr(self.params.spec.bias_paired_loads):
            source = row + first + offset if is_full else row + cutlass.min(first + offset, seqlen_k - 2)
            pair = source.align(2 * self.bias.element_type.width // 8)
            cute.autovec_copy(cute.make_tensor(pair, cute.make_layout(2)), target)
        else:
            for i in cutlass.range_constexpr(2):
                key = first + offset + i if is_full else cutlass.min(first + offset + i, seqlen_k - 1)
                source = row + Int64(key) * self.bias.stride[1]
                target[i] = cute.make_tensor(source, cute.make_layout(1))[0]

    @cute.jit
    def transform(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, bias: BlockBias | None):
        """S + bias, and then score_mod, in place, for a block of a mask's rows that begins at a column."""
        if cutlass.const_expr(bias is not None):
            bias.wait()
            bias.add_to(acc_S_mn)
            bias.release()
        if cutlass.const_expr(self.score_part is not None):
            evaluator, head = self.params.score_evaluator(), self.score_part
            rows = _row_parts(evaluator, head, mask)
            first, first_float = _first_column(mask, first_col)
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                column = evaluator.at_column(head, *_column(first, first_float, c))
                for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                    (acc_S_mn[r, c],) = evaluator.at(head, rows[r], column, acc_S_mn[r, c])

    @cute.jit
    def apply_mask(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32):
        """-inf where mask_mod is false."""
        if cutlass.const_expr(self.mask_part is not None):
            evaluator, head = self.params.mask_evaluator(), self.mask_part
            rows = _row_parts(evaluator, head, mask)
            first, first_float = _first_column(mask, first_col)
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                column = evaluator.at_column(head, *_column(first, first_float, c))
                for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                    (is_visible,) = evaluator.at(head, rows[r], column)
                    acc_S_mn[r, c] = cutlass.select_(is_visible, acc_S_mn[r, c], -Float32.inf)

    def fused_exp2(
        self, mask: Mask, first_col: Int32, factors: tuple, bias: BlockBias | None, applies_mask: bool
    ) -> "ModExp2":
        """The fused pass for a block that the band does not mask. `applies_mask`: it evaluates mask_mod."""
        score, masks = self.score_part, self.mask_part if applies_mask else None
        return ModExp2(
            self,
            factors,
            bias,
            None if score is None else _row_parts(self.params.score_evaluator(), score, mask),
            None if masks is None else _row_parts(self.params.mask_evaluator(), masks, mask),
            _first_column(mask, first_col),
        )


@dataclass(frozen=True)
class ModExp2(FusedExp2):
    """P of a block with a bias and user mods."""

    head: HeadMods
    factors: tuple  # of Q K^T to natural scores, if there is a bias or a score_mod; of those to log2
    bias: BlockBias | None
    score_rows: list | None
    mask_rows: list | None
    first: tuple  # column of this thread, as an int and as a float

    def exponents(self, scores: list, k: int, reference: tuple) -> list:
        """-inf where mask_mod is false."""
        bias = None if self.bias is None else self.bias.step(k)
        columns = [_column(*self.first, 4 * k + i) for i in range(4)]
        if self.score_rows is None:
            exponents = self._linear(scores, bias, reference)
        else:
            evaluator, head = self.head.params.score_evaluator(), self.head.score_part
            natural, log2 = self.factors
            parts = [evaluator.at_column(head, *column) for column in columns]
            exponents = [[None] * 4 for _ in range(2)]
            for r in range(2):
                for i in range(4):
                    x = scores[r][i] * natural
                    x = x if bias is None else x + bias[r][i]
                    (x,) = evaluator.at(head, self.score_rows[r], parts[i], x)
                    exponents[r][i] = cute.math.fma(x, log2, -reference[r])
        return exponents if self.mask_rows is None else self._masked(exponents, columns)

    def _linear(self, scores: list, bias: list | None, reference: tuple) -> list:
        natural, log2 = self.factors
        factor = log2 if natural is None else natural * log2
        terms = [[-reference[r]] * 4 for r in range(2)]
        if bias is not None:
            terms = [[cute.math.fma(x, log2, -reference[r]) for x in bias[r]] for r in range(2)]
        return [[cute.math.fma(scores[r][i], factor, terms[r][i]) for i in range(4)] for r in range(2)]

    def _masked(self, exponents: list, columns: list) -> list:
        evaluator, head = self.head.params.mask_evaluator(), self.head.mask_part
        parts = [evaluator.at_column(head, *column) for column in columns]
        for r in range(2):
            for i in range(4):
                (is_visible,) = evaluator.at(head, self.mask_rows[r], parts[i])
                exponents[r][i] = cutlass.select_(is_visible, exponents[r][i], -Float32.inf)
        return exponents

    @cute.jit
    def block_max(self, acc_S: cute.Tensor, result: cute.Tensor):
        """In the units of the scores that the softmax sees."""
        FusedExp2.block_max(self, acc_S, result)
        inverse = cute.arch.rcp_approx(self.factors[1])
        for r in cutlass.range_constexpr(2):
            result[r] = result[r] * inverse

    def release(self):
        if self.bias is not None:
            self.bias.release()


def _row_parts(evaluator: Evaluator, head: Part, mask: Mask) -> list[Part]:
    """Subexpressions that depend on a row, for every row of this thread."""
    coords = as_mn(mask.tScS)
    rows = (mask.first_row + coords[r, 0][0] for r in range(cute.size(coords, mode=[0])))
    return [evaluator.at_row(head, row) for row in rows]


def _first_column(mask: Mask, first_col: Int32) -> tuple[Int32, Float32]:
    """The first column of this thread, as an int and as a float, so that other columns need no conversion."""
    column = first_col + as_mn(mask.tScS)[0, 0][1]
    return column, Float32(column)


def _column(first: Int32, first_float: Float32, c: int) -> tuple[Int32, Float32]:
    return first + column_offset(c), first_float + Float32(column_offset(c))
