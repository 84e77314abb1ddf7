"""fp32 products on 16-bit tensor cores: each operand is the sum of a high and a low fp16 piece.

    x / f = high + low,  high = fp16(x / f),  low = fp16(x / f - high)

f is a power of two for each head (and sequence), such that the largest row norm of x / f is between 2^13 and 2^14. The
pieces have 22 significant bits together. The error of small elements is up to 2^-38 of the largest norm. A product is
three MMAs:

    A B = A_low B_high + A_high B_low + A_high B_high

An MMA aligns its terms to the largest one and truncates them. Therefore MMAs accumulate within one block only: over
the head dim, the keys of the block, or its queries. fp32 additions, which round to nearest, add up the blocks.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from cute_flash.device.memory.ldmatrix import MmaOperand
from cute_flash.device.memory.views import as_operand_a
from cute_flash.device.ptx import instruction

# The factor of P before it is split. P is at most 2^3 (`softmax.RESCALE_THRESHOLD`).
PROB_SCALE = 2.0**12
# The exponent of the largest row norm after division by the factor.
NORM_BITS = 13
# Limits of the biased fp32 exponent of a norm, between which a factor and its inverse are normal numbers.
_MIN_EXPONENT, _MAX_EXPONENT = 27, 254


class Pieces(NamedTuple):
    """A matrix in 16 bits: its high and its low fp16 piece. 16-bit calls have no low piece.

    A piece is a fragment in registers, or a tile in shared memory.
    """

    high: cute.Tensor | MmaOperand
    low: cute.Tensor | MmaOperand | None = None

    def present(self) -> list[cute.Tensor]:
        return [x for x in self if x is not None]

    def as_operand_a(self) -> "Pieces":
        """Accumulator fragments as fragments of operand A."""
        return Pieces(*(as_operand_a(x) for x in self.present()))


def _exponent(norm: Float32) -> Int32:
    """The biased exponent of a norm, clamped."""
    bits = instruction("mov.b32 {$w0}, {$r0};", Int32, norm)
    return cutlass.min(cutlass.max((bits >> 23) & 255, _MIN_EXPONENT), _MAX_EXPONENT)


def _power(exponent: Int32) -> Float32:
    return instruction("mov.b32 {$w0}, {$r0};", Float32, exponent << 23)


def factor(norm: Float32) -> Float32:
    """f of a head, from its largest row norm."""
    return _power(_exponent(norm) - NORM_BITS)


def inverse_factor(norm: Float32) -> Float32:
    """1 / f"""
    return _power(254 + NORM_BITS - _exponent(norm))


def split(values: cute.Tensor, scale: Float32) -> Pieces:
    """The pieces of fp32 values times a scale, as fragments with the layout of the values."""
    high, low = (cute.make_fragment_like(values, Float16) for _ in range(2))
    scaled = values.load() * scale
    high.store(scaled.to(Float16))
    low.store((scaled - high.load().to(Float32)).to(Float16))
    return Pieces(high, low)


def gemm_ss(mma: cute.TiledMma, acc: cute.Tensor, a: MmaOperand, b: MmaOperand, stage: Int32, steps: int) -> None:
    """acc += A B, with both from shared memory; `steps`: k-steps of a piece. In a row, low pieces follow high ones.

    The forward and the backward must add in the same order: their scores then have the same truncation errors, which
    cancel in exp(S - LSE).
    """
    a, b = a.rederived(), b.rederived()
    for k in range(steps):
        for x, where in ((a, 0), (b, stage)):
            x.load_k(k, where)
            x.load_k(k + steps, where)
        for i, j in ((k + steps, k), (k, k + steps), (k, k)):
            cute.gemm(mma, acc, a.fragment[None, None, i], b.fragment[None, None, j], acc)


def gemm_pieces(mma: cute.TiledMma, acc: cute.Tensor, a: Pieces, b: MmaOperand, stage: Int32) -> None:
    """acc += A B. B is transposed: the columns of its low pieces follow those of its high pieces."""
    a = Pieces(*(x.rederived() if isinstance(x, MmaOperand) else x for x in a))
    b = b.rederived()
    columns = cute.size(b.fragment, mode=[1]) // 2
    halves = cute.logical_divide(b.fragment, (None, columns, None))
    for k in range(cute.size(b.fragment, mode=[2])):
        b.load_k(k, stage)
        # Two tiles of A share one fragment, so the low piece is used before the high piece is loaded.
        for i, others in ((1, (0,)), (0, (1, 0))):
            if isinstance(a[i], MmaOperand):
                a[i].load_k(k, 0)
            rA = a[i].fragment if isinstance(a[i], MmaOperand) else a[i]
            for j in others:
                cute.gemm(mma, acc, rA[None, None, k], halves[None, (None, j), k], acc)


@cute.jit
def add_gemm_rs(mma: cute.TiledMma, acc: cute.Tensor, a: Pieces, b: MmaOperand, stage: Int32):
    """acc += A B with the pieces of A in registers, 16 columns at a time.

    The product of this block has its own accumulators. Adding them to `acc` rounds to nearest.
    """
    b = b.rederived()
    columns = cute.size(b.view, mode=[1]) // 2
    # One ldmatrix.x4 loads the operands of two n8 tiles.
    acc_groups = cute.logical_divide(acc, (None, None, 2))
    b_groups = cute.logical_divide(b.fragment, (None, 2, None))
    for n in cutlass.range_constexpr(columns):
        sums = cute.make_fragment_like(acc_groups[None, None, (None, 0)])
        sums.fill(0.0)
        b.load(n, stage)
        b.load(columns + n, stage)
        for k in cutlass.range_constexpr(cute.size(b.fragment, mode=[2])):
            for i, j in ((1, n), (0, columns + n), (0, n)):
                cute.gemm(mma, sums, a[i][None, None, k], b_groups[None, (None, j), k], sums)
        target = acc_groups[None, None, (None, n)]
        target.store(target.load() + sums.load())
