"""Merges partial outputs over disjoint keys by their LSEs, in one pass over memory.

    LSE = log Σ exp(LSE_i)
    O   = Σ exp(LSE_i - LSE) O_i

Each partial output has some consecutive rows of the output. A row that no partial output has, or whose LSEs are all
-inf, has output 0 and LSE -inf. If one of its LSEs is NaN, its output and its LSE are NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from cute_flash.device.memory.copies import row_vector
from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.kernels.common.kernel import Grid, Kernel

VECTOR = 4  # fp32 elements of a 16-byte load
ROWS_AT_ONCE = 4  # rows of a thread whose loads are in flight together


@dataclass(frozen=True)
class Params:
    """The argument of the kernel."""

    out: cute.Tensor  # (B, H, S, Dv)
    lse: cute.Tensor  # (B, H, S)
    partials: tuple[cute.Tensor, ...]  # (B, H, rows of the partial output, Dv) fp32
    partial_lses: tuple[cute.Tensor, ...]  # (B, H, rows)
    first_rows: tuple[Int32, ...]  # where each partial output begins, as a row of `out`


class PartialRow(NamedTuple):
    """A row of a partial output."""

    lse: Float32
    vector: cute.Tensor  # the VECTOR columns of this thread


class MergePartials(Kernel):
    """One CTA merges `tile.rows` rows of a head."""

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        args, static = self.read_operands(operands), self.static
        lists = (tuple(x) for x in (args.partials, args.partial_lses, args.first_rows))
        batch, heads, seqlen, _ = args.out.shape
        grid = Grid(cute.ceil_div(seqlen, self.tile.rows), heads, batch)
        symbol = f"cute_flash_merge_{static.num_partials}_d{static.head_dim}_{static.dtype}"
        self.launch(symbol, Params(args.out, args.lse, *lists), grid, self.tile.num_threads, stream)

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        # The threads of a row: a power of two, so that a warp has complete rows, or a row complete warps. With narrow
        # rows some threads have no column, so that the CTA has no more rows than the tile.
        lanes = 1 << (-(-self.static.head_dim // VECTOR) - 1).bit_length()
        lanes = max(lanes, self.tile.num_threads // self.tile.rows)
        column, rows_per_pass = thread % lanes * VECTOR, self.tile.num_threads // lanes
        first = block * self.tile.rows + thread // lanes
        for i in cutlass.range_constexpr(0, self.tile.rows // rows_per_pass, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, self.tile.rows // rows_per_pass - i)
            rows = [first + (i + j) * rows_per_pass for j in range(count)]
            loaded = [self.load(p, batch, head, row, column) for row in rows]
            for j in cutlass.range_constexpr(count):
                self.store(p, batch, head, rows[j], column, loaded[j])

    def load(self, p: Params, batch: Int32, head: Int32, row: Int32, column: Int32) -> list[PartialRow]:
        """A row of each partial output, at `column`.

        A partial output that does not have the row loads its nearest row, with an LSE of -inf. Columns past the end
        load column 0; `store` does not write them.
        """
        loaded = []
        column = cutlass.select_(column < self.static.head_dim, column, Int32(0))
        for mX, mLSE, first in zip(p.partials, p.partial_lses, p.first_rows):
            at = row - first
            inside = cutlass.max(cutlass.min(at, mLSE.shape[2] - 1), Int32(0))
            lse = mLSE[batch, head, inside]
            lse = cutlass.select_(at == inside, lse, -Float32.inf)
            vector = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(row_vector(mX[batch, head, None, None], inside, column, VECTOR), vector)
            loaded.append(PartialRow(lse, vector))
        return loaded

    @cute.jit
    def store(self, p: Params, batch: Int32, head: Int32, row: Int32, column: Int32, partials: Sequence[PartialRow]):
        """Store the merged vector, and the LSE of the row from the thread of its first column."""
        lses = [partial.lse for partial in partials]
        largest = lses[0]
        for lse in lses[1:]:
            largest = cute.arch.fmax(largest, lse, nan=True)
        reference = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        weights = [cute.math.exp2((lse - reference) * LOG2_E, fastmath=True) for lse in lses]
        total = weights[0]
        for weight in weights[1:]:
            total = total + weight
        inverse = cutlass.select_(total == 0.0, Float32(0.0), Float32(1.0) / total)
        merged = cute.make_rmem_tensor(VECTOR, p.out.element_type)
        for i in cutlass.range_constexpr(VECTOR):
            value = Float32(0.0)
            for weight, (_, vector) in zip(weights, partials):
                # Vectors of weight 0 are ignored: those of other rows may be NaN.
                value = value + cutlass.select_(weight == 0.0, Float32(0.0), weight * vector[i])
            merged[i] = (value * inverse).to(p.out.element_type)
        if row < p.out.shape[2] and column < self.static.head_dim:
            cute.autovec_copy(merged, row_vector(p.out[batch, head, None, None], row, column, VECTOR))
            if column == 0:
                p.lse[batch, head, row] = reference + cute.math.log(total) if total > 0.0 else largest
