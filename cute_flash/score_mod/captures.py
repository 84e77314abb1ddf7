"""What a user's function captures, found and replaced: closures, defaults, globals, and the state of objects.

The function is rebuilt around stand-ins: tensors become tables, numbers become run-time values, functions and
objects are followed. How each was reached is a `Read`, so that the next call can read it again, from the same
function or from another of the same code, and see that what was traced still holds.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from cute_flash.score_mod.graph import MAX_TABLE_RANK, TABLE_KINDS, Builder, Table
from cute_flash.score_mod.value import TableValue, Value, refuse

# Modules whose contents do not change, so that nothing in them is followed.
FIXED_MODULES = frozenset({"torch", "numpy", "cute_flash", "builtins", *sys.stdlib_module_names})
MAX_ITEMS = 256
MAX_INT = 1 << 31


@dataclass(frozen=True)
class Read:
    """How to find a captured value, from one found before, and what it must be for a trace to hold."""

    parent: int
    get: Callable[[Any], Any]
    holds: Callable[[Any], bool]


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def code_of(function: Any) -> CodeType | type:
    """By what traces of a function are found."""
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function.__code__ if isinstance(function, FunctionType) else type(function)


@functools.lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> tuple[str, ...]:
    names = [x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = (name for one in code.co_consts if isinstance(one, CodeType) for name in _global_names(one))
    return tuple(dict.fromkeys([*names, *inner]))


class Captures:
    """Follows a function, once. `static`: the reads of numbers that are compiled in, by path."""

    def __init__(self, builder: Builder, root: Any, static: frozenset[tuple]) -> None:
        self.builder, self.static = builder, static
        self.reads: list[Read] = []
        self.paths: list[tuple] = []
        self.tables: list[int] = []  # reads, of the builder's tables
        self.numbers: list[int] = []
        self.made: dict[tuple, Any] = {}  # what stands for what is at a path
        self.begun: dict[int, tuple[FunctionType, int]] = {}  # functions that are being rebuilt
        self.same: list[tuple[int, int]] = []  # reads of one function, which refers to itself
        self.function = self.stand_in(root, self._read(-1, None, None, root))

    # Reads

    def _read(self, parent: int, label: Any, get: Any, value: Any) -> int:
        self.paths.append((*self.paths[parent], label) if parent >= 0 else (label,))
        self.reads.append(Read(parent, get, self._holds(value)))
        return len(self.reads) - 1

    def _holds(self, value: Any) -> Callable[[Any], bool]:
        path = self.paths[-1]
        if isinstance(value, Tensor):
            dtype, rank = value.dtype, value.dim()
            return lambda x: isinstance(x, Tensor) and x.dtype == dtype and x.dim() == rank
        if isinstance(value, (bool, str, bytes)) or value is None:
            return lambda x: x is value or (type(x) is type(value) and x == value)
        kind = type(value)
        if isinstance(value, (int, float)):
            if path in self.static:
                return lambda x: type(x) is kind and x == value
            return lambda x: type(x) is kind
        if isinstance(value, FunctionType):
            code = value.__code__
            return lambda x: type(x) is FunctionType and x.__code__ is code
        if isinstance(value, (tuple, list)):
            size = len(value)
            return lambda x: type(x) is kind and len(x) == size
        if isinstance(value, dict):
            names = tuple(value)
            return lambda x: type(x) is kind and tuple(x) == names
        if isinstance(value, (functools.partial, MethodType)) or not _is_fixed(value):
            return lambda x: type(x) is kind
        return lambda x: x is value

    def follow(self, parent: int, label: Any, get: Callable[[Any], Any], value: Any) -> Any:
        """The stand-in of a value that `get` finds in one that was read."""
        path = (*self.paths[parent], label)
        if path not in self.made:
            self.made[path] = self.stand_in(value, self._read(parent, label, get, value))
        return self.made[path]

    # Stand-ins

    def stand_in(self, value: Any, read: int) -> Any:
        if isinstance(value, Tensor):
            return self._table(value, read)
        if value is None or isinstance(value, (bool, str, bytes)):
            return value
        if isinstance(value, (int, float)):
            return value if self.paths[read] in self.static else self.number(value, read)
        if isinstance(value, FunctionType):
            return value if _is_fixed(value) else self._function(value, read)
        if isinstance(value, MethodType):
            return self._method(value, read)
        if isinstance(value, functools.partial):
            func = self.follow(read, "func", attrgetter("func"), value.func)
            args = self.follow(read, "args", attrgetter("args"), value.args)
            return functools.partial(
                func, *args, **self.follow(read, "keywords", attrgetter("keywords"), value.keywords)
            )
        if type(value) in (tuple, list, dict):
            return self._container(value, read)
        return value if _is_fixed(value) else State(self, value, read)

    def number(self, value: int | float, read: int) -> Value:
        self.builder.numbers.append("int" if isinstance(value, int) else "float")
        self.numbers.append(read)
        return Value(self.builder, self.builder.number(len(self.numbers) - 1))

    def _table(self, value: Tensor, read: int) -> Any:
        dtype = dtype_name(value)
        if dtype not in TABLE_KINDS:
            raise refuse(f"a captured tensor is {dtype}: use one of {', '.join(TABLE_KINDS)}")
        if value.dim() > MAX_TABLE_RANK:
            raise refuse(f"a captured tensor has {value.dim()} dimensions: at most {MAX_TABLE_RANK}")
        self.builder.tables.append(Table(dtype, value.dim()))
        self.tables.append(read)
        table = len(self.tables) - 1
        if value.dim() == 0:
            return Value(self.builder, self.builder.load(table, ()))

        def size(dim: int) -> Any:
            shape = self.follow(read, "shape", _shape, tuple(value.shape))
            return shape[dim]

        return TableValue(self.builder, table, size)

    def _container(self, value: Any, read: int) -> Any:
        if len(value) > MAX_ITEMS:
            raise refuse(f"a captured {type(value).__name__} of {len(value)}: capture a tensor")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        found = {key: self.follow(read, key, itemgetter(key), one) for key, one in items}
        return found if isinstance(value, dict) else type(value)(found.values())

    def _method(self, value: MethodType, read: int) -> Any:
        func = self.follow(read, "__func__", attrgetter("__func__"), value.__func__)
        owner = self.follow(read, "__self__", attrgetter("__self__"), value.__self__)
        return functools.partial(func, owner)

    def _function(self, value: FunctionType, read: int) -> FunctionType:
        if id(value) in self.begun:
            new, first = self.begun[id(value)]
            self.same.append((first, read))
            return new
        code = value.__code__
        known: dict[str, Any] = {"__builtins__": value.__globals__.get("__builtins__", __builtins__)}
        known["__name__"] = value.__globals__.get("__name__", "")
        cells = tuple(CellType() for _ in code.co_freevars)
        new = FunctionType(code, known, value.__name__, None, cells)
        # Before what it captures, which may be itself.
        self.begun[id(value)] = new, read
        for i, (cell, old) in enumerate(zip(cells, value.__closure__ or ())):
            try:
                held = old.cell_contents
            except ValueError:
                continue  # not yet assigned
            cell.cell_contents = self.follow(read, ("cell", i), _cell(i), held)
        for name in _global_names(code):
            if name in value.__globals__:
                held = value.__globals__[name]
                known[name] = self.follow(read, ("global", name), _global(name), held)
        if value.__defaults__:
            defaults = attrgetter("__defaults__")
            new.__defaults__ = self.follow(read, "__defaults__", defaults, value.__defaults__)
        if value.__kwdefaults__:
            defaults = attrgetter("__kwdefaults__")
            new.__kwdefaults__ = self.follow(read, "__kwdefaults__", defaults, value.__kwdefaults__)
        del self.begun[id(value)]
        return new


def _cell(i: int) -> Callable[[Any], Any]:
    return lambda function: function.__closure__[i].cell_contents


def _global(name: str) -> Callable[[Any], Any]:
    return lambda function: function.__globals__[name]


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _is_fixed(value: Any) -> bool:
    """Whether a value is what it is: parts of torch and of Python."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in FIXED_MODULES
    if isinstance(value, (type, FunctionType)):
        module = value.__module__ or ""
        if module.startswith("cute_flash.masks"):
            return False
        return module.partition(".")[0] in FIXED_MODULES
    if isinstance(value, torch.nn.Module):
        return False
    if isinstance(value, (BuiltinFunctionType, torch.dtype, torch.device, CodeType)):
        return True
    return (type(value).__module__ or "").partition(".")[0] in FIXED_MODULES


class State:
    """A captured object: its attributes are captures, its methods are traced with it."""

    def __init__(self, captures: Captures, value: Any, read: int) -> None:
        self.__dict__.update(_captures=captures, _value=value, _place=read)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._value, name)
        if isinstance(value, MethodType) and value.__self__ is self._value:
            get = attrgetter(f"{name}.__func__")
            func = self._captures.follow(self._place, ("method", name), get, value.__func__)
            return functools.partial(func, self)
        return self._captures.follow(self._place, name, attrgetter(name), value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise refuse(f"writing .{name} of a captured object")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._value, torch.nn.Module):
            return self.forward(*args, **kwargs)
        if isinstance(self._value, type):
            raise refuse(f"making a {self._value.__name__} inside the function")
        if not isinstance(getattr(type(self._value), "__call__", None), FunctionType):  # noqa: B004
            raise refuse(f"calling a captured {type(self._value).__name__}")
        return self.__getattr__("__call__")(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, str)) and isinstance(self._value, (tuple, list, dict)):
            get = itemgetter(key)
            return self._captures.follow(self._place, ("item", key), get, get(self._value))
        return self.__getattr__("__getitem__")(key)
