"""The three mods of one call together: their graphs, which are compiled in, and their captured values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash.score_mod.derive import Gradient, gradient
from cute_flash.score_mod.graph import Graph
from cute_flash.score_mod.parse import parse_graph
from cute_flash.score_mod.trace import BoundMod, bind

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


@dataclass(frozen=True)
class Graphs:
    """The graphs of a call's mods. Captures and scalars are concatenated in the order of the fields."""

    score: Graph | None = None
    mask: Graph | None = None
    bwd: Graph | None = None  # of score_mod_bwd

    @cached_property
    def text(self) -> str:
        """The graphs as text: `AttentionArgs.mod_graphs`. `graphs_of` parses it in any process."""
        graphs = self.score, self.mask, self.bwd
        if graphs == (None, None, None):
            return ""
        return "[" + ",".join("null" if x is None else x.text for x in graphs) + "]"

    @property
    def present(self) -> list[Graph]:
        """The graphs that the call has, in the order of their captures and scalars."""
        return [graph for graph in (self.score, self.mask, self.bwd) if graph is not None]

    def split(self, captures: Sequence[Any], scalars: Sequence[Any]) -> GraphArguments:
        """Split the concatenated arguments of all graphs into those of each graph."""
        arguments: list[GraphValues] = []
        for graph in (self.score, self.mask, self.bwd):
            num_captures, num_scalars = (0, 0) if graph is None else (len(graph.captures), len(graph.scalars))
            arguments.append(GraphValues(tuple(captures[:num_captures]), tuple(scalars[:num_scalars])))
            captures, scalars = captures[num_captures:], scalars[num_scalars:]
        return GraphArguments(*arguments)

    def gradient(self, captures_needing_grad: tuple[int, ...] = ()) -> Gradient:
        """The gradient of score_mod. Its captures and scalars are `GraphArguments.gradient`."""
        assert self.score is not None
        return gradient(self.score, captures_needing_grad, self.bwd)


class GraphValues(NamedTuple):
    """The captured tensors and scalars of a graph. As kernel arguments, empty tuples are None."""

    captures: tuple[Any, ...]
    scalars: tuple[Any, ...]


@dataclass(frozen=True)
class GraphArguments:
    """The values of each graph."""

    score: GraphValues
    mask: GraphValues
    bwd: GraphValues

    @property
    def gradient(self) -> GraphValues:
        """The values of the gradient of score_mod: those of score_mod, then those of score_mod_bwd."""
        captures, scalars = ((*x, *y) for x, y in zip(self.score, self.bwd, strict=True))
        return GraphValues(captures, scalars)


@lru_cache(maxsize=1024)
def graphs_of(text: str) -> Graphs:
    """Parse `Graphs.text`. Equal texts give the same object; invalid text raises `ValueError`."""
    if not text:
        return Graphs()
    graphs = json.loads(text)
    if not isinstance(graphs, list) or len(graphs) != 3:
        raise ValueError("mod_graphs is not the text of graphs: expected a list of three graphs")
    return Graphs(*(None if x is None else parse_graph(x) for x in graphs))


@lru_cache(maxsize=1024)
def _interned(score: Graph | None, mask: Graph | None, bwd: Graph | None) -> Graphs:
    """The object that `graphs_of` returns for these graphs. Sharing it makes comparisons of graphs fast."""
    return graphs_of(Graphs(score, mask, bwd).text)


class BoundMods(NamedTuple):
    """The mods of a call with the values that they captured, concatenated in the order of `Graphs`."""

    graphs: Graphs
    captures: tuple[Tensor, ...]
    scalars: tuple[float, ...]

    @staticmethod
    def of(score_mod: Callable | None, mask_mod: Callable | None, score_mod_bwd: Callable | None) -> BoundMods:
        if score_mod is None and mask_mod is None and score_mod_bwd is None:
            return NO_MODS
        check_mods(score_mod, score_mod_bwd)
        score = _NO_MOD if score_mod is None else bind(score_mod, "score_mod")
        mask = _NO_MOD if mask_mod is None else bind(mask_mod, "mask_mod")
        bwd = _NO_MOD if score_mod_bwd is None else bind(score_mod_bwd, "score_mod_bwd")
        graphs = _interned(score.graph, mask.graph, bwd.graph)
        captures = score.captures + mask.captures + bwd.captures
        return BoundMods(graphs, captures, score.scalars + mask.scalars + bwd.scalars)


def check_mods(score_mod: Callable | None, score_mod_bwd: Callable | None) -> None:
    if score_mod_bwd is not None and score_mod is None:
        raise ValueError("score_mod_bwd without score_mod: give the score_mod whose gradient it computes")


def mod_arguments(
    score_mod: Callable | None, mask_mod: Callable | None, score_mod_bwd: Callable | None, device: torch.device
) -> tuple[str, tuple[Tensor, ...], tuple[float, ...]]:
    """The fields mod_graphs, captures and scalars of `AttentionArgs` for a call on a device."""
    if _is_dynamo_compiling():
        from cute_flash.score_mod import compiled

        return compiled.mod_arguments(score_mod, mask_mod, score_mod_bwd, device)
    mods = BoundMods.of(score_mod, mask_mod, score_mod_bwd)
    return mods.graphs.text, mods.captures, mods.scalars


_NO_MOD: Any = BoundMod(None, (), ())  # type: ignore[arg-type]
NO_MODS = BoundMods(Graphs(), (), ())
