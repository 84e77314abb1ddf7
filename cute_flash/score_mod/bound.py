"""The functions of one call: their graphs, which are compiled in, and their arguments, which are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from cute_flash.score_mod.derive import Gradient, gradient
from cute_flash.score_mod.graph import Graph
from cute_flash.score_mod.parse import parse_graph
from cute_flash.score_mod.trace import Bound, bound


@dataclass(frozen=True)
class Graphs:
    """What a kernel is compiled for. The order of the fields is that of the arguments."""

    score: Graph | None = None
    mask: Graph | None = None
    bwd: Graph | None = None  # a user's own gradient of the score

    @cached_property
    def text(self) -> str:
        """What operators of torch take, for which `graphs_of` finds these graphs in any process."""
        graphs = self.score, self.mask, self.bwd
        if graphs == (None, None, None):
            return ""
        return "[" + ",".join("null" if x is None else x.text for x in graphs) + "]"

    def parts(self, tables: Sequence[Any], numbers: Sequence[Any]) -> Parts:
        """The arguments of all graphs, one after the other, as those of each."""
        found: list[tuple[tuple, tuple]] = []
        for graph in (self.score, self.mask, self.bwd):
            num_tables, num_numbers = (0, 0) if graph is None else (len(graph.tables), len(graph.numbers))
            found.append((tuple(tables[:num_tables]), tuple(numbers[:num_numbers])))
            tables, numbers = tables[num_tables:], numbers[num_numbers:]
        return Parts(*found)

    def gradient(self, wanted: tuple[int, ...] = ()) -> Gradient:
        """Of the score, with the arguments `Parts.gradient`; `wanted`: its tables that have one too."""
        assert self.score is not None
        return gradient(self.score, wanted, self.bwd)


@dataclass(frozen=True)
class Parts:
    """(tables, numbers) of each graph."""

    score: tuple[tuple, tuple]
    mask: tuple[tuple, tuple]
    bwd: tuple[tuple, tuple]

    @property
    def gradient(self) -> tuple[tuple, tuple]:
        return (*self.score[0], *self.bwd[0]), (*self.score[1], *self.bwd[1])


@lru_cache(maxsize=1024)
def graphs_of(text: str) -> Graphs:
    """The graphs of `Graphs.text`; equal texts give the same object. `ValueError` for any other text."""
    if not text:
        return Graphs()
    graphs = json.loads(text)
    if not isinstance(graphs, list) or len(graphs) != 3:
        raise ValueError("not the text of graphs: expected a list of three")
    return Graphs(*(None if x is None else parse_graph(x) for x in graphs))


@lru_cache(maxsize=1024)
def _interned(score: Graph | None, mask: Graph | None, bwd: Graph | None) -> Graphs:
    """The object that `graphs_of` returns for the same graphs, so that lookups compare by identity."""
    return graphs_of(Graphs(score, mask, bwd).text)


class Call(NamedTuple):
    graphs: Graphs
    tables: tuple[Tensor, ...]
    numbers: tuple[float, ...]

    @staticmethod
    def of(score_mod: Callable | None, mask_mod: Callable | None, score_mod_bwd: Callable | None) -> Call:
        if score_mod_bwd is not None and score_mod is None:
            raise ValueError("score_mod_bwd without score_mod: it is the gradient of that")
        score = _NOTHING if score_mod is None else bound(score_mod, "score_mod")
        mask = _NOTHING if mask_mod is None else bound(mask_mod, "mask_mod")
        bwd = _NOTHING if score_mod_bwd is None else bound(score_mod_bwd, "score_mod_bwd")
        graphs = _interned(score.graph, mask.graph, bwd.graph)
        tables = score.tables + mask.tables + bwd.tables
        return Call(graphs, tables, score.numbers + mask.numbers + bwd.numbers)


_NOTHING: Any = Bound(None, (), ())  # type: ignore[arg-type]
