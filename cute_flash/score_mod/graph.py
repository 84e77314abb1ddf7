"""A user's function as a graph: what `score_mod` or `mask_mod` computes, without the Python around it.

Nodes stand in the order of computation and name their operands by place; equal nodes are one node. Values are
of three kinds: "bool", "int" (int32 in a kernel) and "float" (fp32 there). Python's numbers that a function
captures and torch's tensors are arguments, numbers and tables: another value is the same graph.

The text of a graph is what it is: graphs of one text are equal, and share a kernel.
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

# What a value depends on, as bits.
B, H, ROW, COLUMN, SCORE = 1, 2, 4, 8, 16
INPUTS = {
    "b": ("int", B),
    "h": ("int", H),
    "q": ("int", ROW),
    "kv": ("int", COLUMN),
    "score": ("float", SCORE),
    "grad": ("float", SCORE),  # of what a score became, in a gradient
}
RANKS = {"bool": 0, "int": 1, "float": 2}
TABLE_KINDS = {
    "float16": "float",
    "bfloat16": "float",
    "float32": "float",
    "float64": "float",
    "int32": "int",
    "int64": "int",
    "bool": "bool",
}
MAX_TABLE_RANK = 4


def _floor(x: float) -> float:
    return float(math.floor(x))


# Every operation that computes, by what its operands must be, with its meaning for constants.
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
COMPARISONS: dict[str, Callable] = {  # of two ints or two floats; a bool
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


MEANING: dict[str, Callable] = {
    **ARITHMETIC, **COMPARISONS, **LOGIC, **SHIFTS, **FLOATING, **CASTS,
    "not": _not, "where": lambda c, a, b: a if c else b,
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """One value. `op` is an operation, or "input", "constant", "number" or "load", which `value` names."""

    op: str
    kind: str
    args: tuple[int, ...] = ()  # operands; the indices of a load
    value: Any = None  # name of an input; a constant; place of a number or a table

    def __str__(self) -> str:
        named = "" if self.value is None else f" {self.value!r}"
        return f"{self.op}{named}{''.join(f' %{i}' for i in self.args)} : {self.kind}"


@dataclass(frozen=True)
class Table:
    """A captured tensor, as a kernel is compiled for it: any sizes and strides."""

    dtype: str
    rank: int

    @property
    def kind(self) -> str:
        return TABLE_KINDS[self.dtype]

    @property
    def is_differentiable(self) -> bool:
        return self.kind == "float"


@dataclass(frozen=True, eq=False)
class Graph:
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    tables: tuple[Table, ...] = ()
    numbers: tuple[str, ...] = ()  # kinds

    @cached_property
    def text(self) -> str:
        """The graph as JSON, exactly: `parse.parse_graph` makes an equal graph of it, in any process."""
        tables = [[x.dtype, x.rank] for x in self.tables]
        nodes = [[x.op, x.kind, x.args] + ([] if x.value is None else [x.value]) for x in self.nodes]
        return json.dumps([tables, self.numbers, nodes, self.outputs], separators=(",", ":"))

    @cached_property
    def _hash(self) -> int:
        return hash(self.text)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Graph) and self.text == other.text)

    def __str__(self) -> str:
        """A listing to read."""
        lines = [f"table {i}: {x.dtype}[{x.rank}]" for i, x in enumerate(self.tables)]
        lines += [f"number {i}: {kind}" for i, kind in enumerate(self.numbers)]
        lines += [f"%{i} = {node}" for i, node in enumerate(self.nodes)]
        return "\n".join([*lines, "return " + ", ".join(f"%{i}" for i in self.outputs)])

    def __repr__(self) -> str:
        return f"Graph({self.text!r})"

    @cached_property
    def depends(self) -> tuple[int, ...]:
        """What each node depends on: a union of B, H, ROW, COLUMN and SCORE."""
        found: list[int] = []
        for node in self.nodes:
            own = INPUTS[node.value][1] if node.op == "input" else 0
            found.append(reduce(operator.or_, (found[i] for i in node.args), own))
        return tuple(found)

    @property
    def output_depends(self) -> int:
        """What the outputs depend on, together."""
        return reduce(operator.or_, (self.depends[i] for i in self.outputs), 0)

    @property
    def loads(self) -> tuple[int, ...]:
        return tuple(i for i, node in enumerate(self.nodes) if node.op == "load")

    @property
    def num_inner(self) -> int:
        """Operations that must be done for every score."""
        inner = (bits for node, bits in zip(self.nodes, self.depends) if node.op not in ("input", "constant"))
        return sum(bool(bits & SCORE or (bits & ROW and bits & COLUMN)) for bits in inner)


class Builder:
    """Makes a graph node by node: brings operands to one kind, folds constants, finds equal nodes."""

    def __init__(self, tables: Sequence[Table] = (), numbers: Sequence[str] = ()) -> None:
        self.nodes: list[Node] = []
        self.places: dict[tuple, int] = {}
        self.tables, self.numbers = list(tables), list(numbers)

    def add(self, node: Node) -> int:
        # By text, to which 0.0 and -0.0 are two numbers and NaN is itself.
        key = node.op, node.kind, node.args, repr(node.value)
        if key not in self.places:
            self.places[key] = len(self.nodes)
            self.nodes.append(node)
        return self.places[key]

    def kind(self, i: int) -> str:
        return self.nodes[i].kind

    def has(self, i: Any) -> bool:
        return type(i) is int and 0 <= i < len(self.nodes)

    def input(self, name: str) -> int:
        return self.add(Node("input", INPUTS[name][0], value=name))

    def constant(self, value: Any, kind: str | None = None) -> int:
        kind = kind or next(
            k for k, t in (("bool", bool), ("int", int), ("float", float)) if type(value) is t
        )
        value = {"bool": bool, "int": int, "float": float}[kind](value)
        return self.add(Node("constant", kind, value=value))

    def number(self, i: int) -> int:
        return self.add(Node("number", self.numbers[i], value=i))

    def load(self, table: int, indices: Sequence[int]) -> int:
        """An index outside a table reads its nearest element."""
        assert len(indices) == self.tables[table].rank
        return self.add(
            Node("load", self.tables[table].kind, tuple(self.cast(i, "int") for i in indices), table)
        )

    def cast(self, i: int, kind: str) -> int:
        return i if self.kind(i) == kind else self.op(f"to_{kind}", i)

    def op(self, name: str, *args: int) -> int:
        """The place of an operation's result."""
        args, kind = self.typed(name, args)
        known = [self.nodes[i] for i in args]
        if all(node.op == "constant" for node in known):
            try:
                return self.constant(MEANING[name](*(node.value for node in known)), kind)
            except (ArithmeticError, ValueError):
                pass  # 1 / 0 and the like are for the arithmetic of whoever computes
        same = self._same(name, args, kind)
        return self.add(Node(name, kind, args)) if same is None else same

    def typed(self, name: str, args: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """The operands as an operation takes them, and the kind of its result."""
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

    def _same(self, name: str, args: tuple[int, ...], kind: str) -> int | None:
        """A node that is there already and equals an operation, if that is easily seen."""
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
            chosen = self.nodes[a]
            if chosen.op == "constant":
                return args[1] if chosen.value else args[2]
            return args[1] if args[1] == args[2] else None
        return None

    def _is(self, i: int, value: Any) -> bool:
        node = self.nodes[i]
        return node.op == "constant" and node.value == value

    def graph(self, *outputs: int) -> Graph:
        """What the outputs need, with all tables and numbers, in an order that only they decide."""
        places: dict[int, int] = {}
        todo = list(reversed(outputs))
        while todo:
            i = todo[-1]
            missing = [j for j in self.nodes[i].args if j not in places]
            if i not in places and missing:
                todo.extend(reversed(missing))
                continue
            places.setdefault(todo.pop(), len(places))
        nodes = tuple(
            Node(x.op, x.kind, tuple(places[j] for j in x.args), x.value)
            for x in (self.nodes[i] for i in places)
        )
        return Graph(nodes, tuple(places[i] for i in outputs), tuple(self.tables), tuple(self.numbers))


def with_used_arguments(graph: Graph) -> tuple[Graph, tuple[int, ...], tuple[int, ...]]:
    """The graph with the tables and the numbers that it reads, and which of the old ones these are."""
    used: list[dict[int, int]] = []
    for op in ("load", "number"):
        found = dict.fromkeys(node.value for node in graph.nodes if node.op == op)
        used.append({old: new for new, old in enumerate(found)})
    tables, numbers = used
    nodes = tuple(
        Node(x.op, x.kind, x.args, (tables if x.op == "load" else numbers)[x.value])
        if x.op in ("load", "number")
        else x
        for x in graph.nodes
    )
    kept = tuple(graph.tables[i] for i in tables), tuple(graph.numbers[i] for i in numbers)
    return Graph(nodes, graph.outputs, *kept), tuple(tables), tuple(numbers)


def copied(builder: Builder, graph: Graph) -> list[int]:
    """A graph's nodes in a builder of the same tables and numbers, by place."""
    places: list[int] = []
    for node in graph.nodes:
        places.append(builder.add(Node(node.op, node.kind, tuple(places[i] for i in node.args), node.value)))
    return places
