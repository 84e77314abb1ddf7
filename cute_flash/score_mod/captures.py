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
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from cute_flash.score_mod.graph import CAPTURE_KINDS, MAX_CAPTURE_RANK, Builder, CaptureSpec
from cute_flash.score_mod.proxy import ScalarProxy, TensorProxy, trace_error

# Modules whose contents do not change: their functions and classes are used as they are.
FIXED_MODULES = frozenset({"torch", "numpy", "cute_flash", "builtins", *sys.stdlib_module_names})
MAX_CONTAINER_SIZE = 256
MAX_INT = 1 << 31


@dataclass(frozen=True)
class Source:
    """How to read a captured value, and the condition under which a trace is valid for it."""

    parent: int  # index of the source whose value `get` takes; the root has none
    get: Callable[[Any], Any]
    guard: Callable[[Any], bool]


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


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

    def __init__(self, builder: Builder, root: Any, static: frozenset[tuple]) -> None:
        self.builder, self.static = builder, static
        self.sources: list[Source] = []
        self.paths: list[tuple] = []  # of the sources, from the root
        self.captures: list[int] = []  # the source of each capture of the builder
        self.scalars: list[int] = []  # the source of each scalar of the builder
        self.proxies: dict[tuple, Any] = {}  # by path
        self.rebuilding: dict[int, tuple[FunctionType, int]] = {}  # by id; functions may refer to themselves
        self.aliases: list[tuple[int, int]] = []  # pairs of sources that found the same function
        self.function = self.proxy(root, self._source(-1, None, None, root))

    # Sources

    def _source(self, parent: int, label: Any, get: Any, value: Any) -> int:
        self.paths.append((*self.paths[parent], label) if parent >= 0 else (label,))
        self.sources.append(Source(parent, get, self._guard(value)))
        return len(self.sources) - 1

    def _guard(self, value: Any) -> Callable[[Any], bool]:
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

    def visit(self, parent: int, label: Any, get: Callable[[Any], Any], value: Any) -> Any:
        """The proxy of a value that `get` reads from the parent source's value."""
        path = (*self.paths[parent], label)
        if path not in self.proxies:
            self.proxies[path] = self.proxy(value, self._source(parent, label, get, value))
        return self.proxies[path]

    # Proxies

    def proxy(self, value: Any, source: int) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, source)
        if value is None or isinstance(value, (bool, str, bytes)):
            return value
        if isinstance(value, (int, float)):
            return value if self.paths[source] in self.static else self._scalar(value, source)
        if isinstance(value, FunctionType):
            return value if _is_fixed(value) else self._function(value, source)
        if isinstance(value, MethodType):
            return self._method(value, source)
        if isinstance(value, functools.partial):
            func = self.visit(source, "func", attrgetter("func"), value.func)
            args = self.visit(source, "args", attrgetter("args"), value.args)
            return functools.partial(
                func, *args, **self.visit(source, "keywords", attrgetter("keywords"), value.keywords)
            )
        if type(value) in (tuple, list, dict):
            return self._container(value, source)
        return value if _is_fixed(value) else ObjectProxy(self, value, source)

    def _scalar(self, value: int | float, source: int) -> ScalarProxy:
        self.builder.scalars.append("int" if isinstance(value, int) else "float")
        self.scalars.append(source)
        return ScalarProxy(self.builder, self.builder.scalar(len(self.scalars) - 1))

    def _tensor(self, value: Tensor, source: int) -> Any:
        dtype = dtype_name(value)
        if dtype not in CAPTURE_KINDS:
            raise trace_error(f"a captured tensor is {dtype}: use one of {', '.join(CAPTURE_KINDS)}")
        if value.dim() > MAX_CAPTURE_RANK:
            raise trace_error(f"a captured tensor has {value.dim()} dimensions: at most {MAX_CAPTURE_RANK}")
        self.builder.captures.append(CaptureSpec(dtype, value.dim()))
        self.captures.append(source)
        capture = len(self.captures) - 1
        if value.dim() == 0:
            return ScalarProxy(self.builder, self.builder.load(capture, ()))

        def size(dim: int) -> Any:
            shape = self.visit(source, "shape", _shape, tuple(value.shape))
            return shape[dim]

        return TensorProxy(self.builder, capture, size)

    def _container(self, value: Any, source: int) -> Any:
        if len(value) > MAX_CONTAINER_SIZE:
            raise trace_error(f"a captured {type(value).__name__} of {len(value)}: capture a tensor")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        proxies = {key: self.visit(source, key, itemgetter(key), item) for key, item in items}
        return proxies if isinstance(value, dict) else type(value)(proxies.values())

    def _method(self, value: MethodType, source: int) -> Any:
        func = self.visit(source, "__func__", attrgetter("__func__"), value.__func__)
        owner = self.visit(source, "__self__", attrgetter("__self__"), value.__self__)
        return functools.partial(func, owner)

    def _function(self, value: FunctionType, source: int) -> FunctionType:
        """A function with the same code, whose closure, globals and defaults are proxies."""
        if id(value) in self.rebuilding:
            new, first = self.rebuilding[id(value)]
            self.aliases.append((first, source))
            return new
        code = value.__code__
        names: dict[str, Any] = {"__builtins__": value.__globals__.get("__builtins__", __builtins__)}
        names["__name__"] = value.__globals__.get("__name__", "")
        cells = tuple(CellType() for _ in code.co_freevars)
        new = FunctionType(code, names, value.__name__, None, cells)
        # Registered before its captures are visited, because it may capture itself.
        self.rebuilding[id(value)] = new, source
        for i, (cell, old) in enumerate(zip(cells, value.__closure__ or ())):
            try:
                contents = old.cell_contents
            except ValueError:
                continue  # not yet assigned
            cell.cell_contents = self.visit(source, ("cell", i), _cell(i), contents)
        for name in _global_names(code):
            if name in value.__globals__:
                contents = value.__globals__[name]
                names[name] = self.visit(source, ("global", name), _global(name), contents)
        if value.__defaults__:
            defaults = attrgetter("__defaults__")
            new.__defaults__ = self.visit(source, "__defaults__", defaults, value.__defaults__)
        if value.__kwdefaults__:
            defaults = attrgetter("__kwdefaults__")
            new.__kwdefaults__ = self.visit(source, "__kwdefaults__", defaults, value.__kwdefaults__)
        del self.rebuilding[id(value)]
        return new


def _cell(i: int) -> Callable[[Any], Any]:
    return lambda function: function.__closure__[i].cell_contents


def _global(name: str) -> Callable[[Any], Any]:
    return lambda function: function.__globals__[name]


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _is_fixed(value: Any) -> bool:
    """Whether a value is a part of torch or Python that never changes, and needs no proxy."""
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


class ObjectProxy:
    """A captured object: its attributes are captured too, and its methods are traced."""

    def __init__(self, tracer: CaptureTracer, value: Any, source: int) -> None:
        self.__dict__.update(_tracer=tracer, _value=value, _source=source)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._value, name)
        if isinstance(value, MethodType) and value.__self__ is self._value:
            get = attrgetter(f"{name}.__func__")
            func = self._tracer.visit(self._source, ("method", name), get, value.__func__)
            return functools.partial(func, self)
        return self._tracer.visit(self._source, name, attrgetter(name), value)

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
            get = itemgetter(key)
            return self._tracer.visit(self._source, ("item", key), get, get(self._value))
        return self.__getattr__("__getitem__")(key)
