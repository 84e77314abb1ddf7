"""Attention by definition, with the whole (B, H, Sq, Sk) matrix in memory: the oracle and its yardstick."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_flash.reference.loops import accumulator_dtype, default_scale, group_size
from cute_flash.reference.score import Score, capped, distance
from cute_flash.reference.user_mods import PartWritten, Written
from cute_flash.spec.band import Band


def dense(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float | None = None, score: Score | None = None
) -> tuple[Tensor, Tensor]:
    """The oracle: out and LSE in fp64. Differentiable, also through rows that see no key."""
    group = group_size(q, k)
    K, V = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    S = (q.double() @ K.mT) * default_scale(q, scale)
    S = _modified(S, score)
    P, lse = _probabilities(S, _mask(q, k, band) & _seen(S, score), score)
    return _dropped(P, score) @ V, lse


def dense_low_precision(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float | None = None, score: Score | None = None
) -> tuple[Tensor, Tensor]:
    """The same maths as unfused PyTorch does it on a GPU: S, P and out rounded to the input's dtype.

    Its distance from `dense` is what that dtype costs a careful implementation; a kernel is right when it is
    no more than twice as far. K takes the scale before the product, which keeps fp16 scores in range. The
    products accumulate in fp32 on every machine: on a CPU without bf16 arithmetic PyTorch would do worse.
    Softcap and ALiBi are fp32 arithmetic on rounded scores: a bias of thousands rounded to bf16 would be no
    measure. Differentiable as `dense` is.
    """
    dtype, wide = q.dtype, accumulator_dtype(q.dtype)
    mask = _mask(q, k, band)
    group = group_size(q, k)
    K, V = (x.repeat_interleave(group, dim=1) for x in (k, v))
    K = K * default_scale(q, scale)
    S = (q.to(wide) @ K.to(wide).mT).to(dtype)
    if score is not None:
        S = _modified(S.to(wide), score)
        P, lse = _probabilities(S, mask & _seen(S, score), score)
        return (_dropped(P.to(dtype), score).to(wide) @ V.to(wide)).to(dtype), lse
    empty = ~mask.any(dim=-1)
    S = S.masked_fill(~mask, -torch.inf).masked_fill(empty[:, None], 0.0)
    P = torch.softmax(S, dim=-1).masked_fill(~mask, 0.0)
    lse = S.to(wide).logsumexp(dim=-1).masked_fill(empty, -torch.inf)
    return (P.to(wide) @ V.to(wide)).to(dtype), lse


def _modified(S: Tensor, score: Score | None) -> Tensor:
    """Softcap, ALiBi, bias and score_mod."""
    if score is None:
        return S
    sq, sk = S.shape[2:]
    if score.softcap is not None:
        S = capped(S, score.softcap)
    if score.alibi is not None:
        i, j = (torch.arange(n, device=S.device) for n in (sq, sk))
        S = S - score.alibi.to(S.dtype)[:, :, None, None] * distance(i, j, sq, sk, S.dtype)
    if score.written is not None:
        S, _ = _whole(S, score.written).apply(S, range(sq), range(sk))
    return S


def _seen(S: Tensor, score: Score | None) -> Tensor:
    """What mask_mod and score_mod leave visible, to broadcast with S."""
    seen = torch.ones((), dtype=torch.bool, device=S.device)
    if score is None or score.written is None:
        return seen
    hidden = _whole(S, score.written).hidden(range(S.shape[2]), range(S.shape[3]), S.device)
    seen = seen if hidden is None else ~hidden.expand(*S.shape[:2], 1, *S.shape[2:]).flatten(1, 2)
    return seen & (S.detach() != -torch.inf)


def _whole(S: Tensor, written: Written) -> PartWritten:
    """All scores as one block."""
    return PartWritten(written, range(S.shape[0]), range(S.shape[1]), 1, S.dtype)


def _probabilities(S: Tensor, mask: Tensor, score: Score | None) -> tuple[Tensor, Tensor]:
    """P and LSE of modified scores, under the mask and beside the sinks."""
    S = S.masked_fill(~mask, -torch.inf)
    if score is not None and score.sinks is not None:
        sink = score.sinks.to(S.dtype)[:, None, None].expand(*S.shape[:3], 1)
        S = torch.cat([S, sink], dim=-1)
        mask = torch.cat([mask, mask.new_ones(*mask.shape[:-1], 1)], dim=-1)
    empty = ~mask.any(dim=-1)
    # Rows without keys get finite scores here, their result below: -inf - (-inf) would poison their gradient.
    S = S.masked_fill(empty[..., None], 0.0)
    lse = S.logsumexp(dim=-1)
    P = torch.exp(S - lse[..., None]).masked_fill(~mask, 0.0)
    if score is not None and score.sinks is not None:
        P = P[..., :-1]
    return P, lse.masked_fill(empty, -torch.inf)


def _dropped(P: Tensor, score: Score | None) -> Tensor:
    if score is None or score.dropout is None:
        return P
    batch, heads, sq, sk = P.shape
    return P * score.dropout.kept(range(batch), range(heads), range(sq), range(sk)) * score.dropout.scale


def _mask(q: Tensor, k: Tensor, band: Band) -> Tensor:
    """(Sq, Sk), true where visible: straight from the definition of the band, row by row."""
    sq, sk = q.shape[2], k.shape[2]
    lo = torch.tensor([band.lo(i, sq, sk) for i in range(sq)], dtype=torch.int64, device=q.device)[:, None]
    hi = torch.tensor([band.hi(i, sq, sk) for i in range(sq)], dtype=torch.int64, device=q.device)[:, None]
    j = torch.arange(sk, device=q.device)[None, :]
    return (lo <= j) & (j < hi)
