"""The operations of user mods in a kernel: the arithmetic of `score_mod.evaluate.Evaluator` on DSL scalars.

Floats are fp32, ints int32, and tables CuTe tensors of any strides. Approximations err by a few units in the
last place; an index outside a table reads its nearest element, also where a tile reaches past the last row or
key. Give it graphs that `score_mod.lower.lowered` has seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_flash.device.softmax import LN_2, LOG2_E
from cute_flash.score_mod.graph import Node

TYPES = {"bool": Boolean, "int": Int32, "float": Float32}


def _select(condition: Boolean, a: Any, b: Any, kind: str) -> Any:
    of = TYPES[kind]
    return of(cutlass.select_(condition, of(a), of(b)))


def _exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


def _tanh(x: Float32) -> Float32:
    """1 - 2 / (exp(2 x) + 1): an exponential and a reciprocal, exact at both ends."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(_exp2(x * (2 * LOG2_E)) + 1.0)


def _floor_float(a: Float32, b: Float32) -> Float32:
    return cute.math.floor(a / b)


def _abs_int(a: Int32) -> Int32:
    return cutlass.max(a, -a)


OPS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "exp": lambda a: _exp2(a * LOG2_E),
    "exp2": _exp2,
    "log": lambda a: cute.math.log2(a, fastmath=True) * LN_2,
    "log2": lambda a: cute.math.log2(a, fastmath=True),
    "tanh": _tanh,
    "sqrt": lambda a: cute.math.sqrt(a, fastmath=True),
    "rsqrt": lambda a: cute.math.rsqrt(a, fastmath=True),
    "sigmoid": lambda a: cute.arch.rcp_approx(1.0 + _exp2(-a * LOG2_E)),
    "floor": cute.math.floor,
    "sin": lambda a: cute.math.sin(a, fastmath=True),
    "cos": lambda a: cute.math.cos(a, fastmath=True),
}
# Where ints and floats differ.
OF_INTS: dict[str, Any] = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a - a // b * b,
    "min": cutlass.min,
    "max": cutlass.max,
    "abs": _abs_int,
    "not": lambda a: a ^ -1,
}
OF_FLOATS: dict[str, Any] = {
    "floordiv": _floor_float,
    "mod": lambda a, b: a - _floor_float(a, b) * b,
    "min": lambda a, b: cute.arch.fmin(a, b, nan=True),
    "max": lambda a, b: cute.arch.fmax(a, b, nan=True),
    "abs": cute.math.absf,
}


@dataclass(frozen=True)
class CuteArithmetic:
    def constant(self, value: Any, kind: str) -> Any:
        return TYPES[kind](value)

    def scalar(self, value: Any, kind: str) -> Any:
        return TYPES[kind](value)

    def load(self, table: cute.Tensor, indices: Sequence[Int32], kind: str) -> Any:
        found = table[clamp_indices(table, indices)]
        return found != 0 if kind == "bool" else TYPES[kind](found)

    def op(self, node: Node, *args: Any) -> Any:
        if node.op == "where":
            return _select(*args, node.kind)
        if node.op == "to_bool":
            return args[0] != 0
        if node.op.startswith("to_"):
            return TYPES[node.kind](args[0])
        if node.op == "not" and node.kind == "bool":
            return args[0] == Boolean(False)
        if node.op in OF_INTS:
            return (OF_FLOATS if node.kind == "float" else OF_INTS)[node.op](*args)
        return TYPES[node.kind](OPS[node.op](*args))


def clamp_indices(table: cute.Tensor, indices: Sequence[Int32]) -> Any:
    """The coordinate of an element, moved to the nearest that is there."""
    if not indices:
        return 0
    sizes = table.shape if len(indices) > 1 else (cute.size(table),)
    found = tuple(cutlass.max(cutlass.min(i, n - 1), 0) for i, n in zip(indices, sizes))
    return found if len(found) > 1 else found[0]
