"""The graphs of the three mods of one call, and their text, from which any process parses them.

Every call has a `Graphs`. The modules that trace, parse and differentiate mods take 10 ms to import; this one imports
them for calls that have a mod.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cute_flash.score_mod.derive import Gradient
    from cute_flash.score_mod.graph import Graph


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
        from cute_flash.score_mod.derive import gradient

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
    from cute_flash.score_mod.parse import parse_graph

    graphs = json.loads(text)
    if not isinstance(graphs, list) or len(graphs) != 3:
        raise ValueError("mod_graphs is not the text of graphs: expected a list of three graphs")
    return Graphs(*(None if x is None else parse_graph(x) for x in graphs))


@lru_cache(maxsize=1024)
def interned(score: Graph | None, mask: Graph | None, bwd: Graph | None) -> Graphs:
    """The object that `graphs_of` returns for these graphs. Sharing it makes comparisons of graphs fast."""
    return graphs_of(Graphs(score, mask, bwd).text)
