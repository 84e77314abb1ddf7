"""Attention in plain PyTorch: the oracle, the yardstick of its rounding, and the CPU path of the op.

    dense                 fp64, materialises S: what every test compares with
    dense_low_precision   the same maths in the input's precision: how much error that precision explains
    forward, backward     exact and tiled, O(S) memory at any length: what `attn` runs on the CPU
    tiled_q_outer, tiled_kv_outer   the papers' two loop orders with byte counters (in `loops.py`)

Tensors are q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv); query head h uses key head
h // (H // Hkv). Row i sees the keys of `band`; a row that sees none gives out = 0 and LSE = -inf. The LSE,
(B, H, Sq), is the natural logarithm of Σ exp(scale q·k), in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash.band import Band, BlockRange, ceil_div
from cute_flash.loops import (
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

__all__ = [
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


def dense(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The oracle: out and LSE in fp64, by definition and with the whole (B, H, Sq, Sk) matrix in memory.

    Differentiable, also through rows that see no key.
    """
    mask = _dense_mask(q, k, band)
    empty = ~mask.any(dim=-1)
    group = group_size(q, k)
    K, V = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    S = (q.double() @ K.mT) * default_scale(q, scale)
    # Rows without keys get finite scores here, their result below: -inf - (-inf) would poison their gradient.
    S = S.masked_fill(~mask, -torch.inf).masked_fill(empty[:, None], 0.0)
    lse = S.logsumexp(dim=-1)
    P = torch.exp(S - lse[..., None]).masked_fill(~mask, 0.0)
    return P @ V, lse.masked_fill(empty, -torch.inf)


def dense_low_precision(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same maths as unfused PyTorch does it on a GPU: S, P and out rounded to the input's dtype.

    Its distance from `dense` is what that dtype costs a careful implementation; a kernel is right when it is
    no more than twice as far. K takes the scale before the product, which keeps fp16 scores in range. The
    products accumulate in fp32 on every machine: on a CPU without bf16 arithmetic PyTorch would do worse.
    Differentiable as `dense` is.
    """
    dtype, wide = q.dtype, accumulator_dtype(q.dtype)
    mask = _dense_mask(q, k, band)
    empty = ~mask.any(dim=-1)
    group = group_size(q, k)
    K, V = (x.repeat_interleave(group, dim=1) for x in (k, v))
    K = K * default_scale(q, scale)
    S = (q.to(wide) @ K.to(wide).mT).to(dtype).masked_fill(~mask, -torch.inf)
    S = S.masked_fill(empty[:, None], 0.0)
    P = torch.softmax(S, dim=-1).masked_fill(~mask, 0.0)
    lse = S.to(wide).logsumexp(dim=-1).masked_fill(empty, -torch.inf)
    return (P.to(wide) @ V.to(wide)).to(dtype), lse


def _dense_mask(q: Tensor, k: Tensor, band: Band) -> Tensor:
    """(Sq, Sk), true where visible: straight from the definition of the band, row by row."""
    sq, sk = q.shape[2], k.shape[2]
    lo = torch.tensor([band.lo(i, sq, sk) for i in range(sq)], dtype=torch.int64, device=q.device)[:, None]
    hi = torch.tensor([band.hi(i, sq, sk) for i in range(sq)], dtype=torch.int64, device=q.device)[:, None]
    j = torch.arange(sk, device=q.device)[None, :]
    return (lo <= j) & (j < hi)


@dataclass(frozen=True)
class _Chunks:
    """How much is in flight: `batch` x `heads` key heads, `rows` queries of each query head, `keys` keys."""

    batch: int
    heads: int
    rows: int
    keys: int

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor) -> _Chunks:
        (batch, _, sq, d), (_, heads_kv, sk, _) = q.shape, k.shape
        group, width = group_size(q, k), max(d, v.shape[-1])
        element_bytes = torch.finfo(accumulator_dtype(q.dtype)).bits // 8
        keys = min(max(sk, 1), MAX_KEYS)
        # Live at once in `backward`, which holds more than `forward`: per row q, dO, dq and two products, and
        # S, P, dP, dS; per key k and v as converted and as laid out for the product, and two products.
        row_bytes = element_bytes * group * (5 * width + 4 * keys)
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
                yield slice(b, b + self.batch), slice(h, h + self.heads)


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

    def hide_(self, block: Tensor, keys: range, value: float) -> None:
        """Overwrite what lies outside the band in a (batch, heads_kv, group * rows, keys) block."""
        seen = visible(self.band, self.rows, keys, self.sq, self.sk, block.device)
        block.unflatten(2, (-1, len(self.rows))).masked_fill_(~seen, value)


def forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Exact attention in O(S) memory: out (B, H, Sq, Dv) in q's dtype, contiguous, and the LSE (B, H, Sq)."""
    dtype, scale = accumulator_dtype(q.dtype), default_scale(q, scale)
    sq, sk, group = q.shape[2], k.shape[2], group_size(q, k)
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    chunks = _Chunks.of(q, k, v)
    for b, h in chunks.parts(k):
        Q, O, LSE = (x.unflatten(1, (-1, group))[b, h] for x in (q, out, lse[..., None]))
        K, V = k[b, h], v[b, h]
        for tile in _Tile.all_of(band, chunks, sq, sk):
            Qi = tile.load(Q, dtype) * scale
            Oi = Qi.new_zeros((*Qi.shape[:3], V.shape[-1]))
            m, l = Qi.new_full((*Qi.shape[:3], 1), -torch.inf), Qi.new_zeros((*Qi.shape[:3], 1))
            for keys, is_masked in tile.key_ranges():
                Kj, Vj = (x[:, :, keys.start : keys.stop].to(dtype) for x in (K, V))
                # S = scale Q Kᵀ
                S = Qi @ Kj.mT
                if is_masked:
                    tile.hide_(S, keys, -torch.inf)
                P, alpha, m, l = softmax_step(S, m, l)
                # O = α O + P V
                Oi.mul_(alpha).add_(P @ Vj)
            tile.store(O, Oi.div_(divisor(l)))
            tile.store(LSE, m + l.log())
    return out, lse


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
    dtype, scale = accumulator_dtype(q.dtype), default_scale(q, scale)
    sq, sk, group = q.shape[2], k.shape[2], group_size(q, k)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    chunks = _Chunks.of(q, k, v)
    for b, h in chunks.parts(k):
        per_row = (q, dq, out, dout, lse[..., None], dlse[..., None])
        Q, dQ, O, dO, LSE, dLSE = (x.unflatten(1, (-1, group))[b, h] for x in per_row)
        K, V = k[b, h], v[b, h]
        dK, dV = (x.new_zeros(x.shape, dtype=dtype) for x in (K, V))
        for tile in _Tile.all_of(band, chunks, sq, sk):
            Qi, LSEi = tile.load(Q, dtype) * scale, tile.load(LSE, dtype)
            empty = LSEi == -torch.inf
            dOi = tile.load(dO, dtype).masked_fill(empty, 0.0)
            delta = (dOi * tile.load(O, dtype)).sum(dim=-1, keepdim=True)
            delta = (delta - tile.load(dLSE, dtype)).masked_fill_(empty, 0.0)
            # exp(S - inf) = 0: an empty row needs no other care.
            LSEi = LSEi.masked_fill(empty, torch.inf)
            dQi = torch.zeros_like(Qi)
            for keys, is_masked in tile.key_ranges():
                Kj, Vj, dKj, dVj = (x[:, :, keys.start : keys.stop] for x in (K, V, dK, dV))
                Kj, Vj = Kj.to(dtype), Vj.to(dtype)
                # P = exp(scale Q Kᵀ - LSE)
                P = (Qi @ Kj.mT).sub_(LSEi).exp_()
                if is_masked:
                    tile.hide_(P, keys, 0.0)
                # dV += Pᵀ dO
                dVj.add_(P.mT @ dOi)
                # dS = P ∘ (dO Vᵀ - Δ)
                dS = (dOi @ Vj.mT).sub_(delta).mul_(P)
                # dQ += scale dS K;  dK += dSᵀ (scale Q)
                dQi.add_(dS @ Kj)
                dKj.add_(dS.mT @ Qi)
            tile.store(dQ, dQi.mul_(scale))
        dk[b, h], dv[b, h] = dK, dV
    return dq, dk, dv
