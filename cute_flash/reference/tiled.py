"""Tiled attention in plain PyTorch, exact and in O(S) memory: the loops of the CPU path.

Tensors are q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), of any strides; query head h uses K/V head
h // (H // Hkv). A row that sees no key has out = 0 and LSE = -inf or, with `sinks`, the sink of its head. Accumulators
and the LSE, (B, H, Sq), are fp32 (fp64 for fp64 inputs). `score.py` defines the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cute_flash.reference.formulas import divisor, group_size, softmax_step
from cute_flash.reference.grads import FeatureGrads
from cute_flash.reference.score import ScoreBlock, ScoreFeatures, num_temporaries
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import BlockRange, ceil_div
from cute_flash.spec.shapes import lse_dtype

# A bound on the temporaries of `forward`, and of one step of `backward`, for any shape.
MAX_TEMPORARY_BYTES = 64 << 20
# Large enough for efficient matrix products. More rows than keys, because each chunk of rows converts all of K and V.
MAX_ROWS, MAX_KEYS = 512, 256
# To save memory, chunks first get fewer heads, and only then fewer rows than this.
FEW_ROWS = 64


@dataclass(frozen=True)
class _Chunks:
    """The numbers of sequences, K/V heads, rows of each query head, and keys that are computed at a time."""

    batch: int
    heads: int
    rows: int
    keys: int

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, with_grad: bool) -> _Chunks:
        (batch, _, sq, d), (_, heads_kv, sk, _) = q.shape, k.shape
        group, width = group_size(q, k), max(d, v.shape[-1])
        element_bytes = torch.finfo(lse_dtype(q.dtype)).bits // 8
        keys = min(max(sk, 1), MAX_KEYS)
        # Live at the same time in `backward`, which needs more than `forward`: per row q, dO, dq, two products, and S,
        # P, dP, dS; per key the converted k and v, their copies for the product, and two products.
        blocks = 4 + num_temporaries(args, with_grad)
        row_bytes = element_bytes * group * (5 * width + blocks * keys)
        key_bytes = element_bytes * keys * 6 * width
        few_rows = min(max(sq, 1), FEW_ROWS)
        in_flight = max(1, MAX_TEMPORARY_BYTES // (few_rows * row_bytes + key_bytes))
        heads = min(in_flight, max(heads_kv, 1))
        batches = min(max(1, in_flight // heads), max(batch, 1))
        rows = (MAX_TEMPORARY_BYTES // (heads * batches) - key_bytes) // row_bytes
        return _Chunks(batches, heads, min(max(rows, 1), MAX_ROWS, max(sq, 1)), keys)

    def parts(
        self, q: Tensor, k: Tensor, args: AttentionArgs, sequence: int
    ) -> Iterator[tuple[slice, slice, ScoreFeatures]]:
        """The slices of batch and K/V heads that are computed at a time, with their features."""
        num_sequences, heads_kv, sk, _ = k.shape
        for b in range(0, num_sequences, self.batch):
            for h in range(0, heads_kv, self.heads):
                b_end, h_end = min(b + self.batch, num_sequences), min(h + self.heads, heads_kv)
                batch, heads, seqlens = range(sequence + b, sequence + b_end), range(h, h_end), (q.shape[2], sk)
                features = ScoreFeatures(args, batch, heads, group_size(q, k), seqlens, lse_dtype(q.dtype), q.shape[1])
                yield slice(b, b_end), slice(h, h_end), features


@dataclass(frozen=True)
class _Tile:
    """One chunk of rows, for a part of the batch and heads, and the K/V blocks that it visits.

    The query heads that share a K/V head are rows of one matrix product, (batch, Hkv, group * rows, D) times
    (batch, Hkv, keys, D)ᵀ, so that K is not repeated for each query head.
    """

    features: ScoreFeatures
    rows: range
    block_size: int
    n_blocks: BlockRange

    @staticmethod
    def all_of(features: ScoreFeatures, chunks: _Chunks) -> Iterator[_Tile]:
        sq, sk = features.seqlens
        for i in range(ceil_div(sq, chunks.rows)):
            rows = range(i * chunks.rows, min((i + 1) * chunks.rows, sq))
            n_blocks = features.band.blocks(i, chunks.rows, chunks.keys, sq, sk)
            yield _Tile(features, rows, chunks.keys, n_blocks)

    def blocks(self) -> Iterator[ScoreBlock]:
        """The blocks of scores that the tile computes."""
        n_blocks = self.n_blocks
        for j in range(n_blocks.begin, n_blocks.end):
            keys = range(j * self.block_size, min((j + 1) * self.block_size, self.features.seqlens[1]))
            yield self.features.block(self.rows, keys, in_band=not n_blocks.is_masked(j))

    def of(self, grouped: Tensor) -> Tensor:
        """The view of this tile's rows in a (batch, Hkv, group, Sq, ...) tensor."""
        return grouped[:, :, :, self.rows.start : self.rows.stop]

    def load(self, grouped: Tensor, dtype: torch.dtype) -> Tensor:
        return self.of(grouped).to(dtype).flatten(2, 3)

    def store(self, grouped: Tensor, values: Tensor) -> None:
        self.of(grouped).copy_(values.unflatten(2, (-1, len(self.rows))))

    def rows_without_keys(self, like: Tensor) -> Tensor:
        """Which rows see no key, shaped like the statistics (batch, Hkv, group * rows, 1)."""
        is_empty = torch.ones_like(like, dtype=torch.bool).unflatten(2, (-1, len(self.rows)))
        for block in self.blocks():
            mask = block.visible(like.device)
            if mask is None:
                return torch.zeros_like(like, dtype=torch.bool)
            is_empty = is_empty & ~mask.any(dim=-1, keepdim=True)
        return is_empty.flatten(2, 3)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor,
    max_logit: Tensor | None = None,
    sequence: int = 0,
) -> None:
    """Compute attention into `out` and `lse`.

    Args:
        q: (B, H, Sq, D).
        k: (B, Hkv, Sk, D).
        v: (B, Hkv, Sk, Dv).
        args: All other arguments.
        out: Written; (B, H, Sq, Dv), of any strides.
        lse: Written; (B, H, Sq), of any strides.
        max_logit: Updated in place; (H), the maximum of its old value and the largest score of each head.
        sequence: The index of the first of these sequences in the call's batch.
    """
    dtype, group = lse_dtype(q.dtype), group_size(q, k)
    chunks = _Chunks.of(q, k, v, args, with_grad=False)
    for b, h, features in chunks.parts(q, k, args, sequence):
        Q, O, LSE = (x.unflatten(1, (-1, group))[b, h] for x in (q, out, lse[..., None]))
        K, V = k[b, h], v[b, h]
        for tile in _Tile.all_of(features, chunks):
            Qi = tile.load(Q, dtype) * args.scale
            Oi = Qi.new_zeros((*Qi.shape[:3], V.shape[-1]))
            m, l = features.initial_stats(Qi)
            for block in tile.blocks():
                Kj, Vj = (x[:, :, block.keys.start : block.keys.stop].to(dtype) for x in (K, V))
                # S = scale Q Kᵀ
                S = block.apply(block.scores(Qi, Kj))
                block.apply_mask_(S, -torch.inf)
                if max_logit is not None:
                    # (Hkv, group) = the maximum of itself and the largest scores of the block.
                    largest = max_logit.unflatten(0, (-1, group))[h]
                    torch.maximum(largest, S.unflatten(2, (group, -1)).amax(dim=(0, 3, 4)), out=largest)
                P, alpha, m, l = softmax_step(S, m, l)
                Z = block.dropout_factors()
                # O = α O + (P ∘ Z) V
                Oi.mul_(alpha).add_(block.product(P if Z is None else P.mul_(Z), Vj))
            tile.store(O, Oi.div_(divisor(l)))
            tile.store(LSE, m + l.log())


class Saved(NamedTuple):
    """The tensors of a forward pass that its backward pass reads."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: Saved,
    args: AttentionArgs,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    grads: FeatureGrads,
    sequence: int = 0,
) -> None:
    """Compute the gradients into `dq`, `dk` and `dv`, and add the others to `grads`.

    P is recomputed from the LSE, block by block. With Δ = rowsum(dO ∘ O) - dLSE, P = exp(S - LSE),
    t = tanh(s / softcap), Z the factors of dropout and A the distances of ALiBi:

        dV = (P ∘ Z)ᵀ dO    dS' = P ∘ (Z ∘ dO Vᵀ - Δ)    dS = dS' ∘ (1 - t²)
        dQ = scale dS K     dK = scale dSᵀ Q
        dalibi = -Σ dS' ∘ A    dsinks = -Σ exp(sinks - LSE) Δ

    A row that sees no key has no influence on dq, dk and dv, even if its dO or dLSE is NaN.
    """
    q, k, v, out, lse = saved
    dtype, group = lse_dtype(q.dtype), group_size(q, k)
    chunks = _Chunks.of(q, k, v, args, with_grad=True)
    # A separate sum, added to `grads` at the end, so that the contribution of a sequence does not depend on the others.
    dsinks = None if grads.sinks is None else torch.zeros_like(grads.sinks)
    for b, h, features in chunks.parts(q, k, args, sequence):
        Q, dQ, O, dO, LSE = (x.unflatten(1, (-1, group))[b, h] for x in (q, dq, out, dout, lse[..., None]))
        dLSE = None if dlse is None else dlse[..., None].unflatten(1, (-1, group))[b, h]
        K, V = k[b, h], v[b, h]
        dK, dV = (x.new_zeros(x.shape, dtype=dtype) for x in (K, V))
        for tile in _Tile.all_of(features, chunks):
            Qi, LSEi = tile.load(Q, dtype) * args.scale, tile.load(LSE, dtype)
            empty = LSEi == -torch.inf
            # Rows without keys get P = exp(S - inf) = 0.
            LSEi = LSEi.masked_fill(empty, torch.inf)
            dLSEi = None if dLSE is None else tile.load(dLSE, dtype).masked_fill(empty, 0.0)
            if dsinks is not None:
                # With a sink, a row without keys has a finite LSE.
                empty = empty | tile.rows_without_keys(LSEi)
            dOi = tile.load(dO, dtype).masked_fill(empty, 0.0)
            delta = (dOi * tile.load(O, dtype)).sum(dim=-1, keepdim=True)
            if dLSEi is not None:
                delta.sub_(dLSEi)
            if dsinks is not None:
                dsinks[features.slices[1]] += features.dsinks(LSEi, delta)
                delta.masked_fill_(empty, 0.0)
            dQi = torch.zeros_like(Qi)
            for block in tile.blocks():
                Kj, Vj, dKj, dVj = (x[:, :, block.keys.start : block.keys.stop] for x in (K, V, dK, dV))
                Kj, Vj = Kj.to(dtype), Vj.to(dtype)
                Z = block.dropout_factors()
                # P = exp(S - LSE)
                P = block.apply(block.scores(Qi, Kj)).sub_(LSEi).exp_()
                block.apply_mask_(P, 0.0)
                # dV += (P ∘ Z)ᵀ dO
                dVj.add_(block.product_t(P if Z is None else P * Z, dOi))
                # dS = P ∘ (Z ∘ dO Vᵀ - Δ)
                dP = dOi @ Vj.mT
                block.apply_mask_(dP, 0.0)
                dS = (dP if Z is None else dP.mul_(Z)).sub_(delta).mul_(P)
                dS = block.backward(dS, P, grads)
                # dQ += scale dS K;  dK += dSᵀ (scale Q)
                dQi.add_(block.product(dS, Kj))
                dKj.add_(block.product_t(dS, Qi))
            tile.store(dQ, dQi.mul_(args.scale))
        dk[b, h], dv[b, h] = dK, dV
    if grads.sinks is not None and dsinks is not None:
        grads.sinks += dsinks
