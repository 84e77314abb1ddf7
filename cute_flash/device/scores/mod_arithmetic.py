"""The operations of user mods in a kernel: the arithmetic of `score_mod.evaluate.Evaluator` on DSL scalars.

Floats are fp32, and ints int32 or int64; captured tensors are CuTe tensors of any strides. In 16-bit calls, functions
have errors of a few ulp, but near a zero of log, tanh, sin or cos only the absolute error is small. fp32 calls take
`EXACT_OPS`, the functions of the CUDA math library, with errors of a few ulp everywhere. A negative index of a captured
tensor counts from its end. An index out of bounds, as may occur past the last row or key, loads the nearest element.
Graphs must be lowered (`score_mod.lower`).
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import arith

from cute_flash.device.softmax.softmax import LN_2, LOG2_E
from cute_flash.score_mod.graph import INT_BITS, Node

TYPES = {"bool": Boolean, "int": Int32, "int64": Int64, "float": Float32}


def _fast(name: str) -> Callable[[Float32], Float32]:
    """The approximation of a function of `cute.math`."""
    return partial(getattr(cute.math, name), fastmath=True)


_exp2, _log2 = _fast("exp2"), _fast("log2")


def _tanh(x: Float32) -> Float32:
    """1 - 2 / (exp(2 x) + 1): one exponential and one reciprocal; exactly -1 and 1 for large |x|."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(_exp2(x * (2 * LOG2_E)) + 1.0)


def _mod(a: Float32, b: Float32) -> Float32:
    """The exact remainder with the sign of the divisor, as in Python."""
    rest = cute.math.rem(a, b)
    is_other_sign = (rest * b) < 0.0
    return Float32(cutlass.select_(is_other_sign, rest + b, rest))


def _floordiv(a: Float32, b: Float32) -> Float32:
    """a // b as (a - a % b) / b, rounded to remove the error of the division; a / b if b is 0."""
    quotient = Float32(cute.math.roundeven((a - _mod(a, b)) / b))
    return Float32(cutlass.select_(b == 0.0, a / b, quotient))


# Operations with the same name in `operator`, and functions with the same name in `cute.math`.
OPERATORS = ("add", "sub", "mul", "neg", "lt", "le", "gt", "ge", "eq", "ne", "xor")
FUNCTIONS = ("exp2", "log2", "sqrt", "rsqrt", "sin", "cos")
OPS: dict[str, Any] = {
    **{name: getattr(operator, name) for name in OPERATORS},
    "div": operator.truediv,
    "and": operator.and_,
    "or": operator.or_,
    "shl": operator.lshift,
    "shr": operator.rshift,
    **{name: _fast(name) for name in FUNCTIONS},
    "exp": lambda a: _exp2(a * LOG2_E),
    "log": lambda a: _log2(a) * LN_2,
    "tanh": _tanh,
    "sigmoid": lambda a: cute.arch.rcp_approx(1.0 + _exp2(-a * LOG2_E)),
    "floor": cute.math.floor,
    "round": cute.math.roundeven,
    "erf": cute.math.erf,
    "atan": cute.math.atan,
    "pow": cute.math.pow,
}
EXACT_OPS: dict[str, Any] = {
    **OPS,
    **{name: getattr(cute.math, name) for name in (*FUNCTIONS, "exp", "log", "tanh")},
    "sigmoid": lambda a: 1.0 / (1.0 + cute.math.exp(-a)),
}
# Operations that differ between ints and floats.
INT_OPS: dict[str, Any] = {
    "floordiv": operator.floordiv,
    "mod": lambda a, b: a - a // b * b,
    "min": cutlass.min,
    "max": cutlass.max,
    "abs": lambda a: cutlass.max(a, -a),
    "not": lambda a: a ^ -1,
}
FLOAT_OPS: dict[str, Any] = {
    "floordiv": _floordiv,
    "mod": _mod,
    "min": lambda a, b: cute.arch.fmin(a, b, nan=True),
    "max": lambda a, b: cute.arch.fmax(a, b, nan=True),
    "abs": cute.math.absf,
}


@dataclass(frozen=True)
class CuteArithmetic:
    """Arithmetic for `Evaluator` inside a kernel."""

    is_exact: bool = False  # functions have the accuracy of fp32 calls

    def constant(self, value: Any, kind: str) -> Any:
        return TYPES[kind](value)

    def load(self, capture: cute.Tensor, indices: Sequence[Int32], is_nonnegative: Sequence[bool], kind: str) -> Any:
        element = capture[indices_in_bounds(capture, indices, is_nonnegative)]
        return element != 0 if kind == "bool" else TYPES[kind](element)

    def op(self, node: Node, args: Sequence[Any], is_nonnegative: Sequence[bool]) -> Any:
        dtype = TYPES[node.kind]
        if node.op == "where":
            return dtype(cutlass.select_(args[0], dtype(args[1]), dtype(args[2])))
        if node.op == "to_bool":
            return args[0] != 0
        if node.op == "to_index":
            return Int32(cutlass.max(cutlass.min(args[0], Int64(Int32.max)), Int64(Int32.min)))
        if node.op.startswith("to_"):
            return dtype(args[0])
        if node.op == "not" and node.kind == "bool":
            return args[0] == Boolean(False)
        if node.op in ("floordiv", "mod") and node.kind in INT_BITS and not all(is_nonnegative):
            quotient = _floordiv_ints(*args, dtype)
            return quotient if node.op == "floordiv" else args[0] - quotient * args[1]
        if node.op in INT_OPS:
            return (FLOAT_OPS if node.kind == "float" else INT_OPS)[node.op](*args)
        return dtype((EXACT_OPS if self.is_exact else OPS)[node.op](*args))


def indices_in_bounds(capture: cute.Tensor, indices: Sequence[Int32], is_nonnegative: Sequence[bool]) -> Any:
    """The coordinate of the element to load: negative indices count from the end, others are clamped."""
    if not indices:
        return 0
    sizes = capture.shape if len(indices) > 1 else (cute.size(capture),)
    wrapped = (i if known else _from_end(i, n) for i, n, known in zip(indices, sizes, is_nonnegative))
    coord = tuple(cutlass.max(cutlass.min(i, n - 1), 0) for i, n in zip(wrapped, sizes))
    return coord if len(coord) > 1 else coord[0]


def _floordiv_ints(a: Int32 | Int64, b: Int32 | Int64, dtype: type) -> Int32 | Int64:
    """a // b, rounded down. The DSL's operator rounds towards 0 if an operand is a coordinate of a layout."""
    return dtype(arith.floordivsi(dtype(a).ir_value(), dtype(b).ir_value()))


def _from_end(i: Int32, size: Int32) -> Int32:
    """The index, plus the size if it is negative. `i >> 31` is 0 or -1, so the AND gives 0 or the size."""
    return i + ((i >> 31) & size)
