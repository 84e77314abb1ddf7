"""What of users' functions, a bias and a block map is compiled into a kernel; the rest is arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from cute_flash.score_mod.call import Graphs
from cute_flash.score_mod.graph import ROW, Graph
from cute_flash.score_mod.limits import LONG_FUNCTION
from cute_flash.score_mod.lower import is_inner, lowered


@dataclass(frozen=True)
class Mods:
    graphs: Graphs = field(default_factory=Graphs)
    bias: str = ""  # its dtype, as a kernel reads it; "": none
    reads_pairs: bool = False  # two neighbouring keys of the bias are one aligned load
    is_aligned: bool = False  # the copy engine can fetch blocks of the bias
    block: tuple[int, int] | None = None  # queries and keys of a block of the map
    # Of gradients: whether the bias has one, and the tables of score_mod that do.
    wants_bias: bool = False
    wanted: tuple[int, ...] = ()
    bias_bits: int = 0  # of the graph's ROW and COLUMN, what entries of the bias tell apart; forward: of ROW
    dbias: str = ""  # dtype of the bias's gradient as a kernel writes it; "": none
    adds_bias: bool = False  # entries of it are sums of many scores, and not of one

    @property
    def num_inner(self) -> int:
        """Operations for every score of the forward."""
        graphs = self.graphs.score, self.graphs.mask
        return sum(graph.num_inner for graph in graphs if graph is not None)

    @property
    def has_formula(self) -> bool:
        """Whether the forward computes it beside the exponentials of whole blocks: what is short, and reads
        no table for every score, which takes long. A block map's whole blocks ask for no mask.
        """
        score, mask = self.graphs.score, self.graphs.mask if self.block is None else None
        asked = [graph for graph in (score, mask) if graph is not None]
        is_short = sum(graph.num_inner for graph in asked) <= LONG_FUNCTION
        return bool(asked or self.bias) and is_short and not any(_reads_pairs(graph) for graph in asked)

    @property
    def shares_pairs(self) -> bool:
        """Whether all queries share a row of the bias, of pairs of keys in 32 bits."""
        return self.reads_pairs and self.bias != "float32" and not self.bias_bits & ROW

    @property
    def has_light_formula(self) -> bool:
        """Whether a formula takes hardly a register: a few operations that are one instruction each, or a
        bias that queries share.
        """
        graph, is_alone = self.graphs.score, self.graphs.mask is None and self.block is None
        if not (self.has_formula and is_alone) or (graph is not None and self.bias):
            return False
        if graph is None:
            return self.shares_pairs
        ops = {node.op for node, bits in zip(graph.nodes, graph.depends) if is_inner(bits)}
        return graph.num_inner <= LIGHT_FUNCTION and ops <= _LIGHT

    @property
    def gradient_inner(self) -> int:
        """Operations for every score of the backward; slow ones count as several."""
        score = 0 if self.graphs.score is None else _inner(self.graphs.gradient(self.wanted).graph)
        return score + (0 if self.graphs.mask is None else _inner(self.graphs.mask))

    @property
    def has_light_gradient(self) -> bool:
        """Whether functions of the backward are short, read little, and pass a gradient of weights on."""
        score, mask = self.graphs.score, self.graphs.mask
        if score is not None:
            gradient = self.graphs.gradient(self.wanted).graph
            needs_score = any(node.op == "input" and node.value == "score" for node in gradient.nodes)
            if needs_score or _reads_rows(score) or _inner(score) > SHORT:
                return False
        if mask is None:
            return True
        return not _reads_pairs(mask) and _inner(mask) <= (SHORT_READING if _reads_rows(mask) else SHORT)

    @property
    def in_forward(self) -> Mods:
        graphs = Graphs(self.graphs.score, self.graphs.mask)
        of_bias = self.bias, self.reads_pairs, self.is_aligned
        return Mods(graphs, *of_bias, self.block, bias_bits=self.bias_bits)

    @property
    def in_gradients(self) -> Mods:
        """The backward has a block map in its own blocks, and reads a bias in pairs."""
        return replace(self, is_aligned=False, block=None, wants_bias=False)


# Operations for every score: of a formula of the forward that takes hardly a register; of the backward, and
# there of a mask that reads something for every query.
LIGHT_FUNCTION, SHORT, SHORT_READING = 6, 7, 3
_LIGHT = {"input", "constant", "add", "sub", "mul", "neg", "abs", "min", "max", "to_float"}
# Operations on ints that are many instructions.
_SLOW = {"mod": 10, "floordiv": 10}


@lru_cache(maxsize=1024)
def _inner(graph: Graph) -> int:
    found = lowered(graph)
    nodes = ((node.op, bits) for node, bits in zip(found.nodes, found.depends))
    return sum(_SLOW.get(op, 1) for op, bits in nodes if op not in ("input", "constant") and is_inner(bits))


def _reads_rows(graph: Graph) -> bool:
    """Whether a table is read for every query, or for every score."""
    return any(node.op == "load" and bits & ROW for node, bits in zip(graph.nodes, graph.depends))


def _reads_pairs(graph: Graph) -> bool:
    return any(node.op == "load" and is_inner(bits) for node, bits in zip(graph.nodes, graph.depends))
