"""Captured values are read again at each call, or refused by an error that names an alternative."""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import datetime
import enum
import fractions
import functools
import heapq
import os
import pathlib
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention

from cute_flash import TraceError, attn, masks
from cute_flash.score_mod import trace

SIZE = 12
ROWS, KEYS = torch.arange(SIZE)[:, None], torch.arange(SIZE)


def visible(mask_mod: Any) -> torch.Tensor:
    """(queries, keys): the pairs that attention with this mask uses, read from its output."""
    q, v = torch.zeros(1, 1, SIZE, 8), torch.eye(SIZE)[None, None]
    return attn(q, q, v, mask_mod=mask_mod)[0, 0] > 0


def window(size: int) -> torch.Tensor:
    return (ROWS >= KEYS) & (ROWS - KEYS < size)


class Mode(enum.Enum):
    NARROW, WIDE = 3, 7


class Sizes(enum.IntEnum):
    NARROW, WIDE = 3, 7


class Pair(NamedTuple):
    size: int
    other: int = 0


class Settings(dict):
    """A dict with attributes, as many libraries have them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Numbers(list):
    pass


@dataclass
class Holder:
    cfg: Any = field(default_factory=lambda: types.SimpleNamespace(w=3))
    flag: bool = False

    @property
    def width(self) -> int:
        return self.cfg.w

    def __len__(self) -> int:
        return self.cfg.w

    def __eq__(self, other: Any) -> bool:
        return self.cfg.w == other.cfg.w

    def mask(self, b, h, q, kv):
        return (q >= kv) & (q - kv < self.cfg.w)


@dataclass
class Named:
    w: int

    def __str__(self) -> str:
        return f"w={self.w}"


class Slotted:
    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value


variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
Case = tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]


def near(size_of: Callable) -> Callable[[Any], Any]:
    return lambda x: lambda b, h, q, kv: (q >= kv) & (q - kv < size_of(x))


def context() -> contextvars.ContextVar:
    variable.set(3)
    return variable


def _sizes_module() -> types.ModuleType:
    module = sys.modules["sizes_of_masks"] = types.ModuleType("sizes_of_masks")
    module.w, module.zero = 3, 0  # type: ignore[attr-defined]
    return module


def _imported_size(_: Any) -> Any:
    import sizes_of_masks
    from sizes_of_masks import zero

    return sizes_of_masks.w + zero


# A captured object with 3 in it, a mask of a window of that size, and the change to a window of 7.
CHANGES: dict[str, tuple[Callable[[], Any], Callable, Callable[[Any], Any]]] = {
    "SimpleNamespace": (lambda: types.SimpleNamespace(w=3), near(lambda x: x.w), lambda x: setattr(x, "w", 7)),
    "Namespace": (lambda: argparse.Namespace(w=3), near(lambda x: x.w), lambda x: setattr(x, "w", 7)),
    "contents of a Namespace": (
        lambda: argparse.Namespace(a=3), near(lambda x: 3 + 4 * ("b" in x)), lambda x: setattr(x, "b", 1),
    ),
    "vars": (lambda: types.SimpleNamespace(w=3), near(lambda x: vars(x)["w"]), lambda x: setattr(x, "w", 7)),
    "object in an object": (Holder, lambda x: x.mask, lambda x: setattr(x.cfg, "w", 7)),
    "property": (Holder, near(lambda x: x.width), lambda x: setattr(x.cfg, "w", 7)),
    "len of an object": (Holder, near(lambda x: len(x)), lambda x: setattr(x.cfg, "w", 7)),
    "== of objects": (
        lambda: [Holder(), Holder()], near(lambda x: 3 if x[0] == x[1] else 7), lambda x: setattr(x[0].cfg, "w", 5),
    ),
    "type of an attribute": (
        Holder, near(lambda x: 7 if isinstance(x.cfg, Holder) else 3), lambda x: setattr(x, "cfg", Holder()),
    ),
    "type of a number": (
        lambda: [3], near(lambda x: 7 if type(x[0]) is float else x[0]), lambda x: x.__setitem__(0, 3.0),
    ),
    "slots": (lambda: Slotted(3), near(lambda x: x._value), lambda x: setattr(x, "_value", 7)),
    "new attribute": (
        types.SimpleNamespace, near(lambda x: getattr(x, "w", 3)), lambda x: setattr(x, "w", 7),
    ),
    "hasattr": (types.SimpleNamespace, near(lambda x: 7 if hasattr(x, "w") else 3), lambda x: setattr(x, "w", 0)),
    "defaultdict": (
        lambda: collections.defaultdict(int, w=3), near(lambda x: x["w"]), lambda x: x.__setitem__("w", 7),
    ),
    "key of a defaultdict": (
        lambda: collections.defaultdict(int, a=3), near(lambda x: x.get("w", 3)), lambda x: x.__setitem__("w", 7),
    ),
    "OrderedDict": (
        lambda: collections.OrderedDict(w=3), near(lambda x: sum(x.values())), lambda x: x.__setitem__("v", 4),
    ),
    "mappingproxy": (
        lambda: (x := {"w": 3}, types.MappingProxyType(x)), near(lambda x: x[1]["w"]),
        lambda x: x[0].__setitem__("w", 7),
    ),
    "deque": (lambda: collections.deque([3]), near(lambda x: x[-1]), lambda x: x.append(7)),
    "len of a deque": (lambda: collections.deque([1] * 3), near(lambda x: len(x)), lambda x: x.extend([1] * 4)),
    "len of a set": (lambda: {1, 2, 3}, near(lambda x: len(x)), lambda x: x.update((4, 5, 6, 7))),
    "element of a set": (lambda: {1}, near(lambda x: 7 if 5 in x else 3), lambda x: x.add(5)),
    "truth of a list": (list, near(lambda x: 7 if x else 3), lambda x: x.append(0)),
    "subclass of dict": (lambda: Settings(w=3), near(lambda x: x.w), lambda x: x.update(w=7)),
    "key of a subclass of dict": (Settings, near(lambda x: 7 if "w" in x else 3), lambda x: x.update(w=7)),
    "subclass of list": (lambda: Numbers([3]), near(lambda x: sum(x)), lambda x: x.append(4)),
    "truth of a subclass of list": (Numbers, near(lambda x: 7 if x else 3), lambda x: x.append(0)),
    "named tuple": (lambda: [Pair(3)], near(lambda x: x[0].size), lambda x: x.__setitem__(0, Pair(7))),
    "unpacked named tuple": (
        lambda: [Pair(3)], near(lambda x: (lambda size, other: size)(*x[0])), lambda x: x.__setitem__(0, Pair(7)),
    ),
    "numpy scalar": (lambda: [np.int64(3)], near(lambda x: x[0]), lambda x: x.__setitem__(0, np.int64(7))),
    "int beyond 32 bits": (
        lambda: [3 + (1 << 40)], near(lambda x: x[0] - (1 << 40)), lambda x: x.__setitem__(0, 7 + (1 << 40)),
    ),
    "int that grows beyond 32 bits": (
        lambda: [3], near(lambda x: x[0] % (1 << 32)), lambda x: x.__setitem__(0, 7 + (1 << 32)),
    ),
    "numpy int64 beyond 32 bits": (
        lambda: [np.int64(3 + (1 << 40))], near(lambda x: x[0] % (1 << 32)),
        lambda x: x.__setitem__(0, np.int64(7 + (1 << 40))),
    ),
    "numpy float": (lambda: [np.float32(3)], near(lambda x: x[0]), lambda x: x.__setitem__(0, np.float32(7))),
    "numpy bool": (lambda: [np.False_], near(lambda x: 7 if x[0] else 3), lambda x: x.__setitem__(0, np.True_)),
    "Enum": (lambda: [Mode.NARROW], near(lambda x: x[0].value), lambda x: x.__setitem__(0, Mode.WIDE)),
    "identity of an Enum": (
        lambda: [Mode.NARROW], near(lambda x: 7 if x[0] is Mode.WIDE else 3), lambda x: x.__setitem__(0, Mode.WIDE),
    ),
    "IntEnum": (lambda: [Sizes.NARROW], near(lambda x: x[0]), lambda x: x.__setitem__(0, Sizes.WIDE)),
    "ContextVar": (context, near(lambda x: x.get()), lambda x: x.set(7)),
    "method of a dict": (lambda: {"w": 3}, lambda x: _getter(x.get), lambda x: x.update(w=7)),
    "partial": (
        lambda: types.SimpleNamespace(w=3), lambda x: functools.partial(_configured, x), lambda x: setattr(x, "w", 7),
    ),
    "and_masks": (
        lambda: types.SimpleNamespace(w=3),
        lambda x: flex_attention.and_masks(near(lambda x: x.w)(x), masks.causal()),
        lambda x: setattr(x, "w", 7),
    ),
    "module that the mod imports": (_sizes_module, near(_imported_size), lambda x: setattr(x, "w", 7)),
    "same list": (lambda: [[0], [0]], near(lambda x: 7 if x[0] is x[1] else 3), lambda x: x.__setitem__(0, x[1])),
    "same list, from the other side": (
        lambda: [[0]] * 2, near(lambda x: 3 if x[0] is x[1] else 7 + x[0][0]), lambda x: x.__setitem__(0, [0]),
    ),
    "same tensor": (
        lambda: [torch.zeros(2)] * 2, near(lambda x: 7 if x[0] is not x[1] else 3),
        lambda x: x.__setitem__(0, torch.zeros(2)),
    ),
    "same function": (
        lambda: [window, visible], near(lambda x: 7 if x[0] is x[1] else 3), lambda x: x.__setitem__(1, x[0]),
    ),
    "same object": (
        lambda: [Holder(), Holder()], near(lambda x: 3 if x[0] is not x[1] else 7), lambda x: x.__setitem__(0, x[1]),
    ),
    "text of an object": (
        lambda: Named(3), near(lambda x: 7 if f"{x}" == str(x) == "w=7" else 3), lambda x: setattr(x, "w", 7),
    ),
    "key of a dict": (
        lambda: types.SimpleNamespace(layer=0), near(lambda x: {0: 3, 1: 7}[x.layer]), lambda x: setattr(x, "layer", 1),
    ),
    "text of a number": (
        lambda: types.SimpleNamespace(layer=0), near(lambda x: {"l0": 3, "l1": 7}[f"l{x.layer}"]),
        lambda x: setattr(x, "layer", 1),
    ),
}  # fmt: skip


def _getter(get: Callable) -> Any:
    return lambda b, h, q, kv: (q >= kv) & (q - kv < get("w"))


def _configured(cfg: Any, b, h, q, kv):
    return (q >= kv) & (q - kv < cfg.w)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_is_noticed(name: str) -> None:
    make, mask_of, change = CHANGES[name]
    captured = make()
    mask = mask_of(captured)
    assert torch.equal(visible(mask), window(3))
    change(captured)
    assert torch.equal(visible(mask), window(7))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad mode": (torch.is_grad_enabled, torch.no_grad),
    "inference mode": (lambda: torch.is_inference_mode_enabled(), torch.inference_mode),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "default dtype": (torch.get_default_dtype, lambda: default_dtype(torch.float64)),
    "default device": (lambda: torch.get_default_device(), lambda: torch.device("meta")),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_torch_is_read_again(name: str) -> None:
    read, changed = STATES[name]
    before = read()

    def mask(b, h, q, kv):
        return (q >= kv) & (q - kv < (3 if read() == before else 7))

    def graph(mask_mod: Any) -> Any:
        return trace.bind(mask_mod, "mask_mod").graph

    narrow = graph(lambda b, h, q, kv: (q >= kv) & (q - kv < 3))
    wide = graph(lambda b, h, q, kv: (q >= kv) & (q - kv < 7))
    assert graph(mask) == narrow != wide
    with changed():
        assert graph(mask) == wide
    traces = trace.num_traces
    assert graph(mask) == narrow and trace.num_traces == traces


def test_a_number_of_the_state_of_torch_is_an_argument() -> None:
    def mask(b, h, q, kv):
        return q < torch.initial_seed()

    with torch.random.fork_rng():
        for seed in (3, 7):
            torch.manual_seed(seed)
            assert trace.bind(mask, "mask_mod").scalars == (seed,)


def test_a_number_in_a_namespace_does_not_retrace() -> None:
    cfg = types.SimpleNamespace(w=3)
    mask = near(lambda x: x.w)(cfg)
    trace.bind(mask, "mask_mod")
    before = trace.num_traces
    cfg.w = 5
    assert trace.bind(mask, "mask_mod").scalars == (5,) and trace.num_traces == before


def test_functions_of_one_code_in_torchs_and_masks() -> None:
    """torch's `and_masks` returns functions with the same code."""
    assert torch.equal(visible(flex_attention.and_masks(masks.sliding_window(3))), window(3))
    assert torch.equal(visible(flex_attention.and_masks(masks.sliding_window(7))), window(7))


def test_a_cell_that_is_assigned_later() -> None:
    def make() -> tuple[Any, Any]:
        def mask(b, h, q, kv):
            try:
                size = later
            except NameError:
                size = 3
            return (q >= kv) & (q - kv < size)

        def assign(value: int) -> None:
            nonlocal later
            later = value

        if False:
            later = 0
        return mask, assign

    mask, assign = make()
    assert torch.equal(visible(mask), window(3))
    assign(7)
    assert torch.equal(visible(mask), window(7))


def test_a_global_that_is_assigned_later() -> None:
    def mask(b, h, q, kv):
        try:
            size = defined_later  # type: ignore[name-defined]
        except NameError:
            size = 3
        return (q >= kv) & (q - kv < size)

    assert torch.equal(visible(mask), window(3))
    globals()["defined_later"] = 7
    try:
        assert torch.equal(visible(mask), window(7))
    finally:
        del globals()["defined_later"]


def test_a_context_variable_that_is_set_later() -> None:
    unset: contextvars.ContextVar[int] = contextvars.ContextVar("unset")
    mask = near(lambda x: x.get(3))(unset)
    assert torch.equal(visible(mask), window(3))
    unset.set(7)
    assert torch.equal(visible(mask), window(7))


def test_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"WIDTH": "3"})
    mask = near(lambda x: int(os.environ["WIDTH"]))(None)
    assert torch.equal(visible(mask), window(3))
    monkeypatch.setitem(os.environ, "WIDTH", "7")
    assert torch.equal(visible(mask), window(7))


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan")])
def test_numbers_that_are_compiled_in(value: float) -> None:
    cfg = types.SimpleNamespace(x=value)
    mask = near(lambda x: 7 if x.x > 1 else 3)(cfg)
    assert torch.equal(visible(mask), window(3)) and torch.equal(visible(mask), window(3))


# Tensors

TABLE = torch.randn(4, generator=torch.Generator().manual_seed(0))
TENSORS: dict[str, tuple[Any, Callable]] = {
    "SimpleNamespace": (types.SimpleNamespace(x=TABLE), lambda c, h: c.x[h]),
    "deque": (collections.deque([TABLE]), lambda c, h: c[0][h]),
    "defaultdict": (collections.defaultdict(list, x=[TABLE]), lambda c, h: c["x"][0][h]),
    "ParameterList": (torch.nn.ParameterList([torch.nn.Parameter(TABLE)]), lambda c, h: c[0][h]),
    "elements of a ParameterList": (
        torch.nn.ParameterList([torch.nn.Parameter(TABLE / 2)] * 2), lambda c, h: sum(x[h] for x in c),
    ),
    "ParameterDict": (torch.nn.ParameterDict({"x": torch.nn.Parameter(TABLE)}), lambda c, h: c["x"][h]),
    "ModuleList": (
        torch.nn.ModuleList([torch.nn.ParameterList([torch.nn.Parameter(TABLE)])]), lambda c, h: c[0][0][h],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_in_containers(name: str) -> None:
    captured, value = TENSORS[name]
    q, k, v = (torch.randn(1, 4, 8, 8) for _ in range(3))
    found = attn(q, k, v, score_mod=lambda s, b, h, i, j: s + value(captured, h) * (i - j))
    expected = attn(q, k, v, score_mod=lambda s, b, h, i, j: s + TABLE[h] * (i - j))
    torch.testing.assert_close(found, expected)


def test_gradients_of_a_parameter_list() -> None:
    tables = torch.nn.ParameterList([torch.nn.Parameter(TABLE.clone()) for _ in range(2)])
    q, k, v = (torch.randn(1, 4, 8, 8) for _ in range(3))
    attn(q, k, v, score_mod=lambda s, b, h, i, j: s + tables[1][h] * (i - j)).square().sum().backward()
    assert tables[0].grad is None and tables[1].grad.abs().sum() > 0


# Refusals

hooked = torch.nn.Identity()
hooked.register_forward_hook(lambda *x: None)
ARRAY, FRACTION, GENERATOR, COMPLEX = np.arange(4), fractions.Fraction(1, 3), random.Random(0), 1j
READ = eval
KEYED, ITERATOR = {Holder: 1, Slotted(1): 2}, iter([1, 2])
COUNTS, DEFAULTS, TAIL = collections.Counter(), collections.defaultdict(int), collections.deque([1])


def with_attribute() -> None:
    """A function with an attribute."""


with_attribute.size = 3  # type: ignore[attr-defined]


def counting(s, b, h, q, kv):
    COUNTS["a"] += 1
    return s


def catching(s, b, h, q, kv):
    try:
        return s if q >= kv else -s
    except Exception:
        return s * 3


def catching_everything(s, b, h, q, kv):
    try:
        return s + len([0] * int(q))
    except:  # noqa: E722
        return s * 3


class StraightThrough(torch.autograd.Function):
    """Its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


REFUSED = [
    (lambda s, b, h, q, kv: StraightThrough.apply(s), "the torch.autograd.Function StraightThrough: write its forward"),
    (lambda s, b, h, q, kv: s + ARRAY[h], "a captured numpy array: capture torch.from_numpy"),
    (lambda s, b, h, q, kv: s + ARRAY, "a numpy array: capture torch.from_numpy"),
    (lambda s, b, h, q, kv: s + len(ARRAY), "a captured numpy array: capture torch.from_numpy"),
    (lambda s, b, h, q, kv: s + ARRAY.sum(), "a captured numpy array: capture torch.from_numpy"),
    (lambda s, b, h, q, kv: s + np.zeros(3), "a numpy array: capture torch.from_numpy"),
    (lambda s, b, h, q, kv: s * FRACTION, "a captured Fraction as an operand: expected a number or a tensor"),
    (lambda s, b, h, q, kv: s * COMPLEX, "a captured complex as an operand"),
    (lambda s, b, h, q, kv: s * GENERATOR.random(), r"\.random of a captured Random: compute it outside the mod"),
    (lambda s, b, h, q, kv: s * random.random(), r"\.random of a captured Random: compute it outside the mod"),
    (lambda s, b, h, q, kv: s * random.uniform(0, 1), r"\.random of a captured Random: compute it outside the mod"),
    (lambda s, b, h, q, kv: s * time.time(), "time.time depends on a clock"),
    (lambda s, b, h, q, kv: s * datetime.datetime.now().day, "datetime.datetime depends on a clock"),
    (lambda s, b, h, q, kv: s * torch.rand(()), "torch.rand depends on a clock, the system or random numbers"),
    (lambda s, b, h, q, kv: s * np.random.rand(), "calling a captured .*: compute it outside"),
    (lambda s, b, h, q, kv: s + next(ITERATOR), "not an iterator: a captured object is a proxy"),
    (lambda s, b, h, q, kv: s * float(FRACTION), "'ObjectProxy': a captured object is a proxy .* compute .* outside"),
    (lambda s, b, h, q, kv: object.__setattr__(SETTINGS, "w", 4) or s, "'w': a captured object is a proxy"),
    (counting, "KeyError: 'a': a captured container is a plain dict or list while .* without the defaults"),
    (lambda s, b, h, q, kv: s * DEFAULTS["a"], "KeyError: 'a': a captured container is a plain dict"),
    (lambda s, b, h, q, kv: s * TAIL.popleft(), "no attribute 'popleft': a captured container is a plain dict or list"),
    (lambda s, b, h, q, kv: s * with_attribute.size, "'size': attributes of functions are not captured"),
    (lambda s, b, h, q, kv: np.exp(s), "does not support ufuncs .*: a value has no number .* use operators, torch"),
    (lambda s, b, h, q, kv: s + torch.tensor(q), "dtype of ScalarProxy: a value has no number"),
    (lambda s, b, h, q, kv: s + round(q / 2), "__round__ method: a value has no number"),
    (torch.compile(lambda s, b, h, q, kv: s * 2), "score_mod is a result of torch.compile: give the function itself"),
    (lambda s, b, h, q, kv: s + hash(q), r"hash\(\) of a value, which is not known"),
    (catching, "the truth of a value .* is not known"),
    (catching_everything, "the int of a value is not known"),
    (lambda s, b, h, q, kv: s + KEYED[1], "a captured dict has a key that is not a number or a string"),
    (lambda s, b, h, q, kv: hooked(s), "calling a captured Identity, which has hooks"),
    (lambda s, b, h, q, kv: s + Holder().cfg.w, "a new Holder inside the mod: create it outside"),
    (lambda s, b, h, q, kv: s * len(open(__file__).read()), r"open\(\) inside the mod: call it outside"),
    (lambda s, b, h, q, kv: s * len(pathlib.Path(__file__).read_text()), "pathlib.Path depends on a clock, the system"),
    (lambda s, b, h, q, kv: s * np.load("table.npy").item(), "numpy.load depends on a clock, the system"),
    (lambda s, b, h, q, kv: s * id(ARRAY), r"id\(\) inside the mod: compare objects with `is`"),
    (lambda s, b, h, q, kv: s * hash(GENERATOR), r"hash\(\) of a captured value: compute it outside"),
    (lambda s, b, h, q, kv: s * globals().get("SIZE", 3), r"globals\(\) inside the mod: name the variables"),
    (lambda s, b, h, q, kv: s * eval("SIZE"), r"eval\(\) inside the mod: write the code in the mod"),
    (lambda s, b, h, q, kv: exec("x = 3") or s, r"exec\(\) inside the mod: write the code in the mod"),
    (lambda s, b, h, q, kv: s * READ("SIZE"), r"eval\(\) inside the mod"),
    (lambda s, b, h, q, kv: s * __import__("time").time(), "time.time depends on a clock"),
    (lambda s, b, h, q, kv: s * len(str(GENERATOR)), "__str__ of a captured Random: compute it outside"),
    (lambda s, b, h, q, kv: (torch.manual_seed(0), s)[1], "torch.random.manual_seed depends on .* or changes them"),
]  # fmt: skip


@pytest.mark.parametrize(("mod", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_refusals(mod: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace.bind(mod, "score_mod")


# Writes: a mod runs only when it is traced, so they would be lost.


count = 0
NUMBERS, TABLES, NAMES, QUEUE = [1, 2], {"a": [1]}, {"x"}, collections.deque([1])


def _counting_global(score, b, h, q, kv):
    global count
    count += 1
    return score * count


def _counting_nonlocal() -> Any:
    calls = 0

    def mod(score, b, h, q, kv):
        def inner():
            nonlocal calls
            calls += 1

        inner()
        return score

    return mod


WRITES = {
    "global": (_counting_global, "an assignment to the global count", 2),
    "nonlocal": (_counting_nonlocal(), "an assignment to the nonlocal calls", 3),
    "append": (lambda s, b, h, q, kv: NUMBERS.append(3) or s, "a write to a captured list", 0),
    "element of a list": (lambda s, b, h, q, kv: NUMBERS.__setitem__(0, s) or s, "a write to a captured list", 0),
    "function that writes": (lambda s, b, h, q, kv: s * heapq.heappop(NUMBERS), "a write to a captured list", 0),
    "list in a dict": (lambda s, b, h, q, kv: TABLES["a"].clear() or s, "a write to a captured list", 0),
    "dict": (lambda s, b, h, q, kv: TABLES.update(b=s) or s, "a write to a captured dict", 0),
    "set": (lambda s, b, h, q, kv: NAMES.add("y") or s, "a write to a captured set", 0),
    "deque": (lambda s, b, h, q, kv: QUEUE.append(3) or s, "a write to a captured list", 0),
    "__dict__": (lambda s, b, h, q, kv: vars(SETTINGS).update(w=4) or s, "a write to a captured dict", 0),
    "attribute": (lambda s, b, h, q, kv: setattr(SETTINGS, "w", 4) or s, "an assignment to .w of a captured Simple", 0),
    "del of an attribute": (lambda s, b, h, q, kv: delattr(SETTINGS, "w") or s, "del .w of a captured Simple", 0),
    "attribute of a function": (
        lambda s, b, h, q, kv: setattr(window, "calls", 1) or s, "an assignment to .calls of a captured function", 0,
    ),
}  # fmt: skip
SETTINGS = types.SimpleNamespace(w=3)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_captured_value_is_refused(name: str) -> None:
    mod, message, line = WRITES[name]
    with pytest.raises(TraceError, match=f"score_mod: {message}.*it must not change captured values") as raised:
        trace.bind(mod, "score_mod")
    assert str(raised.value).endswith(f"({__file__}:{mod.__code__.co_firstlineno + line})")
    assert (count, NUMBERS, TABLES, NAMES, len(QUEUE)) == (0, [1, 2], {"a": [1]}, {"x"}, 1)


def test_writes_to_values_of_the_mod_itself() -> None:
    """Lists, dicts and variables that the mod makes, and assignments that change nothing."""
    sizes = [3, 0]

    def mask(b, h, q, kv):
        total, kinds = 0, {}

        def add(x):
            nonlocal total
            total += x
            kinds[x] = True

        own = [*sizes]
        own.append(0)
        own.sort()
        for size in own:
            add(size)
        sizes[1] = sizes[1]
        warnings.warn("a warning is registered in the globals of the mod", stacklevel=1)
        return (q >= kv) & (q - kv < total) & (len(kinds) == 2)

    with pytest.warns(UserWarning, match="is registered"):
        assert torch.equal(visible(mask), window(3))


def test_a_mod_that_catches_everything_may_need_captured_numbers() -> None:
    def near(size: int) -> Any:
        def mask(b, h, q, kv):
            try:
                first = len(range(size))
            except:  # noqa: E722
                first = 0
            return q - kv < first

        return mask

    for size in (2, 3):
        assert torch.equal(visible(near(size)), visible(lambda b, h, q, kv, n=size: q - kv < n))


def test_impure_classes_may_be_named() -> None:
    paths = [3, pathlib.Path()]
    is_path = lambda x: isinstance(x, pathlib.Path)  # noqa: E731
    assert torch.equal(visible(near(lambda x: x[0] if is_path(x[1]) and not is_path(x[0]) else 7)(paths)), window(3))
