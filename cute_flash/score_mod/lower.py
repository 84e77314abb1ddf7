"""Rewrites a graph for kernels, with fewer conversions, divisions and 64-bit operations per score.

An integer that is converted to float is computed in floats if that is exact, because a conversion is as slow as exp2. A
division of a score by a value of its head, row or column becomes a multiplication by the reciprocal, which is computed
once per head, row or column. A quotient or a remainder of an integer by a constant power of two becomes a shift or a
bitwise AND.

An int64 whose bound fits in 32 bits, such as a difference of positions, is computed in 32 bits. A comparison of such a
value with an int64 of the head, row or column is one of 32 bits: the int64 is clamped once per head, row or column.
"""

from __future__ import annotations

from functools import lru_cache

from cute_flash.score_mod.graph import COMPARISONS, INT_BITS, OPERATIONS, SCORE, Builder, Graph, is_per_score
from cute_flash.score_mod.limits import MAX_INDEX

EXACT = 1 << 24  # fp32 represents all integers up to this
_SUMS, _BOUNDED = ("add", "sub"), ("neg", "abs", "min", "max")
_POWERS_OF_TWO = tuple(1 << i for i in range(63))  # all powers of two of int64
# Below the largest int32, so that a clamped int64 beyond 32 bits differs from all numbers with this bound.
NARROW = (1 << 31) - 2


@lru_cache(maxsize=1024)
def lowered(graph: Graph) -> Graph:
    """The graph that a kernel evaluates instead of this one."""
    builder = Builder(graph.captures, graph.scalars)
    bounds = _bounds(graph)
    nodes: list[int] = []  # for each node of the graph, its node in the builder
    floats: dict[int, int] = {}  # the same, for integer nodes that are computed in floats

    def as_float(i: int) -> int:
        """An integer node, computed in floats."""
        node = graph.nodes[i]
        if i not in floats:
            is_exact = node.op in _SUMS + _BOUNDED and bounds[i] <= EXACT
            floats[i] = (
                builder.op(node.op, *(as_float(j) for j in node.args))
                if is_exact and is_per_score(graph.depends[i])
                else builder.cast(nodes[i], "float")
            )
        return floats[i]

    def narrowed(args: tuple[int, ...]) -> list[int]:
        """Operands in 32 bits. Those within `NARROW` keep their values; others are clamped."""
        return [builder.index(nodes[j]) for j in args]

    for i, node in enumerate(graph.nodes):
        if node.op == "to_float" and graph.nodes[node.args[0]].kind in INT_BITS:
            nodes.append(as_float(node.args[0]))
        elif node.kind == "int64" and node.op in _SUMS + _BOUNDED and bounds[i] <= NARROW:
            nodes.append(builder.cast(builder.op(node.op, *narrowed(node.args)), "int64"))
        elif node.op in COMPARISONS and _compares_narrow(graph, bounds, *node.args):
            nodes.append(builder.op(node.op, *narrowed(node.args)))
        elif node.op == "div" and _divides_scores(graph, *node.args):
            a, b = (nodes[j] for j in node.args)
            nodes.append(builder.op("mul", a, builder.op("div", builder.constant(1.0), b)))
        elif node.op in ("floordiv", "mod") and node.kind in INT_BITS:
            nodes.append(_int_division(builder, node.op, *(nodes[j] for j in node.args)))
        elif node.op in OPERATIONS:
            nodes.append(builder.op(node.op, *(nodes[j] for j in node.args)))
        else:
            nodes.append(builder.add(node.moved(nodes)))
    return builder.graph(*(nodes[i] for i in graph.outputs))


def _divides_scores(graph: Graph, a: int, b: int) -> bool:
    return bool(graph.depends[a] & SCORE) and not is_per_score(graph.depends[b])


def _compares_narrow(graph: Graph, bounds: list[float], a: int, b: int) -> bool:
    """Whether 64-bit operands can be compared in 32 bits, and operands that must be clamped are not per score."""
    wide = [i for i in (a, b) if bounds[i] > NARROW]
    return graph.nodes[a].kind == "int64" and len(wide) < 2 and not any(is_per_score(graph.depends[i]) for i in wide)


def _int_division(builder: Builder, name: str, a: int, b: int) -> int:
    """a // b or a % b of ints. By a constant power of two, it is a shift or an AND, which also round down.

    Otherwise the compiler would divide, which rounds towards 0, and correct the result: about ten instructions.
    """
    divisor = builder.nodes[b]
    if divisor.op != "constant" or divisor.value not in _POWERS_OF_TWO:
        return builder.op(name, a, b)
    if name == "mod":
        return builder.op("and", a, builder.constant(divisor.value - 1))
    return builder.op("shr", a, builder.constant(_POWERS_OF_TWO.index(divisor.value)))


def _bounds(graph: Graph) -> list[float]:
    """A bound on the magnitude of each integer and of its operands; inf: unknown."""
    bounds: list[float] = []
    for node in graph.nodes:
        operands = [bounds[j] for j in node.args]
        if node.op == "input" and node.kind == "int":
            bounds.append(MAX_INDEX)
        elif node.op == "constant" and node.kind in INT_BITS:
            bounds.append(abs(node.value))
        elif node.op in _SUMS:
            bounds.append(sum(operands))
        else:
            is_bounded = node.op in _BOUNDED or (node.op == "to_int64" and graph.nodes[node.args[0]].kind == "int")
            bounds.append(max(operands) if is_bounded else float("inf"))
    return bounds
