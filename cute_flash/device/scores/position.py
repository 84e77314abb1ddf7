"""The positions of a thread's accumulator elements among the scores of a head."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.memory.views import as_mn
from cute_flash.device.scores.mask import column_offset


class ScoreBlock(NamedTuple):
    """A block of the scores of one head."""

    batch: Int32
    head: Int32
    m_block: Int32
    n_block: Int32


@dataclass(frozen=True)
class TilePosition:
    """The position of a tile, with the coordinates of every element of this thread."""

    batch_head: Int32  # b H + h
    first_row: Int32
    first_column: Int32
    tScS: cute.Tensor  # (row, column) within the tile of every element of this thread

    def row(self, r: int) -> Int32:
        """The r-th row of this thread."""
        return self.first_row + as_mn(self.tScS)[r, 0][0]

    def column(self, c: int) -> Int32:
        """The c-th column of this thread."""
        return self.first_column + as_mn(self.tScS)[0, c][1]


@dataclass(frozen=True)
class BwdBlockPosition:
    """The position of the first element of this thread in a block of the backward."""

    head: Int32
    batch: Int32
    query: Int32
    key: Int32
    row_step: cutlass.Constexpr  # rows from one m16 tile of a thread to the next
    is_transposed: cutlass.Constexpr = True  # rows are keys and columns are queries

    @property
    def first_row(self) -> Int32:
        return self.key if self.is_transposed else self.query

    @property
    def first_column(self) -> Int32:
        return self.query if self.is_transposed else self.key

    def row_offset(self, r: int) -> int:
        """Distance of the r-th row of a thread from its first."""
        return r // 2 * self.row_step + r % 2 * 8

    def query_at(self, r: int, c: int) -> Int32:
        """The query of the element in the thread's r-th row and c-th column."""
        return self.query + (column_offset(c) if self.is_transposed else self.row_offset(r))

    def key_at(self, r: int, c: int) -> Int32:
        return self.key + (self.row_offset(r) if self.is_transposed else column_offset(c))

    def shifted(self, zero: Int32) -> "BwdBlockPosition":
        """The same position plus a 0 that the compiler cannot fold (`ModScores.opaque`)."""
        return replace(self, query=self.query + zero, key=self.key + zero)
