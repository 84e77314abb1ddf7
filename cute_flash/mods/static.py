"""What of users' functions, a bias and a block map is compiled into a kernel; the rest is arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cute_flash.mods.call import Graphs


@dataclass(frozen=True)
class Mods:
    graphs: Graphs = field(default_factory=Graphs)
    bias: str = ""  # its dtype, as a kernel reads it; "": none
    reads_pairs: bool = False  # two neighbouring keys of the bias are one aligned load
    block: tuple[int, int] | None = None  # queries and keys of a block of the map
    # Of gradients: whether the bias has one, and the tables of score_mod that do.
    wants_bias: bool = False
    wanted: tuple[int, ...] = ()
    bias_bits: int = 0  # of the graph's ROW and COLUMN, what entries of the bias tell apart
    dbias: str = ""  # dtype of the bias's gradient as a kernel writes it; "": none
    adds_bias: bool = False  # entries of it are sums of many scores, and not of one

    @property
    def num_inner(self) -> int:
        """Operations for every score of the forward."""
        graphs = self.graphs.score, self.graphs.mask
        return sum(graph.num_inner for graph in graphs if graph is not None)

    @property
    def in_forward(self) -> Mods:
        return Mods(Graphs(self.graphs.score, self.graphs.mask), self.bias, self.reads_pairs, self.block)

    @property
    def in_gradients(self) -> Mods:
        """The backward has a block map in its own blocks."""
        return replace(self, block=None, wants_bias=False)
