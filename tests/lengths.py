"""The lengths of the sequences of a varlen batch."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lengths:
    """Numbers of queries, keys and used keys of each sequence, and of padding tokens after the last one."""

    queries: list[int]
    keys: list[int]
    used: list[int] | None = None
    padding: tuple[int, int] = (0, 0)

    @staticmethod
    def drawn(seed: int, most: int = 300) -> Lengths:
        """Some sequences have no queries or no keys. The same for the same seed."""
        pick = random.Random(seed)
        batch = pick.choice([1, 2, 3, 7, 20])
        sizes = [0, 1, 2, 17, 63, 64, 65, 128, pick.randrange(1, most), pick.randrange(1, most)]
        queries, keys = ([pick.choice(sizes) for _ in range(batch)] for _ in range(2))
        if pick.random() < 0.3:
            keys = queries
        used = [pick.randrange(k + 1) for k in keys] if pick.random() < 0.4 else None
        return Lengths(queries, keys, used, (pick.choice([0, 0, 5, 200]), pick.choice([0, 0, 9, 150])))

    @property
    def cu_q(self) -> Tensor:
        return torch.tensor([0, *self.queries]).cumsum(0).int()

    @property
    def cu_k(self) -> Tensor:
        return torch.tensor([0, *self.keys]).cumsum(0).int()

    @property
    def used_k(self) -> Tensor | None:
        return None if self.used is None else torch.tensor(self.used).int()

    @property
    def totals(self) -> tuple[int, int]:
        return sum(self.queries) + self.padding[0], sum(self.keys) + self.padding[1]
