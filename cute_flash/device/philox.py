"""Dropout in an accumulator: the Philox of `cute_flash.reference.dropout`, 16 scores a call.

Seen as an operand (`views.as_operand_a`), an accumulator is ((pair, half, half), MMA_M, MMA_K): for each row
tile and each 16 columns a pair of neighbours in a row of a 16 x 16 square, and the four of those that rows
and columns 8 apart make. Those are half of what one call draws for, a word each; the same words, times a
constant, are for the next square of rows. Tiles begin at multiples of 16.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

from cute_flash.device.ptx import kept_halves
from cute_flash.device.views import as_mn
from cute_flash.spec.dropout import APART, HALF, KEYS, MULTIPLIERS, ROUNDS, ROWS, SECOND, WEYL, WORD


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


def query_index(i: Int32) -> Uint32:
    """What queries i, i + 8, i + 16 and i + 24 of a rectangle count as."""
    return Uint32(i // ROWS * APART + i % APART)


def key_index(j: Int32) -> Uint32:
    """What keys j, j + 1, j + 8 and j + 9 of a rectangle count as."""
    return Uint32(j // KEYS * (APART // 2) + j % APART // 2)


def half_factor(i: Int32) -> Uint32:
    """Of words, for query i and that 8 further: 1 in the first half of a rectangle."""
    return cutlass.select_(i // HALF % 2 == 0, Uint32(1), Uint32(SECOND))


@dataclass(frozen=True)
class Dropout:
    """What a call drops: the halves of seed and offset that count, and draws below the threshold."""

    seed: tuple[Uint32, Uint32]
    offset: Uint32
    threshold: Uint32  # in both halves
    scale: Float32  # of what is kept

    @staticmethod
    def read(mRng: cute.Tensor, threshold: Uint32, scale: Float32) -> "Dropout":
        """`mRng`: (seed, offset), int64, in global memory."""
        # All threads agree: said for the keys of the rounds to live in uniform registers.
        words = cute.recast_tensor(mRng, Int32)
        low, high, offset = (Uint32(cute.arch.make_warp_uniform(words[i])) for i in range(3))
        return Dropout((low, high), offset, threshold, scale)

    def words(self, sequence: Int32, query: Uint32, key: Uint32) -> tuple:
        """Of one call: for its keys and those 8 further, of its query and then of that 8 further."""
        return philox_4x32((key, query, Uint32(sequence), self.offset), self.seed)

    def masks(self, words: tuple, factor: Uint32 | None = None) -> list:
        """Of two keys that are neighbours, 16 bits each, all set if they are kept, for each word, or for each
        times a factor.
        """
        draws = words if factor is None else [word * factor for word in words]
        return [kept_halves(draw, self.threshold) for draw in draws]

    @cute.jit
    def draw(self, rP: cute.Tensor, place: "TilePlace") -> cute.Tensor:
        """For P in 16 bits, seen as an operand, a mask of each register: all bits set of what is kept."""
        masks = cute.make_rmem_tensor(cute.size(rP) // 2, Int32)
        first_key = key_index(place.column(0))
        for m in cutlass.range_constexpr(cute.size(rP, mode=[1])):
            query, factor = query_index(place.row(2 * m)), half_factor(place.row(2 * m))
            for k in cutlass.range_constexpr(cute.size(rP, mode=[2])):
                key = first_key + Uint32(APART // 2 * k)
                found = self.masks(self.words(place.sequence, query, key), factor)
                for half in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        masks[cute.crd2idx(((0, r, half), m, k), rP.layout) // 2] = found[2 * r + half]
        return masks


@dataclass(frozen=True)
class TilePlace:
    """Where a tile of accumulators lies in the scores of a head."""

    sequence: Int32  # b H + h
    first_row: Int32
    first_column: Int32
    tScS: cute.Tensor  # (row, column) within the tile of every element of this thread

    def row(self, r: int) -> Int32:
        """The thread's r-th."""
        return self.first_row + as_mn(self.tScS)[r, 0][0]

    def column(self, c: int) -> Int32:
        return self.first_column + as_mn(self.tScS)[0, c][1]
