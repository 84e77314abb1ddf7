"""From a user's function to a graph and the values of what it captured.

A function is traced once. Traces are found by code and hold as long as what was captured is of the same
types: a number or a tensor may be another one at each call, it is read again; a bool, None or a string is
compiled in, and so is a number that Python had to know, as in `range(n)` or `if n > 0`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

from cute_flash.errors import TraceError
from cute_flash.score_mod.captures import MAX_INT, Captures, Read, code_of
from cute_flash.score_mod.graph import Builder, Graph, with_used_arguments
from cute_flash.score_mod.meaning import inputs
from cute_flash.score_mod.value import Specialise, TableValue, Value, node_of

ROLES = {
    "score_mod": ("score", "b", "h", "q", "kv"),
    "mask_mod": ("b", "h", "q", "kv"),
    "score_mod_bwd": ("grad", "score", "b", "h", "q", "kv"),
}
# Of one code, and in all: a program that makes new ones without end must not grow without bound.
MAX_TRACES_OF_CODE, MAX_CODES = 16, 1024


class Bound(NamedTuple):
    """A graph and its arguments of one call."""

    graph: Graph
    tables: tuple[Tensor, ...]
    numbers: tuple[int | float, ...]


@dataclass(frozen=True)
class Trace:
    graph: Graph
    reads: tuple[Read, ...]
    tables: tuple[int, ...]  # reads
    numbers: tuple[int, ...]
    same: tuple[tuple[int, int], ...] = ()  # pairs of reads that must find one object
    _steps: tuple[tuple, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_steps", tuple((x.parent, x.get, x.holds) for x in self.reads))

    def bind(self, function: Any) -> Bound | None:
        """The arguments as they are now, or None where the trace does not hold."""
        found: list[Any] = []
        try:
            for parent, get, holds in self._steps:
                value = get(found[parent]) if get is not None else function
                if not holds(value):
                    return None
                found.append(value)
        except (AttributeError, LookupError, TypeError, ValueError):
            return None
        if any(found[i] is not found[j] for i, j in self.same):
            return None
        numbers = tuple([found[i] for i in self.numbers])
        return Bound(self.graph, tuple([found[i] for i in self.tables]), numbers)


_traces: dict[tuple[str, CodeType | type], list[Trace]] = {}
num_traces = 0  # how many were made, for tests


def bound(function: Callable, role: str) -> Bound:
    """The graph of a function, traced if need be, and what it captures now."""
    if isinstance(function, Bound):
        return function
    if not callable(function):
        raise TraceError(f"{role} is a {type(function).__name__}: give a function of ({_signature(role)})")
    key = role, code_of(function)
    for trace in _traces.get(key, ()):
        found = trace.bind(function)
        if found is not None:
            return _checked(found)
    trace = _traced(function, role)
    if len(_traces) >= MAX_CODES:
        _traces.clear()
    known = _traces.setdefault(key, [])
    known.insert(0, trace)
    del known[MAX_TRACES_OF_CODE:]
    found = trace.bind(function)
    if found is None:
        raise TraceError(f"{role}: what it captures changes while it is read")
    return _checked(found)


def _checked(found: Bound) -> Bound:
    for value in found.numbers:
        if type(value) is int and not -MAX_INT <= value < MAX_INT:
            raise TraceError(f"a captured number is {value}: kernels compute in 32 bits")
    return found


def _signature(role: str) -> str:
    long = {"q": "q_idx", "kv": "kv_idx"}
    return ", ".join(long.get(name, name) for name in ROLES[role])


def _traced(function: Callable, role: str) -> Trace:
    global num_traces
    num_traces += 1
    static: frozenset[tuple] = frozenset()
    while True:
        builder = Builder()
        captures = None
        try:
            captures = Captures(builder, function, static)
            result = captures.function(*inputs(builder, ROLES[role]))
            return _finished(builder, captures, _output(builder, result, role))
        except Specialise as needed:
            assert captures is not None
            static |= {captures.paths[captures.numbers[i]] for i in needed.numbers}
        except TraceError as error:
            raise TraceError(f"{role}: {error}") from None
        except Exception as error:
            raise TraceError(f"{role}: {type(error).__name__}: {error} ({_last_line(error)})") from error


def _last_line(error: Exception) -> str:
    """Where in the user's code an error came from."""
    where, step = "", error.__traceback__
    while step is not None:
        name = step.tb_frame.f_globals.get("__name__", "")
        if not name.startswith(("cute_flash.score_mod.", "torch.")):
            where = f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return where or "in tracing it"


def _output(builder: Builder, result: Any, role: str) -> int:
    if isinstance(result, TableValue) or not isinstance(result, (Value, bool, int, float, Tensor)):
        raise TraceError(f"it returns a {type(result).__name__}, not a value")
    node = node_of(builder, result)
    if role != "mask_mod":
        return builder.cast(node, "float")
    if builder.kind(node) != "bool":
        raise TraceError(f"it returns an {builder.kind(node)}: a mask is of bools, made by comparisons")
    return node


def _finished(builder: Builder, captures: Captures, output: int) -> Trace:
    graph, tables, numbers = with_used_arguments(builder.graph(output))
    return Trace(
        graph,
        tuple(captures.reads),
        tuple(captures.tables[i] for i in tables),
        tuple(captures.numbers[i] for i in numbers),
        tuple(captures.same),
    )
