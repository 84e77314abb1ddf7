"""Gradients of values that many scores share: summed in a thread, then over lanes, then atomically in global memory.

Lanes 4, 8 and 16 apart have different rows of the accumulator of S, and lanes 1 and 2 apart have different columns.
Rows are keys and columns are queries, or the other way round.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_flash.device.ptx import add_if
from cute_flash.score_mod.graph import COLUMN, ROW

# Offsets of the lanes that share an entry, if rows are keys, and the entry depends on the query (ROW), on the key
# (COLUMN) or on neither.
LANES = {ROW: (4, 8, 16), COLUMN: (1, 2), 0: (1, 2, 4, 8, 16)}
BOTH = ROW | COLUMN


class ElementSum(NamedTuple):
    """The sum that is added to an element of a gradient."""

    value: Float32
    gradient: cute.Tensor
    coord: Any  # of the element


class GradientSums:
    """This thread's sums over one block. Elements must be added column by column, and row by row within a column."""

    def __init__(self, is_transposed: bool = True) -> None:
        self.is_transposed = is_transposed  # rows are keys
        self.sums: dict[tuple[Any, int], ElementSum] = {}  # by name and row
        self.depends: dict[Any, int] = {}

    def add(self, name: Any, depends: int, r: int, value: Float32, gradient: cute.Tensor, coord: Any) -> None:
        """Add `value` to the entry `coord` of `gradient` (fp32).

        Args:
            name: identifies the sum among those of the block.
            depends: bits of ROW (queries) and COLUMN (keys), the indices that `coord` depends on. With both there is
                nothing to sum in the thread, and the value goes to global memory at once.
            r: the row of this thread.
        """
        if depends == BOTH:
            add_at(gradient, coord, value)
            return
        if depends and not self.is_transposed:
            depends ^= BOTH
        key = name, r if depends == COLUMN else 0
        old = self.sums.get(key)
        self.sums[key] = ElementSum(value if old is None else old.value + value, gradient, coord)
        self.depends[name] = depends

    def finish_column(self) -> None:
        """Add the sums whose entries depend on the thread's column to global memory. Call it after each column."""
        # All lanes add, most of them 0, because a branch in the middle of a block would cost registers.
        for value, gradient, coord in self._finished(ROW):
            add_at(gradient, coord, cutlass.select_(is_first(sum(LANES[ROW])), value, Float32(0.0)))

    def finish(self) -> None:
        """Add the other sums to global memory. Call it when no other values of the block are in registers."""
        for depends in (COLUMN, 0):
            for value, gradient, coord in self._finished(depends):
                add_once(gradient, coord, value, sum(LANES[depends]))

    def _finished(self, depends: int) -> Iterator[ElementSum]:
        """Remove the sums with these bits, and add each over the lanes that share its entry."""
        for key in [key for key in self.sums if self.depends[key[0]] == depends]:
            own = self.sums.pop(key)
            yield own._replace(value=sum_lanes(own.value, LANES[depends]))


def sum_lanes(value: Float32, offsets: tuple[int, ...]) -> Float32:
    """The sum over the lanes at these XOR offsets; every lane gets it."""
    for offset in offsets:
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


def is_first(lanes: int) -> Boolean:
    """Whether this lane is the first of the lanes whose indices differ only in these bits."""
    return (cute.arch.lane_idx() & lanes) == 0


def add_at(gradient: cute.Tensor, coord: cute.Coord, value: Float32) -> None:
    """Add to an entry of `gradient` in global memory, atomically."""
    target = gradient.iterator + cute.crd2idx(coord, gradient.layout)
    cute.arch.atomic_add(target, value, sem="relaxed", scope="gpu")


def add_once(gradient: cute.Tensor, coord: cute.Coord, value: Float32, lanes: int) -> None:
    """Add from the first of the lanes that share the entry, unless the value is 0."""
    target = gradient.iterator + cute.crd2idx(coord, gradient.layout)
    add_if(Int32(is_first(lanes) & (value != 0.0)), target.toint(), value)
