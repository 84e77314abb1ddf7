"""Draws the seed of a call with dropout."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_seed(device: torch.device) -> Tensor:
    """Draw the (seed, offset) of a call, int64, from torch's generator of the device, without a host sync."""
    return torch.randint((1 << 63) - 1, (2,), dtype=torch.int64, device=device)
