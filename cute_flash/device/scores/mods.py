"""A bias and user mods in the forward. They change a block of scores in natural units (not log2):

    s = score_mod(s + bias[b, h, i, j], b, h, i, j)
    s = -inf where mask_mod(b, h, i, j) is false

Subexpressions that depend only on the head are computed once per tile, those that depend on a row or a column once per
block. Mods are also evaluated past the last row and key. Loads stay within their tensors there, and the results are
not used.

`ModExp2` does the same in the fused score-to-exp2 pass (`device/softmax/fused_exp2.py`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_flash.device.memory.views import as_mn
from cute_flash.device.scores.bias import KEYS_PER_WARP_LOAD, BlockBias, RegisterBias, WarpBias
from cute_flash.device.scores.mask import Mask, column_offset
from cute_flash.device.scores.mod_arithmetic import CuteArithmetic
from cute_flash.device.softmax.exp2 import ProbBlock
from cute_flash.device.softmax.fused_exp2 import FusedExp2, StepScores
from cute_flash.device.softmax.softmax import RowValues, Softmax
from cute_flash.score_mod.evaluate import Evaluator, Part
from cute_flash.score_mod.lower import lowered

# If a thread has many columns, mask_mod may load captured elements for this many columns at a time, because loading all
# columns at once would spill registers. The compiler does not move loads across a `sync_warp`.
COLUMNS_AT_ONCE = 8


class ColumnPosition(NamedTuple):
    """The index of a column, as an int and as a float."""

    index: Int32
    as_float: Float32


class ScoreFactors(NamedTuple):
    """The factors of the fused pass. Without a bias and a score_mod, `log2` converts Q K^T to units of log2."""

    natural: Float32 | None  # from Q K^T to natural units
    log2: Float32  # from natural units to units of log2


@dataclass(frozen=True)
class ModParams:
    """The bias and the user mods of a launch. None: absent."""

    spec: cutlass.Constexpr  # ModSpec
    bias: cute.Tensor | None  # (B, H, Sq, Sk), of any strides
    captures: tuple[cute.Tensor, ...] | None  # tensors that score_mod captures, then those of mask_mod
    scalars: tuple[Float32 | Int32, ...] | None  # Python numbers that they capture, in the same order
    is_exact: cutlass.Constexpr = False  # see `CuteArithmetic`

    def evaluator(self, name: str) -> Evaluator | None:
        """The evaluator of the "score" mod or of the "mask" mod; None: absent."""
        graph = getattr(self.spec.graphs, name)
        if graph is None:
            return None
        arguments = self.spec.graphs.split(self.captures or (), self.scalars or ())
        return Evaluator(lowered(graph), CuteArithmetic(self.is_exact), *getattr(arguments, name))

    @property
    def changes_scores(self) -> bool:
        return bool(self.spec.bias_dtype) or self.spec.graphs.score is not None

    def for_head(self, head: Int32, batch: Int32) -> "HeadMods":
        bias = None if self.bias is None else self.bias[batch, head, None, None]
        evaluators = self.evaluator("score"), self.evaluator("mask")
        return HeadMods(self, bias, *(None if x is None else x.at_head(batch, head) for x in evaluators))


@dataclass(frozen=True)
class HeadMods:
    """The bias and the user mods of one head."""

    params: ModParams
    bias: cute.Tensor | None  # (Sq, Sk)
    score: Part | None  # subexpressions of score_mod that depend on the head
    mask: Part | None  # subexpressions of mask_mod that depend on the head

    def in_block(self, name: str, mask: Mask, first_col: Int32) -> "BlockMod | None":
        """The "score" mod or the "mask" mod for the rows of `mask` from `first_col` on; None: absent."""
        part, evaluator = getattr(self, name), self.params.evaluator(name)
        return None if evaluator is None else BlockMod(evaluator, part, mask, first_col)

    @cute.jit
    def load_bias(
        self, mask: Mask, first_col: Int32, is_full: cutlass.Constexpr, warp_column: Int32 | int | None = None
    ):
        """Start to load the bias of the block that begins at `first_col`; None without a bias.

        Call it before waiting for the scores. `is_full`: all keys of the block exist. `warp_column`: the first column
        of the warp in the block, if all lanes of the warp call it together.
        """
        if cutlass.const_expr(self.bias is None):
            return None
        coords = as_mn(mask.tScS)
        rows, columns = (cute.size(coords, mode=[i]) for i in range(2))
        warp_columns = 4 * columns
        first = first_col + coords[0, 0][1]
        if cutlass.const_expr(warp_column is not None and self.params.spec.bias_pairs_are_shared):
            ends_within = is_full and warp_columns % KEYS_PER_WARP_LOAD == 0
            last = None if ends_within else mask.seqlen_k - 2
            return WarpBias.load(self.bias[0, None], first_col + warp_column, warp_columns, last)
        rows = rows if self.params.spec.bias_varies_by_row else 1
        rBias = cute.make_rmem_tensor((2, columns // 2, rows), self.bias.element_type)
        for r in cutlass.range_constexpr(rows):
            row = cutlass.min(mask.first_row + coords[r, 0][0], mask.seqlen_q - 1)
            source = self.bias.iterator + Int64(row) * self.bias.stride[0]
            for pair in cutlass.range_constexpr(columns // 2):
                self._load_pair(rBias[None, pair, r], source, first, column_offset(2 * pair), mask.seqlen_k, is_full)
        return RegisterBias(rBias)

    @cute.jit
    def _load_pair(
        self,
        target: cute.Tensor,
        row: cute.Pointer,
        first: Int32,
        offset: cutlass.Constexpr,
        seqlen_k: Int32,
        is_full: cutlass.Constexpr,
    ):
        """Load the even key first + offset and the next one.

        With paired loads the row's length is even, so both exist or neither.
        """
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
        """Add the bias, then apply score_mod, in place, for the rows of `mask` from `first_col` on."""
        if cutlass.const_expr(bias is not None):
            bias.wait()
            bias.add_to(acc_S_mn)
            bias.release(acc_S_mn)
        score_mod = self.in_block("score", mask, first_col)
        if cutlass.const_expr(score_mod is not None):
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                column = score_mod.column(score_mod.position(c))
                for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                    acc_S_mn[r, c] = score_mod.at(r, column, acc_S_mn[r, c])

    @cute.jit
    def apply_mask(self, acc_S_mn: cute.Tensor, mask: Mask, first_col: Int32):
        """Set scores to -inf where mask_mod is false."""
        mask_mod = self.in_block("mask", mask, first_col)
        if cutlass.const_expr(mask_mod is not None):
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                if cutlass.const_expr(self.params.spec.has_int64 and c % COLUMNS_AT_ONCE == 0):
                    cute.arch.sync_warp()
                column = mask_mod.column(mask_mod.position(c))
                for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                    acc_S_mn[r, c] = cutlass.select_(mask_mod.at(r, column), acc_S_mn[r, c], -Float32.inf)

    def fused_exp2(
        self, mask: Mask, first_col: Int32, factors: ScoreFactors, bias: BlockBias | None, applies_mask: bool
    ) -> "ModExp2":
        """The fused pass for a block that the band does not mask. `applies_mask`: mask_mod applies to the block."""
        score_mod = self.in_block("score", mask, first_col)
        mask_mod = self.in_block("mask", mask, first_col) if applies_mask else None
        return ModExp2(factors, bias, score_mod, mask_mod)


class BlockMod:
    """A user mod in one block, with the values of its subexpressions that depend on a row of this thread."""

    def __init__(self, evaluator: Evaluator, head: Part, mask: Mask, first_col: Int32) -> None:
        self.evaluator, self.head, coords = evaluator, head, as_mn(mask.tScS)
        rows = range(cute.size(coords, mode=[0]))
        self.rows = [evaluator.at_row(head, mask.first_row + coords[r, 0][0]) for r in rows]
        self.first_column = first_col + coords[0, 0][1]
        # As floats, other columns are this one plus a constant, which needs no conversion.
        self.first_float = Float32(self.first_column)

    def position(self, c: int) -> ColumnPosition:
        """This thread's c-th column."""
        return ColumnPosition(self.first_column + column_offset(c), self.first_float + Float32(column_offset(c)))

    def column(self, position: ColumnPosition) -> Part:
        """The values of the subexpressions that depend on a column."""
        return self.evaluator.at_column(self.head, *position)

    def at(self, r: int, column: Part, score: Float32 | None = None) -> Any:
        """The result of the mod in the thread's r-th row."""
        (result,) = self.evaluator.at(self.head, self.rows[r], column, score)
        return result


@dataclass(frozen=True)
class ModExp2(FusedExp2):
    """The fused pass with a bias and user mods."""

    factors: ScoreFactors
    bias: BlockBias | None
    score_mod: BlockMod | None
    mask_mod: BlockMod | None
    applies_mask = True  # with a block mask, full blocks need no mask_mod

    def exponents(self, scores: StepScores, k: int, reference: RowValues) -> StepScores:
        """The exponents, -inf where mask_mod is false."""
        bias = None if self.bias is None else self.bias.step(k)
        mod = self.mask_mod if self.score_mod is None else self.score_mod
        positions = [] if mod is None else [mod.position(4 * k + i) for i in range(4)]
        if self.score_mod is None:
            exponents = self._linear(scores, bias, reference)
        else:
            exponents = self._modified(scores, bias, positions, reference)
        if self.mask_mod is not None:
            columns = [self.mask_mod.column(position) for position in positions]
            for r in range(2):
                for i in range(4):
                    is_visible = self.mask_mod.at(r, columns[i])
                    exponents[r][i] = cutlass.select_(is_visible, exponents[r][i], -Float32.inf)
        return exponents

    def _linear(self, scores: StepScores, bias: StepScores | None, reference: RowValues) -> StepScores:
        natural, log2 = self.factors
        factor = log2 if natural is None else natural * log2
        terms = [[-reference[r]] * 4 for r in range(2)]
        if bias is not None:
            terms = [[cute.math.fma(x, log2, -reference[r]) for x in bias[r]] for r in range(2)]
        return [[cute.math.fma(scores[r][i], factor, terms[r][i]) for i in range(4)] for r in range(2)]

    def _modified(
        self, scores: StepScores, bias: StepScores | None, positions: list[ColumnPosition], reference: RowValues
    ) -> StepScores:
        natural, log2 = self.factors
        columns = [self.score_mod.column(position) for position in positions]
        exponents = [[None] * 4 for _ in range(2)]
        for r in range(2):
            for i in range(4):
                x = scores[r][i] * natural
                x = self.score_mod.at(r, columns[i], x if bias is None else x + bias[r][i])
                exponents[r][i] = cute.math.fma(x, log2, -reference[r])
        return exponents

    @cute.jit
    def find_max(self, softmax: Softmax, block: ProbBlock):
        """Write `block_max` in the units of the softmax input, which the softmax multiplies by scale_log2."""
        FusedExp2.find_max(self, softmax, block)
        inverse = cute.arch.rcp_approx(self.factors.log2)
        for r in cutlass.range_constexpr(2):
            block.block_max[r] = block.block_max[r] * inverse

    def release(self):
        if self.bias is not None:
            self.bias.release()
