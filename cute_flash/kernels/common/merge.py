"""Merges partial outputs over disjoint keys by their LSEs, in one pass over memory.

    LSE = log Σ exp(LSE_i)
    O   = Σ exp(LSE_i - LSE) O_i

Each partial output has some consecutive rows of the output. A row that no partial output has, or whose LSEs are all
-inf, has output 0 and LSE -inf. If one of its LSEs is NaN, its output and its LSE are NaN.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.kernels.common.kernel import Kernel

VECTOR = 4  # fp32 elements of a 16-byte load
ROWS_AT_ONCE = 4  # rows of a thread whose loads are in flight together


@dataclass(frozen=True)
class Params:
    """The argument of the kernel."""

    out: cute.Tensor  # (B, H, S, Dv)
    lse: cute.Tensor  # (B, H, S)
    partials: tuple  # (B, H, rows of the partial output, Dv) fp32
    partial_lses: tuple  # (B, H, rows)
    first_rows: tuple  # the row of `out` of the first row of each partial output


class MergePartials(Kernel):
    """One CTA merges `tile.rows` rows of a head."""

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        args, static = self.read_operands(operands), self.static
        lists = (tuple(x) for x in (args.partials, args.partial_lses, args.first_rows))
        batch, heads, seqlen, _ = args.out.shape
        grid = (cute.ceil_div(seqlen, self.tile.rows), heads, batch)
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
            loaded = [self.load(p, (batch, head), row, column) for row in rows]
            for j in cutlass.range_constexpr(count):
                self.store(p, (batch, head), rows[j], column, *loaded[j])

    def load(self, p: Params, where: tuple, row: Int32, column: Int32) -> tuple[list, list]:
        """The LSE of a row, and its vector at `column`, of each partial output.

        A partial output that does not have the row loads its nearest row, with an LSE of -inf. Columns past the end
        load column 0; `store` does not write them.
        """
        lses, vectors = [], []
        column = cutlass.select_(column < self.static.head_dim, column, Int32(0))
        for mX, mLSE, first in zip(p.partials, p.partial_lses, p.first_rows):
            at = row - first
            inside = cutlass.max(cutlass.min(at, mLSE.shape[2] - 1), Int32(0))
            lse = mLSE[(*where, inside)]
            lses.append(cutlass.select_(at == inside, lse, -Float32.inf))
            vector = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(_vector(mX[(*where, None, None)], inside, column), vector)
            vectors.append(vector)
        return lses, vectors

    @cute.jit
    def store(self, p: Params, where: tuple, row: Int32, column: Int32, lses: list, vectors: list):
        """Store the merged vector, and the LSE of the row from the thread of its first column."""
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
            for weight, vector in zip(weights, vectors):
                # Vectors of weight 0 are ignored: those of other rows may be NaN.
                value = value + cutlass.select_(weight == 0.0, Float32(0.0), weight * vector[i])
            merged[i] = (value * inverse).to(p.out.element_type)
        if row < p.out.shape[2] and column < self.static.head_dim:
            cute.autovec_copy(merged, _vector(p.out[(*where, None, None)], row, column))
            if column == 0:
                p.lse[(*where, row)] = reference + cute.math.log(total) if total > 0.0 else largest


def _vector(gX: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
    pointer = (gX.iterator + (Int64(row) * gX.stride[0] + column)).align(VECTOR * gX.element_type.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))
