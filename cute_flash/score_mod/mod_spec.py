"""`ModSpec`: the part of user mods, bias and block mask that is compiled into a kernel."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce

from cute_flash.score_mod.graph import COLUMN, ROW, Graph
from cute_flash.score_mod.graphs import Graphs
from cute_flash.score_mod.limits import LONG_MOD_OPS
from cute_flash.score_mod.lower import lowered


@dataclass(frozen=True)
class ModSpec:
    """The compiled-in part of user mods, bias and block mask. Everything else is a run-time argument.

    `spec.describe` sets the graphs, the block mask's tile, the loads of the bias and the gradients that are needed.
    `planning.bias` adds the fields about writing the gradient of the bias.
    """

    graphs: Graphs = field(default_factory=Graphs)
    bias_dtype: str = ""  # as a kernel reads it; "": no bias
    bias_paired_loads: bool = False  # the bias of two neighbouring keys is one aligned load
    bias_tma: bool = False  # TMA can load tiles of the bias
    bias_varies_by_row: bool = False  # forward: the bias differs between queries (its stride is not 0)
    block_mask_tile: tuple[int, int] | None = None  # queries and keys of a block of the block mask
    # The gradients that the backward computes: of the bias, and of these captures of score_mod.
    bias_needs_grad: bool = False
    captures_needing_grad: tuple[int, ...] = ()
    bias_varies: int = 0  # backward: bits ROW and COLUMN, for the dimensions in which the bias does not broadcast
    dbias_dtype: str = ""  # as the backward kernel writes it; "": no gradient of the bias
    dbias_tma: bool = False  # TMA can store tiles of dbias, in the dtype of q
    # dbias has a term per score, which `bwd_sum_dbias` sums. In a compile key: and the kernel writes no zeros in blocks
    # that a band excludes.
    dbias_terms: bool = False
    dbias_accumulates: bool = False  # the kernel adds to dbias, because several scores share an element of the bias

    @cached_property
    def num_captures(self) -> int:
        """The number of captured tensors that the kernel takes, graph by graph."""
        return sum(len(graph.captures) for graph in self.graphs.present)

    @cached_property
    def scalar_kinds(self) -> tuple[str, ...]:
        """Of each captured number: "int" or "float"."""
        return tuple([kind for graph in self.graphs.present for kind in graph.scalars])

    @property
    def ops_per_score(self) -> int:
        """The number of operations of score_mod and mask_mod that run once per score."""
        graphs = self.graphs.score, self.graphs.mask
        return sum(graph.ops_per_score for graph in graphs if graph is not None)

    @property
    def fuses_with_exp2(self) -> bool:
        """Whether the Hopper forward computes the mods of full blocks in the same pass as exp2.

        The mods must be short, and must not load a captured element per score. With a block mask, full blocks
        need no mask_mod.
        """
        score, mask = self.graphs.score, self.graphs.mask if self.block_mask_tile is None else None
        graphs = [graph for graph in (score, mask) if graph is not None]
        is_short = sum(graph.ops_per_score for graph in graphs) <= LONG_MOD_OPS
        return bool(graphs or self.bias_dtype) and is_short and not any(map(_loads_per_score, graphs))

    @cached_property
    def has_int64(self) -> bool:
        """Whether score_mod or mask_mod computes with an int64 per score."""
        graphs = [lowered(graph) for graph in (self.graphs.score, self.graphs.mask) if graph is not None]
        return any(graph.nodes[i].kind == "int64" for graph in graphs for node in graph.per_score for i in node.args)

    @property
    def bias_pairs_are_shared(self) -> bool:
        """Whether all queries share one row of a 16-bit bias, which is read as 32-bit pairs of keys."""
        return self.bias_paired_loads and self.bias_dtype != "float32" and not self.bias_varies_by_row

    @property
    def has_cheap_fusion(self) -> bool:
        """Whether fusing with exp2 needs hardly any registers.

        This holds for a score_mod of few operations that are one instruction each, and for a bias that all queries
        share.
        """
        score, is_alone = self.graphs.score, self.graphs.mask is None and self.block_mask_tile is None
        if not (self.fuses_with_exp2 and is_alone) or (score is not None and self.bias_dtype) or self.has_int64:
            return False
        if score is None:
            return self.bias_pairs_are_shared
        return score.ops_per_score <= CHEAP_OPS and all(node.op in _ONE_INSTRUCTION for node in score.per_score)

    @property
    def capture_loads(self) -> tuple[tuple[int, int], ...]:
        """For each load that has a gradient: its capture, and the bits ROW and COLUMN that its indices depend on."""
        gradient = self.graphs.gradient(self.captures_needing_grad)
        depends, outputs = gradient.graph.depends, gradient.graph.outputs
        loads = []
        for load in gradient.loads:
            bits = reduce(operator.or_, (depends[outputs[i]] for i in load.indices), 0)
            loads.append((load.capture, bits & (ROW | COLUMN)))
        return tuple(loads)

    @property
    def adds_tensors(self) -> bool:
        """Whether scores depend on tensors: on a bias, or on tensors that score_mod captures."""
        return bool(self.bias_dtype) or (self.graphs.score is not None and bool(self.graphs.score.captures))

    @property
    def bwd_ops_per_score(self) -> int:
        """The number of operations of the backward's mods that run once per score; slow ones count as several."""
        score = None if self.graphs.score is None else self.graphs.gradient(self.captures_needing_grad).graph
        return sum(_weighted_ops(graph) for graph in (score, self.graphs.mask) if graph is not None)

    @property
    def has_cheap_bwd(self) -> bool:
        """Whether the backward's mods are short and load little, and the gradient of score_mod does not need the score.

        score_mod may load no element per query or per score; mask_mod may load one per query if it is very short.
        """
        score, mask = self.graphs.score, self.graphs.mask
        if score is not None:
            gradient = self.graphs.gradient(self.captures_needing_grad).graph
            needs_score = any(node.op == "input" and node.value == "score" for node in gradient.nodes)
            if needs_score or _loads_per_row(score) or _weighted_ops(score) > CHEAP_BWD_OPS:
                return False
        if mask is None:
            return True
        most = CHEAP_BWD_OPS_WITH_LOADS if _loads_per_row(mask) else CHEAP_BWD_OPS
        return not _loads_per_score(mask) and _weighted_ops(mask) <= most

    @property
    def for_forward(self) -> ModSpec:
        """The spec with only the fields that the forward uses, so that equal kernels have equal specs."""
        return replace(
            self,
            graphs=Graphs(self.graphs.score, self.graphs.mask),
            bias_needs_grad=False,
            captures_needing_grad=(),
            bias_varies=0,
            dbias_dtype="",
            dbias_tma=False,
            dbias_terms=False,
            dbias_accumulates=False,
        )

    def for_backward(self, uses_tma: bool) -> ModSpec:
        """The spec with only the fields that the backward uses.

        `block_mask_tile` is dropped, because the backward's index lists are in units of kernel tiles. `uses_tma`: TMA
        loads the bias; with `dbias_tma` it also stores the gradient.
        """
        spec = self if uses_tma else replace(self, bias_tma=False, dbias_tma=False, dbias_terms=False)
        return replace(spec, bias_varies_by_row=False, block_mask_tile=None, bias_needs_grad=False)


# Limits of operations per score: for `has_cheap_fusion`; for `has_cheap_bwd`; and for `has_cheap_bwd` with a mask_mod
# that loads an element per query.
CHEAP_OPS, CHEAP_BWD_OPS, CHEAP_BWD_OPS_WITH_LOADS = 6, 7, 3
_ONE_INSTRUCTION = {"input", "constant", "add", "sub", "mul", "neg", "abs", "min", "max", "to_float"}
# The number of instructions of slow operations on ints.
_SLOW = {"mod": 10, "floordiv": 10}


@lru_cache(maxsize=1024)
def _weighted_ops(graph: Graph) -> int:
    """Operations per score of the lowered graph; slow ones count as several."""
    graph = lowered(graph)
    return sum(max(graph.num_ops(node), _SLOW.get(node.op, 0)) for node in graph.per_score)


def _loads_per_row(graph: Graph) -> bool:
    """Whether a captured element is loaded per query, or per score."""
    return any(node.op == "load" and bits & ROW for node, bits in zip(graph.nodes, graph.depends))


def _loads_per_score(graph: Graph) -> bool:
    return any(node.op == "load" for node in graph.per_score)
