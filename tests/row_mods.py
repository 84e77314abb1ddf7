"""score_mods that reduce rows of captured tensors, for tests on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

LENGTH = 12
# For each head and tile of four queries: the tiles of keys that the queries see.
TILES = torch.tensor([[[0, 0], [0, 1], [2, 1]], [[1, 1], [2, 0], [2, 2]]])


def queries(dtype: torch.dtype, seed: int = 0, device: str = "cpu", head_dim: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, LENGTH, head_dim, generator=generator, dtype=torch.float64).to(device, dtype)


def row_table(width: int = 5, device: str = "cpu") -> Tensor:
    return torch.randn(LENGTH, width, generator=torch.Generator().manual_seed(width)).to(device)


def _add(reduce: Callable[[Tensor, Tensor], Tensor], table: Tensor) -> Callable:
    """Add the reduction of two rows of the table, that of the query and that of the key."""
    return lambda score, b, h, q_idx, kv_idx: score + reduce(table[q_idx], table[kv_idx])


# Name -> a function of the table that returns the mod.
MODS: dict[str, Callable[[Tensor], Callable]] = {
    name: partial(_add, reduce)
    for name, reduce in {
        "dot": torch.dot,
        "inner": torch.inner,
        "matmul": lambda a, b: a @ b,
        "product": lambda a, b: (a * b).sum(),
        "distance": lambda a, b: -((a - b).square().sum(dim=-1) + 0.1).sqrt() * (a != b).any(),
        "mean": lambda a, b: torch.mean(a.tanh() + b, dim=0),
        "prod": lambda a, b: (a + 2.0).prod() * 0.1 - b[0],
        "amax": lambda a, b: torch.amax(torch.maximum(a, b)),
        "min": lambda a, b: a.min() + b.max() + torch.min(a, b).sum(),
        "count": lambda a, b: (a > 0).sum() * b.sum(),
        "all": lambda a, b: torch.where((a > b).all(), a.sum(), b.mean()),
        "where": lambda a, b: torch.where(a > 0, a, b.clamp(min=0.0)).sum(-1, keepdim=True).squeeze(-1),
    }.items()
}
