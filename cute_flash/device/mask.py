"""Masking of a block of scores: what lies outside the band becomes -inf."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.band import Band
from cute_flash.device.views import as_mn


def column_offset(c: int) -> int:
    """Distance of a thread's c-th column from its first: pairs of columns, one pair every 8."""
    return c % 2 + c // 2 * 8


@dataclass(frozen=True)
class Mask:
    """The band over one tile of rows."""

    band: Band
    seqlen_q: Int32
    seqlen_k: Int32
    first_row: Int32
    tScS: cute.Tensor  # (row, column) within the tile of every accumulator element
    wraps: cutlass.Constexpr = False  # rows are those of several heads, one after the other

    @cute.jit
    def apply(self, acc_S_mn: cute.Tensor, first_col: Int32, hidden_value=-Float32.inf):
        """`hidden_value`: what takes the place of a hidden score; the bits of it, where those are given."""
        coords = as_mn(self.tScS)
        # A thread's columns are its first one plus compile-time offsets. Counted from that one, the keys end
        # earlier; the band is aligned to their end, so its formulas hold as they are.
        keys = self.seqlen_k - first_col - coords[0, 0][1]
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            row = self.first_row + coords[r, 0][0]
            if cutlass.const_expr(self.wraps):
                row = row % self.seqlen_q
            hi = self.band.hi(row, self.seqlen_q, keys)
            lo = self.band.lo(row, self.seqlen_q, keys)
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                offset = column_offset(c)
                hidden = offset >= hi
                if cutlass.const_expr(self.band.left is not None):
                    hidden = hidden or offset < lo
                acc_S_mn[r, c] = hidden_value if hidden else acc_S_mn[r, c]

    @cute.jit
    def hide_tail(self, acc_S_mn: cute.Tensor, hidden_value=-Float32.inf):
        """Rows past the end: the band knows the ends of columns only."""
        coords = as_mn(self.tScS)
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            if self.first_row + coords[r, 0][0] >= self.seqlen_q:
                acc_S_mn[r, None].fill(hidden_value)
