"""Traces a mod into a graph, and binds the graph to the values that the mod captures.

A mod is traced once. Traces are cached by code object and guarded, as in torch.compile: a trace is valid while the
captured values have the same types. Captured numbers and tensors are read again at each call and may differ. Bools,
None, strings and ints beyond 32 bits are compiled in, and so are numbers that Python itself needs, as in `range(n)` or
`if n > 0`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

from cute_flash.errors import TraceError
from cute_flash.score_mod.captures import CaptureTracer, ComparesObjects, Options, Source, code_of, definition_of
from cute_flash.score_mod.graph import INT_BITS, Builder, Graph, drop_unused_arguments
from cute_flash.score_mod.numbers import Computed, extend
from cute_flash.score_mod.overrides import inputs
from cute_flash.score_mod.proxy import (
    ScalarProxy,
    Specialise,
    TensorProxy,
    is_row,
    node_of,
    refusals,
    user_line,
    without_line,
)
from cute_flash.score_mod.writes import NO_WRITES, line_of_first_write

# The inputs of each kind of mod.
ROLES = {
    "score_mod": ("score", "b", "h", "q", "kv"),
    "mask_mod": ("b", "h", "q", "kv"),
    "score_mod_bwd": ("grad", "score", "b", "h", "q", "kv"),
}
# What an error of Python, torch or numpy inside a mod may mention, and the remedy.
_REMEDIES = {
    "ScalarProxy": "a value has no number while a mod is traced: use operators, torch functions and tensor methods",
    "ObjectProxy": "a captured object is a proxy while a mod is traced: compute the value outside, and capture it",
    "'function' object has no attribute": "attributes of functions are not captured: capture the value in a variable",
    **dict.fromkeys(
        ("KeyError", "'list' object has no attribute", "'dict' object has no attribute"),
        "a captured container is a plain dict or list while a mod is traced, without the defaults and methods of its "
        "class: compute the value outside the mod, and capture it",
    ),
}
# Bounds of the cache, for programs that create new functions endlessly.
MAX_TRACES_OF_CODE, MAX_CODES = 16, 1024


class BoundMod(NamedTuple):
    """A graph and the captured values of one call."""

    graph: Graph
    captures: tuple[Tensor, ...]
    scalars: tuple[int | float, ...]


@dataclass(frozen=True)
class Trace:
    """A graph, and how to read the values that a mod with the same code captures."""

    graph: Graph
    sources: tuple[Source, ...]
    captures: tuple[int, ...]  # indices into sources
    scalars: tuple[int, ...]  # indices into sources, constants and computed, one after the other
    constants: tuple[int | float, ...]  # operands of computed
    computed: tuple[Computed, ...]
    aliases: tuple[tuple[int, int], ...]  # pairs of sources that must give the same object
    distinct: tuple[int, ...]  # sources that must give different objects

    def bind(self, mod: Any) -> BoundMod | None:
        """Read the captured values of a mod; None if a guard fails."""
        values: list[Any] = []
        try:
            for parent, read, key, guard in self.sources:
                value = mod if read is None else read(values[parent], *key)
                if not guard(value):
                    return None
                values.append(value)
        except (AttributeError, LookupError, TypeError, ValueError):
            return None
        for i, j in self.aliases:
            if values[i] is not values[j]:
                return None
        if self.distinct and len({id(values[i]) for i in self.distinct}) < len(self.distinct):
            return None
        if self.computed:
            values += self.constants
            if not extend(values, self.computed):
                return None
        scalars = tuple([values[i] for i in self.scalars]) if self.scalars else ()
        captures = tuple([values[i] for i in self.captures]) if self.captures else ()
        return BoundMod(self.graph, captures, scalars)


_traces: dict[tuple[str, CodeType | type], list[Trace]] = {}
num_traces = 0  # the number of traces so far, for tests


def bind(mod: Callable, role: str) -> BoundMod:
    """The graph of a mod and the values that it captures now. The mod is traced if no cached trace is valid.

    Args:
        mod: The function. A `BoundMod` is returned unchanged.
        role: "score_mod", "mask_mod" or "score_mod_bwd".

    Raises:
        ValueError: The mod is not a function.
        TraceError: The mod cannot be traced.
    """
    if isinstance(mod, BoundMod):
        return mod
    key = role, code_of(mod)
    for trace in _traces.get(key, ()):
        if (bound_mod := trace.bind(mod)) is not None:
            return bound_mod
    check_callable(mod, role)
    trace = _traced(mod, role)
    if len(_traces) >= MAX_CODES:
        _traces.clear()
    traces = _traces.setdefault(key, [])
    traces.insert(0, trace)
    del traces[MAX_TRACES_OF_CODE:]
    bound_mod = trace.bind(mod)
    if bound_mod is None:
        raise TraceError(
            f"{role}: a captured value changes each time it is read: read it outside, and capture the result"
        )
    return bound_mod


def check_callable(mod: Any, role: str) -> None:
    if not callable(mod):
        names = {"q": "q_idx", "kv": "kv_idx"}
        signature = ", ".join([names.get(name, name) for name in ROLES[role]])
        raise ValueError(f"{role} is of type {type(mod).__name__}: give a function of ({signature})")
    if hasattr(mod, "_torchdynamo_orig_callable"):
        raise TraceError(f"{role} is a result of torch.compile: give the function itself, which attn compiles")


@contextmanager
def _errors_at_definition(mod: Callable) -> Iterator[None]:
    """Make errors inside the block name the line where the mod is defined, for code that runs outside the mod."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{without_line(error)} ({definition_of(mod)})") from None


def _traced(mod: Callable, role: str) -> Trace:
    """Trace a mod.

    The mod is traced again if Python needs captured numbers (`Specialise`), with these numbers compiled in, and if it
    compares objects by `is`.
    """
    global num_traces
    num_traces += 1
    options = Options()
    while True:
        builder = Builder()
        tracer, refusals.first = None, None
        try:
            with _errors_at_definition(mod):
                tracer = CaptureTracer(builder, mod, options)
            result = tracer.function(*inputs(builder, ROLES[role]))
            if refusals.first is not None:
                raise refusals.first  # the mod caught it
            if what := tracer.writes.first():
                raise TraceError(f"{what}: {NO_WRITES} ({_line_of_first_write(mod, role, options)})")
            with _errors_at_definition(mod):
                output = output_node(builder, result, role)
            graph, captures, scalars = drop_unused_arguments(builder.graph(output))
            places, constants, computed = tracer.numbers.placed(len(tracer.sources))
            return Trace(
                graph=graph,
                sources=tuple(tracer.sources),
                captures=tuple(tracer.captures[i] for i in captures),
                scalars=tuple(places[i] for i in scalars),
                constants=tuple(constants),
                computed=tuple(computed),
                aliases=tuple(tracer.aliases),
                distinct=tuple(tracer.distinct.values()),
            )
        except Specialise as needed:
            assert tracer is not None
            static = {tracer.paths[source] for source in tracer.numbers.sources(needed.scalars)}
            options = options._replace(static=options.static | static)
        except ComparesObjects:
            options = options._replace(by_identity=True)
        except TraceError as error:
            raise TraceError(f"{role}: {error}") from None
        except Exception as error:
            line = user_line(reversed(list(walk_tb(error.__traceback__)))) or definition_of(mod)
            message = f"{type(error).__name__}: {error}"
            remedies = [f": {remedy}" for text, remedy in _REMEDIES.items() if text in message]
            raise TraceError(f"{role}: {message}{''.join(remedies[:1])} ({line})") from error
        finally:
            refusals.first = None


def _line_of_first_write(mod: Callable, role: str, options: Options) -> str:
    builder = Builder()
    tracer = CaptureTracer(builder, mod, options)
    return line_of_first_write(lambda: tracer.function(*inputs(builder, ROLES[role])), tracer.writes)


def output_node(builder: Builder, result: Any, role: str) -> int:
    """The node of a mod's result, cast to the kind that its role requires."""
    if is_row(result):
        raise TraceError("it returns a row of values: index or reduce it")
    if isinstance(result, TensorProxy) or not isinstance(result, (ScalarProxy, bool, int, float, Tensor)):
        raise TraceError(f"it returns a {type(result).__name__}: return a value, such as the score")
    node = node_of(builder, result)
    if role != "mask_mod":
        return builder.cast(node, "float")
    if (kind := builder.kind(node)) != "bool":
        article = "an" if kind in INT_BITS else "a"
        raise TraceError(f"it returns {article} {kind}: return a bool, such as the result of a comparison")
    return node
