"""A bias and a user's functions in a kernel: what becomes of a block of scores, which are natural here.

    s = score_mod(s + bias[b, h, i, j], b, h, i, j)
    s = -inf where mask_mod(b, h, i, j) is false

What depends on the head is computed once for a tile, on a row or a column once for a block. Places past the
last row and key are asked about too; nothing is read there, and nothing of it counts.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_flash.device.mask import Mask, column_offset
from cute_flash.device.mods import CuteArithmetic
from cute_flash.device.views import as_mn
from cute_flash.mods.evaluate import Evaluator, Part
from cute_flash.mods.lower import lowered


@dataclass(frozen=True)
class Written:
    """Of a launch. None: not there."""

    mods: cutlass.Constexpr  # Mods
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
        parts = self.mods.graphs.parts(self.tables or (), self.numbers or ())
        return Evaluator(lowered(graph), CuteArithmetic(), *getattr(parts, part))

    @property
    def changes_scores(self) -> bool:
        return bool(self.mods.bias) or self.mods.graphs.score is not None

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
    def load_bias(self, mask: Mask, first_col: Int32, is_whole: cutlass.Constexpr):
        """(2, pairs, rows) of the block that begins at a column, in the bias's type; None without one.

        To be asked before the scores are waited for. `is_whole`: all keys of the block exist.
        """
        if cutlass.const_expr(self.bias is None):
            return None
        coords = as_mn(mask.tScS)
        rows, columns = (cute.size(coords, mode=[i]) for i in range(2))
        found = cute.make_rmem_tensor((2, columns // 2, rows), self.bias.element_type)
        first = first_col + coords[0, 0][1]
        for r in cutlass.range_constexpr(rows):
            row = cutlass.min(mask.first_row + coords[r, 0][0], mask.seqlen_q - 1)
            source = self.bias.iterator + Int64(row) * self.bias.stride[0]
            for pair in cutlass.range_constexpr(columns // 2):
                self._load_pair(
                    found[None, pair, r], source, (first, column_offset(2 * pair)), mask.seqlen_k, is_whole
                )
        return found

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
        if cutlass.const_expr(self.written.mods.reads_pairs):
            source = row + first + offset if is_whole else row + cutlass.min(first + offset, seqlen_k - 2)
            pair = source.align(2 * self.bias.element_type.width // 8)
            cute.autovec_copy(cute.make_tensor(pair, cute.make_layout(2)), into)
        else:
            for i in cutlass.range_constexpr(2):
                key = first + offset + i if is_whole else cutlass.min(first + offset + i, seqlen_k - 1)
                source = row + Int64(key) * self.bias.stride[1]
                into[i] = cute.make_tensor(source, cute.make_layout(1))[0]

    @cute.jit
    def transform(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32, bias: cute.Tensor | None):
        """S + bias, and then score_mod, of a block of a mask's rows that begins at a column, in place."""
        if cutlass.const_expr(bias is not None):
            for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                    acc_S_mn[r, c] = acc_S_mn[r, c] + Float32(bias[c % 2, c // 2, r])
        if cutlass.const_expr(self.of_score is not None):
            evaluator, head = self.written.score(), self.of_score
            rows = self._rows(evaluator, head, mask)
            first, first_float = self._first(mask, first_col)
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                column = evaluator.at_column(head, *_column(first, first_float, c))
                for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                    (acc_S_mn[r, c],) = evaluator.at(head, rows[r], column, acc_S_mn[r, c])

    @cute.jit
    def hide(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32):
        """-inf where mask_mod says so."""
        if cutlass.const_expr(self.of_mask is not None):
            evaluator, head = self.written.mask(), self.of_mask
            rows = self._rows(evaluator, head, mask)
            first, first_float = self._first(mask, first_col)
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                column = evaluator.at_column(head, *_column(first, first_float, c))
                for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                    (seen,) = evaluator.at(head, rows[r], column)
                    acc_S_mn[r, c] = cutlass.select_(seen, acc_S_mn[r, c], -Float32.inf)

    def _rows(self, evaluator: Evaluator, head: Part, mask: Mask) -> list[Part]:
        coords = as_mn(mask.tScS)
        places = (mask.first_row + coords[r, 0][0] for r in range(cute.size(coords, mode=[0])))
        return [evaluator.at_row(head, row) for row in places]

    def _first(self, mask: Mask, first_col: Int32) -> tuple[Int32, Float32]:
        """The first column of this thread; also as a float, so that others need no conversion."""
        column = first_col + as_mn(mask.tScS)[0, 0][1]
        return column, Float32(column)


def _column(first: Int32, first_float: Float32, c: int) -> tuple[Int32, Float32]:
    return first + column_offset(c), first_float + Float32(column_offset(c))
