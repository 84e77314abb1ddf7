"""Values without a number: what a user's function is called with to see what it does.

They take part in Python's operators, in torch's functions and in the methods of tensors, as zero-dimensional
tensors would; each records a node. A `TableValue` stands for a captured tensor, which can be indexed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from cute_flash.mods.graph import MAX_TABLE_RANK, Builder, TraceError

DTYPES = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}
KINDS = {
    torch.bool: "bool",
    torch.int32: "int",
    torch.int64: "int",
    torch.float32: "float",
    torch.float64: "float",
    bool: "bool",
    int: "int",
    float: "float",
}
WHERE_INSTEAD = "a value is known only in a kernel: use torch.where(condition, a, b), & and | and ~"


class Specialise(BaseException):
    """A captured number decides what Python does: trace again with its value compiled in."""

    def __init__(self, numbers: set[int]) -> None:
        self.numbers = numbers


def place(frame: FrameType | None = None) -> str:
    """Where the user's function is, of the frames that are running."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("cute_flash.mods.", "torch.")) and module != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown place"


def refuse(what: str) -> TraceError:
    return TraceError(f"{what} ({place()})")


class Value:
    """A number, a bool or a score inside a user's function."""

    def __init__(self, builder: Builder, node: int) -> None:
        self._builder, self._node = builder, node

    @property
    def _kind(self) -> str:
        return self._builder.kind(self._node)

    # What torch's code asks of a tensor

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self._kind]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        return torch.Size()

    @property
    def ndim(self) -> int:
        return 0

    def dim(self) -> int:
        return 0

    def size(self) -> torch.Size:
        return torch.Size()

    def __repr__(self) -> str:
        return f"Value({self._builder.nodes[self._node]})"

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = TORCH.get(func)
        if handler is None:
            raise refuse(f"{_name(func)} has no place in a kernel")
        return handler(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        handler = METHODS.get(name)
        if handler is None:
            if name.startswith("__"):
                raise AttributeError(name)
            raise refuse(f".{name} of a value has no place in a kernel")
        return lambda *args, **kwargs: handler(self, *args, **kwargs)

    # What Python would need to know

    def _needed(self, what: str) -> Any:
        nodes = self._builder.nodes
        found, todo = set(), [self._node]
        while todo:
            node = nodes[todo.pop()]
            if node.op in ("input", "load"):
                raise refuse(f"{what} is not known when a function is traced; {WHERE_INSTEAD}")
            if node.op == "number":
                found.add(node.value)
            todo.extend(node.args)
        if found:
            raise Specialise(found)
        return nodes[self._node].value

    def __bool__(self) -> bool:
        return bool(self._needed("whether this is true (if, and, or, not, min, max)"))

    def __index__(self) -> int:
        return int(self._needed("an int of this"))

    __int__ = __index__

    def __float__(self) -> float:
        return float(self._needed("a Python float of this (float(), math)"))

    def __len__(self) -> int:
        raise refuse("the length of a value")

    def __iter__(self) -> Any:
        raise refuse("going through a value")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise refuse("writing into a value")


def _name(func: Any) -> str:
    owner = "torch.Tensor." if hasattr(Tensor, getattr(func, "__name__", "")) else "torch."
    return owner + getattr(func, "__name__", str(func))


def _builder_of(*args: Any) -> Builder:
    return next(x._builder for x in args if isinstance(x, (Value, TableValue)))


def node_of(builder: Builder, x: Any) -> int:
    """The node of an operand: a value, a Python number, or a tensor of one element."""
    if isinstance(x, Value):
        return x._node
    if isinstance(x, (bool, int, float)):
        # Subclasses, such as those of enum, are numbers.
        plain = x if isinstance(x, bool) else int(x) if isinstance(x, int) else float(x)
        return builder.constant(plain)
    if isinstance(x, TableValue):
        raise refuse(f"a captured tensor of {x._rank - len(x._indices)} dimension(s) as a value: index it")
    if isinstance(x, Tensor):
        if x.numel() == 1 and x.device.type == "cpu" and not x.requires_grad:
            return node_of(builder, x.item())
        raise refuse(
            f"a tensor of shape {tuple(x.shape)} made inside the function: make it outside and capture it"
        )
    raise refuse(f"a {type(x).__name__} as an operand")


def op(name: str, *operands: Any) -> Value:
    builder = _builder_of(*operands)
    nodes = [node_of(builder, x) for x in operands]
    try:
        return Value(builder, builder.op(name, *nodes))
    except TraceError as error:
        raise refuse(str(error)) from None


class TableValue:
    """A captured tensor, or what the first of its indices leave of it."""

    def __init__(
        self, builder: Builder, table: int, sizes: Callable[[int], Any], indices: tuple = ()
    ) -> None:
        self._builder, self._table, self._sizes, self._indices = builder, table, sizes, indices

    @property
    def _rank(self) -> int:
        return self._builder.tables[self._table].rank

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self._builder.tables[self._table].dtype)

    @property
    def ndim(self) -> int:
        return self._rank - len(self._indices)

    def dim(self) -> int:
        return self.ndim

    @property
    def shape(self) -> tuple:
        return tuple(self._sizes(i) for i in range(len(self._indices), self._rank))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0].__index__()

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        for one in keys:
            if one is None or one is Ellipsis or isinstance(one, slice):
                raise refuse(f"indexing a captured tensor with {one}: give an index for each dimension")
            if isinstance(one, int) and one < 0:
                raise refuse(f"index {one} of a captured tensor: count from the front")
        nodes = tuple(node_of(self._builder, one) for one in keys)
        if any(self._builder.kind(i) != "int" for i in nodes):
            raise refuse("an index of a captured tensor that is no int: cast it with .int()")
        indices = self._indices + nodes
        if len(indices) > self._rank:
            raise refuse(f"{len(indices)} indices into a captured tensor of {self._rank} dimensions")
        if len(indices) < self._rank:
            return TableValue(self._builder, self._table, self._sizes, indices)
        return Value(self._builder, self._builder.load(self._table, indices))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise refuse("writing into a captured tensor")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refuse(f".{name} of a captured tensor: do it outside, and capture what comes out")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], TableValue):
            return args[0][args[1]]
        raise refuse(f"{_name(func)} of a captured tensor: index it with an int for each dimension")


assert MAX_TABLE_RANK == 4  # (b, h, q, kv)


# What functions and methods mean


def _cast(x: Any, kind: str) -> Value:
    builder = x._builder
    return Value(builder, builder.cast(x._node, kind))


def _to(x: Value, *args: Any, **kwargs: Any) -> Value:
    found = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)]
    found += [one.dtype for one in args if isinstance(one, (Value, Tensor))]
    if not found:
        return x
    if found[0] not in KINDS:
        raise refuse(f"a cast to {found[0]}: values are bool, int32 or float32")
    return _cast(x, KINDS[found[0]])


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    # The bound first: where they are equal, the gradient is the value's.
    x = x if min is None else op("max", min, x)
    return x if max is None else op("min", max, x)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return op("where", condition, a, b)


def _pow(a: Any, b: Any) -> Value:
    if isinstance(b, Value) and not isinstance(a, (int, float)):
        b = b._needed("an exponent")
    if isinstance(b, (int, float)):
        if b == 0.5 or b == -0.5:
            return op("sqrt" if b > 0 else "rsqrt", a)
        if b == int(b) and abs(b) <= 16:
            return _power(a, int(b))
    if isinstance(a, (int, float)) and a > 0:
        exponent = b if a == 2 else op("mul", b, op("log2", Value(b._builder, b._builder.constant(float(a)))))
        return op("exp2", exponent)
    raise refuse("** with this exponent: whole numbers up to 16 and 0.5 are there; else use exp2 and log2")


def _power(a: Value, n: int) -> Value:
    if n == 0:
        return Value(a._builder, a._builder.cast(a._builder.constant(1), a._kind))
    found: Value | None = None
    square, left = a, abs(n)
    while left:
        if left & 1:
            found = square if found is None else op("mul", found, square)
        square, left = (op("mul", square, square) if left > 1 else square), left >> 1
    assert found is not None
    return found if n > 0 else op("div", 1.0, found)


def _add(a: Any, b: Any, *, alpha: Any = 1) -> Value:
    return op("add", a, b if alpha == 1 else op("mul", b, alpha))


def _sub(a: Any, b: Any, *, alpha: Any = 1) -> Value:
    return op("sub", a, b if alpha == 1 else op("mul", b, alpha))


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "trunc":
        raise refuse("div with rounding_mode='trunc': use 'floor'")
    return op("floordiv" if rounding_mode else "div", a, b)


def _logical(name: str) -> Callable:
    return lambda *args: op(name, *(_cast(x, "bool") if isinstance(x, Value) else bool(x) for x in args))


def _full(value: Any) -> Callable:
    def like(x: Value, *args: Any, **kwargs: Any) -> Value:
        kwargs.pop("device", None)
        given = args[0] if value is None else value
        node = node_of(x._builder, given)
        return _to(Value(x._builder, x._builder.cast(node, x._kind)), **kwargs)

    return like


def _of(name: str) -> Callable:
    return lambda *args: op(name, *args)


def _turned(name: str) -> Callable:
    return lambda a, b: op(name, b, a)


# Names of torch functions and methods of tensors. Where one name is both, it means the same.
METHODS: dict[str, Callable] = {
    **{x: _of(x) for x in ("floor", "exp", "exp2", "log", "log2", "tanh", "sqrt", "rsqrt", "sigmoid")},
    **{x: _of(x) for x in ("sin", "cos", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne")},
    **{x: _of(y) for x, y in (("less", "lt"), ("less_equal", "le"), ("greater", "gt"))},
    **{x: _of(y) for x, y in (("greater_equal", "ge"), ("not_equal", "ne"), ("negative", "neg"))},
    **{x: _of(y) for x, y in (("absolute", "abs"), ("minimum", "min"), ("maximum", "max"))},
    **{x: _of(y) for x, y in (("fmin", "min"), ("fmax", "max"), ("multiply", "mul"), ("mul", "mul"))},
    **{x: _of(y) for x, y in (("floor_divide", "floordiv"), ("remainder", "mod"), ("true_divide", "div"))},
    **{f"bitwise_{x}": _of(x) for x in ("and", "or", "xor", "not")},
    **{f"logical_{x}": _logical(x) for x in ("and", "or", "xor", "not")},
    **{x: _of(y) for x, y in (("bitwise_left_shift", "shl"), ("bitwise_right_shift", "shr"))},
    "add": _add, "sub": _sub, "subtract": _sub, "div": _div, "divide": _div, "pow": _pow,
    "where": _where,
    "clamp": _clamp, "clip": _clamp, "clamp_min": lambda x, min: _clamp(x, min=min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "square": lambda x: op("mul", x, x),
    "reciprocal": lambda x: op("div", 1.0, x),
    "log1p": lambda x: op("log", op("add", x, 1.0)),
    "expm1": lambda x: op("sub", op("exp", x), 1.0),
    "relu": lambda x, inplace=False: op("max", x, 0),
    "silu": lambda x, inplace=False: op("mul", x, op("sigmoid", x)),
    "masked_fill": lambda x, mask, value: _where(mask, value, x),
    "to": _to, "type": _to, "type_as": _to,
    "float": lambda x: _cast(x, "float"), "int": lambda x: _cast(x, "int"),
    "long": lambda x: _cast(x, "int"), "bool": lambda x: _cast(x, "bool"),
    "zeros_like": _full(0), "ones_like": _full(1), "full_like": _full(None),
    "clone": lambda x, **_: x, "detach": lambda x: _detached(x), "contiguous": lambda x: x,
}  # fmt: skip


def _detached(x: Value) -> Value:
    raise refuse("detach: write score_mod_bwd, which says what the gradient is")


TORCH: dict[Any, Callable] = {}
for _method, _handler in METHODS.items():
    for _owner in (torch, Tensor, torch.nn.functional, torch.special):
        if hasattr(_owner, _method):
            TORCH[getattr(_owner, _method)] = _handler
# Operators of a tensor that was made inside the function, with a value on the right.
_OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv", "mod": "mod",
    "and": "and", "or": "or", "xor": "xor", "lshift": "shl", "rshift": "shr",
}  # fmt: skip
for _python, _op in _OPERATORS.items():
    setattr(Value, f"__{_python}__", _of(_op))
    setattr(Value, f"__r{_python}__", _turned(_op))
    for _prefix, _handler in (("", _of(_op)), ("r", _turned(_op))):
        if hasattr(Tensor, f"__{_prefix}{_python}__"):
            TORCH[getattr(Tensor, f"__{_prefix}{_python}__")] = _handler
for _python, _op in (("lt", "lt"), ("le", "le"), ("gt", "gt"), ("ge", "ge"), ("eq", "eq"), ("ne", "ne")):
    setattr(Value, f"__{_python}__", _of(_op))
for _python, _op in (("neg", "neg"), ("abs", "abs"), ("invert", "not")):
    setattr(Value, f"__{_python}__", _of(_op))
Value.__pos__ = lambda self: self  # type: ignore[attr-defined]
Value.__pow__ = lambda self, other: _pow(self, other)  # type: ignore[attr-defined]
Value.__rpow__ = lambda self, other: _pow(other, self)  # type: ignore[attr-defined]
