"""Rotary position embedding of queries and keys, eight columns at a time, in fp32."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.memory.copies import assume_aligned

VECTOR = 8


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of every position. `kind`: "halves" (NeoX) or "pairs" (interleaved)."""

    cos: cute.Tensor  # (positions, dim / 2)
    sin: cute.Tensor
    kind: cutlass.Constexpr
    dim: cutlass.Constexpr  # columns that are rotated

    @cute.jit
    def load(self, row: cute.Tensor, vector: Int32, position: Int32, x: cute.Tensor):
        """Load 8 columns of a row as fp32, from 8 `vector` on; rotate them if they are among the first `dim`."""
        load_floats(row, vector, x)
        if vector * VECTOR < self.dim:
            self.rotate(row, vector, cutlass.max(cutlass.min(position, self.cos.shape[0] - 1), 0), x)

    @cute.jit
    def rotate(self, row: cute.Tensor, vector: Int32, position: Int32, x: cute.Tensor):
        cos, sin = self.cos[position, None], self.sin[position, None]
        if cutlass.const_expr(self.kind == "pairs"):
            for i in cutlass.range_constexpr(VECTOR // 2):
                c, s = Float32(cos[vector * (VECTOR // 2) + i]), Float32(sin[vector * (VECTOR // 2) + i])
                first, second = x[2 * i], x[2 * i + 1]
                x[2 * i], x[2 * i + 1] = rotated(first, second, c, -s), rotated(second, first, c, s)
        else:
            half = self.dim // 2 // VECTOR
            is_second = vector >= half
            other_vector = vector - half if is_second else vector + half
            other = cute.make_rmem_tensor(VECTOR, Float32)
            load_floats(row, other_vector, other)
            column, sign = cutlass.min(vector, other_vector) * VECTOR, Float32(1.0) if is_second else Float32(-1.0)
            for i in cutlass.range_constexpr(VECTOR):
                c, s = Float32(cos[column + i]), sign * Float32(sin[column + i])
                x[i] = rotated(x[i], other[i], c, s)


def rotated(x: Float32, other: Float32, cos: Float32, sin: Float32) -> Float32:
    """cos · x + sin · other: one multiplication, and one fused multiply-add, as in `reference.decode.rotated`."""
    return cute.math.fma(x, cos, other * sin)


@cute.jit
def load_floats(row: cute.Tensor, vector: Int32, x: cute.Tensor):
    """Load eight columns of a row as fp32."""
    raw = cute.make_rmem_tensor(VECTOR, row.element_type)
    source = cute.make_tensor(assume_aligned(row.iterator + vector * VECTOR, 16), cute.make_layout(VECTOR))
    cute.autovec_copy(source, raw)
    x.store(raw.load().to(Float32))
