"""The dropout mask that `spec.dropout` defines, computed with torch's integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash.spec import dropout as spec

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32(counter: Words, key: tuple[int, int]) -> Words:
    """The four random 32-bit words of each counter, as int64. The words of `counter` broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(spec.ROUNDS):
        # int64 holds all 64 bits of the product of two words; the highest bit becomes the sign.
        p0, p2 = c0 * spec.MULTIPLIERS[0], c2 * spec.MULTIPLIERS[1]
        c0, c1, c2, c3 = (word & spec.MASK32 for word in (p2 >> 32 ^ c1 ^ k0, p2, p0 >> 32 ^ c3 ^ k1, p0))
        k0, k1 = (k0 + spec.WEYL[0]) & spec.MASK32, (k1 + spec.WEYL[1]) & spec.MASK32
    return c0, c1, c2, c3


@dataclass(frozen=True, eq=False)
class Dropout:
    """The dropout of one call: probability, (seed, offset), and number of query heads.

    If the call is a shard, `origin` is the position of its first row, key and head in the full call, and `heads` is the
    number of query heads of the full call.
    """

    p: float
    rng: Tensor
    heads: int
    origin: tuple[int, int, int] = (0, 0, 0)

    @property
    def scale(self) -> float:
        """The factor of the weights that are not dropped, so that the expected output does not change."""
        return 1.0 / (1.0 - self.p)

    def keep_mask(self, batch: range, heads: range, rows: range, keys: range) -> Tensor:
        """The mask of a block, (batch, heads, rows, keys): false where a weight is dropped."""
        seed, offset = (int(x) for x in self.rng)
        rows, keys, heads = (range(x.start + at, x.stop + at) for x, at in zip((rows, keys, heads), self.origin))
        device = self.rng.device

        def counters(positions: range, size: int, calls: int) -> Tensor:
            """The counter words, for rows or for keys, of all Philox calls whose rectangles overlap `positions`."""
            begin, end = positions.start // size, -(-positions.stop // size)
            return torch.arange(begin * calls, end * calls, device=device)

        b = torch.arange(batch.start, batch.stop, device=device)[:, None]
        h = torch.arange(heads.start, heads.stop, device=device)
        stride = spec.CALL_STRIDE
        i, j = counters(rows, spec.RECT_ROWS, stride), counters(keys, spec.RECT_KEYS, stride // 2)
        batch_head = (b * self.heads + h)[:, :, None, None]
        counter = (j, i[:, None], batch_head, torch.full_like(batch_head, offset & spec.MASK32))
        words = torch.stack(philox_4x32(counter, (seed & spec.MASK32, seed >> 32 & spec.MASK32)), dim=-1)
        words = torch.stack([words, words * spec.ROW_16_FACTOR], dim=-2)
        draws = torch.stack([words & spec.MAX_RANDOM, words >> 16 & spec.MAX_RANDOM], dim=-1)
        # From (b, h, rectangle of rows, row, rectangle of keys, pair of keys, which 16 rows, which 8 rows, which 8
        # keys, key of a pair) to (b, h, rows, keys).
        draws = draws.unflatten(5, (2, 2)).unflatten(3, (-1, stride // 2)).unflatten(2, (-1, stride))
        draws = draws.permute(0, 1, 2, 6, 7, 3, 4, 8, 5, 9).flatten(6, 9).flatten(2, 5)
        top, left = rows.start % spec.RECT_ROWS, keys.start % spec.RECT_KEYS
        return draws[:, :, top : top + len(rows), left : left + len(keys)] >= spec.threshold(self.p)
