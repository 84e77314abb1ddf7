"""Dropout by a counter: Philox 4x32-7 in integer arithmetic of torch, and which draw belongs to which score.

The mask of a call is a function of (seed, offset) and of a score's place, so nobody stores it: forward and
backward, the CPU and a GPU compute the same bits. One call of Philox gives four words, each of which draws
for two neighbouring keys of two rows, 16 apart: all of them for the scores {i, i + 8, i + 16, i + 24} x
{j, j + 1, j + 8, j + 9} of an aligned rectangle of 32 rows and 16 keys, those of one sequence, j even:

    key        the low and the high half of seed
    counter    (4 ⌊j / 16⌋ + ⌊(j mod 8) / 2⌋,  8 ⌊i / 32⌋ + i mod 8,  b H + h,  the low half of offset)
    word       number 2 (⌊i / 8⌋ mod 2) + ⌊j / 8⌋ mod 2; for the rows 16 to 31 of a rectangle times `SECOND`
    draw       the low 15 bits of its low half for even keys, of its high half for odd ones

In the accumulators of mma.sync and of wgmma those of 16 rows lie in one thread where rows are queries, as in
the forward: a draw is a comparison of two 16-bit floats, and what it says a mask for P in 16 bits. Where rows
are keys, as in the backward, they lie in two threads, which exchange what they drew (`device/kept.py`). Seven
rounds are what Philox needs to pass all tests of randomness that its authors tried (Salmon et al. 2011).
A score is dropped when its draw is below `threshold`.

Each draw by itself is as even as Philox, and so are any two of different words. Those that share a word are
independent but for rows i and i + 16 of an even key: of the 2^15 pairs of draws, the points of a lattice, at
most 3.5 more or less than p^2 of them are dropped both, for every p: 2^-13.2 of all. Of an odd key, whose
product takes a carry of the other half, it is below 2^-26. (Swapping the bytes of the halves instead, which
costs as much, is off by up to 2^-9.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
# A word times this draws for the rows 16 further: odd, and its multiples are spread evenly (MurmurHash3's).
SECOND = 0xC2B2AE35
# Rows and keys of a rectangle, how far apart the scores of one call lie in it, and rows that share no word.
ROWS, KEYS, APART, HALF = 32, 16, 8, 16
DRAW_BITS = 15
MAX_DRAW = (1 << DRAW_BITS) - 1

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four words of 32 bits for every counter; words are int64, counters broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two words fills 64 bits; int64 keeps all of them, the sign being the uppermost.
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (high >> 32 & WORD) ^ c1 ^ k0,
            high & WORD,
            (low >> 32 & WORD) ^ c3 ^ k1,
            low & WORD,
        )
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def threshold(p: float) -> int:
    """Draws below it are dropped: p to the nearest 2^-15, and never all of them."""
    return min(round(p * (1 << DRAW_BITS)), MAX_DRAW)


@dataclass(frozen=True, eq=False)
class Dropout:
    """Of one call: the probability, (seed, offset), the number of query heads, the first sequence's index."""

    p: float
    rng: Tensor
    heads: int
    first: int = 0

    @property
    def scale(self) -> float:
        """Of what is kept, so that the mean stays."""
        return 1.0 / (1.0 - self.p)

    def kept(self, batch: range, heads: range, rows: range, keys: range) -> Tensor:
        """(batch, heads, rows, keys), true where a score is kept."""
        seed, offset = (int(x) for x in self.rng)
        device = self.rng.device

        def places(wanted: range, size: int, calls: int) -> Tensor:
            """Of the calls for whole rectangles."""
            first, last = wanted.start // size, -(-wanted.stop // size)
            return torch.arange(first * calls, last * calls, device=device)

        b = torch.arange(batch.start, batch.stop, device=device)[:, None] + self.first
        h = torch.arange(heads.start, heads.stop, device=device)
        i, j = places(rows, ROWS, APART), places(keys, KEYS, APART // 2)
        sequence = (b * self.heads + h)[:, :, None, None]
        counter = (j, i[:, None], sequence, torch.full_like(sequence, offset & WORD))
        words = torch.stack(philox_4x32(counter, (seed & WORD, seed >> 32 & WORD)), dim=-1)
        words = torch.stack([words, words * SECOND], dim=-2)
        draws = torch.stack([words & MAX_DRAW, words >> 16 & MAX_DRAW], dim=-1)
        # (b, h, rows' rectangle, row, keys' rectangle, pair of keys, which 16 rows, which 8 rows, which 8
        # keys, key of a pair) to rows and keys in order.
        draws = draws.unflatten(5, (2, 2)).unflatten(3, (-1, APART // 2)).unflatten(2, (-1, APART))
        whole = draws.permute(0, 1, 2, 6, 7, 3, 4, 8, 5, 9).flatten(6, 9).flatten(2, 5)
        top, left = rows.start % ROWS, keys.start % KEYS
        return whole[:, :, top : top + len(rows), left : left + len(keys)] >= threshold(self.p)
