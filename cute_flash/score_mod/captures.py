"""Replaces the values that a mod captures by proxies: closures, defaults, globals, and attributes of objects.

The mod is rebuilt with proxies: captured tensors become captures of the graph, captured numbers become its scalars, and
captured functions and objects are rebuilt recursively. A `Source` records how to read each value. With it, the next
call reads the value again, from the same function or from another one with the same code, and checks that the trace is
still valid.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from operator import getitem
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash.score_mod.graph import CAPTURE_KINDS, MAX_CAPTURE_RANK, Builder, CaptureSpec
from cute_flash.score_mod.proxy import ScalarProxy, TensorProxy, trace_error

# Modules whose contents do not change: their functions and classes are used as they are.
FIXED_MODULES = frozenset({"torch", "numpy", "cute_flash", "builtins", *sys.stdlib_module_names})
MAX_CONTAINER_SIZE = 256


class Source(NamedTuple):
    """How to read a captured value, and the condition under which a trace is valid for it."""

    parent: int  # index of the source from whose value `read` takes this one
    read: Callable[[Any, Any], Any] | None  # of the parent's value and `key`; None: this is the mod itself
    key: Any
    guard: Callable[[Any], bool]


def code_of(function: Any) -> CodeType | type:
    """The key of a function's traces: its code object, or the type of a callable object."""
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function.__code__ if isinstance(function, FunctionType) else type(function)


@functools.lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> tuple[str, ...]:
    names = [x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = (name for x in code.co_consts if isinstance(x, CodeType) for name in _global_names(x))
    return tuple(dict.fromkeys([*names, *inner]))


class CaptureTracer:
    """Rebuilds a mod with proxies for its captured values. `static`: paths of numbers to compile in."""

    def __init__(self, builder: Builder, mod: Any, static: frozenset[tuple]) -> None:
        self.builder, self.static = builder, static
        self.sources = [Source(-1, None, None, _guard(mod))]
        self.values = [mod]  # of the sources
        self.paths: list[tuple] = [()]  # of the sources: the (read, key) pairs that lead to them from the mod
        self.captures: list[int] = []  # the source of each capture of the builder
        self.scalars: list[int] = []  # the source of each scalar of the builder
        self.proxies: dict[tuple, Any] = {}  # by path
        self.rebuilding: dict[int, tuple[FunctionType, int]] = {}  # by id; functions may refer to themselves
        self.aliases: list[tuple[int, int]] = []  # pairs of sources that found the same function
        self.function = self._proxy(mod, 0)

    def visit(self, parent: int, read: Callable[[Any, Any], Any], key: Any = None) -> Any:
        """The proxy of a value that `read` takes from the value of the parent source."""
        path = (*self.paths[parent], (read, key))
        if path not in self.proxies:
            value, source = read(self.values[parent], key), len(self.sources)
            self.sources.append(Source(parent, read, key, _guard(value, path in self.static)))
            self.values.append(value)
            self.paths.append(path)
            self.proxies[path] = self._proxy(value, source)
        return self.proxies[path]

    def _proxy(self, value: Any, source: int) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, source)
        if _is_compiled_in(value) or self.paths[source] in self.static:
            return value
        if isinstance(value, (int, float)):
            self.builder.scalars.append("int" if isinstance(value, int) else "float")
            self.scalars.append(source)
            return ScalarProxy(self.builder, self.builder.scalar(len(self.scalars) - 1))
        if isinstance(value, MethodType):
            return functools.partial(self.visit(source, getattr, "__func__"), self.visit(source, getattr, "__self__"))
        if isinstance(value, functools.partial):
            func, args, keywords = (self.visit(source, getattr, name) for name in ("func", "args", "keywords"))
            return functools.partial(func, *args, **keywords)
        if type(value) in (tuple, list, dict):
            return self._container(value, source)
        if _is_fixed(value):
            return value
        return self._function(value, source) if isinstance(value, FunctionType) else ObjectProxy(self, value, source)

    def _tensor(self, value: Tensor, source: int) -> Any:
        self.captures.append(source)
        return capture(self.builder, value.dtype, value.dim(), lambda: self.visit(source, _shape))

    def _container(self, value: Any, source: int) -> Any:
        if len(value) > MAX_CONTAINER_SIZE:
            raise trace_error(f"a captured {type(value).__name__} of {len(value)}: capture a tensor")
        keys = value if isinstance(value, dict) else range(len(value))
        proxies = {key: self.visit(source, getitem, key) for key in keys}
        return proxies if isinstance(value, dict) else type(value)(proxies.values())

    def _function(self, value: FunctionType, source: int) -> FunctionType:
        """A function with the same code, whose closure, globals and defaults are proxies."""
        if id(value) in self.rebuilding:
            new, first = self.rebuilding[id(value)]
            self.aliases.append((first, source))
            return new
        code = value.__code__
        names: dict[str, Any] = {
            x: value.__globals__[x] for x in ("__builtins__", "__name__") if x in value.__globals__
        }
        cells = tuple(CellType() for _ in code.co_freevars)
        new = FunctionType(code, names, value.__name__, None, cells)
        # Registered before its captures are visited, because it may capture itself.
        self.rebuilding[id(value)] = new, source
        for i, (cell, old) in enumerate(zip(cells, value.__closure__ or ())):
            if old != CellType():  # it is assigned
                cell.cell_contents = self.visit(source, _cell, i)
        for name in _global_names(code):
            if name in value.__globals__:
                names[name] = self.visit(source, _global, name)
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(value, name):
                setattr(new, name, self.visit(source, getattr, name))
        del self.rebuilding[id(value)]
        return new


def capture(builder: Builder, dtype: torch.dtype, rank: int, sizes: Callable[[], tuple]) -> ScalarProxy | TensorProxy:
    """Add a captured tensor to a graph."""
    name = str(dtype).removeprefix("torch.")
    if name not in CAPTURE_KINDS:
        raise trace_error(f"a captured tensor is {name}: use one of {', '.join(CAPTURE_KINDS)}")
    if rank > MAX_CAPTURE_RANK:
        raise trace_error(f"a captured tensor has {rank} dimensions: at most {MAX_CAPTURE_RANK}")
    builder.captures.append(CaptureSpec(name, rank))
    i = len(builder.captures) - 1
    return TensorProxy(builder, i, sizes) if rank else ScalarProxy(builder, builder.load(i, ()))


def _guard(value: Any, is_static: bool = False) -> Callable[[Any], bool]:
    """The condition under which a trace is valid for another value in place of this one."""
    kind = type(value)
    if isinstance(value, Tensor):
        dtype, rank = value.dtype, value.dim()
        return lambda x: isinstance(x, Tensor) and x.dtype == dtype and x.dim() == rank
    if _is_compiled_in(value) or is_static:
        return lambda x: type(x) is kind and x == value
    if isinstance(value, FunctionType):
        code = value.__code__
        return lambda x: type(x) is FunctionType and x.__code__ is code
    if isinstance(value, (tuple, list)):
        size = len(value)
        return lambda x: type(x) is kind and len(x) == size
    if isinstance(value, dict):
        names = tuple(value)
        return lambda x: type(x) is kind and tuple(x) == names
    if isinstance(value, (int, float, functools.partial, MethodType)) or not _is_fixed(value):
        return lambda x: type(x) is kind
    return lambda x: x is value


# Readers of captured values; `getattr` and `getitem` are the others.


def _cell(function: FunctionType, i: int) -> Any:
    return function.__closure__[i].cell_contents  # type: ignore[index]


def _global(function: FunctionType, name: str) -> Any:
    return function.__globals__[name]


def _method(owner: Any, name: str) -> FunctionType:
    return getattr(owner, name).__func__


def _shape(x: Tensor, _: None) -> tuple[int, ...]:
    return tuple(x.shape)


def _is_compiled_in(value: Any) -> bool:
    return value is None or isinstance(value, (bool, str, bytes))


def _is_fixed(value: Any) -> bool:
    """Whether a value is a part of torch or Python that never changes, and needs no proxy."""
    if isinstance(value, torch.nn.Module):
        return False
    if isinstance(value, ModuleType):
        module = value.__name__
    elif isinstance(value, (type, FunctionType)):
        module = value.__module__ or ""
        if module.startswith(("cute_flash.masks", "torch.nn.attention.flex_attention")):
            return False  # their functions capture masks
    else:
        module = type(value).__module__ or ""
    return module.partition(".")[0] in FIXED_MODULES


class ObjectProxy:
    """A captured object: its attributes are captured too, and its methods are traced."""

    def __init__(self, tracer: CaptureTracer, value: Any, source: int) -> None:
        self.__dict__.update(_tracer=tracer, _value=value, _source=source)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._value, name)
        if isinstance(value, MethodType) and value.__self__ is self._value:
            return functools.partial(self._tracer.visit(self._source, _method, name), self)
        return self._tracer.visit(self._source, getattr, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise trace_error(f"writing .{name} of a captured object")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._value, torch.nn.Module):
            return self.forward(*args, **kwargs)
        if isinstance(self._value, type):
            raise trace_error(f"making a {self._value.__name__} inside the function")
        if not isinstance(getattr(type(self._value), "__call__", None), FunctionType):  # noqa: B004
            raise trace_error(f"calling a captured {type(self._value).__name__}")
        return self.__getattr__("__call__")(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, str)) and isinstance(self._value, (tuple, list, dict)):
            return self._tracer.visit(self._source, getitem, key)
        return self.__getattr__("__getitem__")(key)
