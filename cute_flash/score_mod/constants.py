"""Recognizes captured values that need no proxy: functions, classes and constants of Python, torch and numpy."""

from __future__ import annotations

import enum
import operator
import re
import sys
import types
from types import BuiltinFunctionType, FunctionType, MethodWrapperType, ModuleType
from typing import Any

import torch

from cute_flash.score_mod.graph import fits

# Modules whose functions and classes need no proxy.
FIXED_MODULES = frozenset({"torch", "numpy", "cute_flash", "builtins", *sys.stdlib_module_names})
# The modules of `FIXED_MODULES` whose functions depend on a clock, the system or random numbers, or change the system.
IMPURE_MODULES = frozenset({
    "_io", "_thread", "ctypes", "datetime", "fileinput", "gc", "genericpath", "getpass", "glob", "importlib", "inspect",
    "io", "linecache", "locale", "mmap", "multiprocessing", "os", "pathlib", "pkgutil", "platform", "posix", "resource",
    "runpy", "secrets", "shutil", "signal", "socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time",
    "urllib", "uuid",
})  # fmt: skip
# The beginnings of the names of such functions of torch and numpy.
_IMPURE_NAMES = (
    "bernoulli", "from_file", "fromfile", "genfromtxt", "load", "manual_seed", "multinomial", "normal", "poisson",
    "rand", "seed",
)  # fmt: skip
# The same for functions of torch that read its state, such as `torch.is_grad_enabled`, and for those that set it.
_STATE_NAMES = ("are_", "current_", "device_count", "get_", "initial_seed", "is_")
_SETTER_NAMES = ("set_", "use_")
# Modules whose numbers and strings are constants, such as math.pi.
MODULES_OF_CONSTANTS = ("cmath", "math", "numpy", "string", "torch")
_IMMUTABLE = (
    torch.dtype, torch.layout, torch.memory_format, torch.finfo, torch.iinfo,
    operator.attrgetter, operator.itemgetter, operator.methodcaller, re.Pattern,
    types.EllipsisType, types.NotImplementedType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.GenericAlias,
    torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
_BOUND = (BuiltinFunctionType, MethodWrapperType)


def is_compiled_in(value: Any) -> bool:
    """Whether the value becomes part of the trace, so that the trace is valid only for an equal value.

    An int beyond 32 bits does, because kernels take captured ints as int32.
    """
    is_wide = type(value) is int and not is_int32(value)
    return value is None or is_wide or isinstance(value, (bool, str, bytes, range, torch.device))


def is_int32(value: int) -> bool:
    return fits(value, "int")


def is_key(value: Any) -> bool:
    """Whether a key of a dict, or an element of a set, can be compiled in."""
    if isinstance(value, tuple):
        return all(map(is_key, value))
    return is_compiled_in(value) or isinstance(value, (int, float)) or is_fixed(value)


def is_fixed(value: Any) -> bool:
    """Whether a value is a part of Python, torch or numpy that never changes, and needs no proxy."""
    if isinstance(value, enum.Enum):
        return is_key(value.value)
    if isinstance(value, (type, FunctionType)):
        # Inner functions may capture values. torch's `and_masks`, for example, returns one that captures the masks.
        is_inner = isinstance(value, FunctionType) and "<locals>" in value.__qualname__
        module = value.__module__ or ""
        return _root(module) in FIXED_MODULES and not module.startswith("cute_flash.masks") and not is_inner
    if isinstance(value, _BOUND):
        return bound_to(value) is None and _root(value.__module__ or "builtins") in FIXED_MODULES
    return isinstance(value, _IMMUTABLE) or type(value) is object or is_numpy(value, "ufunc", "dtype")


def is_fixed_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and _root(value.__name__) in FIXED_MODULES


def is_impure(function: Any) -> bool:
    """Whether a function or a class of Python, torch or numpy depends on a clock, the system or random numbers.

    Functions that set torch's state count too, because a mod runs only when it is traced.
    """
    if not isinstance(function, (type, FunctionType, BuiltinFunctionType)) or bound_to(function) is not None:
        return False
    root, name = _root(function.__module__ or ""), function.__name__
    if root not in ("torch", "numpy"):
        return root in IMPURE_MODULES
    return name.startswith(_IMPURE_NAMES) or (not isinstance(function, type) and name.startswith(_SETTER_NAMES))


def reads_state(function: Any) -> bool:
    """Whether a function of torch reads torch's state, such as the grad mode or the default dtype."""
    is_function = isinstance(function, (FunctionType, BuiltinFunctionType)) and bound_to(function) is None
    return is_function and _root(function.__module__ or "") == "torch" and function.__name__.startswith(_STATE_NAMES)


def bound_to(value: Any) -> Any:
    """The object that a built-in method is bound to; None for functions of a module or a class, and other values."""
    owner = getattr(value, "__self__", None) if isinstance(value, _BOUND) else None
    return None if isinstance(owner, (ModuleType, type)) else owner


def is_numpy(value: Any, *classes: str) -> bool:
    """Whether a value is an instance of a class of numpy, which this module does not import."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, tuple(getattr(numpy, name) for name in classes))


def _root(module: str) -> str:
    return module.partition(".")[0]
