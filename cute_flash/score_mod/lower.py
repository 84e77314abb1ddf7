"""A graph as a kernel wants it: the same values, with less for the slow units to do.

Integers that become floats are computed as floats where that is exact: a conversion of every score would take
as long as its exponential. A score is divided by what its head, row or column decides with one reciprocal of
that.
"""

from __future__ import annotations

from functools import lru_cache

from cute_flash.score_mod.graph import COLUMN, ROW, SCORE, Builder, Graph
from cute_flash.score_mod.limits import MAX_INDEX

EXACT = 1 << 24
_SUMS, _ALIKE = ("add", "sub"), ("neg", "abs", "min", "max")


@lru_cache(maxsize=1024)
def lowered(graph: Graph) -> Graph:
    builder = Builder(graph.tables, graph.numbers)
    reach = _reaches(graph)
    places: list[int] = []
    floats: dict[int, int] = {}

    def floated(i: int) -> int:
        """An integer as a float, from its operands on."""
        node = graph.nodes[i]
        if i not in floats:
            inner = node.op in _SUMS + _ALIKE and reach[i] <= EXACT and is_inner(graph.depends[i])
            floats[i] = (
                builder.op(node.op, *(floated(j) for j in node.args))
                if inner
                else builder.cast(places[i], "float")
            )
        return floats[i]

    for node in graph.nodes:
        if node.op == "to_float" and graph.nodes[node.args[0]].kind == "int":
            places.append(floated(node.args[0]))
        elif node.op == "div" and _divides_scores(graph, *node.args):
            a, b = (places[j] for j in node.args)
            places.append(builder.op("mul", a, builder.op("div", builder.constant(1.0), b)))
        elif node.op in ("input", "constant", "number"):
            places.append(builder.add(node))
        elif node.op == "load":
            places.append(builder.load(node.value, [places[j] for j in node.args]))
        else:
            places.append(builder.op(node.op, *(places[j] for j in node.args)))
    return builder.graph(*(places[i] for i in graph.outputs))


def is_inner(bits: int) -> bool:
    return bool(bits & SCORE or (bits & ROW and bits & COLUMN))


def _divides_scores(graph: Graph, a: int, b: int) -> bool:
    return bool(graph.depends[a] & SCORE) and not is_inner(graph.depends[b])


def _reaches(graph: Graph) -> list[float]:
    """A bound of the size of each integer and of all it is made of, if it is made of positions."""
    found: list[float] = []
    for node in graph.nodes:
        of = [found[j] for j in node.args]
        if node.op == "input" and node.kind == "int":
            found.append(MAX_INDEX)
        elif node.op == "constant" and node.kind == "int":
            found.append(abs(node.value))
        elif node.op in _SUMS:
            found.append(sum(of))
        else:
            found.append(max(of) if node.op in _ALIKE else float("inf"))
    return found
