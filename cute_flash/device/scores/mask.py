"""The band applied to a block of scores: masked scores become -inf."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.memory.views import as_mn
from cute_flash.device.scores.band import Band


def column_offset(c: int) -> int:
    """Distance of the c-th column of a thread from its first column: a thread has one pair of columns in every 8."""
    return c % 2 + c // 2 * 8


@dataclass(frozen=True)
class Mask:
    """Applies the band to the blocks of one tile of rows.

    In the backward, except in the kernel for wide heads, rows are keys and columns are queries. `seqlen_q` is then the
    number of keys, `seqlen_k` the number of queries, and the band is `Band.of_keys`.
    """

    band: Band
    seqlen_q: Int32  # rows of the sequence
    seqlen_k: Int32  # columns of the sequence
    first_row: Int32  # of the tile
    tScS: cute.Tensor  # (row, column) within the tile of every accumulator element
    wraps: cutlass.Constexpr = False  # pack_gqa: a tile has the queries of several heads, one head after the other

    @cute.jit
    def apply(self, acc_S_mn: cute.Tensor, first_col: Int32, masked_value: Float32 | Int32 | float = -Float32.inf):
        """Replace scores outside the band by `masked_value`, in the block that begins at `first_col`."""
        coords = as_mn(self.tScS)
        # Count keys from this thread's first column, so that its columns are compile-time offsets. The formulas of the
        # band still hold, because the band is aligned to the last key.
        keys = self.seqlen_k - first_col - coords[0, 0][1]
        # Chunks count from the first column of all.
        first = 0 if self.band.chunk is None else self.seqlen_k - keys
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            row = self.first_row + coords[r, 0][0]
            if cutlass.const_expr(self.wraps):
                row = row % self.seqlen_q
            hi = self.band.hi(row, self.seqlen_q, keys, first)
            lo = self.band.lo(row, self.seqlen_q, keys, first)
            for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
                offset = column_offset(c)
                is_masked = offset >= hi
                if cutlass.const_expr(self.band.has_left):
                    is_masked = is_masked or offset < lo
                acc_S_mn[r, c] = masked_value if is_masked else acc_S_mn[r, c]

    @cute.jit
    def apply_to_tail_rows(self, acc_S_mn: cute.Tensor, masked_value: Float32 | Int32 | float = -Float32.inf):
        """Replace the rows past the end by `masked_value`; the band does not mask them."""
        coords = as_mn(self.tScS)
        for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
            if self.first_row + coords[r, 0][0] >= self.seqlen_q:
                acc_S_mn[r, None].fill(masked_value)
