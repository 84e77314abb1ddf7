"""Lengths of the sequences of a varlen batch, for tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lengths:
    """The lengths of the sequences of a varlen batch."""

    queries: list[int]
    keys: list[int]
    used: list[int] | None = None  # seqused_k
    padding: tuple[int, int] = (0, 0)  # tokens of q, and of k and v, after the last sequence

    @staticmethod
    def drawn(seed: int, longest: int = 300) -> Lengths:
        """Random lengths, determined by the seed. Some sequences have no queries or no keys."""
        pick = random.Random(seed)
        batch = pick.choice([1, 2, 3, 7, 20])
        sizes = [0, 1, 2, 17, 63, 64, 65, 128, pick.randrange(1, longest), pick.randrange(1, longest)]
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

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the used keys of each sequence."""
        begins = zip(self.cu_q.tolist(), self.cu_k.tolist(), strict=True)
        counts = zip(self.queries, self.used or self.keys, strict=True)
        for (q0, k0), (sq, sk) in zip(begins, counts, strict=False):
            yield slice(q0, q0 + sq), slice(k0, k0 + sk)

    def unused_keys(self) -> Tensor:
        """A mask of the keys that belong to no sequence or are not used."""
        unused = torch.ones(self.totals[1], dtype=torch.bool)
        for _, keys in self.spans():
            unused[keys] = False
        return unused

    def args(self, device: str | torch.device = "cpu") -> dict[str, Tensor | None]:
        """The offsets and lengths as keywords of `attn_varlen`, which are also fields of `AttentionArgs`."""
        used = self.used_k
        return {
            "cu_seqlens_q": self.cu_q.to(device),
            "cu_seqlens_k": self.cu_k.to(device),
            "seqused_k": None if used is None else used.to(device),
        }
