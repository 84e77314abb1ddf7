"""What may happen to a score between Q Kᵀ and P V, by value; whether it happens is `problem.Features`.

For row i and key j of sequence b and query head h, in this order:

    s = scale q·k
    s = softcap tanh(s / softcap)
    s = s - alibi[b, h] |i + Sk - Sq - j|
    s = score_mod(s + bias[b, h, i, j], b, h, i, j)
    s = -inf outside the band, and where mask_mod(b, h, i, j) is false
    p = exp(s - LSE),   LSE = log(exp(sinks[h]) + Σ exp(s))
    p = p / (1 - dropout), or 0 where the mask of `philox.Dropout` drops it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash.reference.dropout import Dropout
from cute_flash.reference.user_mods import PartWritten, Written


@dataclass(frozen=True, eq=False)
class Score:
    """None: not there. Tensors are in any floating dtype."""

    softcap: float | None = None
    alibi: Tensor | None = None  # (B, H)
    sinks: Tensor | None = None  # (H)
    dropout: Dropout | None = None
    written: Written | None = None

    @property
    def extra_blocks(self) -> int:
        """Temporaries of a block of scores beyond those of plain attention, in elements of fp32 a score."""
        written = 0 if self.written is None else self.written.extra_blocks
        numbers = 2 * (self.softcap is not None) + 3 * (self.alibi is not None)
        return numbers + 16 * (self.dropout is not None) + written


def distance(rows: Tensor, keys: Tensor, sq: int, sk: int, dtype: torch.dtype) -> Tensor:
    """(rows, keys): how far each key is from its row's own position."""
    return (rows[:, None] + (sk - sq) - keys).abs().to(dtype)


def capped(S: Tensor, softcap: float) -> Tensor:
    return torch.tanh(S / softcap) * softcap


class PartScore:
    """The values for one part of the batch and key heads, on blocks (batch, Hkv, group * rows, keys)."""

    def __init__(self, score: Score, b: range, h: range, group: int, dtype: torch.dtype) -> None:
        self.score, self.batch, self.num_kv = score, b, len(h)
        self.heads = range(h.start * group, h.stop * group)
        self.slopes = self.sinks = None
        self.written = None if score.written is None else PartWritten(score.written, b, h, group, dtype)
        if score.alibi is not None:
            slopes = score.alibi[b.start : b.stop, self.heads.start : self.heads.stop].to(dtype)
            self.slopes = slopes.unflatten(1, (len(h), group))[..., None, None]
        if score.sinks is not None:
            sinks = score.sinks[self.heads.start : self.heads.stop].to(dtype)
            self.sinks = sinks.view(1, len(h), group, 1, 1)

    def first(self, m: Tensor, l: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """The statistics (batch, Hkv, group * rows, 1) before the first key: the sink's, if there is one."""
        if self.sinks is None:
            return m, l
        sinks = self.sinks.expand(m.shape[0], -1, -1, rows, 1).flatten(2, 3)
        return sinks.clone(), torch.ones_like(l)

    def apply_(self, S: Tensor, distance: Tensor | None) -> Tensor | None:
        """Softcap and ALiBi, in place; the tangent of the softcap, which its derivative is made of."""
        tangent = None
        if self.score.softcap is not None:
            tangent = S.div_(self.score.softcap).tanh_().clone()
            S.mul_(self.score.softcap)
        if self.slopes is not None and distance is not None:
            S.unflatten(2, (-1, len(distance))).sub_(self.slopes * distance)
        return tangent

    def finish(self, S: Tensor, rows: range, keys: range) -> tuple[Tensor, Tensor | None]:
        """Bias and score_mod, after the rest; and the scores before score_mod, if there is one."""
        return (S, None) if self.written is None else self.written.apply(S, rows, keys)

    def hide_(self, block: Tensor, rows: range, keys: range, value: float) -> None:
        """Overwrite what mask_mod hides."""
        if self.written is not None:
            self.written.hide_(block, rows, keys, value)

    def blind(self, like: Tensor, rows: range, seen: Callable) -> Tensor:
        """Which rows (batch, Hkv, group * rows, 1) mask_mod leaves no key of those that the band shows."""
        found = torch.zeros_like(like, dtype=torch.bool)
        if self.written is None or not self.written.hides:
            return found
        found = ~found.unflatten(2, (-1, len(rows)))
        for keys, shown in seen(like.device):
            hidden = self.written.hidden(rows, keys, like.device)
            assert hidden is not None
            found = found & ~(shown & ~hidden).any(dim=-1, keepdim=True)
        return found.flatten(2, 3)

    def dfinish(self, dS: Tensor, before: Tensor | None, P: Tensor, rows: range, keys: range) -> Tensor:
        """The gradient of S before `finish`."""
        return dS if self.written is None else self.written.differentiate(dS, before, P, rows, keys)

    def dslopes(self, dS: Tensor, distance: Tensor) -> Tensor:
        """(batch, heads) of a block."""
        return -(dS.unflatten(2, (-1, len(distance))) * distance).sum(dim=(-2, -1)).flatten(1, 2)

    def dsinks(self, lse: Tensor, delta: Tensor) -> Tensor:
        """(heads) of the rows of a tile, (batch, Hkv, group * rows, 1)."""
        assert self.sinks is not None
        group = self.sinks.shape[2]
        lse, delta = (x.unflatten(2, (group, -1)) for x in (lse, delta))
        return -((self.sinks - lse).exp() * delta).sum(dim=(0, 3, 4)).flatten()

    def factors(self, rows: range, keys: range, dtype: torch.dtype) -> Tensor | None:
        """What dropout multiplies a block by: 0, or the scale of what is kept."""
        dropout = self.score.dropout
        if dropout is None:
            return None
        kept = dropout.kept(self.batch, self.heads, rows, keys)
        return kept.unflatten(1, (self.num_kv, -1)).flatten(2, 3).to(dtype).mul_(dropout.scale)
