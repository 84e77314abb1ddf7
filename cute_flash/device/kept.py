"""Which scores of a block dropout keeps, as bits: the backward asks twice, for dV and for dP.

Two calls of Philox draw for 2 rows and 4 columns of a thread, which is one byte: a step. The steps are a
loop, short enough to run beside the tensor cores, before the scores are there.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_flash.device.philox import Dropout, Place
from cute_flash.device.views import as_mn

STEP_COLUMNS, STEP_BITS = 4, 8
STEPS = 32 // STEP_BITS  # of a word


@dataclass(frozen=True)
class Kept:
    """Bits of the elements (row, column) of an accumulator in one thread."""

    words: cute.Tensor  # Int32
    steps_of_row: cutlass.Constexpr

    @staticmethod
    def draw(dropout: Dropout, place: Place) -> "Kept":
        rows, columns = (cute.size(as_mn(place.tScS), mode=[i]) for i in range(2))
        steps_of_row = columns // STEP_COLUMNS
        num = rows // 2 * steps_of_row
        kept = Kept(cute.make_rmem_tensor(-(-num // STEPS), Int32), steps_of_row)
        kept.fill(dropout, place, num)
        return kept

    @cute.jit
    def fill(self, dropout: Dropout, place: Place, num: cutlass.Constexpr):
        for w in cutlass.range_constexpr(cute.size(self.words)):
            first, last = STEPS * w, min(STEPS * (w + 1), num)
            word = Uint32(0)
            for step in cutlass.range(first, last, unroll=1):
                word = (word >> STEP_BITS) | (self.byte(dropout, place, step) << (32 - STEP_BITS))
            self.words[w] = Int32(word >> (32 - STEP_BITS * (last - first)))

    def byte(self, dropout: Dropout, place: Place, step: Int32) -> Uint32:
        """Of the step's rows and columns: bit 4 (second n8 tile) + 2 (second row) + column of a pair."""
        tile, k = step // self.steps_of_row, step % self.steps_of_row
        found = Uint32(0)
        for pair in range(2):
            draws = dropout.draws(place, place.row(tile), place.column(k, pair))
            for word in range(4):
                # Queries 8 apart are two words apart, keys 8 apart are neighbours.
                column, row = (word // 2, word % 2) if place.turned else (word % 2, word // 2)
                bit = Uint32(1 << (4 * column + 2 * row + pair))
                found = found | cutlass.select_(draws[word] >= dropout.threshold, bit, Uint32(0))
        return found

    def choose(self, x: Float32, r: int, c: int) -> Float32:
        """x if it is kept, else 0."""
        step = r // 2 * self.steps_of_row + c // STEP_COLUMNS
        bit = STEP_BITS * (step % STEPS) + 4 * (c // 2 % 2) + 2 * (r % 2) + c % 2
        is_kept = (Uint32(self.words[step // STEPS]) & Uint32(1 << bit)) != 0
        return cutlass.select_(is_kept, x, Float32(0.0))
