"""The dropout mask of `spec.dropout` in torch's integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash.spec.dropout import APART, KEYS, MAX_DRAW, MULTIPLIERS, ROUNDS, ROWS, SECOND, WEYL, WORD, threshold

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Compute four 32-bit words for each counter. Words are int64; counters broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product of two words has 64 bits, which int64 holds; the highest is its sign bit.
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((high >> 32 & WORD) ^ c1 ^ k0, high & WORD, (low >> 32 & WORD) ^ c3 ^ k1, low & WORD)
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


@dataclass(frozen=True, eq=False)
class Dropout:
    """The dropout of one call: probability, (seed, offset), and number of query heads."""

    p: float
    rng: Tensor
    heads: int

    @property
    def scale(self) -> float:
        """The factor of the weights that are not dropped, which keeps the expected output."""
        return 1.0 / (1.0 - self.p)

    def keep_mask(self, batch: range, heads: range, rows: range, keys: range) -> Tensor:
        """The mask of a block, (batch, heads, rows, keys): false where a weight is dropped."""
        seed, offset = (int(x) for x in self.rng)
        device = self.rng.device

        def counters(positions: range, size: int, calls: int) -> Tensor:
            """One word of the counters of all Philox calls whose rectangles overlap `positions`."""
            begin, end = positions.start // size, -(-positions.stop // size)
            return torch.arange(begin * calls, end * calls, device=device)

        b = torch.arange(batch.start, batch.stop, device=device)[:, None]
        h = torch.arange(heads.start, heads.stop, device=device)
        i, j = counters(rows, ROWS, APART), counters(keys, KEYS, APART // 2)
        sequence = (b * self.heads + h)[:, :, None, None]
        counter = (j, i[:, None], sequence, torch.full_like(sequence, offset & WORD))
        words = torch.stack(philox_4x32(counter, (seed & WORD, seed >> 32 & WORD)), dim=-1)
        words = torch.stack([words, words * SECOND], dim=-2)
        draws = torch.stack([words & MAX_DRAW, words >> 16 & MAX_DRAW], dim=-1)
        # (b, h, rows' rectangle, row, keys' rectangle, pair of keys, which 16 rows, which 8 rows, which 8
        # keys, key of a pair) to rows and keys in order.
        draws = draws.unflatten(5, (2, 2)).unflatten(3, (-1, APART // 2)).unflatten(2, (-1, APART))
        draws = draws.permute(0, 1, 2, 6, 7, 3, 4, 8, 5, 9).flatten(6, 9).flatten(2, 5)
        top, left = rows.start % ROWS, keys.start % KEYS
        return draws[:, :, top : top + len(rows), left : left + len(keys)] >= threshold(self.p)
