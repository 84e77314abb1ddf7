"""Gradients of what many scores share: sums of a thread as far as they go to one place, then of the lanes
that have that place in common, then additions in global memory.

For a block of keys by queries as the tensor cores hold it: rows of a thread are keys, which the lanes
4, 8, 16 apart do not share, columns are queries, which the lanes 1 and 2 apart do not.
"""

from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_flash.device.ptx import add_if
from cute_flash.score_mod.graph import COLUMN, ROW

# What a place depends on: a query (ROW), a key (COLUMN); and the lanes that differ in the rest.
LANES = {ROW: (4, 8, 16), COLUMN: (1, 2), 0: (1, 2, 4, 8, 16)}
BOTH = ROW | COLUMN


class Sums:
    """Of one block; columns come one after the other, and within each its rows."""

    def __init__(self) -> None:
        # By (what, row): the sum, its place, and where it belongs.
        self.found: dict[tuple[Any, int], tuple[Float32, Any, cute.Tensor]] = {}
        self.bits: dict[Any, int] = {}

    def add(self, what: Any, bits: int, r: int, value: Float32, into: cute.Tensor, place: Any) -> None:
        """To an element of `into`, fp32. `bits`: what its place depends on."""
        if bits == BOTH:
            add_at(into, place, value)
            return
        key = what, r if bits == COLUMN else 0
        old = self.found.get(key)
        self.found[key] = value if old is None else old[0] + value, place, into
        self.bits[what] = bits

    def end_column(self) -> None:
        # In the middle of a block, where a branch would cost registers: those of the other lanes add 0.
        for value, place, into, lanes in self._ended(ROW):
            add_at(into, place, cutlass.select_(is_first(lanes), value, Float32(0.0)))

    def end(self) -> None:
        """When nothing else of the block is in registers."""
        for bits in (COLUMN, 0):
            for value, place, into, lanes in self._ended(bits):
                add_once(into, place, value, lanes)

    def _ended(self, bits: int) -> Iterator[tuple[Float32, Any, cute.Tensor, int]]:
        for key in [key for key in self.found if self.bits[key[0]] == bits]:
            value, place, into = self.found.pop(key)
            yield over_lanes(value, LANES[bits]), place, into, sum(LANES[bits])


def over_lanes(value: Float32, offsets: tuple[int, ...]) -> Float32:
    """The sum of the lanes that differ by these; all have it."""
    for offset in offsets:
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


def is_first(lanes: int) -> Boolean:
    """Of the lanes that differ in these bits alone."""
    return (cute.arch.lane_idx() & lanes) == 0


def add_at(into: cute.Tensor, place, value: Float32) -> None:
    target = into.iterator + cute.crd2idx(place, into.layout)
    cute.arch.atomic_add(target, value, sem="relaxed", scope="gpu")


def add_once(into: cute.Tensor, place, value: Float32, lanes: int) -> None:
    """By the first lane; 0 is not added."""
    target = into.iterator + cute.crd2idx(place, into.layout)
    add_if(Int32(is_first(lanes) & (value != 0.0)), target.toint(), value)
