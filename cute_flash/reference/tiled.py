"""Attention in plain PyTorch: the oracle, the yardstick of its rounding, and the CPU path of the op.

    dense                 fp64, materialises S: what every test compares with
    dense_low_precision   the same maths in the input's precision: how much error that precision explains
    forward, backward     exact and tiled, O(S) memory at any length: what `attn` runs on the CPU
    tiled_q_outer, tiled_kv_outer   the papers' two loop orders with byte counters (in `loops.py`)

The first two are in `dense.py`.

Tensors are q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv); query head h uses key head
h // (H // Hkv). Row i sees the keys of `band`; a row that sees none gives out = 0 and LSE = -inf. The LSE,
(B, H, Sq), is the natural logarithm of Σ exp(scale q·k), in fp32 (fp64 for fp64 inputs). A `Score` adds
softcap, ALiBi, sinks, dropout, a bias and what users write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash.reference.dense import dense, dense_low_precision
from cute_flash.reference.loops import (
    Traffic,
    accumulator_dtype,
    default_scale,
    divisor,
    group_size,
    softmax_step,
    tiled_kv_outer,
    tiled_q_outer,
    visible,
)
from cute_flash.reference.score import PartScore, Score, distance
from cute_flash.spec.band import Band, BlockRange, ceil_div

__all__ = [
    "Score",
    "Traffic",
    "accumulator_dtype",
    "backward",
    "dense",
    "dense_low_precision",
    "forward",
    "tiled_kv_outer",
    "tiled_q_outer",
]

# What the temporaries of `forward` and of one step of `backward` may add up to, whatever the shape.
MAX_TEMPORARY_BYTES = 64 << 20
# Long enough for efficient matrix products; more rows than keys: K and V are converted once per row chunk.
MAX_ROWS, MAX_KEYS = 512, 256
# Fewer heads at a time rather than fewer rows than this.
FEW_ROWS = 64


@dataclass(frozen=True)
class _Chunks:
    """How much is in flight: `batch` x `heads` key heads, `rows` queries of each query head, `keys` keys."""

    batch: int
    heads: int
    rows: int
    keys: int

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, score: Score | None) -> _Chunks:
        (batch, _, sq, d), (_, heads_kv, sk, _) = q.shape, k.shape
        group, width = group_size(q, k), max(d, v.shape[-1])
        element_bytes = torch.finfo(accumulator_dtype(q.dtype)).bits // 8
        keys = min(max(sk, 1), MAX_KEYS)
        # Live at once in `backward`, which holds more than `forward`: per row q, dO, dq and two products, and
        # S, P, dP, dS; per key k and v as converted and as laid out for the product, and two products.
        blocks = 4 if score is None else 4 + score.extra_blocks
        row_bytes = element_bytes * group * (5 * width + blocks * keys)
        key_bytes = element_bytes * keys * 6 * width
        few_rows = min(max(sq, 1), FEW_ROWS)
        in_flight = max(1, MAX_TEMPORARY_BYTES // (few_rows * row_bytes + key_bytes))
        heads = min(in_flight, max(heads_kv, 1))
        batches = min(max(1, in_flight // heads), max(batch, 1))
        rows = (MAX_TEMPORARY_BYTES // (heads * batches) - key_bytes) // row_bytes
        return _Chunks(batches, heads, min(max(rows, 1), MAX_ROWS, max(sq, 1)), keys)

    def parts(self, k: Tensor) -> Iterator[tuple[slice, slice]]:
        """The slices of batch and key heads to go through one after the other."""
        for b in range(0, k.shape[0], self.batch):
            for h in range(0, k.shape[1], self.heads):
                yield slice(b, min(b + self.batch, k.shape[0])), slice(h, min(h + self.heads, k.shape[1]))


@dataclass(frozen=True)
class _Tile:
    """The rows of one chunk of queries, for one part of the batch and heads, and the key blocks they visit.

    Query heads are grouped under their key head, and group and row are one axis of every matrix product:
    (batch, heads_kv, group * rows, D) against (batch, heads_kv, keys, D). So no key is copied for its group.
    """

    band: Band
    rows: range
    sq: int
    sk: int
    keys: int
    blocks: BlockRange

    @staticmethod
    def all_of(band: Band, chunks: _Chunks, sq: int, sk: int) -> Iterator[_Tile]:
        for i in range(ceil_div(sq, chunks.rows)):
            rows = range(i * chunks.rows, min((i + 1) * chunks.rows, sq))
            yield _Tile(band, rows, sq, sk, chunks.keys, band.blocks(i, chunks.rows, chunks.keys, sq, sk))

    def key_ranges(self) -> Iterator[tuple[range, bool]]:
        """The key blocks to visit, and whether each needs a mask."""
        for j in range(self.blocks.begin, self.blocks.end):
            keys = range(j * self.keys, min((j + 1) * self.keys, self.sk))
            yield keys, not self.blocks.full_begin <= j < self.blocks.full_end

    def of(self, grouped: Tensor) -> Tensor:
        """The view of this tile's rows in a (batch, heads_kv, group, Sq, ...) tensor."""
        return grouped[:, :, :, self.rows.start : self.rows.stop]

    def load(self, grouped: Tensor, dtype: torch.dtype) -> Tensor:
        return self.of(grouped).to(dtype).flatten(2, 3)

    def store(self, grouped: Tensor, values: Tensor) -> None:
        self.of(grouped).copy_(values.unflatten(2, (-1, len(self.rows))))

    def distance(self, keys: range, like: Tensor) -> Tensor:
        """(rows, keys), of ALiBi."""
        i, j = (torch.arange(x.start, x.stop, device=like.device) for x in (self.rows, keys))
        return distance(i, j, self.sq, self.sk, like.dtype)

    def seen(self, device: torch.device) -> Iterator[tuple[range, Tensor]]:
        """Key blocks with what the band shows of them, (rows, keys)."""
        for keys, _ in self.key_ranges():
            yield keys, visible(self.band, self.rows, keys, self.sq, self.sk, device)

    def blind(self, like: Tensor) -> Tensor:
        """Which rows see no key, as (group * rows, 1)."""
        bounds = [(self.band.lo(i, self.sq, self.sk), self.band.hi(i, self.sq, self.sk)) for i in self.rows]
        rows = torch.tensor([hi <= lo for lo, hi in bounds], dtype=torch.bool, device=like.device)
        return rows.repeat(like.shape[2] // len(rows))[:, None]

    def hide_(self, block: Tensor, keys: range, value: float) -> None:
        """Overwrite what lies outside the band in a (batch, heads_kv, group * rows, keys) block."""
        seen = visible(self.band, self.rows, keys, self.sq, self.sk, block.device)
        block.unflatten(2, (-1, len(self.rows))).masked_fill_(~seen, value)


def _part(score: Score | None, b: slice, h: slice, group: int, dtype: torch.dtype) -> PartScore | None:
    if score is None:
        return None
    return PartScore(score, range(b.start, b.stop), range(h.start, h.stop), group, dtype)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    scale: float | None = None,
    score: Score | None = None,
    max_logit: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention in O(S) memory: out (B, H, Sq, Dv), contiguous, and the LSE (B, H, Sq).

    `max_logit` (H), if given, is raised to the largest score of each head, as it enters the softmax.
    `out_dtype`: of out; q's by default.
    """
    dtype, scale = accumulator_dtype(q.dtype), default_scale(q, scale)
    sq, sk, group = q.shape[2], k.shape[2], group_size(q, k)
    out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=out_dtype)
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    chunks = _Chunks.of(q, k, v, score)
    for b, h in chunks.parts(k):
        Q, O, LSE = (x.unflatten(1, (-1, group))[b, h] for x in (q, out, lse[..., None]))
        K, V = k[b, h], v[b, h]
        part = _part(score, b, h, group, dtype)
        for tile in _Tile.all_of(band, chunks, sq, sk):
            Qi = tile.load(Q, dtype) * scale
            Oi = Qi.new_zeros((*Qi.shape[:3], V.shape[-1]))
            m, l = Qi.new_full((*Qi.shape[:3], 1), -torch.inf), Qi.new_zeros((*Qi.shape[:3], 1))
            if part is not None:
                m, l = part.first(m, l, len(tile.rows))
            for keys, is_masked in tile.key_ranges():
                Kj, Vj = (x[:, :, keys.start : keys.stop].to(dtype) for x in (K, V))
                # S = scale Q Kᵀ
                S = Qi @ Kj.mT
                if part is not None:
                    part.apply_(S, None if part.slopes is None else tile.distance(keys, S))
                    S, _ = part.finish(S, tile.rows, keys)
                    part.hide_(S, tile.rows, keys, -torch.inf)
                if is_masked:
                    tile.hide_(S, keys, -torch.inf)
                if max_logit is not None:
                    _raise_(max_logit.unflatten(0, (-1, group))[h], S)
                P, alpha, m, l = softmax_step(S, m, l)
                Z = None if part is None else part.factors(tile.rows, keys, dtype)
                # O = α O + (P ∘ Z) V
                Oi.mul_(alpha).add_((P if Z is None else P.mul_(Z)) @ Vj)
            tile.store(O, Oi.div_(divisor(l)))
            tile.store(LSE, m + l.log())
    return out, lse


def _raise_(most: Tensor, S: Tensor) -> None:
    """(heads_kv, group), to the largest scores of a block."""
    found = S.unflatten(2, (most.shape[1], -1)).amax(dim=(0, 3, 4))
    torch.maximum(most, found, out=most)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band,
    scale: float | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) in O(S) memory: P is recomputed from the LSE, block by block.

    With Δ = rowsum(dO ∘ O) - dLSE and P = exp(S - LSE):

        dV = Pᵀ dO    dS = P ∘ (dO Vᵀ - Δ)    dQ = scale dS K    dK = scale dSᵀ Q

    Rows whose LSE is -inf saw no key: they give and receive exactly 0, whatever their dO and dLSE hold.
    """
    return backward_with(None, (dout, dlse), q, k, v, out, lse, band, scale)[:3]


def backward_with(
    score: Score | None,
    douts: tuple[Tensor, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`backward` of (dout, dlse) with a score's features: dq, dk, dv, dalibi (B, H) and dsinks (H).

    With t = tanh(s / softcap), Z the factors of dropout, A the distances of ALiBi:

        dV = (P ∘ Z)ᵀ dO    dS' = P ∘ (Z ∘ dO Vᵀ - Δ)    dS = dS' ∘ (1 - t²)
        dalibi = -Σ dS' ∘ A    dsinks = -Σ exp(sinks - LSE) Δ

    The last two are 0 where there is no such feature. Gradients of a bias and of what users' functions
    capture are added to the score's own sums.
    """
    dtype, scale = accumulator_dtype(q.dtype), default_scale(q, scale)
    sq, sk, group = q.shape[2], k.shape[2], group_size(q, k)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dalibi, dsinks = q.new_zeros(q.shape[:2], dtype=dtype), q.new_zeros(q.shape[1], dtype=dtype)
    dout, dlse = douts[0], torch.zeros_like(lse) if douts[1] is None else douts[1]
    chunks = _Chunks.of(q, k, v, score)
    for b, h in chunks.parts(k):
        per_row = (q, dq, out, dout, lse[..., None], dlse[..., None])
        Q, dQ, O, dO, LSE, dLSE = (x.unflatten(1, (-1, group))[b, h] for x in per_row)
        K, V = k[b, h], v[b, h]
        dK, dV = (x.new_zeros(x.shape, dtype=dtype) for x in (K, V))
        part = _part(score, b, h, group, dtype)
        heads = slice(h.start * group, h.stop * group)
        for tile in _Tile.all_of(band, chunks, sq, sk):
            Qi, LSEi = tile.load(Q, dtype) * scale, tile.load(LSE, dtype)
            empty = LSEi == -torch.inf
            # exp(S - inf) = 0: an empty row needs no other care.
            LSEi = LSEi.masked_fill(empty, torch.inf)
            dLSEi = tile.load(dLSE, dtype).masked_fill(empty, 0.0)
            sinks = None if part is None else part.sinks
            if part is not None and sinks is not None:
                # A sink alone gives a row an LSE, and still no key.
                empty = empty | tile.blind(LSEi) | part.blind(LSEi, tile.rows, tile.seen)
            dOi = tile.load(dO, dtype).masked_fill(empty, 0.0)
            delta = (dOi * tile.load(O, dtype)).sum(dim=-1, keepdim=True).sub_(dLSEi)
            if part is not None and sinks is not None:
                dsinks[heads] += part.dsinks(LSEi, delta)
                delta = delta.masked_fill_(empty, 0.0)
            dQi = torch.zeros_like(Qi)
            for keys, is_masked in tile.key_ranges():
                Kj, Vj, dKj, dVj = (x[:, :, keys.start : keys.stop] for x in (K, V, dK, dV))
                Kj, Vj = Kj.to(dtype), Vj.to(dtype)
                S = Qi @ Kj.mT
                Z = tangent = away = before = None
                if part is not None:
                    Z = part.factors(tile.rows, keys, dtype)
                    away = None if part.slopes is None else tile.distance(keys, S)
                    tangent = part.apply_(S, away)
                    S, before = part.finish(S, tile.rows, keys)
                # P = exp(S - LSE)
                P = S.sub_(LSEi).exp_()
                if part is not None:
                    part.hide_(P, tile.rows, keys, 0.0)
                if is_masked:
                    tile.hide_(P, keys, 0.0)
                # dV += (P ∘ Z)ᵀ dO
                dVj.add_((P if Z is None else P * Z).mT @ dOi)
                # dS = P ∘ (Z ∘ dO Vᵀ - Δ)
                dP = dOi @ Vj.mT
                dS = (dP if Z is None else dP.mul_(Z)).sub_(delta).mul_(P)
                if part is not None:
                    dS = part.dfinish(dS, before, P, tile.rows, keys)
                    if away is not None:
                        dalibi[b, heads] += part.dslopes(dS, away)
                    if tangent is not None:
                        dS.mul_(1 - tangent.square_())
                # dQ += scale dS K;  dK += dSᵀ (scale Q)
                dQi.add_(dS @ Kj)
                dKj.add_(dS.mT @ Qi)
            tile.store(dQ, dQi.mul_(scale))
        dk[b, h], dv[b, h] = dK, dV
    return dq, dk, dv, dalibi, dsinks
