"""The dropout mask of an accumulator, by Philox as `spec.dropout` defines it: 16 scores per call.

Viewed as operand A (`views.as_operand_a`), an accumulator is ((pair, row half, column half), MMA_M, MMA_K). In each
16 x 16 square a thread has four pairs of neighbouring columns, in rows 8 apart and columns 8 apart. These are half of
the scores of one Philox call, one word for each pair. The same words times a constant serve the next 16 rows. Tiles
begin at multiples of 16.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64

from cute_flash.device.ptx import keep_masks
from cute_flash.device.scores.position import TilePosition
from cute_flash.spec.dropout import CALL_STRIDE, MASK32, MULTIPLIERS, RECT_KEYS, RECT_ROWS, ROUNDS, ROW_16_FACTOR, WEYL


class FourWords(NamedTuple):
    """A counter, the result of a Philox call, or a mask for each word of a result."""

    w0: Uint32 | Int32
    w1: Uint32 | Int32
    w2: Uint32 | Int32
    w3: Uint32 | Int32


class PhiloxKey(NamedTuple):
    """The key of a Philox call: the seed."""

    low: Uint32
    high: Uint32


def philox_4x32(counter: FourWords, key: PhiloxKey) -> FourWords:
    """Philox-4x32: four words from a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(ROUNDS):
        # A 64-bit product is one instruction, and so are two XORs.
        low, high = Uint64(c0) * Uint64(MULTIPLIERS[0]), Uint64(c2) * Uint64(MULTIPLIERS[1])
        r0, r1 = (k + Uint32(i * weyl & MASK32) for k, weyl in zip((k0, k1), WEYL))
        c0, c1, c2, c3 = Uint32(high >> 32) ^ c1 ^ r0, Uint32(high), Uint32(low >> 32) ^ c3 ^ r1, Uint32(low)
    return FourWords(c0, c1, c2, c3)


def query_index(i: Int32) -> Uint32:
    """The word of the Philox counter for queries i, i + 8, i + 16 and i + 24 of a rectangle."""
    return Uint32(i // RECT_ROWS * CALL_STRIDE + i % CALL_STRIDE)


def key_index(j: Int32) -> Uint32:
    """The word of the Philox counter for keys j, j + 1, j + 8 and j + 9 of a rectangle."""
    return Uint32(j // RECT_KEYS * (CALL_STRIDE // 2) + j % CALL_STRIDE // 2)


def half_factor(i: Int32) -> Uint32:
    """The factor of the words for queries i and i + 8: 1 in the first half of a rectangle, else ROW_16_FACTOR."""
    return cutlass.select_(i // (RECT_ROWS // 2) % 2 == 0, Uint32(1), Uint32(ROW_16_FACTOR))


@dataclass(frozen=True)
class DropoutOrigin:
    """The position of a shard in the full call. The shard applies its part of the full call's dropout mask.

    Shards begin with a Philox rectangle, so an offset of rows or keys is an offset of a word of the counter.
    """

    query: Uint32 | Int32  # `query_index` of the first row
    key: Uint32 | Int32  # `key_index` of the first key
    head: Int32  # the first head
    heads: Int32  # of the full call


def batch_head_index(origin: DropoutOrigin | None, batch: Int32, head: Int32, heads: Int32) -> Int32:
    """b H + h; for a shard, b H + h in the full call."""
    if origin is None:
        return batch * heads + head
    return batch * origin.heads + origin.head + head


@dataclass(frozen=True)
class Dropout:
    """Seed, offset and threshold of a call: random numbers below the threshold drop their score."""

    seed: PhiloxKey
    offset: Uint32
    threshold: Uint32  # the 15-bit threshold, in both 16-bit halves
    origin: DropoutOrigin | None = None  # of a shard

    @staticmethod
    def read(mRng: cute.Tensor, threshold: Int32, origin: DropoutOrigin | None = None) -> "Dropout":
        """Read `mRng`, which is (seed, offset), int64, in global memory."""
        # The values are the same in all threads; `make_warp_uniform` puts the round keys into uniform registers.
        words = cute.recast_tensor(mRng, Int32)
        low, high, offset = (Uint32(cute.arch.make_warp_uniform(words[i])) for i in range(3))
        return Dropout(PhiloxKey(low, high), offset, Uint32(threshold), origin)

    def first_query(self, index: Uint32) -> Uint32:
        """A `query_index`, converted from a shard to the full call."""
        return index if self.origin is None else index + Uint32(self.origin.query)

    def first_key(self, index: Uint32) -> Uint32:
        """A `key_index`, converted from a shard to the full call."""
        return index if self.origin is None else index + Uint32(self.origin.key)

    def words(self, batch_head: Int32, query: Uint32, key: Uint32) -> FourWords:
        """The four words of one call. Word 2 r + c is for query i + 8 r and keys j + 8 c and j + 8 c + 1."""
        return philox_4x32(FourWords(key, query, Uint32(batch_head), self.offset), self.seed)

    def masks(self, words: FourWords, factor: Uint32 | None = None) -> FourWords:
        """An AND mask for each word, or for each word times `factor`.

        A mask has 16 bits for each of two neighbouring keys: 0 if dropout drops the score, else all set.
        """
        scaled = words if factor is None else [word * factor for word in words]
        return FourWords(*(keep_masks(word, self.threshold) for word in scaled))

    @cute.jit
    def masks_of(self, rP: cute.Tensor, position: TilePosition) -> cute.Tensor:
        """An AND mask for each register of 16-bit P, viewed as operand A."""
        masks = cute.make_rmem_tensor(cute.size(rP) // 2, Int32)
        first_key = self.first_key(key_index(position.column(0)))
        for m in cutlass.range_constexpr(cute.size(rP, mode=[1])):
            query, factor = self.first_query(query_index(position.row(2 * m))), half_factor(position.row(2 * m))
            for k in cutlass.range_constexpr(cute.size(rP, mode=[2])):
                key = first_key + Uint32(CALL_STRIDE // 2 * k)
                call = self.masks(self.words(position.batch_head, query, key), factor)
                for half in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        masks[cute.crd2idx(((0, r, half), m, k), rP.layout) // 2] = call[2 * r + half]
        return masks
