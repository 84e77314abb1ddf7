"""Computes a graph, on whatever an `Arithmetic` knows: torch's tensors here, registers in a kernel.

What depends on the head alone, on a row or on a column is computed once for it:

    evaluator = Evaluator(graph, arithmetic, tables, numbers)
    head = evaluator.at_head(b, h)
    row, column = evaluator.at_row(head, q), evaluator.at_column(head, kv)
    (score,) = evaluator.at(head, row, column, score)

A part holds only what later parts need, in a plain tuple of values, so that a kernel can keep it in
registers and carry it into a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cute_flash.score_mod.graph import COLUMN, ROW, SCORE, Graph, Node

AT_HEAD, AT_ROW, AT_COLUMN, AT_SCORE = range(4)


class Arithmetic(Protocol):
    """What values are, and what operations do to them."""

    def constant(self, value: Any, kind: str) -> Any: ...

    def number(self, value: Any, kind: str) -> Any: ...

    def load(self, table: Any, indices: Sequence[Any], kind: str) -> Any:
        """An index outside the table reads its nearest element."""

    def op(self, node: Node, *args: Any) -> Any: ...


@dataclass(frozen=True)
class Stages:
    """When each node of a graph is computed, and what of each stage is needed later."""

    nodes: tuple[tuple[int, ...], ...]  # by stage
    kept: tuple[tuple[int, ...], ...]

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(graph: Graph) -> Stages:
        stage = [_stage(bits) for bits in graph.depends]
        nodes = tuple(tuple(i for i, s in enumerate(stage) if s == at) for at in range(4))
        needed: list[set[int]] = [set() for _ in range(4)]
        for i, node in enumerate(graph.nodes):
            for j in node.args:
                if stage[j] != stage[i]:
                    needed[stage[j]].add(j)
        for i in graph.outputs:
            needed[stage[i]].add(i)
        # Constants are made where they are used.
        needed[AT_HEAD] = {i for i in needed[AT_HEAD] if graph.nodes[i].op != "constant"}
        return Stages(nodes, tuple(tuple(sorted(x)) for x in needed))


def _stage(bits: int) -> int:
    if bits & SCORE or (bits & ROW and bits & COLUMN):
        return AT_SCORE
    return AT_ROW if bits & ROW else AT_COLUMN if bits & COLUMN else AT_HEAD


class Part(NamedTuple):
    """The values of a head, a row or a column that others need: those of `Stages.kept`, in their order."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Evaluator:
    """A graph with its arguments, in the order of the graph's tables and numbers."""

    graph: Graph
    arithmetic: Arithmetic
    tables: tuple[Any, ...]
    numbers: tuple[Any, ...]

    @property
    def stages(self) -> Stages:
        return Stages.of(self.graph)

    def needs(self, stage: int) -> bool:
        """Whether later stages need anything of this one."""
        return bool(self.stages.kept[stage])

    def at_head(self, b: Any, h: Any) -> Part:
        return self._part(AT_HEAD, {}, {"b": b, "h": h})

    def at_row(self, head: Part, q: Any, q_float: Any = None) -> Part:
        """`q_float`: the same as a float, where it is at hand and a conversion is not wanted."""
        return self._part(AT_ROW, self._known(head), {"q": q, "float q": q_float})

    def at_column(self, head: Part, kv: Any, kv_float: Any = None) -> Part:
        return self._part(AT_COLUMN, self._known(head), {"kv": kv, "float kv": kv_float})

    def at(self, head: Part, row: Part, column: Part, score: Any = None, grad: Any = None) -> tuple[Any, ...]:
        """The outputs; `grad` is for gradients, which take it."""
        known = self._known(head, row, column)
        self._run(AT_SCORE, known, {"score": score, "grad": grad})
        return tuple(self._value(known, i) for i in self.graph.outputs)

    def _known(self, *parts: Part) -> dict[int, Any]:
        known: dict[int, Any] = {}
        for stage, part in enumerate(parts):
            known.update(zip(self.stages.kept[stage], part.values))
        return known

    def _part(self, stage: int, known: dict[int, Any], inputs: dict[str, Any]) -> Part:
        self._run(stage, known, inputs)
        return Part(tuple(known[i] for i in self.stages.kept[stage]))

    def _value(self, known: dict[int, Any], i: int) -> Any:
        node = self.graph.nodes[i]
        return self.arithmetic.constant(node.value, node.kind) if node.op == "constant" else known[i]

    def _run(self, stage: int, known: dict[int, Any], inputs: dict[str, Any]) -> None:
        for i in self.stages.nodes[stage]:
            node, given = self.graph.nodes[i], self.arithmetic
            args = [self._value(known, j) for j in node.args]
            if node.op == "constant":
                continue
            if node.op == "input":
                known[i] = inputs[node.value]
            elif node.op == "number":
                known[i] = given.number(self.numbers[node.value], node.kind)
            elif node.op == "load":
                known[i] = given.load(self.tables[node.value], args, node.kind)
            elif node.op == "to_float" and self._given_float(node, inputs) is not None:
                known[i] = self._given_float(node, inputs)
            else:
                known[i] = given.op(node, *args)

    def _given_float(self, node: Node, inputs: dict[str, Any]) -> Any:
        return inputs.get(f"float {self.graph.nodes[node.args[0]].value}")


def _shifted(left: bool) -> Any:
    return lambda a, b: a << b if left else a >> b


TORCH_OPS: dict[str, Any] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "floordiv": torch.floor_divide,
    "mod": torch.remainder, "min": torch.minimum, "max": torch.maximum, "neg": torch.neg, "abs": torch.abs,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "not": torch.bitwise_not,
    "shl": _shifted(True), "shr": _shifted(False), "where": torch.where, "exp": torch.exp,
    "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "tanh": torch.tanh, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid, "floor": torch.floor, "sin": torch.sin, "cos": torch.cos,
}  # fmt: skip


@dataclass(frozen=True)
class TorchArithmetic:
    """Tensors that broadcast against each other: floats of one dtype, ints of 64 bits."""

    dtype: torch.dtype
    device: torch.device

    def _dtype(self, kind: str) -> torch.dtype:
        return {"bool": torch.bool, "int": torch.int64, "float": self.dtype}[kind]

    def constant(self, value: Any, kind: str) -> Tensor:
        return torch.tensor(value, dtype=self._dtype(kind), device=self.device)

    number = constant

    def load(self, table: Tensor, indices: Sequence[Tensor], kind: str) -> Tensor:
        if not indices:
            return table.to(self._dtype(kind))
        if 0 in table.shape:
            raise ValueError(f"a captured tensor has shape {tuple(table.shape)}: there is nothing to read")
        return table[within(table, indices)].to(self._dtype(kind))

    def op(self, node: Node, *args: Tensor) -> Tensor:
        if node.op.startswith("to_"):
            return args[0].to(self._dtype(node.kind))
        return TORCH_OPS[node.op](*args)


def within(table: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Indices, moved to the nearest that are."""
    return tuple(i.clamp(0, size - 1) for i, size in zip(indices, table.shape, strict=True))


def evaluate(
    graph: Graph,
    arguments: tuple[Sequence[Tensor], Sequence[Any]],
    dtype: torch.dtype,
    places: tuple[Tensor, Tensor, Tensor, Tensor],
    score: Tensor | None = None,
    grad: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The outputs on tensors of (b, h, q, kv) that broadcast. Differentiable, in the tables too."""
    b, h, q, kv = places
    evaluator = Evaluator(graph, TorchArithmetic(dtype, b.device), *map(tuple, arguments))
    head = evaluator.at_head(b, h)
    return evaluator.at(head, evaluator.at_row(head, q), evaluator.at_column(head, kv), score, grad)
