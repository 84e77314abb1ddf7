"""The operations of user mods in a kernel: the arithmetic of `score_mod.evaluate.Evaluator` on DSL scalars.

Floats are fp32, ints int32, and captured tensors CuTe tensors of any strides. Approximations err by a few units in the
last place. An index outside a captured tensor loads the nearest element, also at positions past the last row or key.
Graphs must be lowered (`score_mod.lower`).
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
    dtype = TYPES[kind]
    return dtype(cutlass.select_(condition, dtype(a), dtype(b)))


def _exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


def _tanh(x: Float32) -> Float32:
    """1 - 2 / (exp(2 x) + 1): one exponential and one reciprocal, exact at both ends."""
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
# Operations that differ between ints and floats.
INT_OPS: dict[str, Any] = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a - a // b * b,
    "min": cutlass.min,
    "max": cutlass.max,
    "abs": _abs_int,
    "not": lambda a: a ^ -1,
}
FLOAT_OPS: dict[str, Any] = {
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

    def load(self, capture: cute.Tensor, indices: Sequence[Int32], kind: str) -> Any:
        element = capture[clamp_indices(capture, indices)]
        return element != 0 if kind == "bool" else TYPES[kind](element)

    def op(self, node: Node, *args: Any) -> Any:
        if node.op == "where":
            return _select(*args, node.kind)
        if node.op == "to_bool":
            return args[0] != 0
        if node.op.startswith("to_"):
            return TYPES[node.kind](args[0])
        if node.op == "not" and node.kind == "bool":
            return args[0] == Boolean(False)
        if node.op in INT_OPS:
            return (FLOAT_OPS if node.kind == "float" else INT_OPS)[node.op](*args)
        return TYPES[node.kind](OPS[node.op](*args))


def clamp_indices(capture: cute.Tensor, indices: Sequence[Int32]) -> Any:
    """The coordinate of the nearest element."""
    if not indices:
        return 0
    sizes = capture.shape if len(indices) > 1 else (cute.size(capture),)
    coord = tuple(cutlass.max(cutlass.min(i, n - 1), 0) for i, n in zip(indices, sizes))
    return coord if len(coord) > 1 else coord[0]
