"""The text of graphs: it round-trips exactly, in any process, and a text that is not a graph is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_flash import attn, masks
from cute_flash.score_mod.bound import BoundMods
from cute_flash.score_mod.derive import gradient
from cute_flash.score_mod.graph import CAPTURE_KINDS, INPUTS, Builder, CaptureSpec, Graph
from cute_flash.score_mod.graphs import Graphs, graphs_of
from cute_flash.score_mod.lower import lowered
from cute_flash.score_mod.parse import parse_graph
from cute_flash.score_mod.trace import bind
from cute_flash.spec.args import to_schema
from tests.arguments import call_args
from tests.call_count import python_calls
from tests.mod_cases import KINDS, Make, Sizes

ROOT = Path(__file__).parents[2]
MAKE = Make(Sizes(2, 4, 2, 12, 12), 0, "cpu")
IDS = torch.arange(12) // 5
SCORE_MODS = sorted({kind.score for kind in KINDS if kind.score})
MASK_MODS: dict[str, Any] = {
    **{name: getattr(MAKE, name)() for name in sorted({kind.mask for kind in KINDS if kind.mask})},
    "causal": masks.causal(3),
    "prefix_lm": masks.prefix_lm(4),
    "prefix_lm of each": masks.prefix_lm(torch.tensor([2, 7])),
    "document of each": masks.document(torch.stack([IDS, IDS])),
    "offsets": masks.document(offsets=torch.tensor([0, 3, 8])),
    "tree": masks.tree(torch.tensor([-1, 0, 0, 1]), prefix=3),
    "dilated": masks.dilated(3, 2),
    "block_causal": masks.block_causal(5),
    "sliding_window": masks.sliding_window(3, 2),
    "and": masks.and_(masks.causal(), masks.document(IDS)),
    "or": masks.or_(masks.causal(), masks.dilated(4, 2)),
    "not": masks.not_(masks.causal()),
}


def exactly(graph: Graph) -> Any:
    """All contents of a graph; constants by type and repr, which distinguishes -0.0 from 0.0 and 1 from 1.0."""
    nodes = [(x.op, x.kind, x.args, type(x.value), repr(x.value)) for x in graph.nodes]
    return nodes, graph.outputs, graph.captures, graph.scalars, graph.depends


def check(graph: Graph) -> None:
    again = parse_graph(json.loads(graph.text))
    assert exactly(again) == exactly(graph)
    assert again == graph and hash(again) == hash(graph) and again.text == graph.text
    assert str(again) == str(graph)


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name: str) -> None:
    graph = bind(getattr(MAKE, name)(), "score_mod").graph
    differentiable = tuple(i for i, x in enumerate(graph.captures) if x.is_differentiable)
    for one in (graph, gradient(graph).graph, gradient(graph, differentiable).graph):
        check(one)
        check(lowered(one))


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods(name: str) -> None:
    graph = bind(MASK_MODS[name], "mask_mod").graph
    check(graph)
    check(lowered(graph))


@pytest.mark.parametrize(
    "value", [True, False, 0, 1, -7, 1 << 40, 0.0, -0.0, 1.0, 0.1, 5e-324, math.inf, -math.inf, math.nan]
)
def test_constants(value: Any) -> None:
    builder = Builder()
    check(builder.graph(builder.constant(value)))


OPS = {1: ["neg", "abs", "exp", "floor", "to_int"], 2: ["add", "mul", "floordiv", "max", "div", "lt"]}


@st.composite
def graphs(draw: Any) -> Graph:
    dtypes, ranks = st.sampled_from(list(CAPTURE_KINDS)), st.integers(0, 2)
    captures = [CaptureSpec(draw(dtypes), draw(ranks)) for _ in range(2)]
    builder = Builder(captures, ["int", "float"])
    nodes = [builder.input(name) for name in INPUTS] + [builder.scalar(0), builder.scalar(1)]
    nodes.append(builder.constant(draw(st.one_of(st.integers(), st.floats()))))
    nodes += [builder.load(i, nodes[: x.rank]) for i, x in enumerate(captures)]
    for _ in range(draw(st.integers(0, 12))):
        arity = draw(st.integers(1, 2))
        numeric = [i for i in nodes if builder.kind(i) != "bool"]
        args = [draw(st.sampled_from(numeric)) for _ in range(arity)]
        nodes.append(builder.op(draw(st.sampled_from(OPS[arity])), *args))
    return builder.graph(*draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3)))


@given(graphs())
def test_any_graph(graph: Graph) -> None:
    check(graph)


def test_equal_texts_are_one_object() -> None:
    slopes = torch.rand(4)
    call = BoundMods.of(lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs(), masks.causal(), lambda g, *x: g)
    text = call.graphs.text
    assert call.graphs.text is text  # computed once
    assert graphs_of(text) is call.graphs is graphs_of(str(text.encode(), "ascii"))
    assert graphs_of(json.dumps(json.loads(text), indent=1)) == call.graphs
    assert Graphs().text == "" and graphs_of("") == Graphs() == BoundMods.of(None, None, None).graphs
    only = BoundMods.of(None, masks.causal(), None).graphs
    assert only.mask == call.graphs.mask and only != call.graphs and graphs_of(only.text) is only


def test_a_known_text_is_cheap() -> None:
    text = BoundMods.of(None, masks.causal(), None).graphs.text
    assert python_calls(lambda: graphs_of(text)) == 0


def bad_texts() -> Iterator[tuple[str, str]]:
    inputs = [["input", "float", [], "score"], ["input", "int", [], "q"]]

    def of(*nodes: Any, captures: Any = (), scalars: Any = (), outputs: Any = (0,)) -> str:
        return json.dumps([[captures, scalars, [*inputs, *nodes], outputs], None, None])

    yield "not JSON", "alibi"
    yield "one of three", json.dumps([None])
    yield "no list", json.dumps({"score": None})
    yield "parts", json.dumps([[[], [], []], None, None])
    yield "operation", of(["gamma", "float", [0]])
    yield "no name", of([["add"], "float", [0, 0]])
    yield "operand", of(["exp", "float", [2]])
    yield "bool operand", of(["exp", "float", [True]])
    yield "negative operand", of(["exp", "float", [-1]])
    yield "too few operands", of(["add", "float", [0]])
    yield "too many operands", of(["exp", "float", [0, 0]])
    yield "operands of two kinds", of(["add", "float", [0, 1]])
    yield "kind of a result", of(["add", "int", [0, 0]])
    yield "value of an operation", of(["exp", "float", [0], 1])
    yield "condition", of(["where", "float", [1, 0, 0]])
    yield "input", of(["input", "int", [], "x"])
    yield "kind of an input", of(["input", "float", [], "q"])
    yield "constant", of(["constant", "int", [], 1.0])
    yield "constant of no kind", of(["constant", "str", [], "x"])
    yield "scalar", of(["scalar", "int", [], 0])
    yield "kind of a scalar", of(["scalar", "int", [], 0], scalars=["float"])
    yield "kinds of scalars", of(scalars=["bool"])
    yield "capture", of(["load", "float", [1], 0])
    yield "indices", of(["load", "float", [1, 1], 0], captures=[["float32", 1]])
    yield "index", of(["load", "float", [0], 0], captures=[["float32", 1]])
    yield "dtype", of(captures=[["complex64", 1]])
    yield "rank", of(captures=[["float32", 5]])
    yield "outputs", of(outputs=[2])
    yield "no output", of(outputs=[])


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in bad_texts()])
def test_refusals(text: str) -> None:
    with pytest.raises(ValueError):
        graphs_of(text)


PROGRAM = """
import sys, torch
import cute_flash
arguments = torch.load(sys.argv[1])
torch.save(torch.ops.cute_flash.attention_fwd(*arguments), sys.argv[2])
"""


@pytest.mark.processes
def test_another_process_runs_what_this_one_traced(tmp_path: Path) -> None:
    q, k, v = (torch.randn(2, 4, 12, 8) for _ in range(3))
    score_mod, mask_mod = MAKE.gated(), MASK_MODS["document"]
    args = call_args(q, score_mod=score_mod, mask_mod=mask_mod)
    torch.save((q, k, v, *to_schema(args)), tmp_path / "arguments.pt")
    paths = [str(tmp_path / name) for name in ("arguments.pt", "found.pt")]
    subprocess.run([sys.executable, "-c", PROGRAM, *paths], cwd=ROOT, check=True)
    out, _lse, _max_logit = torch.load(tmp_path / "found.pt")
    assert torch.equal(out, attn(q, k, v, score_mod=score_mod, mask_mod=mask_mod))
