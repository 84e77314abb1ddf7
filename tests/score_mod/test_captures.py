"""Captured values are read again at each call, or refused by an error that names an alternative."""

from __future__ import annotations

import argparse
import collections
import contextvars
import datetime
import enum
import fractions
import functools
import os
import random
import time
import types
from collections.abc import Callable
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
KEYED, ITERATOR = {Holder: 1, Slotted(1): 2}, iter([1, 2])


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
    (lambda s, b, h, q, kv: s + next(ITERATOR), "not an iterator"),
    (lambda s, b, h, q, kv: s + KEYED[1], "a captured dict has a key that is not a number or a string"),
    (lambda s, b, h, q, kv: hooked(s), "calling a captured Identity, which has hooks"),
    (lambda s, b, h, q, kv: s + Holder().cfg.w, "a new Holder inside the mod: create it outside"),
]  # fmt: skip


@pytest.mark.parametrize(("mod", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_refusals(mod: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace.bind(mod, "score_mod")
