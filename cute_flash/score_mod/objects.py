"""Proxies of captured objects and modules, whose attributes and elements are captured values too.

Python methods are traced with the proxy in place of `self`. Methods in C cannot be traced. Those of containers run on a
copy whose elements are captured values, `ContextVar.get` returns a captured value, and others raise a `TraceError`.

`replaced` has the versions of built-in functions that mods call, such as `isinstance`, which takes proxies, and `open`,
which raises a `TraceError`.
"""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_flash.score_mod.constants import (
    MODULES_OF_CONSTANTS,
    bound_to,
    is_fixed,
    is_fixed_module,
    is_impure,
    is_numpy,
    reads_state,
)
from cute_flash.score_mod.proxy import Proxy, ScalarProxy, TensorProxy, trace_error
from cute_flash.score_mod.writes import NO_WRITES

if TYPE_CHECKING:
    from cute_flash.score_mod.captures import CaptureTracer

INSTEAD = "compute it outside the mod, and capture the number or the tensor"


class ObjectProxy:
    """A captured object: its attributes are captured too, and its methods are traced."""

    __slots__ = ("__source", "__tracer", "__value")

    def __init__(self, tracer: CaptureTracer, value: Any, source: int) -> None:
        for name, x in (("tracer", tracer), ("value", value), ("source", source)):
            object.__setattr__(self, f"_ObjectProxy__{name}", x)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.__read(type)

    def __read(self, read: Callable[..., Any], *key: Any) -> Any:
        return self.__tracer.visit(self.__source, read, *key)

    def __getattr__(self, name: str) -> Any:
        value = self.__value
        _refuse_impure(value)
        if is_numpy(value, "ndarray"):
            raise trace_error("a captured numpy array: capture torch.from_numpy(array)")
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            raise trace_error(
                f"the torch.autograd.Function {value.__name__}: write its forward in the mod; the gradient is derived "
                "from it, or given by score_mod_bwd"
            )
        try:
            attribute = getattr(value, name)
        except AttributeError:
            self.__read(hasattr, name)  # the trace is valid while the attribute is missing
            raise
        if isinstance(attribute, MethodType) and attribute.__self__ is value:
            return functools.partial(self.__read(_method, name), self)
        return self.__builtin_method(name) if bound_to(attribute) is value else self.__read(getattr, name)

    def __builtin_method(self, name: str) -> Callable:
        if isinstance(self.__value, ContextVar) and name == "get":
            return self.__context_value
        if is_container(self.__value):
            return getattr(self.__read(plain), name)

        def refused(*args: Any, **kwargs: Any) -> Any:
            raise trace_error(f".{name} of {describe(self)}: {INSTEAD}")

        return refused

    def __context_value(self, *default: Any) -> Any:
        try:
            return self.__read(ContextVar.get)
        except LookupError:
            if not default:
                raise
            self.__read(_is_set)  # the trace is valid while the variable is not set
            return default[0]

    def __setattr__(self, name: str, value: Any) -> None:
        raise trace_error(f"an assignment to .{name} of {describe(self)}: {NO_WRITES}")

    def __delattr__(self, name: str) -> None:
        raise trace_error(f"del .{name} of {describe(self)}: {NO_WRITES}")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise trace_error(f"an assignment to an element of {describe(self)}: {NO_WRITES}")

    def __delitem__(self, key: Any) -> None:
        raise trace_error(f"del of an element of {describe(self)}: {NO_WRITES}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self.__value
        _refuse_impure(value)
        if isinstance(value, torch.nn.Module):
            if value._forward_hooks or value._forward_pre_hooks:
                raise trace_error(f"calling {describe(self)}, which has hooks: remove them, or call its forward")
            return self.forward(*args, **kwargs)
        if isinstance(value, type):
            raise trace_error(f"a new {value.__name__} inside the mod: create it outside, and capture it")
        if not isinstance(getattr(type(value), "__call__", None), FunctionType):  # noqa: B004
            raise trace_error(f"calling {describe(self)}: {INSTEAD}")
        return self.__special("__call__", *args, **kwargs)

    def __special(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a special method of the object's class, as operators and built-in functions do."""
        value = self.__value
        if isinstance(getattr(type(value), name, None), FunctionType):
            return functools.partial(self.__read(_special, name), self)(*args, **kwargs)
        if is_container(value) and hasattr(plain(value), name):
            return getattr(self.__read(plain), name)(*args)
        what = "a captured numpy array" if is_numpy(value, "ndarray") else f"{name} of {describe(self)}"
        raise trace_error(f"{what}: {'capture torch.from_numpy(array)' if is_numpy(value, 'ndarray') else INSTEAD}")

    def __bool__(self) -> bool:
        value = self.__value
        if isinstance(getattr(type(value), "__bool__", None), FunctionType):
            return bool(self.__special("__bool__"))
        if hasattr(type(value), "__len__"):
            return len(self) > 0
        return self.__read(bool)

    def __len__(self) -> int:
        return self.__special("__len__")

    def __iter__(self) -> Any:
        return iter(self.__special("__iter__"))

    def __getitem__(self, key: Any) -> Any:
        return self.__special("__getitem__", key)

    def __contains__(self, key: Any) -> bool:
        value = self.__value
        if hasattr(type(value), "__contains__"):
            return bool(self.__special("__contains__", key))
        return any(bool(x == key) for x in self)

    def __eq__(self, other: Any) -> Any:
        if self is other:
            return True
        return self.__special("__eq__", other)

    def __ne__(self, other: Any) -> Any:
        return not self == other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return describe(self)

    def __str__(self) -> str:
        return self.__special("__str__")

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class ModuleProxy:
    """A module of Python, torch or numpy. Its functions, classes and constants need no proxy; other values do."""

    __slots__ = ("__module", "__tracer")

    def __init__(self, tracer: CaptureTracer, module: ModuleType) -> None:
        self.__tracer, self.__module = tracer, module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__module, name)
        if is_fixed_module(value):
            return ModuleProxy(self.__tracer, value)
        is_constant = self.__module.__name__ in MODULES_OF_CONSTANTS and isinstance(value, (int, float, str))
        if is_constant or (is_fixed(value) and not is_impure(value) and not reads_state(value)):
            return replaced(value)
        return self.__tracer.visit(0, _module_attribute, self.__module, name)


class StateReader:
    """A function of torch that reads torch's state. Its result is a captured value: it is read again at each call."""

    def __init__(self, tracer: CaptureTracer, function: Callable[..., Any]) -> None:
        self._tracer, self._function = tracer, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, (Proxy, ObjectProxy)) for x in (*args, *kwargs.values())):
            return self._function(*args, **kwargs)  # a description of a value, such as `torch.is_floating_point`
        return self._tracer.visit(0, _result, self._function, args, tuple(kwargs.items()))


def describe(x: Any) -> str:
    """A description of a captured object, for error messages."""
    value = original(x)
    return f"the captured class {value.__name__}" if type(value) is type else f"a captured {type(value).__name__}"


def original(x: Any) -> Any:
    """The captured object behind a proxy. A value that is not an `ObjectProxy` is returned unchanged."""
    return x._ObjectProxy__value if type(x) is ObjectProxy else x


def _refuse_impure(value: Any) -> None:
    if is_impure(value):
        name = f"{value.__module__}.{value.__name__}"
        raise trace_error(
            f"{name} depends on a clock, the system or random numbers, or changes them: call it outside the mod, and "
            "capture the result"
        )


def is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, Sequence, Set)) and not isinstance(value, type)


# Functions for `captures.Source.read`


def plain(value: Any) -> Any:
    """The elements of a container of any class as a dict, a list, a tuple or a frozenset."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return frozenset(value)
    return tuple(value) if isinstance(value, tuple) else list(value)


def _method(owner: Any, name: str) -> FunctionType:
    return getattr(owner, name).__func__


def _special(owner: Any, name: str) -> FunctionType:
    return getattr(type(owner), name)


def _module_attribute(_: Any, module: ModuleType, name: str) -> Any:
    return getattr(module, name)


def _result(_: Any, function: Callable[..., Any], args: tuple, kwargs: tuple) -> Any:
    return function(*args, **dict(kwargs))


def _is_set(variable: ContextVar) -> bool:
    return variable.get(_UNSET) is not _UNSET


_UNSET = object()

# Replacements of built-in functions that inspect a value: for a proxy, they inspect the captured value.


def _isinstance(x: Any, classes: Any) -> bool:
    is_proxy = type(x) is ObjectProxy or isinstance(x, (ScalarProxy, TensorProxy))
    return issubclass(_class_of(x), _originals(classes)) if is_proxy else isinstance(x, _originals(classes))


def _issubclass(cls: Any, classes: Any) -> bool:
    return issubclass(original(cls), _originals(classes))


def _class(x: Any, *others: Any) -> Any:
    if others:
        raise trace_error("a new class inside the mod: create it outside, and capture it")
    return x.__class__ if type(x) is ObjectProxy else _class_of(x)


def _callable(x: Any) -> bool:
    return callable(original(x))


def _vars(*args: Any) -> Any:
    if not args:
        raise trace_error("vars() without an argument inside the mod: name the variables")
    return args[0].__dict__


def _hash(x: Any) -> int:
    if isinstance(x, (ObjectProxy, TensorProxy)):
        raise trace_error(f"hash() of a captured value: {INSTEAD}")
    if isinstance(x, ScalarProxy) and x._python_type is None:
        raise trace_error("hash() of a value, which is not known while the mod is traced")
    return hash(x)


def _class_of(x: Any) -> type:
    if isinstance(x, ScalarProxy):
        return x._python_type or Tensor
    return Tensor if isinstance(x, TensorProxy) else type(original(x))


def _originals(classes: Any) -> Any:
    if isinstance(classes, tuple):
        return tuple(map(_originals, classes))
    return type if classes is _class else original(classes)


def _refused(name: str, instead: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise trace_error(f"{name}() inside the mod: {instead}")

    return refused


_REPLACEMENTS: dict[Any, Callable] = {
    isinstance: _isinstance, issubclass: _issubclass, type: _class, callable: _callable, vars: _vars, hash: _hash,
    dir: _refused("dir", "name the attributes"),
    globals: _refused("globals", "name the variables"),
    id: _refused("id", "compare objects with `is`"),
    operator.is_: _refused("operator.is_", "write `is`"),
    operator.is_not: _refused("operator.is_not", "write `is not`"),
    **{x: _refused(x.__name__, "write the code in the mod") for x in (compile, eval, exec)},
    **{x: _refused(x.__name__, "call it outside, and capture the result") for x in (input, open)},
}  # fmt: skip
# By name, for the built-in functions of mods.
BUILTINS = {x.__name__: new for x, new in _REPLACEMENTS.items() if hasattr(builtins, x.__name__)}


def replaced(value: Any) -> Any:
    """The version for mods of a built-in function; any other value is returned unchanged."""
    return _REPLACEMENTS.get(value, value) if isinstance(value, BuiltinFunctionType) else value
