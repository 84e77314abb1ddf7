"""Symbolic differentiation of a score_mod's graph, with respect to the score and the captured tensors.

A gradient is a graph too, with the same captures and scalars and one more input, `grad`: the gradient of the
modified score. Its outputs are the gradient of the score and then, for each load of a capture that needs a
gradient, the gradient of the loaded element and the indices of that element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from cute_flash.errors import TraceError
from cute_flash.score_mod.graph import Builder, Graph, Node, copy_nodes

LN_2 = math.log(2)


@dataclass(frozen=True)
class LoadGradient:
    """The gradient of one load."""

    capture: int
    output: int  # of the gradient graph: the gradient of the loaded element
    indices: tuple[int, ...]  # outputs of the gradient graph: the indices of that element


@dataclass(frozen=True)
class Gradient:
    graph: Graph
    loads: tuple[LoadGradient, ...] = ()


class _Rules:
    """The derivatives: rule(gradient, result, *operands) -> a gradient for each operand, or None."""

    def __init__(self, builder: Builder) -> None:
        self.m = builder.op
        self.of = builder.constant

    def rule(self, node: Node) -> Callable[..., tuple[int | None, ...]]:
        rule = getattr(self, f"_{node.op}", None)
        if rule is None:
            raise TraceError(f"{node.op} of floats has no derivative: give score_mod_bwd")
        return rule

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


def _needs_grad(graph: Graph, captures: tuple[int, ...]) -> list[bool]:
    """Which nodes need a gradient: floats that depend on the score or on one of these captures."""
    needs_grad: list[bool] = []
    for node in graph.nodes:
        is_leaf = (node.op == "input" and node.value == "score") or (node.op == "load" and node.value in captures)
        needs_grad.append(node.kind == "float" and (is_leaf or any(needs_grad[i] for i in node.args)))
    return needs_grad


@lru_cache(maxsize=1024)
def gradient(graph: Graph, captures_needing_grad: tuple[int, ...] = (), score_mod_bwd: Graph | None = None) -> Gradient:
    """The gradient of a score_mod's graph. `score_mod_bwd` replaces the derivative with respect to the score.

    With `score_mod_bwd`, the captures and scalars are those of score_mod, followed by those of score_mod_bwd.
    """
    builder = Builder(graph.captures, graph.scalars)
    if score_mod_bwd is not None:
        builder = Builder((*graph.captures, *score_mod_bwd.captures), (*graph.scalars, *score_mod_bwd.scalars))
    nodes = copy_nodes(builder, graph)
    if score_mod_bwd is not None and not captures_needing_grad:
        return Gradient(builder.graph(_user_gradient(builder, graph, score_mod_bwd)))
    needs_grad, rules = _needs_grad(graph, captures_needing_grad), _Rules(builder)
    grads: dict[int, int] = {graph.outputs[0]: builder.input("grad")}
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        if i not in grads or not needs_grad[i] or node.op in ("input", "load"):
            continue
        operand_grads = rules.rule(node)(grads[i], nodes[i], *(nodes[j] for j in node.args))
        for j, part in zip(node.args, operand_grads, strict=True):
            if part is not None and needs_grad[j]:
                grads[j] = builder.op("add", grads[j], part) if j in grads else part
    score = [i for i, node in enumerate(graph.nodes) if node.op == "input" and node.value == "score"]
    dscore = grads[score[0]] if score and score[0] in grads else builder.constant(0.0)
    outputs = [dscore if score_mod_bwd is None else _user_gradient(builder, graph, score_mod_bwd)]
    loads = []
    for i in graph.loads:
        node = graph.nodes[i]
        if node.value in captures_needing_grad and i in grads:
            first = len(outputs) + 1
            outputs += [grads[i], *(nodes[j] for j in node.args)]
            loads.append(LoadGradient(node.value, first - 1, tuple(range(first, len(outputs)))))
    return Gradient(builder.graph(*outputs), tuple(loads))


def _user_gradient(builder: Builder, graph: Graph, score_mod_bwd: Graph) -> int:
    """The node of score_mod_bwd's result; its arguments follow those of the score_mod."""
    shift = {"load": len(graph.captures), "scalar": len(graph.scalars)}
    nodes = tuple(
        Node(x.op, x.kind, x.args, x.value + shift[x.op]) if x.op in shift else x for x in score_mod_bwd.nodes
    )
    shifted = Graph(nodes, score_mod_bwd.outputs, score_mod_bwd.captures, score_mod_bwd.scalars)
    return copy_nodes(builder, shifted)[score_mod_bwd.outputs[0]]
