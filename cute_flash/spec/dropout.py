"""The random numbers of dropout: Philox 4x32-7, a counter-based generator, and the assignment of numbers to scores.

The dropout mask is a function of (seed, offset) and of a score's position, so it is never stored: forward and
backward, CPU and GPU compute the same bits. Each score (b, h, i, j) has one 15-bit random number, and is dropped if
the number is below `threshold`.

One Philox call returns four 32-bit words. The two halves of a word hold the numbers of two neighbouring keys of row i;
the word times `ROW_16_FACTOR` holds those of row i + 16. So one call serves the scores {i, i + 8, i + 16, i + 24} x
{j, j + 1, j + 8, j + 9}, j even, in an aligned rectangle of 32 rows and 16 keys of one sequence:

    key        the low and the high half of seed
    counter    (4 ⌊j / 16⌋ + ⌊(j mod 8) / 2⌋,  8 ⌊i / 32⌋ + i mod 8,  b H + h,  the low half of offset)
    word       index 2 (⌊i / 8⌋ mod 2) + ⌊j / 8⌋ mod 2; times `ROW_16_FACTOR` for rows 16 to 31 of a rectangle
    number     the low 15 bits of the word's low half for even keys, of its high half for odd keys

In the forward, accumulator rows are queries. One thread holds all scores of a Philox call that are in the same 16 rows
(i and i + 8), for mma.sync and wgmma alike. One f16x2 comparison then gives the mask of two 16-bit elements of P. In
the backward, except that of Hopper above head dim 128, accumulator rows are keys: two threads hold these scores, and
exchange their random numbers (`device/scores/dropout_bits.py`).

Seven rounds are the fewest with which Philox passed all statistical tests of its authors (Salmon et al. 2011). Single
numbers, and pairs from different words, are as uniform as Philox. Pairs from one word are independent, except those of
rows i and i + 16. The probability that both are dropped differs from p² by at most 3.5 / 2^15 = 2^-13.2 for even keys,
and by less than 2^-26 for odd keys, because the multiplication carries bits of the low half into the high half.
Swapping bytes instead of multiplying has the same cost, but would give differences of up to 2^-9.
"""

from __future__ import annotations

from functools import lru_cache

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
MASK32 = 0xFFFFFFFF
# A word times this constant holds the random numbers of the row 16 further down. It is odd, and its multiples are
# spread evenly (from MurmurHash3).
ROW_16_FACTOR = 0xC2B2AE35
# Rows and keys of a rectangle; `ROW_16_FACTOR` applies to the second half of its rows.
RECT_ROWS, RECT_KEYS = 32, 16
# Distance between the rows of a Philox call, and between its pairs of keys.
CALL_STRIDE = 8
RANDOM_BITS = 15
MAX_RANDOM = (1 << RANDOM_BITS) - 1


@lru_cache(maxsize=64)
def threshold(p: float) -> int:
    """The number below which scores are dropped: p rounded to a multiple of 2^-15, and less than 1."""
    return min(round(p * (1 << RANDOM_BITS)), MAX_RANDOM)
