"""A bias and a user's functions in a kernel: what becomes of a block of scores, which are natural here.

    s = score_mod(s + bias[b, h, i, j], b, h, i, j)
    s = -inf where mask_mod(b, h, i, j) is false

What depends on the head is computed once for a tile, on a row or a column once for a block. Places past the
last row and key are asked about too; nothing is read there, and nothing of it counts.

`WrittenFormula` does the same beside the exponentials (`device/exponents.py`).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_flash.device.bias import KEYS_OF_WARP, Bias, LoadedBias, SharedBias
from cute_flash.device.exponents import Formula
from cute_flash.device.mask import Mask, column_offset
from cute_flash.device.mods import CuteArithmetic
from cute_flash.device.views import as_mn
from cute_flash.score_mod.evaluate import Evaluator, Part
from cute_flash.score_mod.lower import lowered


@dataclass(frozen=True)
class Written:
    """Of a launch. None: not there."""

    mods: cutlass.Constexpr  # ModSpec
    bias: cute.Tensor | None  # (B, H, Sq, Sk), of any strides
    tables: tuple | None  # of score_mod, of mask_mod, of score_mod_bwd
    numbers: tuple | None

    def score(self) -> Evaluator | None:
        return self._evaluator(self.mods.graphs.score, "score")

    def mask(self) -> Evaluator | None:
        return self._evaluator(self.mods.graphs.mask, "mask")

    def _evaluator(self, graph, part: str) -> Evaluator | None:
        if graph is None:
            return None
        parts = self.mods.graphs.split(self.tables or (), self.numbers or ())
        return Evaluator(lowered(graph), CuteArithmetic(), *getattr(parts, part))

    @property
    def changes_scores(self) -> bool:
        return bool(self.mods.bias_dtype) or self.mods.graphs.score is not None

    def of_head(self, head: Int32, batch: Int32) -> "WrittenOfHead":
        score, mask = self.score(), self.mask()
        return WrittenOfHead(
            self,
            None if self.bias is None else self.bias[batch, head, None, None],
            None if score is None else score.at_head(batch, head),
            None if mask is None else mask.at_head(batch, head),
        )


@dataclass(frozen=True)
class WrittenOfHead:
    written: Written
    bias: cute.Tensor | None  # (Sq, Sk)
    of_score: Part | None
    of_mask: Part | None

    @cute.jit
    def load_bias(
        self,
        mask: Mask,
        first_col: Int32,
        is_whole: cutlass.Constexpr,
        by_warp: cutlass.Constexpr = False,
    ):
        """The block that begins at a column, in the bias's type; None without one.

        To be asked before the scores are waited for. `is_whole`: all keys of the block exist; `by_warp`: all
        lanes ask at once.
        """
        if cutlass.const_expr(self.bias is None):
            return None
        coords = as_mn(mask.tScS)
        rows, columns = (cute.size(coords, mode=[i]) for i in range(2))
        tile_n = 4 * columns
        first = first_col + coords[0, 0][1]
        if cutlass.const_expr(by_warp and self.written.mods.bias_pairs_are_shared):
            ends_within = is_whole and tile_n % KEYS_OF_WARP == 0
            last = None if ends_within else mask.seqlen_k - 2
            return SharedBias.load(self.bias[0, None], first_col, tile_n, last)
        rows = rows if self.written.mods.bias_varies_by_row else 1
        found = cute.make_rmem_tensor((2, columns // 2, rows), self.bias.element_type)
        for r in cutlass.range_constexpr(rows):
            row = cutlass.min(mask.first_row + coords[r, 0][0], mask.seqlen_q - 1)
            source = self.bias.iterator + Int64(row) * self.bias.stride[0]
            for pair in cutlass.range_constexpr(columns // 2):
                self._load_pair(found[None, pair, r], source, (first, column_offset(2 * pair)), mask.seqlen_k, is_whole)
        return LoadedBias(found)

    @cute.jit
    def _load_pair(
        self,
        into: cute.Tensor,
        row: cute.Pointer,
        column: tuple,
        seqlen_k: Int32,
        is_whole: cutlass.Constexpr,
    ):
        """Two neighbouring keys, of which the first is an even one: both exist, or none, where pairs are read
        at once.
        """
        first, offset = column
        if cutlass.const_expr(self.written.mods.bias_paired_loads):
            source = row + first + offset if is_whole else row + cutlass.min(first + offset, seqlen_k - 2)
            pair = source.align(2 * self.bias.element_type.width // 8)
            cute.autovec_copy(cute.make_tensor(pair, cute.make_layout(2)), into)
        else:
            for i in cutlass.range_constexpr(2):
                key = first + offset + i if is_whole else cutlass.min(first + offset + i, seqlen_k - 1)
                source = row + Int64(key) * self.bias.stride[1]
                into[i] = cute.make_tensor(source, cute.make_layout(1))[0]

    @cute.jit
    def transform(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, given: Bias | None):
        """S + bias, and then score_mod, of a block of a mask's rows that begins at a column, in place."""
        if cutlass.const_expr(given is not None):
            given.wait()
            given.add(acc_S_mn)
            given.release()
        if cutlass.const_expr(self.of_score is not None):
            evaluator, head = self.written.score(), self.of_score
            rows = _rows(evaluator, head, mask)
            first, first_float = _first(mask, first_col)
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                column = evaluator.at_column(head, *_column(first, first_float, c))
                for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                    (acc_S_mn[r, c],) = evaluator.at(head, rows[r], column, acc_S_mn[r, c])

    @cute.jit
    def hide(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32):
        """-inf where mask_mod says so."""
        if cutlass.const_expr(self.of_mask is not None):
            evaluator, head = self.written.mask(), self.of_mask
            rows = _rows(evaluator, head, mask)
            first, first_float = _first(mask, first_col)
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                column = evaluator.at_column(head, *_column(first, first_float, c))
                for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                    (seen,) = evaluator.at(head, rows[r], column)
                    acc_S_mn[r, c] = cutlass.select_(seen, acc_S_mn[r, c], -Float32.inf)

    def formula(
        self,
        mask: Mask,
        first_col: Int32,
        factors: tuple,
        given: Bias | None,
        hides: bool,
    ) -> "WrittenFormula":
        """Of a block that the band does not cut. `factors`: see there; `hides`: mask_mod is asked."""
        score, hidden = self.of_score, self.of_mask if hides else None
        return WrittenFormula(
            self,
            factors,
            given,
            None if score is None else _rows(self.written.score(), score, mask),
            None if hidden is None else _rows(self.written.mask(), hidden, mask),
            _first(mask, first_col),
        )


@dataclass(frozen=True)
class WrittenFormula(Formula):
    """P of a block by what users write."""

    head: WrittenOfHead
    factors: tuple  # of products, to make them natural, where there is a bias or a score_mod; then to log2
    bias: Bias | None
    score_rows: list | None
    mask_rows: list | None
    first: tuple  # column of this thread, and the same as a float

    def exponents(self, products: list, k: int, reference: tuple) -> list:
        """Of products[row][column] of a k-step, less a reference; -inf where it is hidden."""
        bias = None if self.bias is None else self.bias.step(k)
        columns = [_column(*self.first, 4 * k + i) for i in range(4)]
        if self.score_rows is None:
            found = self._linear(products, bias, reference)
        else:
            evaluator, head, (natural, log2) = self.head.written.score(), self.head.of_score, self.factors
            parts = [evaluator.at_column(head, *column) for column in columns]
            found = [[None] * 4 for _ in range(2)]
            for r in range(2):
                for i in range(4):
                    x = products[r][i] * natural
                    x = x if bias is None else x + bias[r][i]
                    (x,) = evaluator.at(head, self.score_rows[r], parts[i], x)
                    found[r][i] = cute.math.fma(x, log2, -reference[r])
        return found if self.mask_rows is None else self._hidden(found, columns)

    def _linear(self, products: list, bias: list | None, reference: tuple) -> list:
        natural, log2 = self.factors
        factor = log2 if natural is None else natural * log2
        terms = [[-reference[r]] * 4 for r in range(2)]
        if bias is not None:
            terms = [[cute.math.fma(x, log2, -reference[r]) for x in bias[r]] for r in range(2)]
        return [[cute.math.fma(products[r][i], factor, terms[r][i]) for i in range(4)] for r in range(2)]

    def _hidden(self, found: list, columns: list) -> list:
        evaluator, head = self.head.written.mask(), self.head.of_mask
        parts = [evaluator.at_column(head, *column) for column in columns]
        for r in range(2):
            for i in range(4):
                (seen,) = evaluator.at(head, self.mask_rows[r], parts[i])
                found[r][i] = cutlass.select_(seen, found[r][i], -Float32.inf)
        return found

    @cute.jit
    def block_max(self, acc_S: cute.Tensor, found: cute.Tensor):
        """In the units of the softmax's scores."""
        Formula.block_max(self, acc_S, found)
        inverse = cute.arch.rcp_approx(self.factors[1])
        for r in cutlass.range_constexpr(2):
            found[r] = found[r] * inverse

    def release(self):
        if self.bias is not None:
            self.bias.release()


def _rows(evaluator: Evaluator, head: Part, mask: Mask) -> list[Part]:
    coords = as_mn(mask.tScS)
    places = (mask.first_row + coords[r, 0][0] for r in range(cute.size(coords, mode=[0])))
    return [evaluator.at_row(head, row) for row in places]


def _first(mask: Mask, first_col: Int32) -> tuple[Int32, Float32]:
    """The first column of this thread; also as a float, so that others need no conversion."""
    column = first_col + as_mn(mask.tScS)[0, 0][1]
    return column, Float32(column)


def _column(first: Int32, first_float: Float32, c: int) -> tuple[Int32, Float32]:
    return first + column_offset(c), first_float + Float32(column_offset(c))
