"""Mask, score features and their gradients on one block of scores, in torch: all steps between Q Kᵀ and P V.

For row i and key j of sequence b and query head h, in this order:

    s = scale q·k
    s = softcap tanh(s / softcap)
    s = s - alibi[b, h] |i + Sk - Sq - j|
    s = score_mod(s + bias[b, h, i, j], b, h, i, j)
    s = -inf outside the band, and where mask_mod(b, h, i, j) is false
    p = exp(s - LSE),   LSE = log(exp(sinks[h]) + Σ exp(s))
    p = p / (1 - dropout), or 0 where the mask of `dropout.Dropout` drops it

Blocks are (batch, Hkv, group * rows, keys): the query heads that share a K/V head are rows of one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash.reference.dropout import Dropout
from cute_flash.reference.grads import FeatureGrads
from cute_flash.reference.loops import visible
from cute_flash.reference.user_mods import UserMods
from cute_flash.spec.args import AttentionArgs


@dataclass(frozen=True)
class Part:
    """The sequences and K/V heads of a call that are computed together."""

    batch: range  # indices of sequences in the whole call
    heads_kv: range
    group: int  # query heads of each K/V head

    @property
    def heads(self) -> range:
        return range(self.heads_kv.start * self.group, self.heads_kv.stop * self.group)


def num_temporaries(args: AttentionArgs, with_grad: bool) -> int:
    """An upper bound of the fp32 temporaries per score of a block, in addition to those of plain attention.

    Dropout uses int64 words. Each operation of a user mod may keep a result and a copy of it.
    """
    num = 2 * bool(args.softcap) + 3 * (args.alibi is not None) + 16 * bool(args.dropout)
    if not args.has_mods:
        return num
    num += 2
    graphs = args.mods
    if graphs.score is not None:
        num += 2 * graphs.score.ops_per_score
        if with_grad:
            num += 2 * graphs.gradient(args.captures_needing_grad).graph.ops_per_score
    return num if graphs.mask is None else num + 2 * graphs.mask.ops_per_score


class ScoreFeatures:
    """The mask and the score features of a call, for one part of its batch and K/V heads."""

    def __init__(
        self, args: AttentionArgs, part: Part, seqlens: tuple[int, int], dtype: torch.dtype, heads: int
    ) -> None:
        self.part, self.seqlens, self.dtype = part, seqlens, dtype
        self.band, self.softcap = args.band, args.softcap
        self.slopes = self.sinks = self.dropout = self.mods = None
        b, h = (slice(x.start, x.stop) for x in (part.batch, part.heads))
        shape = len(part.heads_kv), part.group
        if args.alibi is not None:
            slopes = args.alibi[b, h] if args.alibi.dim() == 2 else args.alibi[None, h]
            self.slopes = slopes.to(dtype).unflatten(1, shape)[..., None, None]
        if args.sinks is not None:
            self.sinks = args.sinks[h].to(dtype).view(1, *shape, 1, 1)
        if args.dropout:
            assert args.rng is not None
            self.dropout = Dropout(args.dropout, args.rng, heads)
        if args.has_mods:
            self.mods = UserMods(args, part.batch, part.heads, shape, dtype)

    def block(self, rows: range, keys: range, in_band: bool = False) -> ScoreBlock:
        """`in_band`: the block lies inside the band."""
        return ScoreBlock(self, rows, keys, in_band)

    def initial_stats(self, m: Tensor, l: Tensor, rows: range) -> tuple[Tensor, Tensor]:
        """The row max and row sum (batch, Hkv, group * rows, 1) before the first key, which include the sink."""
        if self.sinks is None:
            return m, l
        sinks = self.sinks.expand(m.shape[0], -1, -1, len(rows), 1).flatten(2, 3)
        return sinks.clone(), torch.ones_like(l)

    def dsinks(self, lse: Tensor, delta: Tensor) -> Tensor:
        """The gradients of the part's sinks, (heads), from rows (batch, Hkv, group * rows, 1)."""
        assert self.sinks is not None
        lse, delta = (x.unflatten(2, (self.part.group, -1)) for x in (lse, delta))
        return -((self.sinks - lse).exp() * delta).sum(dim=(0, 3, 4)).flatten()


class ScoreBlock:
    """The scores of some rows and keys.

    `apply` saves intermediate values for `backward`. It works out of place, so that autograd can record it.
    """

    def __init__(self, features: ScoreFeatures, rows: range, keys: range, in_band: bool) -> None:
        self.features, self.rows, self.keys, self.in_band = features, rows, keys, in_band
        self.tanh: Tensor | None = None
        self.distance: Tensor | None = None
        self.before_mod: Tensor | None = None

    def by_head(self, block: Tensor) -> Tensor:
        """A view of a block as (batch, Hkv, group, rows, keys)."""
        return block.unflatten(2, (self.features.part.group, len(self.rows)))

    def apply(self, S: Tensor) -> Tensor:
        """Apply softcap, ALiBi, bias and score_mod to S = scale Q Kᵀ."""
        features = self.features
        if features.softcap:
            self.tanh = torch.tanh(S / features.softcap)
            S = self.tanh * features.softcap
        if features.slopes is not None:
            self.distance = self._distance(S.device)
            S = (self.by_head(S) - features.slopes * self.distance).flatten(2, 3)
        if features.mods is not None:
            after, before = features.mods.apply(self.by_head(S), self.rows, self.keys)
            S, self.before_mod = after.flatten(2, 3), before
        return S

    def _distance(self, device: torch.device) -> Tensor:
        """(rows, keys): the distance of each key from the position of the row."""
        sq, sk = self.features.seqlens
        i, j = (torch.arange(x.start, x.stop, device=device) for x in (self.rows, self.keys))
        return (i[:, None] + (sk - sq) - j).abs().to(self.features.dtype)

    def visible(self, device: torch.device) -> Tensor | None:
        """The mask, which broadcasts against `by_head`: false where a score is masked. None: no score is masked."""
        features = self.features
        mask = None
        if features.mods is not None:
            mask = features.mods.visible(self.rows, self.keys, device)
        if not self.in_band:
            in_band = visible(features.band, self.rows, self.keys, *features.seqlens, device)
            mask = in_band if mask is None else mask & in_band
        return mask

    def apply_mask_(self, block: Tensor, value: float) -> None:
        """Overwrite the masked entries of a block, in place."""
        mask = self.visible(block.device)
        if mask is not None:
            self.by_head(block).masked_fill_(~mask, value)

    def dropout_mask(self) -> Tensor | None:
        """The mask of dropout, shaped like the block: false where a weight is dropped."""
        features = self.features
        if features.dropout is None:
            return None
        mask = features.dropout.keep_mask(features.part.batch, features.part.heads, self.rows, self.keys)
        return mask.unflatten(1, (len(features.part.heads_kv), -1)).flatten(2, 3)

    def dropout_factors(self) -> Tensor | None:
        """The factors of the weights of a block: 0 for dropped ones, 1 / (1 - dropout) for the others."""
        mask, dropout = self.dropout_mask(), self.features.dropout
        return None if mask is None or dropout is None else mask.to(self.features.dtype).mul_(dropout.scale)

    def backward(self, dS: Tensor, P: Tensor, grads: FeatureGrads) -> Tensor:
        """The gradient of `apply`'s argument from that of its result; adds the block's contribution to `grads`."""
        features, part = self.features, self.features.part
        if features.mods is not None:
            mods = features.mods
            dS, P = self.by_head(dS), self.by_head(P)
            dS = mods.backward(dS, self.before_mod, P, self.rows, self.keys, grads).flatten(2, 3)
        if self.distance is not None:
            assert grads.alibi is not None
            dslopes = -(self.by_head(dS) * self.distance).sum(dim=(-2, -1)).flatten(1, 2)
            b, h = (slice(x.start, x.stop) for x in (part.batch, part.heads))
            grads.alibi[b, h] += dslopes
        return dS if self.tanh is None else dS * (1 - self.tanh.square())
