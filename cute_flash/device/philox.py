"""Dropout in an accumulator: the Philox of `cute_flash.philox`, four scores of one thread a call.

Seen as an operand (`views.as_operand_a`), an accumulator is ((pair, half, half), MMA_M, MMA_K): for each row
tile and each 16 columns two places in a row of a 16 x 16 square, and of each place the four scores that
rows and columns 8 apart make. Those are what one call draws for. Tiles begin at multiples of 16.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

from cute_flash.device.views import as_mn
from cute_flash.philox import APART, MULTIPLIERS, ROUNDS, SQUARE, WEYL, WORD


def philox_4x32(counter: tuple, key: tuple) -> tuple:
    """Four Uint32 of four Uint32 and two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(ROUNDS):
        # Both halves of a product are one instruction, and so are two exclusive-ors.
        low, high = Uint64(c0) * Uint64(MULTIPLIERS[0]), Uint64(c2) * Uint64(MULTIPLIERS[1])
        r0, r1 = (k + Uint32(i * weyl & WORD) for k, weyl in zip((k0, k1), WEYL))
        c0, c1, c2, c3 = Uint32(high >> 32) ^ c1 ^ r0, Uint32(high), Uint32(low >> 32) ^ c3 ^ r1, Uint32(low)
    return c0, c1, c2, c3


def square_index(i: Int32) -> Uint32:
    """What rows or keys i and i + 8 of a square count as: 8 ⌊i / 16⌋ + i mod 8."""
    return Uint32(i // SQUARE * APART + i % APART)


@dataclass(frozen=True)
class Dropout:
    """What a call drops: the halves of seed and offset that count, and draws below the threshold."""

    seed: tuple[Uint32, Uint32]
    offset: Uint32
    threshold: Uint32
    scale: Float32  # of what is kept

    @staticmethod
    def read(mRng: cute.Tensor, threshold: Uint32, scale: Float32) -> "Dropout":
        """`mRng`: (seed, offset), int64, in global memory."""
        # All threads agree: said for the keys of the rounds to live in uniform registers.
        words = cute.recast_tensor(mRng, Int32)
        low, high, offset = (Uint32(cute.arch.make_warp_uniform(words[i])) for i in range(3))
        return Dropout((low, high), offset, threshold, scale)

    @cute.jit
    def drop(self, acc: cute.Tensor, place: "Place", steps: cutlass.Constexpr = None):
        """P = 0 where it is dropped, for an accumulator seen as an operand, or some of its 16 columns."""
        self._change(acc, place, steps, False)

    @cute.jit
    def negate(self, acc: cute.Tensor, place: "Place", steps: cutlass.Constexpr = None):
        """P = -P where it is dropped: P is never negative, and its sign remembers the draw."""
        self._change(acc, place, steps, True)

    @cute.jit
    def _change(self, acc: cute.Tensor, place: "Place", steps: cutlass.Constexpr, negates: cutlass.Constexpr):
        steps = range(cute.size(acc, mode=[2])) if steps is None else steps
        for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            row = place.row(m)
            for k in cutlass.range_constexpr(steps.start, steps.stop):
                for pair in cutlass.range_constexpr(2):
                    draws = self.draws(place, row, place.column(k, pair))
                    for half in cutlass.range_constexpr(2):
                        for r in cutlass.range_constexpr(2):
                            # Queries 8 apart are two words apart, keys 8 apart are neighbours.
                            word = 2 * half + r if place.turned else 2 * r + half
                            at = ((pair, r, half), m, k)
                            if cutlass.const_expr(negates):
                                dropped = -acc[at]
                            else:
                                dropped = Float32(0.0)
                            acc[at] = dropped if draws[word] < self.threshold else acc[at]

    def draws(self, place: "Place", row: Uint32, column: Uint32) -> tuple:
        """For {i, i + 8} x {j, j + 8}, queries i by keys j."""
        i, j = (column, row) if place.turned else (row, column)
        return philox_4x32((j, i, Uint32(place.sequence), self.offset), self.seed)


@dataclass(frozen=True)
class Place:
    """Where a tile of accumulators lies in the scores of a head."""

    sequence: Int32  # b H + h
    first_row: Int32
    first_column: Int32
    tScS: cute.Tensor  # (row, column) within the tile of every element of this thread
    turned: cutlass.Constexpr = False  # rows are keys and columns queries

    def row(self, m: int) -> Uint32:
        return square_index(self.first_row + as_mn(self.tScS)[2 * m, 0][0])

    def column(self, k: int, pair: int) -> Uint32:
        """A thread's columns are its first one plus compile-time offsets (`mask.column_offset`)."""
        first = square_index(self.first_column + as_mn(self.tScS)[0, 0][1])
        return first + Uint32(APART * k + pair)
