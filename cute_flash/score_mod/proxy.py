"""Proxies: the values that a mod is called with when it is traced.

A `ScalarProxy` behaves like a zero-dimensional tensor in Python operators, torch functions and tensor methods
(`overrides` defines them); each operation adds a node to the graph. A `TensorProxy` replaces a captured tensor, which
the mod can index. A captured tensor with one dimension left to index, and a value after `unsqueeze`, are rows: a
`RowProxy` has a `ScalarProxy` for each element, operations apply to each element, and reductions are unrolled.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from cute_flash.errors import TraceError
from cute_flash.score_mod.constants import is_numpy
from cute_flash.score_mod.graph import INT_BITS, TYPES, Builder, Node

DTYPES = {"bool": torch.bool, "int": torch.int32, "int64": torch.int64, "float": torch.float32}
USE_WHERE = "use torch.where(condition, a, b), and &, | and ~ instead of and, or and not"
# Rows are unrolled, so long rows would take long to compile and to run.
MAX_ROW = 32
NOT_SUPPORTED = "{} is not supported in a mod: use an operation that docs/mods.md lists"


# Handlers of tensor methods, by name, and of torch functions; `overrides` fills them.
METHODS: dict[str, Callable] = {}
TORCH: dict[Any, Callable] = {}
# Functions and methods that reduce a row, by name.
REDUCTIONS: dict[str, Callable] = {}


class Specialise(BaseException):
    """Raised when Python needs the value of captured numbers, to trace again with these numbers compiled in."""

    def __init__(self, scalars: set[int]) -> None:
        self.scalars = scalars
        refusals.add(self)


class Refusals(threading.local):
    """The first refusal of the trace that runs in a thread. It counts even if the mod catches it."""

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def add(self, error: BaseException) -> None:
        self.first = self.first or error


refusals = Refusals()


def user_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The file and line of the first (frame, line number) pair in user code; "" if there is none."""
    for frame, line in frames:
        module = frame.f_globals.get("__name__", "")
        if module not in ("torch", "cute_flash.api") and not module.startswith(("cute_flash.score_mod.", "torch.")):
            return f"{frame.f_code.co_filename}:{line}"
    return ""


def trace_error(message: str) -> TraceError:
    """A `TraceError` whose message ends with the line of user code that is running, in parentheses."""
    error = TraceError(f"{message} ({user_line(walk_stack(sys._getframe()))})")
    refusals.add(error)
    return error


def without_line(error: BaseException) -> str:
    """The message of a `trace_error` without its line."""
    return str(error).rpartition(" (")[0] or str(error)


class Proxy:
    """The attributes, methods and functions of a tensor that all proxies have. `overrides` adds the operators."""

    _what = ""  # the proxy in error messages
    ndim: int
    shape: Any
    __array_ufunc__ = None  # operators with a numpy scalar call the proxy's method
    __hash__ = object.__hash__

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if is_row(self) and name in REDUCTIONS:
            return partial(REDUCTIONS[name], self)
        handler = METHODS.get(name)
        if handler is None:
            if name.startswith("__"):
                raise AttributeError(name)
            raise trace_error(NOT_SUPPORTED.format(f".{name} of {self._what}"))
        return lambda *args, **kwargs: call(handler, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_torch(func, args, kwargs or {})


class ScalarProxy(Proxy):
    """A float, int or bool of a mod that is being traced."""

    _what = "a value"
    device, shape, ndim = torch.device("cpu"), torch.Size(), 0

    def __init__(self, builder: Builder, node: int) -> None:
        self._builder, self._node = builder, node

    @property
    def _kind(self) -> str:
        return self._builder.kind(self._node)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self._kind]

    def __repr__(self) -> str:
        return f"ScalarProxy({self._builder.nodes[self._node]})"

    def __hash__(self) -> int:
        return object.__hash__(self) if self._python_type is None else hash(self._python_value("a hash"))

    def __format__(self, spec: str) -> str:
        return repr(self) if self._python_type is None else format(self._python_value("text"), spec)

    def __str__(self) -> str:
        return format(self, "")

    # Conversions to Python values, for constants and captured numbers only

    def _leaves(self) -> list[Node]:
        """The inputs, loads, scalars and constants that the value depends on."""
        nodes = self._builder.nodes
        leaves, todo = [], [self._node]
        while todo:
            node = nodes[todo.pop()]
            if node.op == "load" or not node.args:
                leaves.append(node)
            todo.extend(node.args)
        return leaves

    @property
    def _python_type(self) -> type | None:
        """The Python type of a value that depends only on constants and captured numbers; None for other values."""
        return None if any(node.op in ("input", "load") for node in self._leaves()) else TYPES[self._kind]

    def _python_value(self, what: str) -> Any:
        """The value of a constant. Raises `Specialise` for captured numbers, and an error naming `what` for others."""
        if self._python_type is None:
            raise trace_error(f"{what} is not known while the mod is traced: {USE_WHERE}")
        if scalars := {node.value for node in self._leaves() if node.op == "scalar"}:
            raise Specialise(scalars)
        return self._builder.nodes[self._node].value

    def __bool__(self) -> bool:
        return bool(self._python_value("the truth of a value (if, and, or, not, min, max)"))

    def __index__(self) -> int:
        return int(self._python_value("the int of a value"))

    __int__ = __index__

    def __float__(self) -> float:
        return float(self._python_value("the Python float of a value (float(), math)"))

    def __len__(self) -> int:
        raise trace_error("len() of a value: values in a mod have no dimensions")

    def __iter__(self) -> Any:
        raise trace_error("iteration over a value: values in a mod have no dimensions")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise trace_error("assignment into a value: use torch.where to compute a new one")


def _name(func: Any) -> str:
    owner = "torch.Tensor." if hasattr(Tensor, getattr(func, "__name__", "")) else "torch."
    return owner + getattr(func, "__name__", str(func))


def node_of(builder: Builder, x: Any) -> int:
    """The node of an operand: a proxy, a Python number, or a tensor of one element."""
    if isinstance(x, ScalarProxy):
        return x._node
    if isinstance(x, (bool, int, float)):
        return builder.constant(x)
    if is_numpy(x, "generic"):
        return node_of(builder, x.item())
    if is_numpy(x, "ndarray"):
        raise trace_error("a numpy array: capture torch.from_numpy(array)")
    if isinstance(x, TensorProxy):
        raise trace_error(f"a captured tensor of {x.ndim} dimension(s) as a value: index it")
    if isinstance(x, Tensor):
        if x.numel() == 1 and x.device.type == "cpu" and not x.requires_grad:
            return node_of(builder, x.item())
        raise trace_error(
            f"a tensor of shape {tuple(x.shape)} created inside the mod: create it outside, and capture it"
        )
    raise trace_error(f"{x!r} as an operand: expected a number or a tensor")


def op(name: str, *operands: Any) -> ScalarProxy:
    """Record an operation and return its result."""
    builder = next(x._builder for x in operands if isinstance(x, (ScalarProxy, TensorProxy)))
    nodes = [node_of(builder, x) for x in operands]
    try:
        node = builder.compute(name, nodes)
        return ScalarProxy(builder, builder.op(name, *nodes) if node is None else node)
    except TraceError as error:
        raise trace_error(str(error)) from None


class TensorProxy(Proxy):
    """A captured tensor, whose first dimensions may already be indexed."""

    _what = "a row of a captured tensor"

    def __init__(self, builder: Builder, capture: int, sizes: Callable[[], tuple], indices: tuple = ()) -> None:
        self._builder, self._capture, self._sizes, self._indices = builder, capture, sizes, indices
        spec = builder.captures[capture]
        self._rank, self.ndim, self.dtype = spec.rank, spec.rank - len(indices), getattr(torch, spec.dtype)

    @property
    def shape(self) -> tuple:
        return self._sizes()[len(self._indices) :]

    def __len__(self) -> int:
        return self.shape[0].__index__()

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        for index in keys:
            if index is None or index is Ellipsis or isinstance(index, slice):
                raise trace_error(f"indexing a captured tensor with {index}: give an index for each dimension")
        nodes = tuple(node_of(self._builder, index) for index in keys)
        if any(self._builder.kind(i) not in INT_BITS for i in nodes):
            raise trace_error("an index of a captured tensor is not an int: cast it with .int()")
        indices = self._indices + nodes
        if len(indices) > self._rank:
            raise trace_error(f"{len(indices)} indices into a captured tensor of {self._rank} dimensions")
        if len(indices) < self._rank:
            return TensorProxy(self._builder, self._capture, self._sizes, indices)
        return ScalarProxy(self._builder, self._builder.load(self._capture, indices))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise trace_error("assignment into a captured tensor: a mod must not change captured values")

    def __getattr__(self, name: str) -> Any:
        if self.ndim == 1 or name.startswith("__"):
            return super().__getattr__(name)
        raise trace_error(f".{name} of a captured tensor: compute it outside the mod, and capture the result")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], TensorProxy):
            return args[0][args[1]]
        if any(map(is_row, args)):
            return call_torch(func, args, kwargs or {})
        raise trace_error(f"{_name(func)} of a captured tensor: index it with an int for each dimension")


class RowProxy(Proxy):
    """A row of values, such as the last dimension of a captured tensor."""

    _what = "a row of values"
    device, ndim = torch.device("cpu"), 1

    def __init__(self, elements: Sequence[ScalarProxy]) -> None:
        self._elements = tuple(elements)
        self.shape = torch.Size((len(self._elements),))

    @property
    def dtype(self) -> torch.dtype:
        return self._elements[0].dtype

    def __len__(self) -> int:
        return len(self._elements)

    def __iter__(self) -> Iterator[ScalarProxy]:
        return iter(self._elements)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) or (isinstance(key, ScalarProxy) and key._python_type is not None):
            return self._elements[key]
        raise trace_error(f"indexing a row of values with {key}: use a constant, or index the tensor")

    def __bool__(self) -> bool:
        raise trace_error(f"the truth of a row of values: use .any() or .all(), and {USE_WHERE}")


def is_row(x: Any) -> bool:
    return isinstance(x, RowProxy) or (isinstance(x, TensorProxy) and x.ndim == 1)


def elements_of(x: Any) -> tuple[ScalarProxy, ...]:
    """The elements of a row."""
    if isinstance(x, RowProxy):
        return x._elements
    if not 0 < len(x) <= MAX_ROW:
        raise trace_error(
            f"a row of {len(x)} elements of a captured tensor: use 1 to {MAX_ROW}, or compute it outside the mod"
        )
    return tuple(x[i] for i in range(len(x)))


def by_element(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> RowProxy:
    """Apply a function to each element of rows of equal lengths. Values, and rows of one element, are repeated."""
    kwargs = kwargs or {}
    rows = {id(x): elements_of(x) for x in (*args, *kwargs.values()) if is_row(x)}
    lengths = {len(row) for row in rows.values()} - {1} or {1}
    if len(lengths) > 1:
        raise trace_error(f"rows of {' and '.join(map(str, sorted(lengths)))} elements: they must have equal lengths")

    def element(x: Any, i: int) -> Any:
        row = rows.get(id(x))
        return x if row is None else row[i if len(row) > 1 else 0]

    return RowProxy(
        [
            function(*(element(x, i) for x in args), **{name: element(x, i) for name, x in kwargs.items()})
            for i in range(lengths.pop())
        ]
    )


def call(handler: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the handler of an operation; if an argument is a row, for each element."""
    if not any(map(is_row, (*args, *kwargs.values()))):
        return handler(*args, **kwargs)
    return by_element(handler, args, kwargs)


def call_torch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    reduction = REDUCTIONS.get(getattr(func, "__name__", ""))
    if reduction is not None and is_row(args[0]):
        return reduction(*args, **kwargs)
    handler = TORCH.get(func)
    if handler is None:
        raise trace_error(NOT_SUPPORTED.format(_name(func)))
    return call(handler, args, kwargs)
