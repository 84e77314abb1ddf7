"""Values without a number: what a user's function is called with to see what it does.

They take part in Python's operators, in torch's functions and in the methods of tensors, as zero-dimensional
tensors would (`mods.meaning` says how); each records a node. A `TableValue` stands for a captured tensor,
which can be indexed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from cute_flash.errors import TraceError
from cute_flash.score_mod.graph import Builder

DTYPES = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}
WHERE_INSTEAD = "a value is known only in a kernel: use torch.where(condition, a, b), & and | and ~"


# What methods of tensors and torch's functions do with values; filled by `mods.meaning`.
METHODS: dict[str, Callable] = {}
TORCH: dict[Any, Callable] = {}


class Specialise(BaseException):
    """A captured number decides what Python does: trace again with its value compiled in."""

    def __init__(self, numbers: set[int]) -> None:
        self.numbers = numbers


def place() -> str:
    """Where the user's function is, of the frames that are running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("cute_flash.score_mod.", "torch.")) and module != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
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
