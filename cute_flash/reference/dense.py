"""Attention by its definition, with all scores in memory: the fp64 oracle, and a yardstick for rounding errors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_flash.reference.formulas import default_scale, group_size
from cute_flash.reference.score import ScoreBlock, ScoreFeatures
from cute_flash.reference.varlen import sequences
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from cute_flash.spec.features import features_of
from cute_flash.spec.shapes import lse_dtype


def plain_args(q: Tensor, band: Band | None = None, scale: float | None = None) -> AttentionArgs:
    """The arguments of a call without features."""
    band = band or Band()
    return AttentionArgs(
        scale=default_scale(q, scale), window_left=band.left, window_right=band.right, attention_chunk=band.chunk
    )


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band | None = None,
    scale: float | None = None,
    *,
    args: AttentionArgs | None = None,
) -> tuple[Tensor, Tensor]:
    """The oracle: out and LSE in fp64. It is differentiable, also through rows that see no key.

    `args` replaces `band` and `scale` for a call with features, dense or varlen.
    """
    args = plain_args(q, band, scale) if args is None else args
    return _each_sequence(_dense, q, k, v, args)


def dense_low_precision(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band | None = None,
    scale: float | None = None,
    *,
    args: AttentionArgs | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as unfused PyTorch computes it on a GPU: S, P and out are rounded to the input's dtype.

    Its distance from `dense` is the error of a careful implementation in that dtype; tests accept a kernel whose error
    is at most twice as large. K is scaled before the product, which keeps fp16 scores in range. Products accumulate in
    fp32 on every machine, because PyTorch is less accurate on a CPU without bf16 arithmetic. Score features are
    computed in fp32 from rounded scores: rounding ALiBi terms of several thousand to bf16 would make the error too
    large to be a yardstick. The arguments are those of `dense`, and the result is differentiable.
    """
    args = plain_args(q, band, scale) if args is None else args
    return _each_sequence(_dense_low_precision, q, k, v, args)


def _dense(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, sequence: int) -> tuple[Tensor, Tensor]:
    group = group_size(q, k)
    K, V = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    block = _single_block(q, k, args, sequence, torch.float64)
    S = block.apply((q.double() @ K.mT) * args.scale)
    P, lse = _probabilities(S, _mask(S, args.band, block), block.features.sinks)
    return _drop(P, block) @ V, lse


def _dense_low_precision(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, sequence: int) -> tuple[Tensor, Tensor]:
    dtype, wide, group = q.dtype, lse_dtype(q.dtype), group_size(q, k)
    K, V = (x.repeat_interleave(group, dim=1) for x in (k, v))
    K = K * args.scale
    S = (q.to(wide) @ K.to(wide).mT).to(dtype)
    block = _single_block(q, k, args, sequence, wide)
    if args.has_mods or set(features_of(args)) - {"return_max_logit"}:
        S = block.apply(S.to(wide))
        P, lse = _probabilities(S, _mask(S, args.band, block), block.features.sinks)
        return (_drop(P.to(dtype), block).to(wide) @ V.to(wide)).to(dtype), lse
    mask = _mask(S, args.band, block)
    empty = ~mask.any(dim=-1)
    S = S.masked_fill(~mask, -torch.inf).masked_fill(empty[:, None], 0.0)
    P = torch.softmax(S, dim=-1).masked_fill(~mask, 0.0)
    lse = S.to(wide).logsumexp(dim=-1).masked_fill(empty, -torch.inf)
    return (P.to(wide) @ V.to(wide)).to(dtype), lse


def _each_sequence(
    attention: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs
) -> tuple[Tensor, Tensor]:
    """Apply `attention` to a dense call, or to each sequence of a varlen batch; padding gets out 0 and LSE -inf."""
    if args.cu_seqlens_q is None:
        return attention(q, k, v, args, 0)
    outs, lses = [], []
    for s in sequences(q, k, args):
        out, lse = attention(s.of_queries(q), s.of_keys(k), s.of_keys(v), args, s.index)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    padding = len(q) - int(args.cu_seqlens_q[-1])
    outs.append(outs[0].new_zeros(padding, q.shape[1], v.shape[2]))
    lses.append(lses[0].new_full((q.shape[1], padding), -torch.inf))
    return torch.cat(outs), torch.cat(lses, dim=1)


def _single_block(q: Tensor, k: Tensor, args: AttentionArgs, sequence: int, dtype: torch.dtype) -> ScoreBlock:
    """All scores as one block, with K and V repeated for every query head (a group of 1)."""
    (batch, heads, sq, _), sk = q.shape, k.shape[2]
    sequences_here = range(sequence, sequence + batch)
    features = ScoreFeatures(args, sequences_here, range(heads), 1, (sq, sk), dtype, heads)
    # `in_band=True` says that all scores are in the band, so the block does not apply it; `_mask` applies it.
    return features.block(range(sq), range(sk), in_band=True)


def _mask(S: Tensor, band: Band, block: ScoreBlock) -> Tensor:
    """True where a score is visible, to broadcast with S: (Sq, Sk) without user mods."""
    mask = band_mask(band, S.shape[2], S.shape[3], S.device)
    if block.features.mods is None:
        return mask
    # The mask of the user mods without the band, because the block has `in_band`.
    mod_mask = block.visible(S.device)
    if mod_mask is not None:
        mask = mask & mod_mask.expand(*S.shape[:2], 1, *S.shape[2:]).flatten(1, 2)
    # A score_mod masks a score by returning -inf.
    return mask & (S.detach() != -torch.inf)


def band_mask(band: Band, sq: int, sk: int, device: torch.device) -> Tensor:
    """(Sq, Sk), true where visible, computed row by row from the definition of the band."""
    lo = torch.tensor([band.lo(i, sq, sk) for i in range(sq)], dtype=torch.int64, device=device)[:, None]
    hi = torch.tensor([band.hi(i, sq, sk) for i in range(sq)], dtype=torch.int64, device=device)[:, None]
    j = torch.arange(sk, device=device)[None, :]
    return (lo <= j) & (j < hi)


def _probabilities(S: Tensor, mask: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """P and LSE of masked scores, with the sinks in the softmax."""
    S = S.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        S = torch.cat([S, sinks.view(-1, 1, 1).expand(*S.shape[:3], 1)], dim=-1)
        mask = torch.cat([mask, mask.new_ones(*mask.shape[:-1], 1)], dim=-1)
    empty = ~mask.any(dim=-1)
    # Rows without keys get finite scores, because -inf - (-inf) would make gradients NaN. Their results are set below.
    S = S.masked_fill(empty[..., None], 0.0)
    lse = S.logsumexp(dim=-1)
    P = torch.exp(S - lse[..., None]).masked_fill(~mask, 0.0)
    if sinks is not None:
        P = P[..., :-1]
    return P, lse.masked_fill(empty, -torch.inf)


def _drop(P: Tensor, block: ScoreBlock) -> Tensor:
    """P after dropout."""
    Z = block.dropout_factors()
    return P if Z is None else (P * Z).to(P.dtype)
