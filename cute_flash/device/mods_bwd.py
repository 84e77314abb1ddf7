"""What a bias and a user's functions make of a block of the backward, between the products and dS.

    S   = scale q·k, capped, - slope |distance| + bias
    P   = exp(score_mod(S) - LSE),  0 where the band or mask_mod hides
    dS' = P (Z dP - D)
    dS  = the gradient of score_mod, of S and dS'; 0 where P is 0

Rows are keys, columns queries, as everywhere in the backward. In the place of the products stands P, made
while dP is on its way, unless the gradient needs S itself, or softcap its tangent: then these stay, and P is
computed twice. What a function makes of a query alone is computed where its column is, and kept for no
longer; of a key alone, once for a block.

A function may give a number to any score, also to one of -inf. Where P stands, it is hidden itself, by 0;
where S stays, hidden scores are told by their bits; where there is no function, by -inf.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.bias_bwd import BiasBlock, BiasTerms
from cute_flash.device.entry_list import EntryLists
from cute_flash.device.mask import Mask, column_offset
from cute_flash.device.mods import CuteArithmetic, clamp_indices
from cute_flash.device.place import Place
from cute_flash.device.ptx import pack, select_if
from cute_flash.device.score_bwd import BlockScores, bits_and, derivative
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.sums import Sums
from cute_flash.device.views import as_mn
from cute_flash.score_mod.bound import Graphs
from cute_flash.score_mod.derive import LoadGradient
from cute_flash.score_mod.evaluate import Evaluator
from cute_flash.score_mod.graph import COLUMN, ROW, Graph
from cute_flash.score_mod.lower import lowered

# Columns of which a mask may have loaded something at a time, where there are many.
AT_ONCE = 8
# No arithmetic gives this one: results that are no number have other bits.
HIDDEN = 0x7FC0DEAD


@dataclass(frozen=True)
class Code:
    """Compiled in: graphs as kernels want them."""

    score: Graph | None
    mask: Graph | None
    gradient: Graph | None
    loads: tuple[LoadGradient, ...]  # whose tables have a gradient
    wanted: tuple[int, ...]  # those tables

    @staticmethod
    def of(graphs: Graphs, wanted: tuple[int, ...]) -> "Code":
        found = None if graphs.score is None else graphs.gradient(wanted)
        score, mask, gradient = (
            None if graph is None else lowered(graph)
            for graph in (graphs.score, graphs.mask, None if found is None else found.graph)
        )
        return Code(score, mask, gradient, () if found is None else found.loads, wanted)

    @property
    def needs_score(self) -> bool:
        """Whether the gradient needs more of a score than its weight."""
        nodes = () if self.gradient is None else self.gradient.nodes
        return any(node.op == "input" and node.value == "score" for node in nodes)

    def passes_on(self, output: int) -> bool:
        """Whether an output is the gradient as it came: 0 where the weight is 0."""
        assert self.gradient is not None
        node = self.gradient.nodes[self.gradient.outputs[output]]
        return node.op == "input" and node.value == "grad"

    def chosen(self, outputs: tuple, i: int, nothing) -> Float32:
        """An output; a weight of 0 passes nothing on, also where the function has no derivative."""
        found = Float32(outputs[i])
        return found if self.passes_on(i) else cutlass.select_(nothing, Float32(0.0), found)

    def depends(self, load: LoadGradient) -> int:
        """What the place of a load depends on."""
        assert self.gradient is not None
        bits = 0
        for i in load.indices:
            bits |= self.gradient.depends[self.gradient.outputs[i]]
        return bits & (ROW | COLUMN)


@dataclass(frozen=True)
class WrittenTerms:
    """Of a launch. (tables, numbers) of each graph; None: no such graph."""

    code: cutlass.Constexpr  # Code
    scale: Float32
    softcap: Float32 | None
    score: tuple | None
    mask: tuple | None
    gradient: tuple | None
    bias: BiasTerms | None
    dtables: tuple | None  # fp32 sums, of the tables that have a gradient
    lists: EntryLists | None = None  # of a block map
    is_early: cutlass.Constexpr = True

    def block(self, plain: BlockScores, mask: Mask, head: Int32, batch: Int32, first_col: Int32):
        row, column = as_mn(mask.tScS)[0, 0]
        place = Place(head, batch, first_col + column, mask.first_row + row, plain.row_step)
        size = tuple(cute.size(as_mn(mask.tScS), mode=[i]) for i in range(2))
        bias = None
        if self.bias is not None:
            bias = self.bias.block(place, size, (mask.seqlen_k, mask.seqlen_q))
        return WrittenScores(plain, self, place, size, bias, self.is_early)


class Function:
    """A graph at the place of a block; the parts of its keys are at hand."""

    def __init__(self, graph: Graph, arguments: tuple | None, place: Place, num_rows: int) -> None:
        tables, numbers = (tuple(x or ()) for x in arguments or ((), ()))
        self.evaluator = Evaluator(graph, CuteArithmetic(), tables, numbers)
        self.place = place
        self.head = self.evaluator.at_head(place.batch, place.head)
        offsets = [place.row_offset(r) for r in range(num_rows)]
        key = Float32(place.key)
        self.keys = [
            self.evaluator.at_column(self.head, place.key + offset, key + Float32(offset)) for offset in offsets
        ]
        self.query = Float32(place.query)

    def column(self, c: int):
        """The part of a query."""
        offset = column_offset(c)
        return self.evaluator.at_row(self.head, self.place.query + offset, self.query + Float32(offset))

    def at(self, r: int, column, score=None, grad=None) -> tuple:
        return self.evaluator.at(self.head, column, self.keys[r], score, grad)


@dataclass(frozen=True)
class WrittenScores:
    """A block of scores in one thread, with the parts of `BlockScores` that its features need."""

    plain: BlockScores
    terms: WrittenTerms
    place: Place
    size: cutlass.Constexpr  # rows and columns of this thread
    bias: BiasBlock | None
    is_early: cutlass.Constexpr  # there are registers for a block of the bias while S is on its way

    # What is compiled in

    @property
    def code(self) -> Code:
        return self.terms.code

    @property
    def caps(self) -> bool:
        return self.plain.score.rate is not None

    @property
    def has_slope(self) -> bool:
        return self.plain.score.slope_log2 is not None

    @property
    def keeps_tangent(self) -> bool:
        """The tangent stays in the place of a score: the gradient of what comes after it is wanted too."""
        return self.caps and (self.has_slope or self.bias is not None or self.code.score is not None)

    @property
    def keeps_score(self) -> bool:
        return self.keeps_tangent or self.code.needs_score

    @property
    def scales(self) -> bool:
        """Products are scaled before more is made of them; else the exponent takes the scale."""
        changes = self.has_slope or self.bias is not None or self.code.score is not None
        return changes and not self.caps

    @property
    def hides_weights(self) -> bool:
        """All is made of a product at once, between exponentials, and hidden after that."""
        return self.scales and not self.keeps_score

    # The way of a block

    @cute.jit
    def prepare(self):
        """Before the products are there."""
        if cutlass.const_expr(self.bias is not None and self.is_early):
            self.bias.fetch()

    @cute.jit
    def cap(self, acc_S: cute.Tensor):
        """Products -> S, or its tangent, before the mask"""
        S_mn = as_mn(acc_S)
        if cutlass.const_expr(self.caps):
            self.plain.score.apply_cap(acc_S)
        if cutlass.const_expr(self.scales and self.keeps_score):
            for c in cutlass.range_constexpr(self.size[1]):
                if cutlass.const_expr(self.bias is not None and not self.is_early):
                    self.bias.fetch_column(c)
                for r in cutlass.range_constexpr(self.size[0]):
                    S_mn[r, c] = self.shifted(S_mn[r, c] * self.terms.scale, r, c)

    def shifted(self, x: Float32, r: int, c: int) -> Float32:
        """With slope and bias."""
        if self.has_slope:
            x = x - self.plain.score.slope_log2 * (1 / LOG2_E) * self.plain.distance(r, c)
        return x if self.bias is None else x + self.bias.at(r, c)

    @property
    def marks_bits(self) -> bool:
        """Hidden scores are marked by their bits, for a function that makes a number of -inf."""
        return self.code.score is not None and not self.hides_weights

    def hidden(self, acc_S: cute.Tensor) -> tuple:
        """What a hidden element is to be, and the elements as those are."""
        if self.marks_bits:
            return bits_of(acc_S), Int32(HIDDEN)
        return as_mn(acc_S), Float32(0.0 if self.hides_weights else -Float32.inf)

    @cute.jit
    def cut(self, acc_S: cute.Tensor, mask: Mask, first_col: Int32):
        """What the band hides, and keys past the end."""
        S_mn, nothing = self.hidden(acc_S)
        mask.apply(S_mn, first_col, nothing)
        mask.hide_tail(S_mn, nothing)

    @cute.jit
    def hide(self, acc_S: cute.Tensor, is_partial=None):
        """What mask_mod hides; `is_partial`: of a block map's blocks, whether it decides in this one."""
        if cutlass.const_expr(is_partial is None):
            self.apply_mask(acc_S)
        elif is_partial:
            self.apply_mask(acc_S)

    @cute.jit
    def apply_mask(self, acc_S: cute.Tensor):
        if cutlass.const_expr(self.code.mask is not None):
            function = Function(self.code.mask, self.terms.mask, self.place, self.size[0])
            S_mn, nothing = self.hidden(acc_S)
            for c in cutlass.range_constexpr(self.size[1]):
                if cutlass.const_expr(self.size[1] > 2 * AT_ONCE and c % AT_ONCE == 0):
                    # Loads do not pass it: those of all columns at once would spill.
                    cute.arch.sync_warp()
                query = function.column(c)
                for r in cutlass.range_constexpr(self.size[0]):
                    (seen,) = function.at(r, query)
                    S_mn[r, c] = select_if(seen, S_mn[r, c], nothing)

    @cute.jit
    def weigh(self, acc_S: cute.Tensor, rP: cute.Tensor, rLSE: cute.Tensor):
        """-> P, kept or dropped, in rP, unless it is yet to be hidden; what dS will need of it stays."""
        S_mn, bits = as_mn(acc_S), bits_of(acc_S)
        function, bias = self.function(), None if self.is_early else self.bias
        for c in cutlass.range_constexpr(0, self.size[1], 2):
            if cutlass.const_expr(bias is not None and (self.keeps_tangent or self.hides_weights)):
                bias.fetch_column(c)
                bias.fetch_column(c + 1)
            queries = [None if function is None else function.column(c + j) for j in range(2)]
            for r in cutlass.range_constexpr(self.size[0]):
                pair = []
                for j in cutlass.range_constexpr(2):
                    x = S_mn[r, c + j]
                    P = self.weight(x, (r, c + j), rLSE, function, queries[j], bits)
                    if cutlass.const_expr(not self.keeps_score):
                        S_mn[r, c + j] = P * derivative(x) if cutlass.const_expr(self.caps) else P
                    pair.append(P)
                if cutlass.const_expr(not self.hides_weights):
                    self.pack(rP, pair, S_mn, r, c)

    @cute.jit
    def pack_weights(self, acc_P: cute.Tensor, rP: cute.Tensor):
        """P, kept or dropped, in rP: after `weigh` and what hides weights."""
        P_mn = as_mn(acc_P)
        for c in cutlass.range_constexpr(0, self.size[1], 2):
            for r in cutlass.range_constexpr(self.size[0]):
                self.pack(rP, [P_mn[r, c + j] for j in range(2)], P_mn, r, c)

    def pack(self, rP: cute.Tensor, pair: list, S_mn: cute.Tensor, r: int, c: int) -> None:
        kept, packed = self.plain.kept, cute.recast_tensor(rP, Int32)
        if kept is not None:
            pair = [kept.choose(P, r, c + j) for j, P in enumerate(pair)]
        # Neighbours in a row are neighbours in registers.
        packed[cute.crd2idx((r, c), S_mn.layout) // 2] = pack(*pair, rP.element_type)

    def function(self) -> Function | None:
        if self.code.score is None:
            return None
        return Function(self.code.score, self.terms.score, self.place, self.size[0])

    def before(self, x: Float32, r: int, c: int) -> Float32:
        """S, of what stands in its place."""
        if self.keeps_tangent or self.hides_weights:
            return self.shifted(x * (self.terms.softcap if self.caps else self.terms.scale), r, c)
        return x

    def weight(self, x: Float32, at: tuple, rLSE, function: Function | None, query, bits) -> Float32:
        """exp(score_mod(S) - LSE)"""
        r, c = at
        lse = self.plain.of_query(rLSE, r, c)
        if function is None:
            S, unit = self.before(x, r, c), Float32(LOG2_E)
            if not self.scales and not self.keeps_tangent:
                unit = self.plain.score.softcap_log2 if self.caps else self.plain.score.scale_log2
            return cute.math.exp2(S * unit - lse, fastmath=True)
        (score,) = function.at(r, query, self.before(x, r, c))
        P = cute.math.exp2(Float32(score) * LOG2_E - lse, fastmath=True)
        return cutlass.select_(bits[r, c] == HIDDEN, Float32(0.0), P) if self.marks_bits else P

    @cute.jit
    def differentiate(self, acc_S: cute.Tensor, acc_dP: cute.Tensor, rLSE, rD: cute.Tensor, dslope):
        """What `weigh` left -> dS; what slope, bias and tables receive is added to theirs, or returned, for
        its `end` to add.
        """
        S_mn, dP_mn, bits = as_mn(acc_S), as_mn(acc_dP), bits_of(acc_S)
        again, zero = self.again(dP_mn)
        function = again.function() if cutlass.const_expr(self.keeps_score) else None
        gradient = again.gradient()
        tables = TableSums(self.code, self.terms.dtables)
        for c in cutlass.range_constexpr(self.size[1]):
            if cutlass.const_expr(self.keeps_tangent and self.bias is not None):
                again.bias.fetch_column(c)
            query = None if function is None else function.column(c)
            column = None if gradient is None else gradient.column(c)
            for r in cutlass.range_constexpr(self.size[0]):
                x, dP = S_mn[r, c], dP_mn[r, c]
                if cutlass.const_expr(self.plain.kept is not None):
                    dP = self.plain.kept.choose(dP, r, c) * self.plain.keep_scale
                P, S = x, None
                if cutlass.const_expr(self.keeps_score):
                    moved = x + zero
                    P = again.weight(moved, (r, c), rLSE, function, query, bits)
                    S = again.before(moved, r, c)
                dS = P * (dP - self.plain.of_query(rD, r, c))
                if cutlass.const_expr(gradient is not None):
                    outputs = gradient.at(r, column, S, dS)
                    nothing = P == 0.0
                    dS = self.code.chosen(outputs, 0, nothing)
                    tables.add(outputs, nothing, r)
                if cutlass.const_expr(self.has_slope):
                    dslope[0] = dslope[0] - dS * again.plain.distance(r, c)
                if cutlass.const_expr(self.bias is not None):
                    again.bias.add(dS, r, c, tables.sums)
                S_mn[r, c] = dS * derivative(x) if cutlass.const_expr(self.keeps_tangent) else dS
            tables.sums.end_column()
        return tables.sums

    def gradient(self) -> Function | None:
        if self.code.gradient is None:
            return None
        return Function(self.code.gradient, self.terms.gradient, self.place, self.size[0])

    def again(self, dP_mn: cute.Tensor) -> tuple:
        """The same place, of which the compiler does not know it: what is computed of it twice would else be
        computed once and be kept for all elements; and a 0 of which it knows no more.
        """
        if not self.keeps_score and not self.code.loads:
            return self, None
        zero = bits_and(dP_mn[0, 0], self.plain.heads >> 24)
        place, plain = self.place.moved(zero), self.plain
        if plain.first_distance is not None:
            plain = replace(plain, first_distance=plain.first_distance + Float32(zero))
        bias = None if self.bias is None else self.terms.bias.block(place, self.size, self.bias.lengths)
        return replace(self, place=place, plain=plain, bias=bias), Float32(zero)


class TableSums:
    """The gradients of a function's tables."""

    def __init__(self, code: Code, dtables: tuple | None) -> None:
        self.code, self.dtables, self.sums = code, dtables, Sums()

    def add(self, outputs: tuple, nothing, r: int) -> None:
        for i, load in enumerate(self.code.loads):
            grad = self.code.chosen(outputs, load.output, nothing)
            into = self.dtables[self.code.wanted.index(load.capture)]
            place = clamp_indices(into, [outputs[j] for j in load.indices])
            self.sums.add(i, self.code.depends(load), r, grad, into, place)


def bits_of(acc: cute.Tensor) -> cute.Tensor:
    return as_mn(cute.recast_tensor(acc, Int32))
