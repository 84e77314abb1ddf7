"""Evaluates a graph with an `Arithmetic`: on torch tensors here, on registers in a kernel.

Values that depend only on the head, a row or a column are computed once per head, row or column:

    evaluator = Evaluator(graph, arithmetic, captures, scalars)
    head = evaluator.at_head(b, h)
    row, column = evaluator.at_row(head, q), evaluator.at_column(head, kv)
    (score,) = evaluator.at(head, row, column, score)

`head`, `row` and `column` are plain tuples of the values that later stages need (`Part`), so that a kernel can keep
them in registers across a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from cute_flash.score_mod.graph import CASTS, COLUMN, OPERATIONS, ROW, TORCH_NAMES, Graph, Node, is_per_score

AT_HEAD, AT_ROW, AT_COLUMN, AT_SCORE = range(4)


class Arithmetic(Protocol):
    """The representation of values, and the operations on them.

    The implementations are `TorchArithmetic` and, in kernels, `device.scores.mod_arithmetic.CuteArithmetic`.
    """

    def constant(self, value: Any, kind: str) -> Any:
        """A constant or a captured number."""

    def load(self, capture: Any, indices: Sequence[Any], is_nonnegative: Sequence[bool], kind: str) -> Any:
        """An element of a captured tensor; a negative index counts from the end, one out of bounds is clamped.

        `is_nonnegative`: which indices are known not to be negative.
        """

    def op(self, node: Node, args: Sequence[Any], is_nonnegative: Sequence[bool]) -> Any:
        """The result of an operation. `is_nonnegative`: which operands are known not to be negative."""


@dataclass(frozen=True)
class Stages:
    """The stage at which each node of a graph is computed, and the nodes that later stages need."""

    nodes: tuple[tuple[int, ...], ...]  # for each stage, the nodes that it computes
    live: tuple[tuple[int, ...], ...]  # for each stage, those of its nodes that later stages or the outputs need

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(graph: Graph) -> Stages:
        stage = [_stage(bits) for bits in graph.depends]
        needed = {j for i, node in enumerate(graph.nodes) for j in node.args if stage[j] != stage[i]}
        needed.update(graph.outputs)
        # Constants are created where they are used, so that they take no register until then.
        live = [i for i in sorted(needed) if graph.nodes[i].op != "constant"]

        def by_stage(nodes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(i for i in nodes if stage[i] == at) for at in range(4))

        return Stages(by_stage(range(len(stage))), by_stage(live))


def _stage(bits: int) -> int:
    if is_per_score(bits):
        return AT_SCORE
    return AT_ROW if bits & ROW else AT_COLUMN if bits & COLUMN else AT_HEAD


# The values of a head, a row or a column that later stages need, in the order of `Stages.live`.
Part = tuple[Any, ...]


@dataclass(frozen=True)
class Evaluator:
    """A graph with its arguments: the values of its captures and scalars, in the graph's order."""

    graph: Graph
    arithmetic: Arithmetic
    captures: tuple[Any, ...]
    scalars: tuple[Any, ...]

    @property
    def stages(self) -> Stages:
        return Stages.of(self.graph)

    def at_head(self, b: Any, h: Any) -> Part:
        return self._part(AT_HEAD, (), {"b": b, "h": h})

    def at_row(self, head: Part, q: Any, q_float: Any = None) -> Part:
        """`q_float` is q as a float, if the caller has it, which saves a conversion."""
        return self._part(AT_ROW, (head,), {"q": q, "float q": q_float})

    def at_column(self, head: Part, kv: Any, kv_float: Any = None) -> Part:
        return self._part(AT_COLUMN, (head,), {"kv": kv, "float kv": kv_float})

    def at(self, head: Part, row: Part, column: Part, score: Any = None, grad: Any = None) -> tuple[Any, ...]:
        """The outputs of the graph. `grad` is an input of gradient graphs only."""
        values = self._run(AT_SCORE, (head, row, column), {"score": score, "grad": grad})
        return tuple(self._value(values, i) for i in self.graph.outputs)

    def _part(self, stage: int, parts: tuple[Part, ...], inputs: dict[str, Any]) -> Part:
        values = self._run(stage, parts, inputs)
        return tuple(values[i] for i in self.stages.live[stage])

    def _value(self, values: dict[int, Any], i: int) -> Any:
        node = self.graph.nodes[i]
        return self.arithmetic.constant(node.value, node.kind) if node.op == "constant" else values[i]

    def _run(self, stage: int, parts: tuple[Part, ...], inputs: dict[str, Any]) -> dict[int, Any]:
        """The values of a stage's nodes and of earlier stages, by node index."""
        values: dict[int, Any] = {}
        for live, part in zip(self.stages.live, parts):
            values.update(zip(live, part))
        for i in self.stages.nodes[stage]:
            node, arithmetic = self.graph.nodes[i], self.arithmetic
            args = [self._value(values, j) for j in node.args]
            is_nonnegative = [self.graph.is_nonnegative[j] for j in node.args]
            if node.op == "constant":
                continue
            if node.op == "input":
                values[i] = inputs[node.value]
            elif node.op == "scalar":
                values[i] = arithmetic.constant(self.scalars[node.value], node.kind)
            elif node.op == "load":
                values[i] = arithmetic.load(self.captures[node.value], args, is_nonnegative, node.kind)
            elif node.op == "to_float" and self._converted_input(node, inputs) is not None:
                values[i] = self._converted_input(node, inputs)
            else:
                values[i] = arithmetic.op(node, args, is_nonnegative)
        return values

    def _converted_input(self, node: Node, inputs: dict[str, Any]) -> Any:
        return inputs.get(f"float {self.graph.nodes[node.args[0]].value}")


TORCH_OPS = {name: getattr(torch, TORCH_NAMES.get(name, name)) for name in OPERATIONS if name not in CASTS}


@dataclass(frozen=True)
class TorchArithmetic:
    """Values are torch tensors that broadcast: floats of one dtype, int32, int64 and bools."""

    dtype: torch.dtype
    device: torch.device

    def _dtype(self, kind: str) -> torch.dtype:
        return {"bool": torch.bool, "int": torch.int32, "int64": torch.int64, "float": self.dtype}[kind]

    def constant(self, value: Any, kind: str) -> Tensor:
        return torch.tensor(value, dtype=self._dtype(kind), device=self.device)

    def load(self, capture: Tensor, indices: Sequence[Tensor], is_nonnegative: Sequence[bool], kind: str) -> Tensor:
        if not indices:
            return capture.to(self._dtype(kind))
        if 0 in capture.shape:
            raise ValueError(f"a captured tensor has shape {tuple(capture.shape)}: give it at least one element")
        return capture[indices_in_bounds(capture, indices)].to(self._dtype(kind))

    def op(self, node: Node, args: Sequence[Tensor], is_nonnegative: Sequence[bool]) -> Tensor:
        if node.op == "to_index":
            bounds = torch.iinfo(torch.int32)
            return args[0].clamp(bounds.min, bounds.max).to(torch.int32)
        if node.op in CASTS:
            return args[0].to(self._dtype(node.kind))
        try:
            return TORCH_OPS[node.op](*args)
        except RuntimeError as error:
            if str(error) != "ZeroDivisionError":
                raise
            sign = "//" if node.op == "floordiv" else "%"
            raise ValueError(
                f"{sign} of ints by 0 in a mod: make the divisor nonzero, such as torch.where(n == 0, 1, n)"
            ) from None


def indices_in_bounds(capture: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The indices of the elements that are loaded: negative ones count from the end, others are clamped."""
    sizes = zip(indices, capture.shape, strict=True)
    return tuple(torch.where(i < 0, i + size, i).clamp(0, size - 1) for i, size in sizes)


def evaluate(
    graph: Graph,
    arguments: tuple[Sequence[Tensor], Sequence[Any]],
    dtype: torch.dtype,
    indices: tuple[Tensor, Tensor, Tensor, Tensor],
    score: Tensor | None = None,
    grad: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Evaluate a graph with torch. The result is differentiable with respect to the score and the captures.

    Args:
        graph: The graph.
        arguments: Its (captures, scalars).
        dtype: The dtype of floats.
        indices: Tensors of b, h, q and kv, which broadcast.
        score: The scores; None for a mask_mod.
        grad: The gradients of the modified scores, for a gradient graph.

    Returns:
        The outputs of the graph.
    """
    b, h, q, kv = (x.to(torch.int32) for x in indices)
    evaluator = Evaluator(graph, TorchArithmetic(dtype, b.device), *map(tuple, arguments))
    head = evaluator.at_head(b, h)
    return evaluator.at(head, evaluator.at_row(head, q), evaluator.at_column(head, kv), score, grad)
