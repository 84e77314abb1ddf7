"""The seed of one call of dropout."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_seed(device: torch.device) -> Tensor:
    """(seed, offset) of one call, int64, from torch's generator of the device; no host sync."""
    return torch.randint((1 << 63) - 1, (2,), dtype=torch.int64, device=device)
