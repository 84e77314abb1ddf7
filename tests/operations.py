"""A score_mod for each operation that mods may use, for tests on the CPU, with the DSL's compiler, and on a GPU.

They work on proxies and on tensors alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TABLE = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
Mod = Callable[[Any, Any, Any, Any, Any], Any]


def score_mods(device: str = "cpu") -> dict[str, Mod]:
    """One mod for each operation; captured tensors are on `device`."""
    int8 = torch.tensor([-3, 0, 127, -128, 5], dtype=torch.int8, device=device)
    uint8 = torch.tensor([3, 0, 127, 255, 5], dtype=torch.uint8, device=device)
    int16 = torch.tensor([-300, 0, 127, 32000, -32768], dtype=torch.int16, device=device)
    flags = torch.tensor([True, False, True, True, False], device=device)
    powers = torch.tensor([0.5, 1.5, 2.0, 3.0], device=device)
    table = TABLE.to(device)
    int64 = torch.tensor([5, 5 + (1 << 32), -1, 1 << 62, -3_000_000_000], device=device)
    large = (1 << 32) + 5
    return {
        "sign": lambda s, b, h, q, kv: torch.sign(s) + torch.sign(q - kv),
        "erf": lambda s, b, h, q, kv: torch.erf(s) + s.erf(),
        "erfc": lambda s, b, h, q, kv: torch.special.erfc(s),
        "gelu": lambda s, b, h, q, kv: F.gelu(s),
        "gelu tanh": lambda s, b, h, q, kv: F.gelu(s, approximate="tanh"),
        "softplus": lambda s, b, h, q, kv: F.softplus(s) + F.softplus(30 * s, beta=2.0),
        "logsigmoid": lambda s, b, h, q, kv: F.logsigmoid(s),
        "leaky_relu": lambda s, b, h, q, kv: F.leaky_relu(s, 0.1),
        "atan": lambda s, b, h, q, kv: torch.atan(s) + (s * 50).arctan(),
        "tan": lambda s, b, h, q, kv: torch.tan(s * 0.3),
        "log10": lambda s, b, h, q, kv: torch.log10(s.abs() + 1),
        "isfinite": lambda s, b, h, q, kv: torch.where(torch.isfinite(s / (q - kv)), s, 2.0),
        "isnan": lambda s, b, h, q, kv: torch.where(torch.isnan((s - s) / (q - kv)), 3.0, s),
        "isinf": lambda s, b, h, q, kv: torch.where((s / (q - kv)).isinf(), s, -s),
        "round": lambda s, b, h, q, kv: s + torch.round(s * 4) + torch.round((q - kv) * 0.5),
        "ceil trunc": lambda s, b, h, q, kv: s + torch.ceil(s) - torch.trunc(s) + torch.floor(q),
        "fmod": lambda s, b, h, q, kv: torch.fmod(s, 0.7) + torch.fmod(q - kv, 3),
        "remainder": lambda s, b, h, q, kv: s % 0.7 + torch.remainder(s, -0.7) + (q - kv) % 3 + (q - kv) % -3,
        "remainder of near multiples": lambda s, b, h, q, kv: s + (q * 0.1) % 0.1 + (kv * 1.0) % 0.1,
        "floor division": lambda s, b, h, q, kv: s + (q - kv) // 3 + (q - kv) // -3 + 7 // (kv + 1),
        "powers of two": lambda s, b, h, q, kv: (
            s + (q - kv) % 4 + (kv - q) // 2 + (q - kv) // 64 + kv % 1 + (q + kv) % (1 << 30) + (q + kv) // 4
        ),
        "floor division of floats": lambda s, b, h, q, kv: s + ((q - kv) * 1.0) // 0.1 + (q * 0.7) // -0.7,
        "divisions": lambda s, b, h, q, kv: (
            s + torch.div(q - kv, 3, rounding_mode="trunc") + torch.div(q - kv, -2.5, rounding_mode="trunc")
        ),
        "bool arithmetic": lambda s, b, h, q, kv: s + ((q > 1) + (kv > 2)) * 3.0 + (q > kv) * (kv > 0) + (q > 2) * q,
        "bit arithmetic": lambda s, b, h, q, kv: s + ((q & 3) | (kv ^ 5)) + (~(q - kv)) + ((q - kv) >> 1) + (kv << 2),
        "max min": lambda s, b, h, q, kv: torch.max(s, s * 2) + torch.min(q, kv),
        "where method": lambda s, b, h, q, kv: s.where(q > kv, s * 2),
        "new": lambda s, b, h, q, kv: s + q.new_full((), 2.5, dtype=torch.float32) * s.new_ones(()) + b.new_zeros(()),
        "powers": lambda s, b, h, q, kv: s**3 * 0.1 + (s.abs() + 1) ** -2 + (s.abs() + 0.1) ** 1.7 + 3 ** (kv * 0.01),
        "power of a table": lambda s, b, h, q, kv: (s.abs() + 0.1) ** powers[h],
        "power of a negative number": lambda s, b, h, q, kv: s + torch.pow(-(kv + 1.0), (h - 1).float()),
        "int8": lambda s, b, h, q, kv: s + int8[kv % 5] // 2 + uint8[q % 5] % 7 + int16[kv % 5] * 0.01,
        "bool table": lambda s, b, h, q, kv: torch.where(flags[q % 5] ^ flags[kv % 5], s, s * 0.5),
        "int64": lambda s, b, h, q, kv: (
            torch.where(int64[q % 5] == int64[kv % 5], s, s * 0.5)
            + (int64[kv % 5] // (q + 3)) % 7
            + (((int64[q % 5] ^ int64[kv % 5]) >> 33) & 3)
            + int64[(q + kv) % 5] * 1e-20
        ),
        "large ints": lambda s, b, h, q, kv: (
            torch.where(int64[kv % 5] == large, s * 0.5, s)
            + (q.long() * (1 << 33) - kv) % 1000 * 0.01
            + table[h, int64[q % 5] >> 61] * (int64[kv % 5] < 1 << 40)
        ),
        "negative index": lambda s, b, h, q, kv: s * table[h, -1] + table[h - 1, (kv % 5) - 5] + table[-(h + 1), q % 5],
    }


SCORE_MODS = score_mods()


def places(size: int, batch: int = 1, head: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q and kv of size x size scores; they broadcast."""
    return torch.tensor(batch), torch.tensor(head), torch.arange(size)[:, None], torch.arange(size)


def scores(size: int) -> Tensor:
    """Random fp64 scores, none of them near 0 or a half-integer. The first is large."""
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    x[0, 0] = 9.3
    return x + 0.01 * math.pi
