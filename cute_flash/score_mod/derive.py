"""Symbolic differentiation of a score_mod's graph, with respect to the score and the captured tensors.

A gradient is a graph too, with the same captures and scalars and one more input, `grad`: the gradient of the
modified score. Its outputs are the gradient of the score and then, for each load of a capture that needs a
gradient, the gradient of the loaded element and the indices of that element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from cute_flash.errors import TraceError
from cute_flash.score_mod.graph import Builder, Graph
from cute_flash.score_mod.overrides import inputs
from cute_flash.score_mod.proxy import ScalarProxy, op

LN_2 = math.log(2)


@dataclass(frozen=True)
class LoadGradient:
    """The gradient of one load of a captured tensor."""

    capture: int
    output: int  # output of the gradient graph: the gradient of the loaded element
    indices: tuple[int, ...]  # outputs of the gradient graph: the indices of that element


@dataclass(frozen=True)
class Gradient:
    """The gradient of a score_mod. The first output of `graph` is the gradient of the score."""

    graph: Graph
    loads: tuple[LoadGradient, ...] = ()


def _chosen(gradient: ScalarProxy, is_first: ScalarProxy) -> tuple[ScalarProxy, ScalarProxy]:
    """The gradients of two operands, where the result is the first if `is_first`, else the second."""
    return op("where", is_first, gradient, 0.0), op("where", is_first, 0.0, gradient)


# The derivatives: rule(gradient of the result, result, *operands) -> for each operand, its gradient or None.
_RULES: dict[str, Callable[..., tuple]] = {
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, -g),
    "mul": lambda g, y, a, b: (g * b, g * a),
    "div": lambda g, y, a, b: (g / b, -(g / b * y)),
    "mod": lambda g, y, a, b: (g, -(g * (a // b))),  # a % b = a - a // b * b
    "neg": lambda g, y, a: (-g,),
    "abs": lambda g, y, a: (op("where", a > 0.0, g, op("where", a < 0.0, -g, 0.0)),),
    "min": lambda g, y, a, b: _chosen(g, a < b),
    "max": lambda g, y, a, b: _chosen(g, a > b),
    "where": lambda g, y, c, a, b: (None, *_chosen(g, c)),
    "exp": lambda g, y, a: (g * y,),
    "exp2": lambda g, y, a: (g * y * LN_2,),
    "log": lambda g, y, a: (g / a,),
    "log2": lambda g, y, a: (g * (1 / LN_2) / a,),
    "tanh": lambda g, y, a: (g * (1.0 - y * y),),
    "sqrt": lambda g, y, a: (g * 0.5 / y,),
    "rsqrt": lambda g, y, a: (g * -0.5 * (y * (y * y)),),
    "sigmoid": lambda g, y, a: (g * (y * (1.0 - y)),),
    "sin": lambda g, y, a: (g * op("cos", a),),
    "cos": lambda g, y, a: (-(g * op("sin", a)),),
    "erf": lambda g, y, a: (g * (2 / math.sqrt(math.pi)) * op("exp", -(a * a)),),
    "atan": lambda g, y, a: (g / (1.0 + a * a),),
    "pow": lambda g, y, a, b: (
        g * op("where", b == 0.0, 0.0, b * op("pow", a, b - 1.0)),
        g * op("where", a == 0.0, 0.0, y * op("log", a)),
    ),
    "floor": lambda g, y, a: (None,),
    "round": lambda g, y, a: (None,),
}


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
    bwd = score_mod_bwd or Graph((), ())
    builder = Builder((*graph.captures, *bwd.captures), (*graph.scalars, *bwd.scalars))
    nodes = [ScalarProxy(builder, i) for i in builder.copy(graph)]
    if score_mod_bwd is not None and not captures_needing_grad:
        return Gradient(builder.graph(_user_gradient(builder, graph, score_mod_bwd)))
    needs_grad = _needs_grad(graph, captures_needing_grad)
    grads: dict[int, ScalarProxy] = {}
    (grads[graph.outputs[0]],) = inputs(builder, ["grad"])
    dscore = builder.constant(0.0)
    for i, node in reversed(list(enumerate(graph.nodes))):
        if i not in grads or not needs_grad[i]:
            continue
        if node.op == "input":
            dscore = grads[i]._node
        if node.op in ("input", "load"):
            continue
        if node.op not in _RULES:
            raise TraceError(f"{node.op} of floats has no derivative: give score_mod_bwd")
        operand_grads = _RULES[node.op](grads[i], nodes[i], *(nodes[j] for j in node.args))
        for j, part in zip(node.args, operand_grads, strict=True):
            if part is not None and needs_grad[j]:
                grads[j] = grads[j] + part if j in grads else part
    outputs = [dscore if score_mod_bwd is None else _user_gradient(builder, graph, score_mod_bwd)]
    loads = []
    for i, node in enumerate(graph.nodes):
        if node.op == "load" and node.value in captures_needing_grad and i in grads:
            first = len(outputs) + 1
            outputs += [grads[i]._node, *(nodes[j]._node for j in node.args)]
            loads.append(LoadGradient(node.value, first - 1, tuple(range(first, len(outputs)))))
    return Gradient(builder.graph(*outputs), tuple(loads))


def _user_gradient(builder: Builder, graph: Graph, score_mod_bwd: Graph) -> int:
    """The node of score_mod_bwd's result; its arguments follow those of the score_mod."""
    shift = {"load": len(graph.captures), "scalar": len(graph.scalars)}
    nodes = tuple(replace(x, value=x.value + shift[x.op]) if x.op in shift else x for x in score_mod_bwd.nodes)
    return builder.copy(replace(score_mod_bwd, nodes=nodes))[score_mod_bwd.outputs[0]]
