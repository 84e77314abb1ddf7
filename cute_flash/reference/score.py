"""Mask, score features and their gradients on one block of scores, in torch: all steps between Q Kᵀ and P V.

For query i and key j of sequence b and query head h, in this order:

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

import torch
from torch import Tensor

from cute_flash.reference.dropout import Dropout
from cute_flash.reference.formulas import distances, visible
from cute_flash.reference.grads import FeatureGrads
from cute_flash.reference.user_mods import UserMods
from cute_flash.spec.args import AttentionArgs


def num_temporaries(args: AttentionArgs, with_grad: bool) -> int:
    """An upper bound on the fp32 temporaries per score of a block, in addition to those of plain attention.

    Dropout uses int64 words. Each operation of a user mod may keep a result and a copy.
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
    """The mask and the score features of a call, for some of its sequences and K/V heads.

    Args:
        args: The call's arguments.
        batch: The indices of the sequences in the whole call.
        heads_kv: The indices of the K/V heads.
        group: The number of query heads that share a K/V head.
        seqlens: (Sq, Sk).
        dtype: The dtype of scores.
        num_heads: The number of all query heads of the call.
    """

    def __init__(
        self,
        args: AttentionArgs,
        batch: range,
        heads_kv: range,
        group: int,
        seqlens: tuple[int, int],
        dtype: torch.dtype,
        num_heads: int,
    ) -> None:
        self.batch, self.heads = batch, range(heads_kv.start * group, heads_kv.stop * group)
        self.group, self.seqlens, self.dtype = group, seqlens, dtype
        self.band, self.softcap = args.band, args.softcap
        self.slopes = self.sinks = self.dropout = self.mods = None
        self.slices = b, h = slice(batch.start, batch.stop), slice(self.heads.start, self.heads.stop)
        shape = len(heads_kv), group
        if args.alibi is not None:
            slopes = args.alibi[b, h] if args.alibi.dim() == 2 else args.alibi[None, h]
            self.slopes = slopes.to(dtype).unflatten(1, shape)[..., None, None]
        if args.sinks is not None:
            self.sinks = args.sinks[h].to(dtype).view(1, *shape, 1, 1)
        if args.dropout:
            assert args.rng is not None
            row, key, head, total = args.dropout_origin or (0, 0, 0, num_heads)
            self.dropout = Dropout(args.dropout, args.rng, total, (row, key, head))
        if args.has_mods:
            self.mods = UserMods(args, batch, self.heads, shape, dtype)

    def block(self, rows: range, keys: range, in_band: bool = False) -> ScoreBlock:
        """A block of scores. If `in_band`, the block lies inside the band and needs no mask for it."""
        return ScoreBlock(self, rows, keys, in_band)

    def initial_stats(self, Q: Tensor) -> tuple[Tensor, Tensor]:
        """The row max and row sum before the first key, (batch, Hkv, group * rows, 1); they include the sink."""
        m = Q.new_full((*Q.shape[:3], 1), -torch.inf)
        if self.sinks is None:
            return m, torch.zeros_like(m)
        m.unflatten(2, (self.group, -1)).copy_(self.sinks)
        return m, torch.ones_like(m)

    def dsinks(self, lse: Tensor, delta: Tensor) -> Tensor:
        """The gradients of the sinks, (heads), from rows (batch, Hkv, group * rows, 1)."""
        assert self.sinks is not None
        lse, delta = (x.unflatten(2, (self.group, -1)) for x in (lse, delta))
        return -((self.sinks - lse).exp() * delta).sum(dim=(0, 3, 4)).flatten()


class ScoreBlock:
    """The scores of some rows and keys.

    `apply` saves intermediate values for `backward`. It is out of place, so that autograd can record it.
    """

    def __init__(self, features: ScoreFeatures, rows: range, keys: range, in_band: bool) -> None:
        self.features, self.rows, self.keys, self.in_band = features, rows, keys, in_band
        self.tanh: Tensor | None = None
        self.distance: Tensor | None = None
        self.before_mod: Tensor | None = None
        self.mask: Tensor | None = None  # the cached result of `visible`

    def by_head(self, block: Tensor) -> Tensor:
        """A view of a block as (batch, Hkv, group, rows, keys)."""
        return block.unflatten(2, (self.features.group, len(self.rows)))

    def apply(self, S: Tensor) -> Tensor:
        """Apply softcap, ALiBi, bias and score_mod to S = scale Q Kᵀ."""
        features = self.features
        if features.softcap:
            self.tanh = torch.tanh(S / features.softcap)
            S = self.tanh * features.softcap
        if features.slopes is not None:
            self.distance = self._distances(S.device).abs().to(features.dtype)
            S = (self.by_head(S) - features.slopes * self.distance).flatten(2, 3)
        if features.mods is not None:
            after, before = features.mods.apply(self.by_head(S), self.rows, self.keys)
            S, self.before_mod = after.flatten(2, 3), before
        return S

    def _distances(self, device: torch.device) -> Tensor:
        return distances(self.rows, self.keys, *self.features.seqlens, device)

    def visible(self, device: torch.device) -> Tensor | None:
        """The mask, which broadcasts with `by_head`: false for masked scores. None: no score is masked."""
        features = self.features
        if self.mask is None:
            self.mask = None if features.mods is None else features.mods.visible(self.rows, self.keys, device)
            if not self.in_band:
                in_band = visible(features.band, self._distances(device), self.keys.start)
                self.mask = in_band if self.mask is None else self.mask & in_band
        return self.mask

    def apply_mask_(self, block: Tensor, value: float) -> None:
        """Overwrite the masked entries of a block, in place."""
        mask = self.visible(block.device)
        if mask is not None:
            self.by_head(block).masked_fill_(~mask, value)

    def scores(self, Q: Tensor, K: Tensor) -> Tensor:
        """Q Kᵀ, with 0 for masked scores, so that NaN in a masked key has no influence on gradients."""
        S = Q @ K.mT
        self.apply_mask_(S, 0.0)
        return S

    def product(self, weights: Tensor, V: Tensor) -> Tensor:
        """weights V, where masked weights are 0 and V has a row for each key.

        A masked key has no influence, even if its row of V is NaN or infinite.
        """
        mask = self.visible(V.device)
        return weights @ V if mask is None else _product(weights, V, self._flat(mask, weights))

    def product_t(self, weights: Tensor, rows: Tensor) -> Tensor:
        """weightsᵀ rows, where `rows` has a row for each query; see `product`."""
        mask = self.visible(rows.device)
        return weights.mT @ rows if mask is None else _product(weights.mT, rows, self._flat(mask, weights).mT)

    def _flat(self, mask: Tensor, block: Tensor) -> Tensor:
        """The mask in the shape of a block."""
        return mask.expand_as(self.by_head(block)).flatten(2, 3)

    def dropout_factors(self) -> Tensor | None:
        """The factor of each weight: 0 for dropped weights, 1 / (1 - dropout) for the others. None: no dropout."""
        features = self.features
        if features.dropout is None:
            return None
        mask = features.dropout.keep_mask(features.batch, features.heads, self.rows, self.keys)
        return mask.unflatten(1, (-1, features.group)).flatten(2, 3).to(features.dtype).mul_(features.dropout.scale)

    def backward(self, dS: Tensor, P: Tensor, grads: FeatureGrads) -> Tensor:
        """Compute the gradient of the input of `apply` from `dS`, that of its output, and add to `grads`."""
        features = self.features
        if features.mods is not None:
            blocks = self.by_head(dS), self.before_mod, self.by_head(P)
            dS = features.mods.backward(*blocks, self.rows, self.keys, grads).flatten(2, 3)
        if self.distance is not None:
            assert grads.alibi is not None
            grads.alibi[features.slices] -= (self.by_head(dS) * self.distance).sum(dim=(-2, -1)).flatten(1, 2)
        return dS if self.tanh is None else dS * (1 - self.tanh.square())


def _product(weights: Tensor, X: Tensor, mask: Tensor) -> Tensor:
    """weights @ X, without the products of masked weights and non-finite elements of X."""
    is_finite = X.isfinite()
    if is_finite.all():
        return weights @ X
    product = weights @ X.where(is_finite, 0.0)
    others = X.masked_fill(is_finite, 0.0)
    for j in (~is_finite).flatten(0, 1).any(dim=-1).any(dim=0).nonzero().flatten().tolist():
        terms = weights[..., j : j + 1] * others[..., j : j + 1, :]
        product += terms.masked_fill(~mask[..., j : j + 1], 0.0)
    return product
