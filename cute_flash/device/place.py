"""Where the elements of a block of keys by queries are that a thread holds."""

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32


@dataclass(frozen=True)
class Place:
    head: Int32
    batch: Int32
    query: Int32  # of the first column
    key: Int32  # of the first row
    row_step: cutlass.Constexpr  # from one m16 tile of a thread to the next

    def row_offset(self, r: int) -> int:
        return r // 2 * self.row_step + r % 2 * 8

    def moved(self, zero: Int32) -> "Place":
        return replace(self, query=self.query + zero, key=self.key + zero)
