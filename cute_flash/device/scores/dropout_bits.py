"""Dropout in the backward: one keep bit per score of a block, used for dV and for dP.

`DropoutBits` is for blocks of keys by queries. `RowDropoutBits` is for blocks of queries by keys, where a thread holds
both keys of every Philox word that it uses, so threads exchange nothing.

One Philox call serves the scores {i, i + 8, i + 16, i + 24} x {j, j + 1, j + 8, j + 9}, queries by keys, in a rectangle
of 32 queries and 16 keys (`spec.dropout`). In blocks of keys by queries, a thread holds queries i and i + 1, and the
queries 8, 16 and 24 after each. It holds only one of the keys j and j + 1, and the key 8 after it. So the threads of
keys j and j + 1, which are 4 lanes apart, need the results of the same calls. Both threads share these calls: the first
thread calls Philox for query i, the second for query i + 1, each for both keys. Then a shuffle exchanges the bits of 32
scores.

A step is one call per thread. It gives the bits of 2 rows and 8 columns of a thread, or of 4 or 2 columns if the thread
has only so many. Up to MAX_UNROLLED steps are unrolled if registers allow; otherwise the steps run as a loop, while the
tensor cores compute the scores. The first column of a block is a multiple of 4 times the columns of a step.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_flash.device.memory.views import as_mn
from cute_flash.device.ptx import chosen_bytes, spread_signs
from cute_flash.device.scores.philox import Dropout, half_factor, key_index, query_index
from cute_flash.device.scores.position import TilePosition
from cute_flash.spec.dropout import CALL_STRIDE, ROW_16_FACTOR

HALF_COLUMNS = 4  # columns of a thread in 16 queries, half of a Philox rectangle
QUARTER_COLUMNS = 2  # in 8 queries
MAX_UNROLLED = 4  # steps
LOW_BITS = 0x00010001  # the lowest bit of both halves of a word
NEIGHBOUR = 4  # distance in lanes of the threads of keys j and j + 1
# prmt selectors that combine this thread's word and its neighbour's. The thread of the even key takes both low halves,
# its own (even queries) first; the thread of the odd key both high halves, the neighbour's (even queries) first.
OF_EVEN_KEY, OF_ODD_KEY = 0x5410, 0x3276
# prmt selectors that fill each half with the sign bit of its low byte, or of its high byte.
OF_LOW_BYTES, OF_HIGH_BYTES = 0xAA88, 0xBB99


class StepRange(NamedTuple):
    """Steps `first` to `last` - 1 of a word."""

    first: int
    last: int
    unrolls: bool


class KeepBits:
    """Words of keep bits. In each word, the low half is for even columns and the high half for odd ones."""

    words: cute.Tensor  # Int32

    def bit_position(self, r: int, c: int) -> tuple[int, int]:
        """(word, bit) of an element. `bit` is the position in the half of the word that the parity of c selects."""
        raise NotImplementedError

    def select(self, x: Float32, r: int, c: int) -> Float32:
        """x, or 0 if dropout drops it."""
        word, bit = self.bit_position(r, c)
        is_set = (Uint32(self.words[word]) & Uint32(1 << bit + 16 * (c % 2))) != 0
        return cutlass.select_(is_set, x, Float32(0.0))

    def pair_mask(self, r: int, c: int) -> Int32:
        """An AND mask for the packed 16-bit elements c and c + 1, c even: 0 where dropout drops the element."""
        word, bit = self.bit_position(r, c)
        # Shift both bits to the sign positions of their bytes.
        return spread_signs(self.words[word] << 7 - bit % 8, OF_LOW_BYTES if bit < 8 else OF_HIGH_BYTES)


@dataclass(frozen=True)
class DropoutBits(KeepBits):
    """The keep bits of this thread's accumulator elements.

    In each word, the low half is for even queries and the high half for odd ones.
    """

    words: cute.Tensor  # Int32
    step_columns: cutlass.Constexpr  # of a thread in a step: 8, 4 or 2
    steps_of_row: cutlass.Constexpr  # steps of a pair of rows

    @property
    def step_bits(self) -> int:
        """Bits of a step in one half of a word: 2 keys times the queries of one parity; the key changes fastest."""
        return self.step_columns

    @property
    def steps(self) -> int:
        """Steps that fit in a word."""
        return 16 // self.step_bits

    @staticmethod
    def compute(dropout: Dropout, position: TilePosition, may_unroll: bool) -> "DropoutBits":
        """Compute the bits of a block. `may_unroll`: there are registers for several Philox calls at a time."""
        rows, columns = (cute.size(as_mn(position.tScS), mode=[i]) for i in range(2))
        step_columns = min(columns, 2 * HALF_COLUMNS)
        steps_of_row, rest = divmod(columns, step_columns)
        assert rest == 0
        num = rows // 2 * steps_of_row
        result = DropoutBits(cute.make_rmem_tensor(-(-num * step_columns // 16), Int32), step_columns, steps_of_row)
        result._compute(dropout, position, num, may_unroll and num <= MAX_UNROLLED)
        return result

    @cute.jit
    def _compute(self, dropout: Dropout, position: TilePosition, num: cutlass.Constexpr, unrolls: cutlass.Constexpr):
        parity = position.row(0) % 2
        selector = Int32(OF_EVEN_KEY) if parity == 0 else Int32(OF_ODD_KEY)
        for w in cutlass.range_constexpr(cute.size(self.words)):
            first, last = self.steps * w, min(self.steps * (w + 1), num)
            own = self.own_word(dropout, position, StepRange(first, last, unrolls), parity)
            other = self.neighbour_word(own, dropout, position, StepRange(first, last, True))
            self.words[w] = chosen_bytes(own, other, selector)

    @cute.jit
    def own_word(self, dropout: Dropout, position: TilePosition, steps: cutlass.Constexpr, parity: Int32) -> Int32:
        """The bits that this thread computes: queries of one parity, even keys in the low half, odd keys in the high.

        `parity`: 0 for even queries, 1 for odd ones.
        """
        first, last, unrolls = steps
        word = Int32(0)
        for step in cutlass.range(first, last, unroll=last - first if unrolls else 1):
            bits = self.step_word(dropout, position, step, parity) << 16 - self.step_bits
            word = ((word >> self.step_bits) & (0xFFFF >> self.step_bits) * LOW_BITS) | bits
        # If the word is not full, move its steps to the low end of both halves.
        missing = self.step_bits * (self.steps - (last - first))
        return word if missing == 0 else (word >> missing) & (0xFFFF >> missing) * LOW_BITS

    def step_word(self, dropout: Dropout, position: TilePosition, step: Int32, parity: Int32) -> Int32:
        """The bits of one step, at the low end of both halves of the word.

        Bit 2 q + k is for the thread's q-th query of this parity, and for its k-th even key in the low half, or its
        k-th odd key in the high half.
        """
        tile, k = step // self.steps_of_row, step % self.steps_of_row
        query = dropout.first_query(query_index(position.column(0))) + Uint32(parity + CALL_STRIDE * k)
        words = dropout.words(position.batch_head, query, dropout.first_key(key_index(position.row(2 * tile))))
        if self.step_columns == 2 * HALF_COLUMNS:
            masks = dropout.masks(words) + dropout.masks(words, Uint32(ROW_16_FACTOR))
        else:
            masks = dropout.masks(words, half_factor(position.column(0)))
        if self.step_columns == QUARTER_COLUMNS:
            # The first two words are for query i, the others for query i + 8.
            is_first = position.column(0) // CALL_STRIDE % 2 == 0
            masks = [cutlass.select_(is_first, masks[j], masks[2 + j]) for j in range(2)]
        bits = masks[0] & LOW_BITS
        for i in range(1, len(masks)):
            bits = bits | (masks[i] & (LOW_BITS << i))
        return bits

    def neighbour_word(self, own: Int32, dropout: Dropout, position: TilePosition, steps: StepRange) -> Int32:
        """The neighbour's `own_word`, for queries of the other parity."""
        return cute.arch.shuffle_sync_bfly(own, offset=NEIGHBOUR)

    def bit_position(self, r: int, c: int) -> tuple[int, int]:
        queries = self.step_columns // 2  # of the same parity in a step
        step = r // 2 * self.steps_of_row + c // 2 // queries
        return step // self.steps, self.step_bits * (step % self.steps) + 2 * (c // 2 % queries) + r % 2


@dataclass(frozen=True)
class RowDropoutBits(KeepBits):
    """The keep bits of this thread's accumulator elements, if rows are queries.

    A call serves two rows of the thread, 8 apart, and two pairs of keys. The tile begins at a multiple of 16 keys.
    """

    words: cute.Tensor  # Int32: 4 bits of each half for every 16 keys

    @staticmethod
    def compute(dropout: Dropout, position: TilePosition) -> "RowDropoutBits":
        rows, columns = (cute.size(as_mn(position.tScS), mode=[i]) for i in range(2))
        assert rows == 2 and columns in (HALF_COLUMNS, 2 * HALF_COLUMNS)
        query, factor = dropout.first_query(query_index(position.row(0))), half_factor(position.row(0))
        first, word = dropout.first_key(key_index(position.column(0))), Int32(0)
        for k in range(columns // HALF_COLUMNS):
            call = dropout.words(position.batch_head, query, first + Uint32(CALL_STRIDE // 2 * k))
            for i, mask in enumerate(dropout.masks(call, factor)):
                # Among the words of a call the pair of keys changes fastest, among bits the row.
                word = word | (mask & (LOW_BITS << HALF_COLUMNS * k + 2 * (i % 2) + i // 2))
        words = cute.make_rmem_tensor(1, Int32)
        words[0] = word
        return RowDropoutBits(words)

    def bit_position(self, r: int, c: int) -> tuple[int, int]:
        return 0, c // 2 * 2 + r
