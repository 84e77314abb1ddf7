"""A bias and user mods in the backward: the steps of a block from Q K^T to dS.

    S   = softcap(scale q·k) - slope |distance| + bias
    P   = exp(score_mod(S) - LSE),  0 where the band or mask_mod masks
    dS' = P (Z dP - Δ),  Z = 0 or 1 / (1 - dropout),  Δ = rowsum(dO O) - dLSE
    dS  = score_mod'(S) dS', 0 where P is 0; then times the derivative of softcap

P takes the registers of S while dP is computed. If the gradient needs S itself, or the tanh of softcap, the registers
keep that value instead, and P is computed twice. Rows are keys and columns are queries, or the other way round
(`BlockScores.is_transposed`). Subexpressions that depend on a column are computed for each column and then dropped;
those that depend on a row are computed once per block.

A score_mod may map -inf to a finite number, so -inf does not always mark masked entries. If the masks apply to P
(`masks_probs`), masked entries are set to 0. If they apply to S, masked entries hold a sentinel NaN with a score_mod,
and -inf without one.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_flash.device.gradients.bias_bwd import BwdBiasParams, BwdBlockBias, BwdSmemBias, Lengths, ThreadSize
from cute_flash.device.gradients.gradient_sums import GradientSums
from cute_flash.device.gradients.score_bwd import BlockScores, GradientBlock, PlainScores, ProbPair, store_pair
from cute_flash.device.memory.views import as_mn
from cute_flash.device.ptx import bits_and, select_if, store_if, tanh_derivative
from cute_flash.device.scheduling.block_sparse import BwdBlockIndices
from cute_flash.device.scores.mask import Mask, column_offset
from cute_flash.device.scores.mod_arithmetic import CuteArithmetic, indices_in_bounds
from cute_flash.device.scores.mods import COLUMNS_AT_ONCE
from cute_flash.device.scores.position import BwdBlockPosition
from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.score_mod.derive import LoadGradient
from cute_flash.score_mod.evaluate import Evaluator, Part
from cute_flash.score_mod.graph import COLUMN, ROW, Graph
from cute_flash.score_mod.graphs import Graphs
from cute_flash.score_mod.lower import lowered

# The sentinel NaN of masked scores. Arithmetic returns NaNs with other bits.
MASKED_BITS = 0x7FC0DEAD
Outputs = tuple[Any, ...]  # of a graph: DSL scalars


class ModArguments(NamedTuple):
    """The values that a graph captured. None: it captured none; kernels take no empty tuples."""

    captures: tuple[cute.Tensor, ...] | None = None
    scalars: tuple[Float32 | Int32, ...] | None = None


class CaptureTerms(NamedTuple):
    """The terms of the gradients of captured tensors, (loads, B, H, Sq, Sk) each."""

    terms: cute.Tensor  # fp32
    elements: cute.Tensor  # the indices of the elements that they are added to


@dataclass(frozen=True)
class BwdGraphs:
    """The lowered graphs of the user mods, which are compile-time constants."""

    score: Graph | None
    mask: Graph | None
    gradient: Graph | None
    loads: tuple[LoadGradient, ...]  # of captured tensors that need a gradient
    captures_needing_grad: tuple[int, ...]

    @staticmethod
    def of(graphs: Graphs, captures_needing_grad: tuple[int, ...]) -> "BwdGraphs":
        derived = None if graphs.score is None else graphs.gradient(captures_needing_grad)
        gradient, loads = (None, ()) if derived is None else (derived.graph, derived.loads)
        all_lowered = (None if x is None else lowered(x) for x in (graphs.score, graphs.mask, gradient))
        return BwdGraphs(*all_lowered, loads, captures_needing_grad)

    @property
    def needs_score(self) -> bool:
        """Whether the gradient graph reads the score, not only dS'."""
        nodes = () if self.gradient is None else self.gradient.nodes
        return any(node.op == "input" and node.value == "score" for node in nodes)

    def output(self, outputs: Outputs, i: int, is_zero: Boolean) -> Float32:
        """The i-th output of the gradient graph; 0 where P is 0, because the derivative may not be finite there."""
        assert self.gradient is not None
        node, value = self.gradient.nodes[self.gradient.outputs[i]], Float32(outputs[i])
        # The incoming gradient is already 0 where P is 0.
        is_incoming = node.op == "input" and node.value == "grad"
        return value if is_incoming else cutlass.select_(is_zero, Float32(0.0), value)

    def nonnegative(self, load: LoadGradient) -> list[bool]:
        """For each index of a load, whether it is known not to be negative."""
        assert self.gradient is not None
        return [self.gradient.is_nonnegative[self.gradient.outputs[i]] for i in load.indices]

    def depends(self, load: LoadGradient) -> int:
        """The bits of ROW and COLUMN that the indices of a load depend on."""
        assert self.gradient is not None
        bits = 0
        for i in load.indices:
            bits |= self.gradient.depends[self.gradient.outputs[i]]
        return bits & (ROW | COLUMN)


@dataclass(frozen=True)
class BwdModParams:
    """The bias and the user mods of a launch.

    `score`, `mask` and `gradient` are the captured values of the graphs of the score_mod, of the mask_mod and of the
    gradient; None: there is no such graph, or it captures nothing.
    """

    graphs: cutlass.Constexpr  # BwdGraphs
    scale: Float32
    softcap: Float32 | None
    score: ModArguments | None
    mask: ModArguments | None
    gradient: ModArguments | None
    bias: BwdBiasParams | None
    dcaptures: tuple[cute.Tensor, ...] | None  # fp32 gradients of the captured tensors that need one
    block_indices: BwdBlockIndices | None = None  # of a block mask
    prefetches_bias: cutlass.Constexpr = True  # registers suffice to load a block's bias while S is computed
    dcapture_terms: CaptureTerms | None = None  # for deterministic gradients
    is_exact: cutlass.Constexpr = False  # see `CuteArithmetic`

    def block(self, plain: BlockScores, mask: Mask, head: Int32, batch: Int32, first_col: Int32):
        """`plain` with the bias and the user mods, for the rows of `mask` and the columns from `first_col` on."""
        coords = as_mn(mask.tScS)
        (row, column), size = coords[0, 0], ThreadSize(*(cute.size(coords, mode=[i]) for i in range(2)))
        if plain.is_transposed:
            position = BwdBlockPosition(head, batch, first_col + column, mask.first_row + row, plain.row_step)
            lengths = Lengths(mask.seqlen_k, mask.seqlen_q)
        else:
            position = BwdBlockPosition(head, batch, mask.first_row + row, first_col + column, plain.row_step, False)
            lengths = Lengths(mask.seqlen_q, mask.seqlen_k)
        bias = None if self.bias is None else self.bias.block(position, size, lengths)
        return ModScores(plain, self, position, size, bias)


class ModEvaluator:
    """A graph in one block, with the values of its subexpressions that depend on a row of this thread."""

    def __init__(
        self,
        graph: Graph,
        arithmetic: CuteArithmetic,
        arguments: ModArguments | None,
        position: BwdBlockPosition,
        num_rows: int,
    ) -> None:
        captures, scalars = (tuple(x or ()) for x in arguments or ModArguments())
        self.evaluator = Evaluator(graph, arithmetic, captures, scalars)
        self.position = position
        self.head = self.evaluator.at_head(position.batch, position.head)
        # In the graph, rows are queries and columns are keys.
        at_query, at_key = self.evaluator.at_row, self.evaluator.at_column
        at_row, self.at_column = (at_key, at_query) if position.is_transposed else (at_query, at_key)
        row, offsets = Float32(position.first_row), (position.row_offset(r) for r in range(num_rows))
        rows = ((position.first_row + offset, row + Float32(offset)) for offset in offsets)
        self.rows = [at_row(self.head, *x) for x in rows]
        self.first_column = Float32(position.first_column)

    def column(self, c: int) -> Part:
        """The values of the subexpressions that depend on the thread's c-th column."""
        offset = column_offset(c)
        return self.at_column(self.head, self.position.first_column + offset, self.first_column + Float32(offset))

    def at(self, r: int, column: Part, score: Float32 | None = None, grad: Float32 | None = None) -> Outputs:
        """The outputs of the graph in the thread's r-th row."""
        parts = (column, self.rows[r]) if self.position.is_transposed else (self.rows[r], column)
        return self.evaluator.at(self.head, *parts, score, grad)


@dataclass(frozen=True)
class ModScores:
    """This thread's scores of one block: `BlockScores` with a bias and user mods."""

    plain: BlockScores
    params: BwdModParams
    position: BwdBlockPosition
    size: cutlass.Constexpr  # ThreadSize
    bias: BwdBlockBias | BwdSmemBias | None

    # ---- compile-time properties

    @property
    def graphs(self) -> BwdGraphs:
        return self.params.graphs

    @property
    def has_softcap(self) -> bool:
        return self.plain.has_softcap

    @property
    def has_alibi(self) -> bool:
        return self.plain.has_alibi

    @property
    def keeps_tanh(self) -> bool:
        """Whether the registers of S keep the tanh of softcap.

        ALiBi, a bias and score_mod follow softcap. Their gradients need dS before the derivative of softcap is applied.
        """
        return self.has_softcap and (self.has_alibi or self.bias is not None or self.graphs.score is not None)

    @property
    def keeps_score(self) -> bool:
        """Whether the registers of S keep S or tanh, not P, until dS is computed."""
        return self.keeps_tanh or self.graphs.needs_score

    @property
    def scales(self) -> bool:
        """Whether Q K^T is scaled before ALiBi, bias or score_mod. Else softcap or the exponent includes the scale."""
        changes = self.has_alibi or self.bias is not None or self.graphs.score is not None
        return changes and not self.has_softcap

    @property
    def masks_probs(self) -> bool:
        """Whether masks apply to P instead of S, because one pass computes P from Q K^T."""
        return self.scales and not self.keeps_score

    @property
    def masks_by_bits(self) -> bool:
        """Whether masked scores hold a sentinel NaN, because score_mod may map -inf to a finite number."""
        return self.graphs.score is not None and not self.masks_probs

    # ---- the steps of a block

    @cute.jit
    def prefetch(self):
        """Start to load the bias. Call it before waiting for the products."""
        if cutlass.const_expr(self.bias is not None and self.params.prefetches_bias):
            self.bias.load()

    @cute.jit
    def apply_before_mask(self, acc_S: cute.Tensor):
        """Replace Q K^T by the tanh of softcap, or by S if the registers keep S. Called before the mask."""
        S_mn = as_mn(acc_S)
        if cutlass.const_expr(self.has_softcap):
            self.plain.score.softcap.apply_cap(acc_S)
        if cutlass.const_expr(self.scales and self.keeps_score):
            for c in cutlass.range_constexpr(self.size.columns):
                if cutlass.const_expr(self.bias is not None and not self.params.prefetches_bias):
                    self.bias.load_column(c)
                for r in cutlass.range_constexpr(self.size.rows):
                    S_mn[r, c] = self.with_alibi_and_bias(S_mn[r, c] * self.params.scale, r, c)

    def with_alibi_and_bias(self, x: Float32, r: int, c: int) -> Float32:
        if self.has_alibi:
            x = x - self.plain.score.alibi.slope_log2 * (1 / LOG2_E) * self.plain.distance(r, c)
        return x if self.bias is None else x + self.bias.at(r, c)

    def masked_value(self, acc_S: cute.Tensor) -> tuple[cute.Tensor, Int32 | Float32]:
        """The view that masks write to, and the value that they write."""
        if self.masks_by_bits:
            return bits_of(acc_S), Int32(MASKED_BITS)
        return as_mn(acc_S), Float32(0.0 if self.masks_probs else -Float32.inf)

    @cute.jit
    def apply_band(self, acc_S: cute.Tensor, mask: Mask, first_col: Int32):
        """Mask scores outside the band, and keys and queries past the end."""
        S_mn, masked = self.masked_value(acc_S)
        mask.apply(S_mn, first_col, masked)
        mask.apply_to_tail_rows(S_mn, masked)

    @cute.jit
    def apply_mask(self, acc_S: cute.Tensor, is_partial: Boolean | None = None):
        """Apply mask_mod. `is_partial`: with a block mask, whether this block needs it."""
        if cutlass.const_expr(is_partial is None):
            self.apply_mask_mod(acc_S)
        elif is_partial:
            self.apply_mask_mod(acc_S)

    @cute.jit
    def apply_mask_mod(self, acc_S: cute.Tensor):
        mask_mod = self.mod("mask")
        if cutlass.const_expr(mask_mod is not None):
            S_mn, masked = self.masked_value(acc_S)
            for c in cutlass.range_constexpr(self.size.columns):
                if cutlass.const_expr(self.size.columns > 2 * COLUMNS_AT_ONCE and c % COLUMNS_AT_ONCE == 0):
                    cute.arch.sync_warp()
                column = mask_mod.column(c)
                for r in cutlass.range_constexpr(self.size.rows):
                    (is_visible,) = mask_mod.at(r, column)
                    S_mn[r, c] = select_if(is_visible, S_mn[r, c], masked)

    @cute.jit
    def exponentiate(self, acc_S: cute.Tensor, rP: cute.Tensor, rLSE: cute.Tensor):
        """Compute P, and pack it after dropout into rP, unless masks apply to P later (`pack_probs`).

        The registers of S keep the values for `differentiate`. The stage of a bias in shared memory is released, unless
        `differentiate` reads it again.
        """
        S_mn, bits = as_mn(acc_S), bits_of(acc_S)
        score_mod, bias = self.mod("score"), None if self.params.prefetches_bias else self.bias
        for c in cutlass.range_constexpr(0, self.size.columns, 2):
            if cutlass.const_expr(bias is not None and (self.keeps_tanh or self.masks_probs)):
                bias.load_column(c)
                bias.load_column(c + 1)
            columns = [None if score_mod is None else score_mod.column(c + j) for j in range(2)]
            for r in cutlass.range_constexpr(self.size.rows):
                pair = []
                for j in cutlass.range_constexpr(2):
                    x = S_mn[r, c + j]
                    P = self.prob(x, r, c + j, rLSE, score_mod, columns[j], bits)
                    if cutlass.const_expr(not self.keeps_score):
                        S_mn[r, c + j] = P * tanh_derivative(x) if cutlass.const_expr(self.has_softcap) else P
                    pair.append(P)
                if cutlass.const_expr(not self.masks_probs):
                    self.pack_pair(rP, ProbPair(*pair), S_mn, r, c)
        if cutlass.const_expr(isinstance(self.bias, BwdSmemBias) and not self.keeps_tanh):
            self.bias.release()

    @cute.jit
    def pack_probs(self, acc_P: cute.Tensor, rP: cute.Tensor):
        """Pack P after dropout into rP. Called after the masks if these apply to P."""
        P_mn = as_mn(acc_P)
        for c in cutlass.range_constexpr(0, self.size.columns, 2):
            for r in cutlass.range_constexpr(self.size.rows):
                self.pack_pair(rP, ProbPair(P_mn[r, c], P_mn[r, c + 1]), P_mn, r, c)

    def pack_pair(self, rP: cute.Tensor, pair: ProbPair, S_mn: cute.Tensor, r: int, c: int) -> None:
        dropout = self.plain.dropout_bits
        if dropout is not None:
            pair = ProbPair(*(dropout.select(P, r, c + j) for j, P in enumerate(pair)))
        store_pair(rP, pair, cute.crd2idx((r, c), S_mn.layout))

    def mod(self, name: str) -> ModEvaluator | None:
        """The graph "score", "mask" or "gradient" in this block; None: absent."""
        graph, arguments = getattr(self.graphs, name), getattr(self.params, name)
        if graph is None:
            return None
        arithmetic = CuteArithmetic(self.params.is_exact)
        return ModEvaluator(graph, arithmetic, arguments, self.position, self.size.rows)

    def mod_input(self, x: Float32, r: int, c: int) -> Float32:
        """The input of score_mod, from the value in a register of S."""
        if self.keeps_tanh or self.masks_probs:
            scale = self.params.softcap if self.has_softcap else self.params.scale
            return self.with_alibi_and_bias(x * scale, r, c)
        return x

    def prob(
        self,
        x: Float32,
        r: int,
        c: int,
        rLSE: cute.Tensor,
        score_mod: ModEvaluator | None,
        column: Part | None,
        bits: cute.Tensor,
    ) -> Float32:
        """P = exp(score_mod(S) - LSE), from the value x in a register of S."""
        lse = self.plain.of_query(rLSE, r, c)
        if score_mod is None:
            S, unit = self.mod_input(x, r, c), Float32(LOG2_E)
            if not self.scales and not self.keeps_tanh:
                score = self.plain.score
                unit = score.softcap.softcap_log2 if self.has_softcap else score.scale_log2
            return cute.math.exp2(S * unit - lse, fastmath=True)
        (score,) = score_mod.at(r, column, self.mod_input(x, r, c))
        P = cute.math.exp2(Float32(score) * LOG2_E - lse, fastmath=True)
        return cutlass.select_(bits[r, c] == MASKED_BITS, Float32(0.0), P) if self.masks_by_bits else P

    @cute.jit
    def differentiate(self, block: GradientBlock):
        """Replace the values that `exponentiate` kept by dS, and sum the gradients of slope, bias and captured tensors.

        Returns the sums, which the caller passes to `finish`.
        """
        S_mn, dP_mn, bits, dalibi = as_mn(block.acc_S), as_mn(block.acc_dP), bits_of(block.acc_S), block.dalibi
        opaque, zero = self.opaque(dP_mn)
        score_mod = opaque.mod("score") if cutlass.const_expr(self.keeps_score) else None
        gradient, sums = opaque.mod("gradient"), GradientSums(self.position.is_transposed)
        for c in cutlass.range_constexpr(self.size.columns):
            if cutlass.const_expr(self.keeps_tanh and self.bias is not None):
                opaque.bias.load_column(c)
            score_column = None if score_mod is None else score_mod.column(c)
            gradient_column = None if gradient is None else gradient.column(c)
            for r in cutlass.range_constexpr(self.size.rows):
                x, dP = S_mn[r, c], dP_mn[r, c]
                if cutlass.const_expr(self.plain.dropout_bits is not None):
                    dP = self.plain.dropout_bits.select(dP, r, c) * self.plain.dropout_scale
                P, S = x, None
                if cutlass.const_expr(self.keeps_score):
                    shifted = x + zero
                    P = opaque.prob(shifted, r, c, block.rLSE, score_mod, score_column, bits)
                    S = opaque.mod_input(shifted, r, c)
                dS = P * (dP - self.plain.of_query(block.rDelta, r, c))
                if cutlass.const_expr(gradient is not None):
                    outputs = gradient.at(r, gradient_column, S, dS)
                    is_zero = P == 0.0
                    dS = self.graphs.output(outputs, 0, is_zero)
                    opaque.add_capture_gradients(sums, outputs, is_zero, r, c)
                if cutlass.const_expr(self.has_alibi):
                    dalibi[0] = dalibi[0] - dS * opaque.plain.distance(r, c)
                if cutlass.const_expr(self.bias is not None):
                    opaque.bias.add_gradient(dS, r, c, sums)
                S_mn[r, c] = dS * tanh_derivative(x) if cutlass.const_expr(self.keeps_tanh) else dS
            sums.finish_column()
        return sums

    @cute.jit
    def finish_bias(self, rdS: cute.Tensor):
        """Finish a bias in shared memory after dS, before a fence.

        Release its stage if `differentiate` has read it. In the kernel for wide heads, write dS there if TMA stores the
        gradient. `rdS`: dS in 16 bits.
        """
        if cutlass.const_expr(isinstance(self.bias, BwdSmemBias)):
            if cutlass.const_expr(self.keeps_tanh):
                self.bias.release()
            self.bias.write_gradient(rdS)

    def finish(self, sums: GradientSums) -> None:
        """Finish the sums of `differentiate`."""
        sums.finish()

    def add_capture_gradients(self, sums: GradientSums, outputs: Outputs, is_zero: Boolean, r: int, c: int) -> None:
        """Add the gradients of captured tensors, or store their terms, which torch then sums in a fixed order."""
        for i, load in enumerate(self.graphs.loads):
            grad = self.graphs.output(outputs, load.output, is_zero)
            dcapture = self.params.dcaptures[self.graphs.captures_needing_grad.index(load.capture)]
            coord = indices_in_bounds(dcapture, [outputs[j] for j in load.indices], self.graphs.nonnegative(load))
            if self.params.dcapture_terms is None:
                sums.add(i, self.graphs.depends(load), r, grad, dcapture, coord)
            else:
                self.store_term(i, grad, cute.crd2idx(coord, dcapture.layout), r, c)

    def store_term(self, i: int, grad: Float32, element: Int32, r: int, c: int) -> None:
        """Store a score's term of the gradient of the i-th load, and the index of the element it is added to."""
        position, terms = self.position, self.params.dcapture_terms
        query, key = position.query_at(r, c), position.key_at(r, c)
        gTerms, gElements = (mX[i, position.batch, position.head, None, None] for mX in terms)
        exists = Int32((query < gTerms.shape[0]) & (key < gTerms.shape[1]))
        offset = cute.crd2idx((query, key), gTerms.layout)
        store_if(exists, (gTerms.iterator + offset).toint(), grad, Float32)
        store_if(exists, (gElements.iterator + offset).toint(), Int32(element), Int32)

    def opaque(self, dP_mn: cute.Tensor) -> tuple["ModScores", Float32 | None]:
        """The same scores at a position that the compiler cannot recognise, and a float 0 that it cannot fold.

        Otherwise the compiler would merge the second computation of P with the first, and keep the common
        subexpressions of all elements in registers.
        """
        if not self.keeps_score and not self.graphs.loads:
            return self, None
        zero = bits_and(dP_mn[0, 0], self.plain.heads >> 24)
        position, plain = self.position.shifted(zero), self.plain
        if plain.first_distance is not None:
            plain = replace(plain, first_distance=plain.first_distance + Float32(zero))
        bias = None if self.bias is None else self.bias.moved(position)
        return replace(self, position=position, plain=plain, bias=bias), Float32(zero)


AnyScores = PlainScores | BlockScores | ModScores


def bits_of(acc: cute.Tensor) -> cute.Tensor:
    return as_mn(cute.recast_tensor(acc, Int32))
