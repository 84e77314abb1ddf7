"""The operators, torch functions and tensor methods that mods may use. On proxies, they record their operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_flash.score_mod.graph import CASTS, COMPARISONS, LOGIC, OPERATIONS, TORCH_NAMES, Builder
from cute_flash.score_mod.proxy import (
    DTYPES,
    METHODS,
    REDUCTIONS,
    TORCH,
    Proxy,
    RowProxy,
    ScalarProxy,
    TensorProxy,
    by_element,
    call,
    elements_of,
    is_row,
    node_of,
    op,
    trace_error,
)

# Powers with integer exponents up to this are computed by multiplication.
MAX_PRODUCT = 64
KINDS = {dtype: kind for kind, dtype in DTYPES.items()} | {torch.float64: "float"}


def inputs(builder: Builder, names: Sequence[str]) -> list[ScalarProxy]:
    """The arguments that a mod is called with."""
    return [ScalarProxy(builder, builder.input(name)) for name in names]


def _to(x: ScalarProxy, *args: Any, **kwargs: Any) -> ScalarProxy:
    dtypes = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.dtype)]
    dtypes += [arg.dtype for arg in args if isinstance(arg, (ScalarProxy, Tensor))]
    if not dtypes:
        return x
    if dtypes[0] not in KINDS:
        raise trace_error(f"a cast to {dtypes[0]}: values are bool, int32, int64 or float32")
    return op(f"to_{KINDS[dtypes[0]]}", x)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    # The bound comes first, because the gradient of equal operands goes to the second.
    x = x if min is None else op("max", min, x)
    return x if max is None else op("min", max, x)


def _pow(a: Any, b: Any) -> ScalarProxy:
    if isinstance(b, ScalarProxy) and b._python_type is not None and not isinstance(a, (int, float)):
        b = b._python_value("an exponent")
    if isinstance(b, (int, float)):
        if b == 0.5 or b == -0.5:
            return op("sqrt" if b > 0 else "rsqrt", a)
        if abs(b) <= MAX_PRODUCT and b == int(b):
            return _power(a, int(b))
    if isinstance(a, (int, float)) and a > 0:
        return op("exp2", op("mul", b, math.log2(a)))
    if _is_int(a) and _is_int(b):
        raise trace_error(
            "** of ints with an exponent that is not a constant: cast the base or the exponent with .float()"
        )
    return op("pow", a, b)


def _is_int(x: Any) -> bool:
    return x._kind != "float" if isinstance(x, ScalarProxy) else isinstance(x, int)


def _power(a: ScalarProxy, n: int) -> ScalarProxy:
    if n < 0:
        return op("div", 1.0, _power(a, -n))
    product, square = _full_like(1)(a), a
    while n:
        if n & 1:
            product = op("mul", product, square)
        square, n = op("mul", square, square), n >> 1
    return product


def _with_alpha(name: str) -> Callable:
    return lambda a, b, *, alpha=1: op(name, a, b if alpha == 1 else op("mul", b, alpha))


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> ScalarProxy:
    if rounding_mode != "trunc":
        return op("floordiv" if rounding_mode else "div", a, b)
    if not (_is_int(a) and _is_int(b)):
        return _trunc(op("div", a, b))
    quotient = abs(a) // abs(b)
    return op("where", (a < 0) ^ (b < 0), -quotient, quotient)


def _ceil(x: Any) -> ScalarProxy:
    return op("neg", op("floor", op("neg", x)))


def _of_floats(function: Callable[[ScalarProxy], ScalarProxy]) -> Callable:
    """A rounding function that returns ints unchanged."""
    return lambda x: x if _is_int(x) else function(x)


def _trunc(x: Any) -> ScalarProxy:
    return op("where", op("lt", x, 0.0), _ceil(x), op("floor", x))


def _round(x: Any, *, decimals: int = 0) -> ScalarProxy:
    if decimals:
        raise trace_error(f"round with decimals={decimals}: round to integers")
    return x if _is_int(x) else op("round", x)


def _fmod(a: Any, b: Any) -> ScalarProxy:
    rest = abs(a) % abs(b)
    return op("where", a < 0, -rest, rest)


def _sign(x: Any) -> ScalarProxy:
    return x if x._kind == "bool" else op("sub", op(f"to_{x._kind}", x > 0), op(f"to_{x._kind}", x < 0))


def _gelu(x: Any, approximate: str = "none") -> ScalarProxy:
    if approximate == "tanh":
        inner = op("tanh", math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))
    else:
        inner = op("erf", x * math.sqrt(0.5))
    return 0.5 * x * op("add", 1.0, inner)


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> ScalarProxy:
    # The exponent is clamped, so that the gradient of the branch that is not taken is not NaN.
    product = x * beta
    power = op("exp", _clamp(product, max=threshold))
    return op("where", product > threshold, x, op("div", op("log", op("add", 1.0, power)), beta))


def _is_finite(x: Any) -> Any:
    return _full_like(True)(x, dtype=torch.bool) if _is_int(x) else op("lt", op("abs", x), math.inf)


def _is_infinite(x: Any) -> Any:
    return _full_like(False)(x, dtype=torch.bool) if _is_int(x) else op("eq", op("abs", x), math.inf)


def _new_full(value: Any) -> Callable:
    """`new_ones` and the like, without dimensions. If `value` is None, the caller passes it, as for `new_full`."""

    def new(x: ScalarProxy, size: Any, fill_value: Any = value, **kwargs: Any) -> ScalarProxy:
        if tuple(size):
            raise trace_error(f"a new tensor of shape {tuple(size)}: create it outside the mod, and capture it")
        return _full_like(fill_value)(x, dtype=kwargs.get("dtype"))

    return new


def _logical(name: str) -> Callable:
    def as_bool(x: Any) -> Any:
        return op("to_bool", x) if isinstance(x, ScalarProxy) else bool(x)

    return lambda *args: op(name, *map(as_bool, args))


def _full_like(value: Any) -> Callable:
    """`ones_like` and the like. If `value` is None, the caller passes it, as for `full_like`."""

    def like(x: ScalarProxy, *args: Any, **kwargs: Any) -> ScalarProxy:
        node = node_of(x._builder, args[0] if value is None else value)
        return _to(ScalarProxy(x._builder, node), kwargs.get("dtype") or x.dtype)

    return like


def _detached(x: ScalarProxy) -> ScalarProxy:
    raise trace_error("detach: write score_mod_bwd, which defines the gradient")


def _of(name: str) -> Callable:
    """The handler that records this operation."""
    return lambda *args: op(name, *args)


def _reflected(name: str) -> Callable:
    return lambda a, b: op(name, b, a)


# ---- rows


def _reduced(name: str, row: Any, dim: Any, keepdim: bool, cast: str = "") -> Any:
    """Combine the elements of a row, in pairs."""
    if dim not in (None, 0, -1, (0,), (-1,), [0], [-1]):
        raise trace_error(f"dim={dim} of a row of values, which has one dimension")
    values = [op(cast, x) if cast else x for x in elements_of(row)]
    while len(values) > 1:
        pairs = [op(name, a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(values) - len(values) % 2 :]
    return RowProxy(values) if keepdim else values[0]


def _sum(row: Any, dim: Any = None, keepdim: bool = False) -> Any:
    is_bool = elements_of(row)[0]._kind == "bool"
    return _reduced("add", row, dim, keepdim, "to_int" if is_bool else "")


def _mean(row: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _reduced("add", row, dim, keepdim, "to_float") / float(len(row))


def _reduction(name: str, cast: str = "") -> Callable:
    return lambda row, dim=None, keepdim=False: _reduced(name, row, dim, keepdim, cast)


def _extremum(name: str) -> Callable:
    """`max` and `min` of two rows, or of the elements of one."""

    def extremum(row: Any, other: Any = None, **kwargs: Any) -> Any:
        if kwargs or isinstance(other, int):
            raise trace_error(f"{name} with dim: use a{name}, which returns the values alone")
        return _reduced(name, row, None, False) if other is None else by_element(partial(op, name), (row, other))

    return extremum


def _dot(a: Any, b: Any) -> Any:
    if not (is_row(a) and is_row(b)):
        raise trace_error("a dot product of a row and a value: it takes two rows")
    return _sum(by_element(partial(op, "mul"), (a, b)))


def _unsqueeze(x: ScalarProxy, dim: int) -> RowProxy:
    if dim not in (0, -1):
        raise trace_error(f"unsqueeze({dim}) of a value, which has no dimensions: use 0 or -1")
    return RowProxy([x])


def _second_dimension(row: Any, dim: int) -> Any:
    raise trace_error("unsqueeze of a row: values in a mod have at most one dimension")


def _squeeze(row: Any, dim: int = 0) -> Any:
    elements = elements_of(row)
    return elements[0] if len(elements) == 1 else row


REDUCTIONS.update({
    "sum": _sum, "mean": _mean, "prod": _reduction("mul"), "amax": _reduction("max"), "amin": _reduction("min"),
    "any": _reduction("or", "to_bool"), "all": _reduction("and", "to_bool"),
    "max": _extremum("max"), "min": _extremum("min"),
    "dot": _dot, "inner": _dot, "vdot": _dot, "matmul": _dot,
    "unsqueeze": _second_dimension, "squeeze": _squeeze,
})  # fmt: skip


# ---- the tables of handlers


_ALIASES = {
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "negative": "neg",
    "absolute": "abs", "fmin": "min", "fmax": "max", "multiply": "mul", "true_divide": "div",
    "float": "to_float", "double": "to_float", "int": "to_int", "long": "to_int64", "bool": "to_bool",
}  # fmt: skip
# By name, for both torch functions and tensor methods.
METHODS.update({
    **{TORCH_NAMES.get(x, x): _of(x) for x in OPERATIONS if x not in CASTS},
    **{x: _of(y) for x, y in _ALIASES.items()},
    **{f"logical_{x}": _logical(x) for x in LOGIC},
    "add": _with_alpha("add"), "sub": _with_alpha("sub"), "subtract": _with_alpha("sub"),
    "div": _div, "divide": _div, "pow": _pow,
    "clamp": _clamp, "clip": _clamp, "clamp_min": lambda x, min: _clamp(x, min=min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "square": lambda x: op("mul", x, x),
    "sign": _sign, "sgn": _sign,
    "isfinite": _is_finite, "isinf": _is_infinite, "isnan": lambda x: op("ne", x, x),
    "ceil": _of_floats(_ceil), "trunc": _of_floats(_trunc), "fix": _of_floats(_trunc), "round": _round,
    "floor": _of_floats(_of("floor")), "fmod": _fmod,
    "max": lambda a, b: op("max", a, b), "min": lambda a, b: op("min", a, b),
    "arctan": _of("atan"), "erfc": lambda x: op("sub", 1.0, op("erf", x)),
    "tan": lambda x: op("div", op("sin", x), op("cos", x)),
    "log10": lambda x: op("mul", op("log2", x), math.log10(2)),
    "gelu": _gelu, "softplus": _softplus, "logsigmoid": lambda x: op("neg", _softplus(op("neg", x))),
    "leaky_relu": lambda x, negative_slope=0.01, inplace=False: op("where", x > 0, x, x * negative_slope),
    "new_ones": _new_full(1), "new_zeros": _new_full(0), "new_full": _new_full(None),
    "is_floating_point": lambda x: x._kind == "float",
    "reciprocal": lambda x: op("div", 1.0, x),
    "log1p": lambda x: op("log", op("add", x, 1.0)),
    "expm1": lambda x: op("sub", op("exp", x), 1.0),
    "relu": lambda x, inplace=False: op("max", x, 0),
    "silu": lambda x, inplace=False: op("mul", x, op("sigmoid", x)),
    "masked_fill": lambda x, mask, value: op("where", mask, value, x),
    "to": _to, "type": _to, "type_as": _to, "unsqueeze": _unsqueeze,
    "zeros_like": _full_like(0), "ones_like": _full_like(1), "full_like": _full_like(None),
    "clone": lambda x, **_: x, "detach": _detached, "contiguous": lambda x: x, "positive": lambda x: x,
})  # fmt: skip


for _method, _handler in METHODS.items():
    for _owner in (torch, Tensor, torch.nn.functional, torch.special):
        if hasattr(_owner, _method):
            TORCH[getattr(_owner, _method)] = _handler
# `Tensor.where` takes the condition as its second operand, unlike `torch.where`.
METHODS["where"] = TORCH[Tensor.where] = lambda x, condition, other: op("where", condition, x, other)
# Python operators on proxies. They are also registered for tensors: a tensor made inside the mod may be on the left.
_OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv", "mod": "mod",
    "and": "and", "or": "or", "xor": "xor", "lshift": "shl", "rshift": "shr",
}  # fmt: skip


def _set_operator(name: str, handler: Callable) -> None:
    setattr(Proxy, name, lambda *args: call(handler, args, {}))


for _python, _op in _OPERATORS.items():
    for _method, _handler in ((f"__{_python}__", _of(_op)), (f"__r{_python}__", _reflected(_op))):
        _set_operator(_method, _handler)
        if hasattr(Tensor, _method):
            TORCH[getattr(Tensor, _method)] = _handler
_UNREFLECTED: dict[str, Callable] = {
    **{x: _of(x) for x in (*COMPARISONS, "neg", "abs")},
    **{"invert": _of("not"), "pos": lambda x: x, "pow": _pow, "rpow": lambda x, base: _pow(base, x)},
}
for _python, _handler in _UNREFLECTED.items():
    _set_operator(f"__{_python}__", _handler)
for _class in (RowProxy, TensorProxy):
    setattr(_class, "__matmul__", _dot)  # noqa: B010
