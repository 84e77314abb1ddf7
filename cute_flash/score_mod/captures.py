"""Replaces the values that a mod captures by proxies: closures, defaults, globals, and attributes of objects.

The mod is rebuilt with proxies: captured tensors become captures of the graph, captured numbers become its scalars, and
captured functions and objects are rebuilt recursively. A `Source` records how to read each value. The next call, of the
same function or of another one with the same code, uses it to read the value again and to check that the trace is
still valid.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
from collections.abc import Callable
from operator import getitem
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash.score_mod.constants import (
    bound_to,
    is_compiled_in,
    is_fixed,
    is_fixed_module,
    is_impure,
    is_int32,
    is_key,
    is_numpy,
    reads_state,
)
from cute_flash.score_mod.graph import CAPTURE_KINDS, MAX_CAPTURE_RANK, Builder, CaptureSpec
from cute_flash.score_mod.numbers import Numbers
from cute_flash.score_mod.objects import BUILTINS, ModuleProxy, ObjectProxy, StateReader, is_container, plain, replaced
from cute_flash.score_mod.proxy import ScalarProxy, TensorProxy, trace_error
from cute_flash.score_mod.writes import WriteLog

MAX_CONTAINER_SIZE = 256


class Source(NamedTuple):
    """How to read a captured value, and the condition under which a trace is valid for it."""

    parent: int  # index of the source that holds this value, such as the function that captures it
    read: Callable[..., Any] | None  # read(parent's value, *key) returns the value; None for the mod itself
    key: tuple
    guard: Callable[[Any], bool]  # whether the trace is valid for a value


def code_of(function: Any) -> CodeType | type:
    """The key under which traces of a function are cached: its code object, or the type of a callable object."""
    if type(function) is FunctionType:
        return function.__code__
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function.__code__ if isinstance(function, FunctionType) else type(function)


def definition_of(mod: Any) -> str:
    """The file and line where a mod is defined, or the class of a callable object, for error messages.

    For a wrapper (`__wrapped__`), it is the definition of the wrapped function.
    """
    code = code_of(inspect.unwrap(mod))
    if isinstance(code, CodeType):
        return f"{code.co_filename}:{code.co_firstlineno}"
    return f"{code.__module__}.{code.__qualname__}"


@functools.lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> tuple[str, ...]:
    names = [x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = (name for x in code.co_consts if isinstance(x, CodeType) for name in _global_names(x))
    return tuple(dict.fromkeys([*names, *inner]))


@functools.lru_cache(maxsize=1024)
def _compares_objects(code: CodeType) -> bool:
    """Whether `is` compares two values of which the second is no constant, such as None."""
    before = None
    for x in dis.get_instructions(code):
        if x.opname == "IS_OP" and before != "LOAD_CONST":
            return True
        before = x.opname
    return any(_compares_objects(x) for x in code.co_consts if isinstance(x, CodeType))


class ComparesObjects(BaseException):
    """Raised when a mod compares objects by `is`, to trace it again with `Options.by_identity`."""


class Options(NamedTuple):
    """Captured values that are compiled into the graph: none at first, and more if tracing needs them."""

    static: frozenset[tuple] = frozenset()  # the paths of numbers to compile in
    # Whether one object has one proxy, and the trace is valid for the same objects only. Mods with `is` need it.
    by_identity: bool = False


class CaptureTracer:
    """Rebuilds a mod with proxies for its captured values."""

    def __init__(self, builder: Builder, mod: Any, options: Options) -> None:
        self.builder, (self.static, self.by_identity) = builder, options
        self.writes = WriteLog()
        self.builtins = {**vars(builtins), **BUILTINS, "__import__": self._import}
        self.sources = [Source(-1, None, (), _guard(mod))]
        self.values = [mod]  # the value of each source
        self.paths: list[tuple] = [()]  # the path of each source: the (read, key) pairs that lead from the mod to it
        self.captures: list[int] = []  # the source of each capture of the builder
        self.numbers = Numbers(builder)
        builder.compute = self.numbers.compute
        self.proxies: dict[tuple, Any] = {}  # by path
        self.rebuilding: dict[int, tuple[FunctionType, int]] = {}  # functions in progress, by id, with their sources
        self.objects: dict[int, tuple[ObjectProxy, int]] = {}  # by id, with their sources
        self.aliases: list[tuple[int, int]] = []  # pairs of sources with the same function or object
        self.distinct: dict[int, int] = {}  # with `by_identity`: the first source of each object, by id
        self.function = self._proxy(mod, 0)

    def visit(self, parent: int, read: Callable[..., Any], *key: Any) -> Any:
        """The proxy of the value that `read` gets from the value of the parent source."""
        path = (*self.paths[parent], (read, key))
        if path not in self.proxies:
            value, source = read(self.values[parent], *key), len(self.sources)
            self.sources.append(Source(parent, read, key, _guard(value, path in self.static)))
            self.values.append(value)
            self.paths.append(path)
            first = self._first_source(value, source)
            if first == source:
                self.proxies[path] = self._proxy(value, source)
            else:
                self.aliases.append((first, source))
                self.proxies[path] = self.proxies[self.paths[first]]
        return self.proxies[path]

    def _first_source(self, value: Any, source: int) -> int:
        """With `by_identity`, the first source of an object. Numbers and constants are no objects."""
        if not self.by_identity or isinstance(value, (int, float)) or is_compiled_in(value) or is_fixed(value):
            return source
        first = self.distinct.setdefault(id(value), source)
        return first if self.paths[first] in self.proxies else source  # a function that captures itself is in progress

    def _proxy(self, value: Any, source: int) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, source)
        if reads_state(value):
            return StateReader(self, value)
        is_constant = is_compiled_in(value) or (is_fixed(value) and not is_impure(value))
        if is_constant or self.paths[source] in self.static:
            return replaced(value)
        if type(value) in (int, float):
            return ScalarProxy(self.builder, self.numbers.add(value, source))
        if isinstance(value, (int, float)) or is_numpy(value, "generic"):
            return self.visit(source, _number)
        if isinstance(value, MethodType):
            return functools.partial(self.visit(source, getattr, "__func__"), self.visit(source, getattr, "__self__"))
        if bound_to(value) is not None:
            return getattr(self.visit(source, getattr, "__self__"), value.__name__)
        if isinstance(value, functools.partial):
            func, args, keywords = (self.visit(source, getattr, name) for name in ("func", "args", "keywords"))
            return functools.partial(func, *args, **keywords)
        if isinstance(value, functools._lru_cache_wrapper):
            return self.visit(source, getattr, "__wrapped__")
        if type(value) in (tuple, list, dict, set, frozenset):
            return self._container(value, source)
        if is_fixed_module(value):
            return ModuleProxy(self, value)
        if isinstance(value, FunctionType) and not is_impure(value):
            return self._function(value, source)
        if is_container(value) and is_fixed(type(value)):
            return self.visit(source, plain)
        return self._object(value, source)

    def _object(self, value: Any, source: int) -> ObjectProxy:
        """One proxy per object, so that `is` and `==` of proxies give the results of the objects."""
        if id(value) in self.objects:
            proxy, first = self.objects[id(value)]
            self.aliases.append((first, source))
            return proxy
        proxy = ObjectProxy(self, value, source)
        self.objects[id(value)] = proxy, source
        return proxy

    def _tensor(self, value: Tensor, source: int) -> Any:
        self.captures.append(source)
        return capture(self.builder, value.dtype, value.dim(), lambda: self.visit(source, _shape))

    def _container(self, value: Any, source: int) -> Any:
        if len(value) > MAX_CONTAINER_SIZE:
            raise trace_error(
                f"a captured {type(value).__name__} of {len(value)} elements, more than {MAX_CONTAINER_SIZE}: "
                "capture a tensor"
            )
        if isinstance(value, (dict, set, frozenset)) and not all(map(is_key, value)):
            what = "key" if isinstance(value, dict) else "element"
            raise trace_error(
                f"a captured {type(value).__name__} has a {what} that is not a number or a string: "
                "compute the value outside the mod, and capture it"
            )
        proxy: Any
        if isinstance(value, (set, frozenset)):
            proxy = type(value)(value)
        else:
            keys = value if isinstance(value, dict) else range(len(value))
            proxies = {key: self.visit(source, getitem, key) for key in keys}
            proxy = proxies if isinstance(value, dict) else type(value)(proxies.values())
        self.writes.watch_container(proxy)
        return proxy

    def _import(self, *args: Any, **kwargs: Any) -> Any:
        """`import` inside the mod: the attributes of a module are captured values."""
        return self.visit(0, _imported, builtins.__import__(*args, **kwargs))

    def _function(self, value: FunctionType, source: int) -> FunctionType:
        """A function with the same code and with proxies in its closure, globals and defaults."""
        if id(value) in self.rebuilding:
            new, first = self.rebuilding[id(value)]
            self.aliases.append((first, source))
            return new
        code = value.__code__
        if _compares_objects(code) and not self.by_identity:
            raise ComparesObjects
        names: dict[str, Any] = {"__builtins__": self.builtins}
        names |= {x: value.__globals__[x] for x in ("__name__", "__package__") if x in value.__globals__}
        cells = tuple(CellType() for _ in code.co_freevars)
        new = FunctionType(code, names, value.__name__, None, cells)
        # Registered before its captures are visited, because it may capture itself.
        self.rebuilding[id(value)] = new, source
        for i, (cell, old) in enumerate(zip(cells, value.__closure__ or ())):
            if old == CellType():  # an unassigned cell
                self.visit(source, _has_cell, i)
            else:
                cell.cell_contents = self.visit(source, _cell, i)
        for name in _global_names(code):
            if name in value.__globals__:
                names[name] = self.visit(source, _global, name)
            elif not hasattr(builtins, name):
                self.visit(source, _has_global, name)
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(value, name):
                setattr(new, name, self.visit(source, getattr, name))
        del self.rebuilding[id(value)]
        self.writes.watch_function(new)
        return new


def capture(builder: Builder, dtype: torch.dtype, rank: int, sizes: Callable[[], tuple]) -> ScalarProxy | TensorProxy:
    """Add a captured tensor to a graph."""
    name = str(dtype).removeprefix("torch.")
    if name not in CAPTURE_KINDS:
        raise trace_error(f"a captured tensor is {name}: use one of {', '.join(CAPTURE_KINDS)}")
    if rank > MAX_CAPTURE_RANK:
        raise trace_error(f"a captured tensor has {rank} dimensions: give it at most {MAX_CAPTURE_RANK}")
    builder.captures.append(CaptureSpec(name, rank))
    i = len(builder.captures) - 1
    return TensorProxy(builder, i, sizes) if rank else ScalarProxy(builder, builder.load(i, ()))


def _guard(value: Any, is_static: bool = False) -> Callable[[Any], bool]:
    """The condition under which a trace that was made with this value is valid for another value."""
    kind = type(value)
    if isinstance(value, Tensor):
        dtype, rank = value.dtype, value.dim()
        return lambda x: isinstance(x, Tensor) and x.dtype == dtype and x.dim() == rank
    if is_static and (value == 0 or value != value):
        text = repr(value)  # differs for 0.0 and -0.0, and is equal for NaN
        return lambda x: type(x) is kind and repr(x) == text
    if is_compiled_in(value) or is_static:
        return lambda x: type(x) is kind and x == value
    if isinstance(value, FunctionType):
        code = value.__code__
        return lambda x: type(x) is FunctionType and x.__code__ is code
    if kind in (tuple, list):
        size = len(value)
        return lambda x: type(x) is kind and len(x) == size
    if kind is dict:
        names = tuple(value)
        return lambda x: type(x) is kind and tuple(x) == names
    if kind in (set, frozenset):
        elements = frozenset(value)
        return lambda x: type(x) is kind and x == elements
    if bound_to(value) is not None:
        name = value.__name__
        return lambda x: type(x) is kind and x.__name__ == name
    if is_fixed(value) or isinstance(value, ModuleType):
        return lambda x: x is value
    if kind is int:
        return lambda x: type(x) is int and is_int32(x)
    return lambda x: type(x) is kind


# Functions for `Source.read`. Built-in functions and those of `objects` are used too.


def _cell(function: FunctionType, i: int) -> Any:
    return function.__closure__[i].cell_contents  # type: ignore[index]


def _has_cell(function: FunctionType, i: int) -> bool:
    return function.__closure__[i] != CellType()  # type: ignore[index]


def _global(function: FunctionType, name: str) -> Any:
    return function.__globals__[name]


def _has_global(function: FunctionType, name: str) -> bool:
    return name in function.__globals__


def _imported(_: Any, module: ModuleType) -> ModuleType:
    return module


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _number(x: Any) -> Any:
    """The int, float or bool of a numpy scalar or of an instance of a subclass."""
    if is_numpy(x, "generic"):
        return x.item()
    return int(x) if isinstance(x, int) else float(x)
