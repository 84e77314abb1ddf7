"""The graph of a score_mod or mask_mod: the operations that it performs, without the Python around them.

Nodes are in topological order and refer to their operands by index; equal nodes are shared. A value has one
of three kinds: "bool", "int" (int32 in a kernel) and "float" (fp32 in a kernel). The tensors and numbers that
a mod captures are arguments of the graph, `captures` and `scalars`: changing their values does not change the
graph.

`Graph.text` identifies a graph. Graphs with the same text are equal and share a kernel.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

from cute_flash.errors import TraceError

# Bits: the indices, or the score, that a value depends on.
B, H, ROW, COLUMN, SCORE = 1, 2, 4, 8, 16
INPUTS = {
    "b": ("int", B),
    "h": ("int", H),
    "q": ("int", ROW),
    "kv": ("int", COLUMN),
    "score": ("float", SCORE),
    "grad": ("float", SCORE),  # gradient of the modified score, an input of gradient graphs
}
RANKS = {"bool": 0, "int": 1, "float": 2}
CAPTURE_KINDS = {
    "float16": "float",
    "bfloat16": "float",
    "float32": "float",
    "float64": "float",
    "int32": "int",
    "int64": "int",
    "bool": "bool",
}
MAX_CAPTURE_RANK = 4


def _floor(x: float) -> float:
    return float(math.floor(x))


# The operations, grouped by the kinds of their operands, with the Python function that folds constants.
ARITHMETIC: dict[str, Callable] = {  # of two ints or two floats
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "min": min,
    "max": max,
    "neg": operator.neg,
    "abs": abs,
}
COMPARISONS: dict[str, Callable] = {  # of two ints or two floats; the result is a bool
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
LOGIC: dict[str, Callable] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}  # bools or ints
SHIFTS: dict[str, Callable] = {"shl": operator.lshift, "shr": operator.rshift}  # ints
FLOATING: dict[str, Callable] = {  # floats
    "div": operator.truediv,
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "tanh": math.tanh,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "floor": _floor,
    "sin": math.sin,
    "cos": math.cos,
}
CASTS: dict[str, Callable] = {"to_float": float, "to_int": int, "to_bool": bool}


def _not(x: Any) -> Any:
    return not x if isinstance(x, bool) else ~x


OPERATIONS: dict[str, Callable] = {
    **ARITHMETIC, **COMPARISONS, **LOGIC, **SHIFTS, **FLOATING, **CASTS,
    "not": _not, "where": lambda c, a, b: a if c else b,
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """One value: an operation, or one of "input", "constant", "scalar" and "load"."""

    op: str
    kind: str
    args: tuple[int, ...] = ()  # operands; the indices of a load
    value: Any = None  # name of an input; value of a constant; index of a scalar or of a loaded capture

    def __str__(self) -> str:
        value = "" if self.value is None else f" {self.value!r}"
        return f"{self.op}{value}{''.join(f' %{i}' for i in self.args)} : {self.kind}"


@dataclass(frozen=True)
class CaptureSpec:
    """The part of a captured tensor that is compiled in; sizes and strides are run-time values."""

    dtype: str
    rank: int

    @property
    def kind(self) -> str:
        return CAPTURE_KINDS[self.dtype]

    @property
    def is_differentiable(self) -> bool:
        return self.kind == "float"


@dataclass(frozen=True, eq=False)
class Graph:
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    captures: tuple[CaptureSpec, ...] = ()
    scalars: tuple[str, ...] = ()  # kinds

    @cached_property
    def text(self) -> str:
        """The graph as JSON, without loss: `parse.parse_graph` builds an equal graph from it in any process."""
        captures = [[x.dtype, x.rank] for x in self.captures]
        nodes = [[x.op, x.kind, x.args] + ([] if x.value is None else [x.value]) for x in self.nodes]
        return json.dumps([captures, self.scalars, nodes, self.outputs], separators=(",", ":"))

    @cached_property
    def _hash(self) -> int:
        return hash(self.text)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Graph) and self.text == other.text)

    def __str__(self) -> str:
        """A listing for people to read."""
        lines = [f"capture {i}: {x.dtype}[{x.rank}]" for i, x in enumerate(self.captures)]
        lines += [f"scalar {i}: {kind}" for i, kind in enumerate(self.scalars)]
        lines += [f"%{i} = {node}" for i, node in enumerate(self.nodes)]
        return "\n".join([*lines, "return " + ", ".join(f"%{i}" for i in self.outputs)])

    def __repr__(self) -> str:
        return f"Graph({self.text!r})"

    @cached_property
    def depends(self) -> tuple[int, ...]:
        """The inputs that each node depends on: a union of B, H, ROW, COLUMN and SCORE."""
        depends: list[int] = []
        for node in self.nodes:
            input_bits = INPUTS[node.value][1] if node.op == "input" else 0
            depends.append(reduce(operator.or_, (depends[i] for i in node.args), input_bits))
        return tuple(depends)

    @property
    def output_depends(self) -> int:
        """The inputs that the outputs depend on: a union of B, H, ROW, COLUMN and SCORE."""
        return reduce(operator.or_, (self.depends[i] for i in self.outputs), 0)

    @property
    def loads(self) -> tuple[int, ...]:
        return tuple(i for i, node in enumerate(self.nodes) if node.op == "load")

    @property
    def ops_per_score(self) -> int:
        """The number of operations that run once per score, rather than once per row, column or head."""
        nodes = zip(self.nodes, self.depends)
        return sum(is_per_score(bits) for node, bits in nodes if node.op not in ("input", "constant"))


def is_per_score(bits: int) -> bool:
    """Whether a value that depends on these inputs differs from score to score."""
    return bool(bits & SCORE or (bits & ROW and bits & COLUMN))


class Builder:
    """Builds a graph node by node: casts operands to one kind, folds constants, shares equal nodes."""

    def __init__(self, captures: Sequence[CaptureSpec] = (), scalars: Sequence[str] = ()) -> None:
        self.nodes: list[Node] = []
        self.indices: dict[tuple, int] = {}
        self.captures, self.scalars = list(captures), list(scalars)

    def add(self, node: Node) -> int:
        """The index of a node, appended unless an equal one exists."""
        # By repr, because 0.0 and -0.0 are equal numbers but two constants, and NaN is unequal but one constant.
        key = node.op, node.kind, node.args, repr(node.value)
        if key not in self.indices:
            self.indices[key] = len(self.nodes)
            self.nodes.append(node)
        return self.indices[key]

    def kind(self, i: int) -> str:
        return self.nodes[i].kind

    def has(self, i: Any) -> bool:
        return type(i) is int and 0 <= i < len(self.nodes)

    def input(self, name: str) -> int:
        return self.add(Node("input", INPUTS[name][0], value=name))

    def constant(self, value: Any, kind: str | None = None) -> int:
        kind = kind or next(k for k, t in (("bool", bool), ("int", int), ("float", float)) if type(value) is t)
        value = {"bool": bool, "int": int, "float": float}[kind](value)
        return self.add(Node("constant", kind, value=value))

    def scalar(self, i: int) -> int:
        return self.add(Node("scalar", self.scalars[i], value=i))

    def load(self, capture: int, indices: Sequence[int]) -> int:
        """An element of a captured tensor; an index out of bounds is clamped."""
        spec = self.captures[capture]
        assert len(indices) == spec.rank
        return self.add(Node("load", spec.kind, tuple(self.cast(i, "int") for i in indices), capture))

    def cast(self, i: int, kind: str) -> int:
        return i if self.kind(i) == kind else self.op(f"to_{kind}", i)

    def op(self, name: str, *args: int) -> int:
        """The index of an operation's result."""
        args, kind = self.typed(name, args)
        operands = [self.nodes[i] for i in args]
        if all(node.op == "constant" for node in operands):
            try:
                return self.constant(OPERATIONS[name](*(node.value for node in operands)), kind)
            except (ArithmeticError, ValueError):
                pass  # 1 / 0 and the like are left to torch or the GPU
        same = self._simplified(name, args, kind)
        return self.add(Node(name, kind, args)) if same is None else same

    def typed(self, name: str, args: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """The operands, cast to the kind that an operation takes, and the kind of its result."""
        kinds = [self.kind(i) for i in args]
        widest = max(kinds, key=RANKS.__getitem__)
        if name in CASTS:
            return args, name.removeprefix("to_")
        if name in FLOATING:
            return tuple(self.cast(i, "float") for i in args), "float"
        if name in ARITHMETIC:
            if widest == "bool":
                raise TraceError(f"{name} of bools: use &, | and ~, or cast with .int() or .float()")
            return tuple(self.cast(i, widest) for i in args), widest
        if name in COMPARISONS:
            widest = "int" if widest == "bool" else widest
            return tuple(self.cast(i, widest) for i in args), "bool"
        if name == "where":
            condition, *chosen = args
            if kinds[0] != "bool":
                raise TraceError(f"where: the condition is {kinds[0]}, not bool")
            widest = max(kinds[1:], key=RANKS.__getitem__)
            return (condition, *(self.cast(i, widest) for i in chosen)), widest
        if widest == "float":
            raise TraceError(f"{name} of floats: it is for bools and ints")
        if name in SHIFTS:
            widest = "int"
        return tuple(self.cast(i, widest) for i in args), widest

    def _simplified(self, name: str, args: tuple[int, ...], kind: str) -> int | None:
        """A node that equals the operation by a simple identity such as x + 0; None: there is none."""
        a, b = args[0], args[1] if len(args) > 1 else -1
        if name in ("add", "or", "xor"):
            zero = False if kind == "bool" else 0
            return a if self._is(b, zero) else b if self._is(a, zero) else None
        if name in ("sub", "shl", "shr"):
            return a if self._is(b, 0) else None
        if name == "mul":
            if kind == "int" and (self._is(a, 0) or self._is(b, 0)):
                return self.constant(0)
            return a if self._is(b, 1) else b if self._is(a, 1) else None
        if name == "div" or (name == "floordiv" and kind == "int"):
            return a if self._is(b, 1) else None
        if name == "and" and kind == "bool":
            if self._is(a, False) or self._is(b, False):
                return self.constant(False)
            return a if self._is(b, True) else b if self._is(a, True) else None
        if name in ("min", "max"):
            return a if a == b else None
        if name in ("not", "neg"):
            inner = self.nodes[a]
            return inner.args[0] if inner.op == name else None
        if name == "where":
            condition = self.nodes[a]
            if condition.op == "constant":
                return args[1] if condition.value else args[2]
            return args[1] if args[1] == args[2] else None
        return None

    def _is(self, i: int, value: Any) -> bool:
        node = self.nodes[i]
        return node.op == "constant" and node.value == value

    def graph(self, *outputs: int) -> Graph:
        """The graph of the outputs, with all captures and scalars.

        Unused nodes are dropped. The order of the others depends on the outputs alone, so that mods that
        compute the same have the same graph.
        """
        order: dict[int, int] = {}
        todo = list(reversed(outputs))
        while todo:
            i = todo[-1]
            missing = [j for j in self.nodes[i].args if j not in order]
            if i not in order and missing:
                todo.extend(reversed(missing))
                continue
            order.setdefault(todo.pop(), len(order))
        nodes = tuple(
            Node(x.op, x.kind, tuple(order[j] for j in x.args), x.value) for x in (self.nodes[i] for i in order)
        )
        return Graph(nodes, tuple(order[i] for i in outputs), tuple(self.captures), tuple(self.scalars))


def drop_unused_arguments(graph: Graph) -> tuple[Graph, tuple[int, ...], tuple[int, ...]]:
    """The graph with only the captures and scalars that it reads, and their old indices."""
    used: list[dict[int, int]] = []
    for op in ("load", "scalar"):
        old_indices = dict.fromkeys(node.value for node in graph.nodes if node.op == op)
        used.append({old: new for new, old in enumerate(old_indices)})
    captures, scalars = used
    nodes = tuple(
        Node(x.op, x.kind, x.args, (captures if x.op == "load" else scalars)[x.value])
        if x.op in ("load", "scalar")
        else x
        for x in graph.nodes
    )
    used_arguments = tuple(graph.captures[i] for i in captures), tuple(graph.scalars[i] for i in scalars)
    return Graph(nodes, graph.outputs, *used_arguments), tuple(captures), tuple(scalars)


def copy_nodes(builder: Builder, graph: Graph) -> list[int]:
    """Add a graph's nodes to a builder with the same captures and scalars; return their indices in it."""
    copies: list[int] = []
    for node in graph.nodes:
        copies.append(builder.add(Node(node.op, node.kind, tuple(copies[i] for i in node.args), node.value)))
    return copies
