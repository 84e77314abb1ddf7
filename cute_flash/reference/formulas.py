"""Formulas that the CPU path, the oracle and `merge` share: the mask of a band, and a step of the online softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_flash.spec.band import Band


def default_scale(q: Tensor, scale: float | None) -> float:
    return (q.shape[-1] or 1) ** -0.5 if scale is None else scale


def group_size(q: Tensor, k: Tensor) -> int:
    """The number of query heads that share a K/V head."""
    return q.shape[1] // k.shape[1] if k.shape[1] else 1


def distances(rows: range, keys: range, sq: int, sk: int, device: torch.device) -> Tensor:
    """(rows, keys): the distance of each key from the position of the row, negative for keys before it."""
    i, j = (torch.arange(x.start, x.stop, device=device) for x in (rows, keys))
    return j - (i[:, None] + (sk - sq))


def visible(band: Band, distance: Tensor, first_key: int = 0) -> Tensor:
    """The band's mask of a block, from its `distances`: true where the row sees the key.

    `first_key`: the index of the first key of the block, which tells where chunks begin.
    """
    mask = torch.ones_like(distance, dtype=torch.bool)
    if band.left is not None:
        mask &= distance >= -band.left
    if band.right is not None:
        mask &= distance <= band.right
    if band.chunk is not None:
        key = torch.arange(first_key, first_key + distance.shape[1], device=distance.device)
        mask &= key // band.chunk == torch.div(key - distance, band.chunk, rounding_mode="floor")
    return mask


def softmax_step(S: Tensor, m: Tensor, l: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step of the online softmax: P (in the memory of S), α, m', l'."""
    m_new = torch.maximum(m, S.amax(dim=-1, keepdim=True))
    # For a row that has seen no key, m' is -inf and S - m' would be NaN; with a shift of 0, its P and α are 0.
    shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
    P = S.sub_(shift).exp_()
    alpha = torch.exp(m - shift)
    return P, alpha, m_new, alpha * l + P.sum(dim=-1, keepdim=True)


def divisor(l: Tensor) -> Tensor:
    """The divisor of O: l, or 1 for rows without keys, whose O = 0 and l = 0 must give 0."""
    return l.masked_fill(l == 0.0, 1.0)
