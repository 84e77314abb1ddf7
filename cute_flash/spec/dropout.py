"""Dropout by a counter: Philox 4x32-7, and which draw belongs to which score.

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
are keys, as in the backward, they lie in two threads, which exchange what they drew (`device/dropout_bits.py`). Seven
rounds are what Philox needs to pass all tests of randomness that its authors tried (Salmon et al. 2011).
A score is dropped when its draw is below `threshold`.

Each draw by itself is as even as Philox, and so are any two of different words. Those that share a word are
independent but for rows i and i + 16 of an even key: of the 2^15 pairs of draws, the points of a lattice, at
most 3.5 more or less than p^2 of them are dropped both, for every p: 2^-13.2 of all. Of an odd key, whose
product takes a carry of the other half, it is below 2^-26. (Swapping the bytes of the halves instead, which
costs as much, is off by up to 2^-9.)
"""

from __future__ import annotations

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


def threshold(p: float) -> int:
    """Draws below it are dropped: p to the nearest 2^-15, and never all of them."""
    return min(round(p * (1 << DRAW_BITS)), MAX_DRAW)
