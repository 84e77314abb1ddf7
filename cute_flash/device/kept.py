"""Which scores of a block of keys by queries dropout keeps, as bits: the backward asks for dV and for dP.

One call of Philox draws for {i, i + 8, i + 16, i + 24} x {j, j + 1, j + 8, j + 9}, queries by keys. Of the
queries a thread holds i and i + 1 and those 8, 16 and 24 further, of the keys one of j and j + 1 and that 8
further. So the threads of j and of j + 1, lanes 4 apart, share the work: the first draws for query i, the
second for i + 1, each for both keys, and they exchange what the other needs, 32 scores at a time.

A step is one call: 2 rows and 8 columns of a thread; 4 columns, where it has no more. Where there are few
steps, they run side by side; more are a loop, short enough to run beside the tensor cores, before the scores
are there. Columns begin at multiples of 32; where there are 4, of 16.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_flash.device.philox import Dropout, TilePlace, half_factor, key_index, query_index
from cute_flash.device.ptx import chosen_bytes, spread_signs
from cute_flash.device.views import as_mn
from cute_flash.spec.dropout import APART, SECOND

HALF_COLUMNS = 4  # in half of a rectangle
SIDE_BY_SIDE = 4  # steps, at most
LOW_BITS = 0x00010001  # the lowest of both halves
NEIGHBOUR = 4  # lanes to the one with the next key
# The low halves of mine and the other, which has the odd query; the high halves of the other and mine.
OF_EVEN_KEY, OF_ODD_KEY = 0x5410, 0x3276
# The signs of the lower bytes of both halves, and of the upper ones, for all bits of the halves.
OF_LOW_BYTES, OF_HIGH_BYTES = 0xAA88, 0xBB99


@dataclass(frozen=True)
class Kept:
    """Bits of the elements (row, column) of an accumulator in one thread. Low halves: even queries."""

    words: cute.Tensor  # Int32
    halves: cutlass.Constexpr  # of the queries of a call: 1 or 2
    steps_of_row: cutlass.Constexpr

    @property
    def step_bits(self) -> int:
        """Of a half of a word: one of each key, and then one of each query."""
        return 4 * self.halves

    @property
    def steps(self) -> int:
        """Of a word."""
        return 16 // self.step_bits

    @staticmethod
    def draw(dropout: Dropout, place: TilePlace, is_alone: bool) -> "Kept":
        """`is_alone`: registers are left for several calls at a time."""
        rows, columns = (cute.size(as_mn(place.tScS), mode=[i]) for i in range(2))
        halves = min(columns // HALF_COLUMNS, 2)
        steps_of_row, rest = divmod(columns, HALF_COLUMNS * halves)
        assert rest == 0
        num, bits = rows // 2 * steps_of_row, 4 * halves
        kept = Kept(cute.make_rmem_tensor(-(-num * bits // 16), Int32), halves, steps_of_row)
        kept.fill(dropout, place, num, is_alone and num <= SIDE_BY_SIDE)
        return kept

    @cute.jit
    def fill(self, dropout: Dropout, place: TilePlace, num: cutlass.Constexpr, unrolls: cutlass.Constexpr):
        parity = place.row(0) % 2
        selector = Int32(OF_EVEN_KEY) if parity == 0 else Int32(OF_ODD_KEY)
        for w in cutlass.range_constexpr(cute.size(self.words)):
            first, last = self.steps * w, min(self.steps * (w + 1), num)
            mine = self.drawn(dropout, place, (first, last, unrolls), parity)
            self.words[w] = chosen_bytes(mine, self.of_neighbour(mine, dropout, place, (first, last, True)), selector)

    @cute.jit
    def drawn(self, dropout: Dropout, place: TilePlace, steps: cutlass.Constexpr, parity: Int32) -> Int32:
        """For the even or the odd queries of some steps: low halves of even keys, high halves of odd ones."""
        first, last, unrolls = steps
        word = Int32(0)
        for step in cutlass.range(first, last, unroll=last - first if unrolls else 1):
            found = self.bits(dropout, place, step, parity) << 16 - self.step_bits
            word = ((word >> self.step_bits) & (0xFFFF >> self.step_bits) * LOW_BITS) | found
        # Fewer steps than a word has room for stand at its beginning.
        missing = self.step_bits * (self.steps - (last - first))
        return word if missing == 0 else (word >> missing) & (0xFFFF >> missing) * LOW_BITS

    def bits(self, dropout: Dropout, place: TilePlace, step: Int32, parity: Int32) -> Int32:
        """Of a step, four or eight of both halves: bit 2 (which query) + (second key)."""
        tile, k = step // self.steps_of_row, step % self.steps_of_row
        query = query_index(place.column(0)) + Uint32(parity + APART * k)
        words = dropout.words(place.sequence, query, key_index(place.row(2 * tile)))
        if self.halves == 2:
            masks = dropout.masks(words) + dropout.masks(words, Uint32(SECOND))
        else:
            masks = dropout.masks(words, half_factor(place.column(0)))
        found = masks[0] & LOW_BITS
        for bit in range(1, len(masks)):
            found = found | (masks[bit] & (LOW_BITS << bit))
        return found

    def of_neighbour(self, mine: Int32, dropout: Dropout, place: TilePlace, steps: tuple) -> Int32:
        """What it has drawn: the same for the other queries."""
        return cute.arch.shuffle_sync_bfly(mine, offset=NEIGHBOUR)

    def place(self, r: int, c: int) -> tuple[int, int]:
        """The word, and the bit in the half of it that columns of this parity have."""
        queries = 2 * self.halves  # of the same parity in a step
        step = r // 2 * self.steps_of_row + c // 2 // queries
        return step // self.steps, self.step_bits * (step % self.steps) + 2 * (c // 2 % queries) + r % 2

    def choose(self, x: Float32, r: int, c: int) -> Float32:
        """x if it is kept, else 0."""
        word, bit = self.place(r, c)
        is_kept = (Uint32(self.words[word]) & Uint32(1 << bit + 16 * (c % 2))) != 0
        return cutlass.select_(is_kept, x, Float32(0.0))

    def mask(self, r: int, c: int) -> Int32:
        """Of elements c and c + 1, c even, in 16 bits each: all set if they are kept."""
        word, bit = self.place(r, c)
        # Both bits become the signs of their bytes.
        return spread_signs(self.words[word] << 7 - bit % 8, OF_LOW_BYTES if bit < 8 else OF_HIGH_BYTES)
