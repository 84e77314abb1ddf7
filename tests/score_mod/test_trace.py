"""Tracing of mods: compiled-in values, arguments, refusals, and the time of a call with a known mod."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cute_flash import TraceError, UnsupportedError, attn
from cute_flash.score_mod import trace
from cute_flash.score_mod.bound import BoundMods
from cute_flash.score_mod.graph import COLUMN, ROW, SCORE, B, Builder, CaptureSpec, H
from cute_flash.score_mod.trace import bind
from tests.call_count import python_calls

TABLE = torch.randn(4, 9)
SIZE = 5


def traced(function: Any, role: str = "score_mod") -> trace.BoundMod:
    return bind(function, role)


def is_traced_anew(function: Any, role: str = "score_mod") -> bool:
    before = trace.num_traces
    bind(function, role)
    return trace.num_traces > before


def window(size: int) -> Any:
    return lambda b, h, q, kv: q - kv < size


def both(f: Any, g: Any) -> Any:
    return lambda *place: f(*place) & g(*place)


# Arguments


def test_text() -> None:
    slopes = torch.rand(4)

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * torch.abs(q_idx - kv_idx)

    found = traced(alibi)
    assert found.captures == (slopes,) and found.scalars == ()
    assert str(found.graph).splitlines() == [
        "capture 0: float32, 1-d",
        "%0 = input 'score' : float",
        "%1 = input 'h' : int",
        "%2 = load 0 %1 : float",
        "%3 = input 'q' : int",
        "%4 = input 'kv' : int",
        "%5 = sub %3 %4 : int",
        "%6 = abs %5 : int",
        "%7 = to_float %6 : float",
        "%8 = mul %2 %7 : float",
        "%9 = sub %0 %8 : float",
        "return %9",
    ]
    assert found.graph.depends == (SCORE, H, H, ROW, COLUMN, *[ROW | COLUMN] * 3, H | ROW | COLUMN, 31 - B)


def test_numbers_and_tensors_are_arguments() -> None:
    def make(table: torch.Tensor, size: int, rate: float) -> Any:
        return lambda score, b, h, q, kv: torch.where(q - kv < size, score * rate + table[h, kv], 0.0)

    first = traced(make(TABLE, 3, 0.5))
    assert set(first.scalars) == {3, 0.5}
    other = torch.randn(8, 100)
    assert not is_traced_anew(make(other, 7, 0.25))
    again = traced(make(other, 7, 0.25))
    assert again.graph is first.graph and again.captures == (other,) and set(again.scalars) == {7, 0.25}
    # Another type is another graph.
    assert is_traced_anew(make(other.half(), 7, 0.25))
    assert traced(make(other.half(), 7, 0.25)).graph != first.graph
    assert is_traced_anew(make(other, 7, 1))


def test_globals_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(b, h, q, kv):
        return q - kv < SIZE

    assert traced(mask, "mask_mod").scalars == (5,)
    monkeypatch.setitem(globals(), "SIZE", 6)
    assert traced(mask, "mask_mod").scalars == (6,) and not is_traced_anew(mask, "mask_mod")


def test_bools_and_none_are_compiled_in() -> None:
    def make(flag: Any) -> Any:
        return lambda score, b, h, q, kv: score * 2 if flag else score

    assert traced(make(True)).graph != traced(make(None)).graph == traced(make(False)).graph
    assert not is_traced_anew(make(True)) and not is_traced_anew(make(None))


def test_a_number_that_python_must_know_is_compiled_in() -> None:
    def make(times: int, rate: float) -> Any:
        def mod(score, b, h, q, kv):
            for _ in range(times):
                score = score + kv * rate
            return score if rate > 0 else -score

        return mod

    found = traced(make(2, 0.5))
    assert found.scalars == () and len(found.graph.nodes) < len(traced(make(3, 0.5)).graph.nodes)
    assert not is_traced_anew(make(3, 0.5)) and is_traced_anew(make(3, 0.25))
    assert traced(lambda score, b, h, q, kv: score**SIZE).scalars == ()


def test_equal_functions_share_a_graph() -> None:
    one = traced(lambda score, b, h, q, kv: score + TABLE[h, q])
    other = traced(lambda s, batch, head, i, j: torch.add(s, TABLE[head][i]))
    assert one.graph == other.graph and hash(one.graph) == hash(other.graph)


# Functions and objects that are traced


def test_defaults_keywords_partials_and_helpers() -> None:
    def helper(x, rate=2.0, *, shift=1.0):
        return x * rate + shift

    def mod(factor, score, b, h, q, kv, extra=3):
        return helper(score * factor + extra)

    found = traced(functools.partial(mod, 0.5))
    assert sorted(found.scalars) == [0.5, 1.0, 2.0, 3]
    assert 0.75 in traced(functools.partial(mod, 0.75)).scalars
    assert not is_traced_anew(functools.partial(mod, 0.75))


def test_one_code_with_other_captures() -> None:
    one = window(5)
    assert traced(both(one, one), "mask_mod").scalars == (5, 5)
    assert not is_traced_anew(both(window(6), window(7)), "mask_mod")
    assert traced(both(window(6), window(7)), "mask_mod").scalars == (6, 7)


class Learned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.rate = torch.nn.Parameter(torch.randn(4)), 2.0

    def scaled(self, x):
        return x * self.rate

    def forward(self, score, b, h, q_idx, kv_idx):
        return self.scaled(score) + self.table[h]


@dataclass
class Window:
    size: int
    ids: tuple[torch.Tensor, ...]

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < self.size) & (self.ids[0][q_idx] == self.ids[0][kv_idx])


def test_objects_with_state() -> None:
    learned = Learned()
    found = traced(learned)
    assert found.captures[0] is learned.table and found.scalars == (2.0,)
    learned.rate = 3.0
    assert traced(learned).scalars == (3.0,) and traced(learned.forward).graph == found.graph
    assert not is_traced_anew(Learned())
    mask = Window(3, (torch.arange(9),))
    found = traced(mask, "mask_mod")
    assert found.scalars == (3,) and found.captures[0] is mask.ids[0]
    assert not is_traced_anew(Window(4, (torch.arange(9),)), "mask_mod")


def test_a_function_that_calls_itself() -> None:
    def power(x, n):
        return x if n == 0 else power(x * x, n - 1)

    found = traced(lambda score, b, h, q, kv: power(score, 3))
    assert [node.op for node in found.graph.nodes] == ["input", "mul", "mul", "mul"]


def test_sizes_of_captured_tensors_are_arguments() -> None:
    def make(table: torch.Tensor) -> Any:
        return lambda score, b, h, q, kv: score + table[h, (q - kv).clamp(0, table.shape[1] - 1)]

    assert traced(make(TABLE)).scalars == (8,)
    assert traced(make(torch.randn(4, 20))).scalars == (19,)


def test_tensors_of_no_dimension_are_values() -> None:
    scale = torch.tensor(2.0)
    found = traced(lambda score, b, h, q, kv: score * scale + torch.tensor(0.5))
    assert found.captures == (scale,) and found.graph.captures[0].rank == 0


# Refusals

BAD = [
    (lambda s, b, h, q, kv: torch.lgamma(s), "torch.*lgamma is not supported in a mod"),
    (lambda s, b, h, q, kv: s if s > 0 else -s, r"use torch.where\(condition, a, b\)"),
    (lambda s, b, h, q, kv: (s > 0) and s, r"use torch.where\(condition, a, b\), and &, \| and ~"),
    (lambda s, b, h, q, kv: max(s, 1), "min, max"),
    (lambda s, b, h, q, kv: float(s), "the Python float"),
    (lambda s, b, h, q, kv: TABLE[h] + s, "it returns a row of values"),
    (lambda s, b, h, q, kv: TABLE[h, q, kv] + s, "3 indices into a captured tensor of 2"),
    (lambda s, b, h, q, kv: TABLE[h, s] + s, "not an int: cast it"),
    (lambda s, b, h, q, kv: TABLE[:, 0] + s, "indexing a captured tensor with slice"),
    (lambda s, b, h, q, kv: TABLE.exp()[h, q] + s, ".exp of a captured tensor"),
    (lambda s, b, h, q, kv: torch.exp(TABLE)[h, q] + s, "exp of a captured tensor"),
    (lambda s, b, h, q, kv: s + torch.zeros(3), r"a tensor of shape \(3,\) created inside the mod"),
    (lambda s, b, h, q, kv: s.detach(), "detach: write score_mod_bwd"),
    (lambda s, b, h, q, kv: s.half(), ".half of a value"),
    (lambda s, b, h, q, kv: s.to(torch.float16), "a cast to torch.float16"),
    (lambda s, b, h, q, kv: s & 1, "and of floats"),
    (lambda s, b, h, q, kv: (q > 1) - (kv > 1), "sub of bools: use &"),
    (lambda s, b, h, q, kv: torch.where(q, s, 0.0), "the condition is int: give a bool"),
    (lambda s, b, h, q, kv: s + kv**q, r"\*\* of ints with an exponent"),
    (lambda s, b, h, q, kv: unknown + s, "NameError: name 'unknown' is not defined"),  # type: ignore[name-defined] # noqa: F821
    (lambda s, b, h, q, kv: None, "it returns a NoneType"),
    (lambda s: s, "takes 1 positional argument"),
]


@pytest.mark.parametrize(("function", "message"), BAD, ids=[message[:25] for _, message in BAD])
def test_refusals_name_the_operation_and_the_line(function: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message) as raised:
        traced(function)
    assert isinstance(raised.value, UnsupportedError) and str(raised.value).startswith("score_mod: ")
    assert f"{__file__}:{function.__code__.co_firstlineno})" in str(raised.value)


def test_other_refusals() -> None:
    with pytest.raises(TraceError, match="mask_mod: it returns an int: return a bool"):
        bind(lambda b, h, q, kv: q, "mask_mod")
    for role, signature in (("score_mod", "score, b, h, q_idx, kv_idx"), ("mask_mod", "b, h, q_idx, kv_idx")):
        with pytest.raises(ValueError, match=rf"{role} is of type int: give a function of \({signature}\)") as invalid:
            attn(*(torch.zeros(1, 1, 2, 8) for _ in range(3)), **{role: 3})  # type: ignore[arg-type]
        assert not isinstance(invalid.value, UnsupportedError)
    five = torch.zeros(1, 1, 1, 1, 1)
    with pytest.raises(TraceError, match="has 5 dimensions: give it at most 4"):
        bind(lambda s, b, h, q, kv: s + five[0, 0, 0, 0, 0], "score_mod")
    with pytest.raises(TraceError, match="a captured tensor is complex64"):
        numbers = torch.zeros(3, dtype=torch.complex64)
        bind(lambda s, b, h, q, kv: s + numbers[0], "score_mod")
    table = list(range(300))

    def mod(s, b, h, q, kv):
        return s + table[0]

    with pytest.raises(TraceError, match="a captured list of 300 elements, more than 256: capture a tensor") as raised:
        attn(*(torch.zeros(1, 1, 2, 8) for _ in range(3)), score_mod=mod)
    assert str(raised.value).endswith(f"({__file__}:{mod.__code__.co_firstlineno})")
    with pytest.raises(ValueError, match="score_mod_bwd without score_mod"):
        BoundMods.of(None, None, lambda *x: x[0])


# Graphs


def test_ints_have_the_bits_that_they_need() -> None:
    """Python ints beyond 32 bits are int64, those beyond 64 bits are floats; constants wrap as the results of torch."""
    large, ids = (1 << 40) + 3, torch.tensor([1 << 40, 2])
    graph = traced(lambda s, b, h, q, kv: torch.where((ids[q] == large) & (q < 10**30), s, 0.0)).graph
    assert graph.scalars == () and [x.value for x in graph.nodes if x.op == "constant"] == [large, 1e30, 0.0]
    build = Builder([CaptureSpec("int64", 1), CaptureSpec("float32", 1)])
    q, most = build.input("q"), build.constant((1 << 31) - 1)
    kinds = [build.kind(build.constant(x)) for x in (-(1 << 31), 1 << 31, -(1 << 63), 1 << 63)]
    assert kinds == ["int", "int64", "int64", "float"]
    assert build.nodes[build.op("add", most, most)] == build.nodes[build.constant(-2)]
    assert build.nodes[build.op("to_int", build.constant((1 << 40) + 7))] == build.nodes[build.constant(7)]
    wide = build.op("to_int64", q)
    assert build.kind(build.op("add", q, wide)) == build.kind(build.op("mul", q, build.constant(large))) == "int64"
    assert build.op("to_int", wide) == build.op("to_index", wide) == q
    assert build.op("to_float", wide) == build.op("to_float", q)
    clamped = build.nodes[build.load(1, [build.op("min", build.load(0, [wide]), build.constant(5))])].args[0]
    assert build.nodes[clamped].op == "min" and build.kind(clamped) == "int"
    with pytest.raises(TraceError, match="to_index of float"):
        build.op("to_index", build.input("score"))


def test_builder_folds() -> None:
    build = Builder()
    x, i = build.input("score"), build.input("q")
    one, zero = build.constant(1), build.constant(0)
    assert build.op("mul", x, one) == x == build.op("add", x, zero) == build.op("div", x, one)
    assert build.op("mul", i, zero) == zero and build.op("sub", i, zero) == i
    assert build.op("neg", build.op("neg", x)) == x
    true = build.constant(True)
    is_less = build.op("lt", x, one)
    assert build.op("and", is_less, true) == is_less == build.op("not", build.op("not", is_less))
    assert build.op("where", true, x, one) == x == build.op("where", is_less, x, x)
    assert build.nodes[build.op("add", one, one)].value == 2
    assert build.constant(0.0) != build.constant(-0.0)
    assert build.constant(float("nan")) == build.constant(float("nan"))
    assert build.nodes[build.op("div", one, zero)].op == "div"
    assert build.op("add", x, i) == build.op("add", x, i)


def test_call() -> None:
    table = torch.rand(4)
    call = BoundMods.of(
        lambda s, b, h, q, kv: s * 0.5 + table[h] * SIZE, window(3), lambda grad, s, b, h, q, kv: grad * 0.5
    )
    parts = call.graphs.split(call.captures, call.scalars)
    assert parts.score == ((table,), (5,)) and parts.mask == ((), (3,)) and parts.bwd == ((), ())


def test_a_known_function_is_cheap() -> None:
    def make(table: torch.Tensor, size: int) -> Any:
        def mod(score, b, h, q_idx, kv_idx):
            near = (q_idx - kv_idx).clamp(0, table.shape[1] - 1)
            return torch.where(near < size, score + table[h, near], -float("inf"))

        return mod

    bind(make(TABLE, 3), "score_mod")
    # One call reads each captured value, and one checks it. One computes table.shape[1] - 1.
    assert python_calls(lambda: bind(make(TABLE, 3), "score_mod")) <= 25
