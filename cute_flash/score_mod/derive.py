"""The gradient of a score's graph: with respect to the score, and to every element of a table it reads.

A gradient is a graph too, with the same tables and numbers and one more input, `grad`: the gradient of what
the score became. Its outputs are, in this order, the gradient of the score, and for every load of a table
that wants one, the gradient of what was loaded and the indices where it belongs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from cute_flash.errors import TraceError
from cute_flash.score_mod.graph import Builder, Graph, Node, copied

LN_2 = math.log(2)


@dataclass(frozen=True)
class LoadGradient:
    """Of one load: places among the outputs of the gradient's graph."""

    table: int
    output: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Gradient:
    graph: Graph
    loads: tuple[LoadGradient, ...] = ()


class _Rules:
    """What an operation passes on to its operands: rule(gradient, result, *operands) -> one for each."""

    def __init__(self, builder: Builder) -> None:
        self.m = builder.op
        self.of = builder.constant

    def rule(self, node: Node) -> Callable[..., tuple[int | None, ...]]:
        found = getattr(self, f"_{node.op}", None)
        if found is None:
            raise TraceError(f"{node.op} of floats has no derivative: give score_mod_bwd")
        return found

    def _add(self, g, y, a, b):
        return g, g

    def _sub(self, g, y, a, b):
        return g, self.m("neg", g)

    def _mul(self, g, y, a, b):
        return self.m("mul", g, b), self.m("mul", g, a)

    def _div(self, g, y, a, b):
        of_a = self.m("div", g, b)
        return of_a, self.m("neg", self.m("mul", of_a, y))

    def _mod(self, g, y, a, b):
        # a - floor(a / b) b
        return g, self.m("neg", self.m("mul", g, self.m("floor", self.m("div", a, b))))

    def _neg(self, g, y, a):
        return (self.m("neg", g),)

    def _abs(self, g, y, a):
        zero = self.of(0.0)
        below = self.m("where", self.m("lt", a, zero), self.m("neg", g), zero)
        return (self.m("where", self.m("gt", a, zero), g, below),)

    def _min(self, g, y, a, b):
        return self._chosen(g, self.m("lt", a, b))

    def _max(self, g, y, a, b):
        return self._chosen(g, self.m("gt", a, b))

    def _where(self, g, y, c, a, b):
        return None, *self._chosen(g, c)

    def _chosen(self, g, is_first):
        zero = self.of(0.0)
        return self.m("where", is_first, g, zero), self.m("where", is_first, zero, g)

    def _exp(self, g, y, a):
        return (self.m("mul", g, y),)

    def _exp2(self, g, y, a):
        return (self.m("mul", self.m("mul", g, y), self.of(LN_2)),)

    def _log(self, g, y, a):
        return (self.m("div", g, a),)

    def _log2(self, g, y, a):
        return (self.m("div", self.m("mul", g, self.of(1 / LN_2)), a),)

    def _tanh(self, g, y, a):
        return (self.m("mul", g, self.m("sub", self.of(1.0), self.m("mul", y, y))),)

    def _sqrt(self, g, y, a):
        return (self.m("div", self.m("mul", g, self.of(0.5)), y),)

    def _rsqrt(self, g, y, a):
        return (self.m("mul", self.m("mul", g, self.of(-0.5)), self.m("mul", y, self.m("mul", y, y))),)

    def _sigmoid(self, g, y, a):
        return (self.m("mul", g, self.m("mul", y, self.m("sub", self.of(1.0), y))),)

    def _sin(self, g, y, a):
        return (self.m("mul", g, self.m("cos", a)),)

    def _cos(self, g, y, a):
        return (self.m("neg", self.m("mul", g, self.m("sin", a))),)

    def _floor(self, g, y, a):
        return (None,)


def _active(graph: Graph, wanted: tuple[int, ...]) -> list[bool]:
    """Which nodes have a gradient to pass on: floats that depend on the score or on a wanted table."""
    found: list[bool] = []
    for node in graph.nodes:
        is_leaf = (node.op == "input" and node.value == "score") or (
            node.op == "load" and node.value in wanted
        )
        found.append(node.kind == "float" and (is_leaf or any(found[i] for i in node.args)))
    return found


@lru_cache(maxsize=1024)
def gradient(graph: Graph, wanted: tuple[int, ...] = (), given: Graph | None = None) -> Gradient:
    """The gradient of a score's graph. `wanted`: tables that have one. `given`: a user's own, of the score.

    With `given`, tables and numbers are those of the score's graph and then those of the given one.
    """
    builder = Builder(graph.tables, graph.numbers)
    if given is not None:
        builder = Builder((*graph.tables, *given.tables), (*graph.numbers, *given.numbers))
    places = copied(builder, graph)
    if given is not None and not wanted:
        return Gradient(builder.graph(_of_given(builder, graph, given)))
    active, rules = _active(graph, wanted), _Rules(builder)
    sums: dict[int, int] = {graph.outputs[0]: builder.input("grad")}
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        if i not in sums or not active[i] or node.op in ("input", "load"):
            continue
        found = rules.rule(node)(sums[i], places[i], *(places[j] for j in node.args))
        for j, part in zip(node.args, found, strict=True):
            if part is not None and active[j]:
                sums[j] = builder.op("add", sums[j], part) if j in sums else part
    score = [i for i, node in enumerate(graph.nodes) if node.op == "input" and node.value == "score"]
    dscore = sums[score[0]] if score and score[0] in sums else builder.constant(0.0)
    outputs = [dscore if given is None else _of_given(builder, graph, given)]
    loads = []
    for i in graph.loads:
        node = graph.nodes[i]
        if node.value in wanted and i in sums:
            first = len(outputs) + 1
            outputs += [sums[i], *(places[j] for j in node.args)]
            loads.append(LoadGradient(node.value, first - 1, tuple(range(first, len(outputs)))))
    return Gradient(builder.graph(*outputs), tuple(loads))


def _of_given(builder: Builder, graph: Graph, given: Graph) -> int:
    """The result of a user's gradient, its arguments after those of the score."""
    shift = {"load": len(graph.tables), "number": len(graph.numbers)}
    nodes = tuple(
        Node(x.op, x.kind, x.args, x.value + shift[x.op]) if x.op in shift else x for x in given.nodes
    )
    return copied(builder, Graph(nodes, given.outputs, given.tables, given.numbers))[given.outputs[0]]
