"""Gradients of values that many scores share: sums in a thread, then over the lanes that share the entry, then atomic
additions to global memory.

For a block of keys by queries as the tensor cores hold it: the rows of a thread are keys, in which lanes 4, 8 and 16
apart differ; its columns are queries, in which lanes 1 and 2 apart differ.
"""

from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_flash.device.ptx import add_if
from cute_flash.score_mod.graph import COLUMN, ROW

# By what an entry depends on, a query (ROW) or a key (COLUMN): offsets of the lanes that share it.
LANES = {ROW: (4, 8, 16), COLUMN: (1, 2), 0: (1, 2, 4, 8, 16)}
BOTH = ROW | COLUMN


class GradientSums:
    """The sums of one block, which is visited column by column, and within a column row by row."""

    def __init__(self) -> None:
        # By (name, row): the sum, the coordinate of its entry, and the tensor of the gradient.
        self.sums: dict[tuple[Any, int], tuple[Float32, Any, cute.Tensor]] = {}
        self.depends: dict[Any, int] = {}

    def add(self, name: Any, depends: int, r: int, value: Float32, gradient: cute.Tensor, coord: Any) -> None:
        """Add to an entry of `gradient`, fp32. `depends`: bits of ROW and COLUMN that its coordinate depends on."""
        if depends == BOTH:
            add_at(gradient, coord, value)
            return
        key = name, r if depends == COLUMN else 0
        old = self.sums.get(key)
        self.sums[key] = value if old is None else old[0] + value, coord, gradient
        self.depends[name] = depends

    def finish_column(self) -> None:
        # In the middle of a block a branch would cost registers: the other lanes add 0.
        for value, coord, gradient, lanes in self._finished(ROW):
            add_at(gradient, coord, cutlass.select_(is_first(lanes), value, Float32(0.0)))

    def finish(self) -> None:
        """To be called when nothing else of the block is in registers."""
        for depends in (COLUMN, 0):
            for value, coord, gradient, lanes in self._finished(depends):
                add_once(gradient, coord, value, lanes)

    def _finished(self, depends: int) -> Iterator[tuple[Float32, Any, cute.Tensor, int]]:
        for key in [key for key in self.sums if self.depends[key[0]] == depends]:
            value, coord, gradient = self.sums.pop(key)
            yield sum_lanes(value, LANES[depends]), coord, gradient, sum(LANES[depends])


def sum_lanes(value: Float32, offsets: tuple[int, ...]) -> Float32:
    """The sum over the lanes at these offsets; all of them get it."""
    for offset in offsets:
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


def is_first(lanes: int) -> Boolean:
    """Whether this is the first of the lanes that differ in these bits only."""
    return (cute.arch.lane_idx() & lanes) == 0


def add_at(gradient: cute.Tensor, coord, value: Float32) -> None:
    target = gradient.iterator + cute.crd2idx(coord, gradient.layout)
    cute.arch.atomic_add(target, value, sem="relaxed", scope="gpu")


def add_once(gradient: cute.Tensor, coord, value: Float32, lanes: int) -> None:
    """The first lane adds, unless the value is 0."""
    target = gradient.iterator + cute.crd2idx(coord, gradient.layout)
    add_if(Int32(is_first(lanes) & (value != 0.0)), target.toint(), value)
