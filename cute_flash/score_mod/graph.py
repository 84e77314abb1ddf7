"""The graph of a mod: its operations on scores, positions and captured values.

Nodes are in topological order and refer to their operands by index; equal nodes are shared. A value has one of four
kinds: "bool", "int" (int32), "int64" or "float" (fp32 in a kernel). An operation of an "int" and an "int64" is computed
in 64 bits. The tensors and numbers that a mod captures are arguments of the graph, `captures` and `scalars`: changing
their values does not change the graph.

`Graph.text` identifies a graph. Graphs with the same text are equal and share a kernel.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

from cute_flash.errors import TraceError

# Bits of the inputs that a value depends on: batch, head, query position, key position, score.
B, H, ROW, COLUMN, SCORE = 1, 2, 4, 8, 16
INPUTS = {
    "b": ("int", B),
    "h": ("int", H),
    "q": ("int", ROW),
    "kv": ("int", COLUMN),
    "score": ("float", SCORE),
    "grad": ("float", SCORE),  # gradient of the modified score, an input of gradient graphs
}
# The Python type of each kind, narrowest first.
TYPES: dict[str, type[Any]] = {"bool": bool, "int": int, "int64": int, "float": float}
INT_BITS = {"int": 32, "int64": 64}
CAPTURE_KINDS = {
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), "float"),
    **dict.fromkeys(("int8", "uint8", "int16", "int32"), "int"),
    "int64": "int64",
    "bool": "bool",
}
MAX_CAPTURE_RANK = 4


def fits(value: int, kind: str) -> bool:
    """Whether an int is a value of the kind "int" or "int64"."""
    bound = 1 << (INT_BITS[kind] - 1)
    return -bound <= value < bound


def kind_of(value: bool | int | float) -> str:
    """The kind of a Python number: the narrowest one that has its value. Ints beyond 64 bits are floats."""
    if isinstance(value, int) and not isinstance(value, bool):
        return next((kind for kind in INT_BITS if fits(value, kind)), "float")
    return next(kind for kind, cls in TYPES.items() if isinstance(value, cls))


def _wrapped(value: int, kind: str) -> int:
    """The result of integer arithmetic in the bits of a kind."""
    bound = 1 << (INT_BITS[kind] - 1)
    return (value + bound) % (2 * bound) - bound


def _to_index(value: int) -> int:
    bound = 1 << (INT_BITS["int"] - 1)
    return min(max(value, -bound), bound - 1)


def _not(x: Any) -> Any:
    return not x if isinstance(x, bool) else ~x


# The operations, grouped by the kinds of their operands, with the Python function that folds constants.
ARITHMETIC: dict[str, Callable] = {  # of ints or of floats
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "abs")},
    "min": min,
    "max": max,
}
# Of two ints or two floats; the result is a bool.
COMPARISONS: dict[str, Callable] = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
# Of bools or ints.
LOGIC: dict[str, Callable] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": _not}
SHIFTS: dict[str, Callable] = {"shl": operator.lshift, "shr": operator.rshift}  # of ints
FLOATING: dict[str, Callable] = {  # of floats
    **{name: getattr(math, name) for name in ("exp", "log", "log2", "tanh", "sqrt", "floor", "sin", "cos")},
    **{name: getattr(math, name) for name in ("erf", "atan", "pow")},
    "div": operator.truediv,
    "round": round,  # half to even
    "exp2": lambda x: 2.0**x,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}
# "to_int" of an int64 keeps the low 32 bits. "to_index" clamps it to 32 bits: for an index, out of bounds either way.
CASTS: dict[str, Callable] = {**{f"to_{kind}": cast for kind, cast in TYPES.items()}, "to_index": _to_index}
OPERATIONS: dict[str, Callable] = {
    **ARITHMETIC, **COMPARISONS, **LOGIC, **SHIFTS, **FLOATING, **CASTS, "where": lambda c, a, b: a if c else b,
}  # fmt: skip
# Arithmetic on bools is logic, as in torch.
OF_BOOLS = {"add": "or", "mul": "and", "min": "and", "max": "or"}
# Operations that take many instructions, with the number of operations that they count as: of floats, and of int64.
LONG_OPERATIONS = {"erf": 10, "atan": 10, "pow": 30, "floordiv": 20, "mod": 20}
LONG_INT64_OPERATIONS = {"floordiv": 70, "mod": 70}
# Weights of values that are rounded from float64: of a tensor without dimensions, and of an element of another.
NUMBER, TABLE = 1, 2
# Operations whose result may differ by more than the rounding of an operand.
SENSITIVE = (*COMPARISONS, *CASTS, "floor", "round", "floordiv", "mod", "add", "sub", "sin", "cos")
# The torch functions of operations, where their names differ.
TORCH_NAMES = {
    **{"floordiv": "floor_divide", "mod": "remainder", "min": "minimum", "max": "maximum"},
    **{name: f"bitwise_{name}" for name in LOGIC},
    **{"shl": "bitwise_left_shift", "shr": "bitwise_right_shift"},
}
# Simplifications: x op identity = x, and identity op x = x if the operation commutes.
_IDENTITIES = {
    **dict.fromkeys(("add", "sub", "or", "xor", "shl", "shr"), 0),
    **dict.fromkeys(("mul", "div", "floordiv", "and"), 1),
}
_COMMUTATIVE = ("add", "or", "xor", "mul", "and")
_NO_IDENTITY = (("and", "int"), ("and", "int64"), ("floordiv", "float"))  # 1 & 2 is not 2, and 2.5 // 1 is not 2.5
# x op 0 = 0; false for a float x that is NaN.
_ABSORBED_BY_ZERO = (("mul", "int"), ("mul", "int64"), ("and", "int"), ("and", "int64"), ("and", "bool"))


@dataclass(frozen=True)
class Node:
    """One value: an operation, or one of "input", "constant", "scalar" and "load"."""

    op: str
    kind: str
    args: tuple[int, ...] = ()  # nodes: the operands of an operation, or the indices of a load
    value: Any = None  # the name of an input, the value of a constant, or the index of a scalar or of a loaded capture

    @property
    def num_ops(self) -> int:
        """The number of operations that the node counts as."""
        if self.op in ("input", "to_int64"):
            return 0
        if self.kind == "int64":
            return LONG_INT64_OPERATIONS.get(self.op, 2)
        return LONG_OPERATIONS.get(self.op, 1) if self.kind == "float" else 1

    def moved(self, indices: Any) -> Node:
        """The node with each operand i replaced by indices[i]."""
        return replace(self, args=tuple(indices[i] for i in self.args))

    def __str__(self) -> str:
        value = "" if self.value is None else f" {self.value!r}"
        return f"{self.op}{value}{''.join(f' %{i}' for i in self.args)} : {self.kind}"


@dataclass(frozen=True)
class CaptureSpec:
    """The properties of a captured tensor that are compiled in. Sizes and strides are run-time values."""

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
    """A traced mod, or the gradient of one."""

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    captures: tuple[CaptureSpec, ...] = ()
    scalars: tuple[str, ...] = ()  # the kind of each scalar

    @cached_property
    def text(self) -> str:
        """The graph as JSON. `parse.parse_graph` builds an equal graph from it in any process."""
        captures = [[x.dtype, x.rank] for x in self.captures]
        nodes = [[x.op, x.kind, x.args] + ([] if x.value is None else [x.value]) for x in self.nodes]
        return json.dumps([captures, self.scalars, nodes, self.outputs], separators=(",", ":"))

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Graph) and self.text == other.text)

    def __str__(self) -> str:
        """A listing for people to read."""
        lines = [f"capture {i}: {x.dtype}, {x.rank}-d" for i, x in enumerate(self.captures)]
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
    def per_score(self) -> list[Node]:
        """The nodes that are computed for each score, rather than once per row, column or head."""
        return [node for node, bits in zip(self.nodes, self.depends) if is_per_score(bits)]

    @property
    def ops_per_score(self) -> int:
        """The number of operations that run once per score; long ones count as several."""
        return sum(map(self.num_ops, self.per_score))

    def num_ops(self, node: Node) -> int:
        """The number of operations that one of the nodes counts as."""
        is_wide = node.op in COMPARISONS and self.nodes[node.args[0]].kind == "int64"
        return node.num_ops + is_wide

    @cached_property
    def rounded_operation(self) -> str | None:
        """An operation that may be far off because a float64 tensor is rounded to fp32: its torch name. None: there is
        none.

        Such an operation has no score among its operands. Scores are rounded too, so that the result has their error
        anyway. An element of a table makes it one, and so do two values of tensors without dimensions, which otherwise
        count as numbers, as in torch's promotion of types.
        """
        rounded: list[int] = []  # for each node: 0, NUMBER or TABLE
        for node, bits in zip(self.nodes, self.depends):
            if node.op == "load" and self.captures[node.value].dtype == "float64":
                rounded.append(TABLE if self.captures[node.value].rank else NUMBER)
                continue
            operands = [] if bits & SCORE else [rounded[i] for i in node.args]
            if node.op in SENSITIVE and sum(operands) >= TABLE:
                return TORCH_NAMES.get(node.op, node.op)
            rounded.append(max(operands, default=0))
        return None

    @cached_property
    def is_nonnegative(self) -> tuple[bool, ...]:
        """Whether each node is known to be at least 0, or NaN."""
        known: list[bool] = []
        for node in self.nodes:
            known.append(_is_nonnegative(node, [known[i] for i in node.args], self))
        return tuple(known)


def _is_nonnegative(node: Node, operands: list[bool], graph: Graph) -> bool:
    if node.kind == "bool" or node.op == "abs":
        return True
    if node.op == "input":
        return node.kind == "int"  # b, h, q and kv
    if node.op == "constant":
        return node.value >= 0
    if node.op == "load":
        return graph.captures[node.value].dtype == "uint8"
    if node.op in ("max", "and"):
        return any(operands)
    if node.op in ("where", "mod", "shl", "shr"):
        # A remainder has the sign of the divisor, and a shift that of the number.
        return {"where": all(operands[1:]), "mod": operands[-1]}.get(node.op, operands[0])
    if node.op == "to_int" and graph.nodes[node.args[0]].kind == "int64":
        return False
    closed = "add", "mul", "min", "floordiv", "div", "or", "xor", *CASTS, "floor", "round"
    return node.op in closed and all(operands)


def is_per_score(bits: int) -> bool:
    """Whether a value that depends on these inputs must be computed for each score."""
    return bool(bits & SCORE or (bits & ROW and bits & COLUMN))


class Builder:
    """Builds a graph node by node: casts operands to one kind, folds constants, shares equal nodes."""

    def __init__(self, captures: Sequence[CaptureSpec] = (), scalars: Sequence[str] = ()) -> None:
        self.nodes: list[Node] = []
        self.indices: dict[tuple, int] = {}
        self.captures, self.scalars = list(captures), list(scalars)
        # While a mod is traced: `Numbers.compute`, which computes operations on captured numbers on the host.
        self.compute: Callable[[str, Sequence[int]], int | None] = lambda name, nodes: None

    def add(self, node: Node) -> int:
        """The index of a node. It is appended unless an equal node exists."""
        # Values are compared by repr: 0.0 and -0.0 are different constants although they are equal, and NaN is one
        # constant although it does not equal itself.
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
        kind = kind or kind_of(value)
        return self.add(Node("constant", kind, value=TYPES[kind](value)))

    def scalar(self, i: int) -> int:
        return self.add(Node("scalar", self.scalars[i], value=i))

    def load(self, capture: int, indices: Sequence[int]) -> int:
        """An element of a captured tensor; a negative index counts from the end, one out of bounds is clamped."""
        spec = self.captures[capture]
        assert len(indices) == spec.rank
        return self.add(Node("load", spec.kind, tuple(map(self.index, indices)), capture))

    def cast(self, i: int, kind: str) -> int:
        return i if self.kind(i) == kind else self.op(f"to_{kind}", i)

    def index(self, i: int) -> int:
        """An int as an index of a captured tensor, which has 32 bits."""
        return self.op("to_index", i) if self.kind(i) == "int64" else self.cast(i, "int")

    def op(self, name: str, *args: int) -> int:
        """Add an operation, cast its operands, simplify it if possible, and return the index of the result."""
        if name in OF_BOOLS and self._widest(args) == "bool":
            name = OF_BOOLS[name]
        args, kind = self.typed(name, args)
        operands = [self.nodes[i] for i in args]
        if all(node.op == "constant" for node in operands):
            try:
                value = OPERATIONS[name](*(node.value for node in operands))
            except (ArithmeticError, ValueError):
                pass  # 1 / 0 and the like are computed by torch or the GPU
            else:
                if kind not in INT_BITS or fits(value, kind):
                    return self.constant(value, kind)
                if operands[0].kind != "float":
                    return self.constant(_wrapped(value, kind), kind)
        same = self._simplified(name, args, kind)
        return self.add(Node(name, kind, args)) if same is None else same

    def typed(self, name: str, args: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """The operands, cast to a kind that the operation takes, and the kind of its result."""
        if name == "to_index":
            if self.kind(args[0]) != "int64":
                raise TraceError(f"to_index of {self.kind(args[0])}: only an int64 is clamped to 32 bits")
            return args, "int"
        if name in CASTS:
            return args, name.removeprefix("to_")
        if name == "where":
            condition, *chosen = args
            if self.kind(condition) != "bool":
                raise TraceError(f"where: the condition is {self.kind(condition)}: give a bool, such as a comparison")
            kind = self._widest(chosen)
            return (condition, *(self.cast(i, kind) for i in chosen)), kind
        kind = self._widest(args)
        if name in ARITHMETIC and kind == "bool":
            raise TraceError(f"{name} of bools: use &, | and ~, or cast with .int() or .float()")
        if name in (*LOGIC, *SHIFTS) and kind == "float":
            raise TraceError(f"{name} of floats: cast the operands with .int() or .bool()")
        if name in FLOATING:
            kind = "float"
        elif kind == "bool" and name not in LOGIC:
            kind = "int"
        return tuple(self.cast(i, kind) for i in args), "bool" if name in COMPARISONS else kind

    def _widest(self, args: Sequence[int]) -> str:
        return max((self.kind(i) for i in args), key=list(TYPES).index)

    def _simplified(self, name: str, args: tuple[int, ...], kind: str) -> int | None:
        """A node that equals the operation by an identity such as x + 0 = x; None: there is none."""
        a, b = args[0], args[-1]
        if name in CASTS:
            return self._simplified_cast(name, a, kind)
        if name == "where":
            condition, a, b = args
            if self.nodes[condition].op == "constant":
                return a if self.nodes[condition].value else b
            return a if a == b else None
        if name in ("min", "max"):
            return a if a == b else None
        if name in ("not", "neg"):
            inner = self.nodes[a]
            return inner.args[0] if inner.op == name else None
        if (name, kind) in _ABSORBED_BY_ZERO and (self._is(a, 0) or self._is(b, 0)):
            return self.constant(0, kind)
        if name in _IDENTITIES and (name, kind) not in _NO_IDENTITY:
            if self._is(b, _IDENTITIES[name]):
                return a
            if self._is(a, _IDENTITIES[name]) and name in _COMMUTATIVE:
                return b
        return None

    def _simplified_cast(self, name: str, a: int, kind: str) -> int | None:
        """The node that equals the cast of node `a`; None: there is none."""
        inner = self.nodes[a]
        if inner.kind == kind:
            return a
        if inner.op == "to_int64" and self.kind(inner.args[0]) != "float":
            return self.cast(inner.args[0], kind)  # the int64 has the value of its operand
        if name == "to_index" and inner.op in ("min", "max", "where"):
            *condition, x, y = inner.args
            return self.op(inner.op, *condition, self.index(x), self.index(y))  # clamping commutes with these
        return None

    def _is(self, i: int, value: Any) -> bool:
        node = self.nodes[i]
        return node.op == "constant" and node.value == value

    def graph(self, *outputs: int) -> Graph:
        """The graph of these outputs, with all captures and scalars.

        Unused nodes are dropped. The order of the others depends only on the outputs, so that equal computations give
        the same graph.
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
        nodes = tuple(self.nodes[i].moved(order) for i in order)
        return Graph(nodes, tuple(order[i] for i in outputs), tuple(self.captures), tuple(self.scalars))

    def copy(self, graph: Graph) -> list[int]:
        """Add the nodes of a graph with the same captures and scalars; return their indices."""
        copies: list[int] = []
        for node in graph.nodes:
            copies.append(self.add(node.moved(copies)))
        return copies


def drop_unused_arguments(graph: Graph) -> tuple[Graph, tuple[int, ...], tuple[int, ...]]:
    """The graph with only the captures and scalars that it reads, and their old indices."""
    used: dict[str, dict[int, int]] = {"load": {}, "scalar": {}}  # new indices by old ones
    nodes = []
    for node in graph.nodes:
        if node.op in used:
            new_indices = used[node.op]
            node = replace(node, value=new_indices.setdefault(node.value, len(new_indices)))
        nodes.append(node)
    captures, scalars = map(tuple, used.values())
    specs, kinds = tuple(graph.captures[i] for i in captures), tuple(graph.scalars[i] for i in scalars)
    return Graph(tuple(nodes), graph.outputs, specs, kinds), captures, scalars
