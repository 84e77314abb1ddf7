"""The loop orders of the FlashAttention papers, for study: plain torch that counts the bytes it would move on a GPU.

Q is split into Tr tiles of Br rows, K and V into Tc blocks of Bc keys, which fit into shared memory.

    tiled_q_outer    FlashAttention-2, Algorithm 1: for each Q tile all K/V blocks; O, m, l stay on chip
    tiled_kv_outer   FlashAttention, Algorithm 1: for each K/V block all Q tiles; O, m, l are reloaded every time

Both give the same results; `Traffic` is their cost. Tensors are (B, H, S, D), where H is a multiple of Hkv. Each step
computes all batches and heads, as the CTAs of a grid do, and counts are sums over them. A step is the online softmax:

    S = scale Q Kᵀ    m' = max(m, rowmax S)    P = exp(S - m')
    α = exp(m - m')   l' = α l + rowsum P      O' = α O + P V

A row that sees no key keeps m = -inf, l = 0, O = 0, and its result is O = 0, LSE = m + log l = -inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_flash.reference.formulas import default_scale, distances, divisor, group_size, softmax_step, visible
from cute_flash.spec.band import Band, BlockRange, ceil_div
from cute_flash.spec.shapes import lse_dtype


@dataclass
class Traffic:
    """The bytes that a loop order moves between device memory and the chip, and the rescales of the accumulator."""

    read_bytes: int = 0
    write_bytes: int = 0
    # How often the maximum of a row grew in a later block, so that its accumulator was multiplied by exp(m - m').
    rescales: int = 0
    # Steps in which at least one row of the tile rescaled: the rescales of a kernel that tests once per step.
    block_rescales: int = 0
    blocks_visited: int = 0
    # Blocks that needed a mask, because an edge of the band or the end of the keys is inside them.
    blocks_masked: int = 0


class _Loop:
    """The parts that both loop orders share: inputs in the accumulator's dtype, scores, counters."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float | None, Br: int, Bc: int) -> None:
        self.band, self.scale, self.Br, self.Bc = band, default_scale(q, scale), Br, Bc
        self.dtype = lse_dtype(q.dtype)
        self.sq, self.sk = q.shape[2], k.shape[2]
        self.Q = q.to(self.dtype)
        # Each query head reads K and V of its K/V head, and the reads count for each query head.
        self.K, self.V = (x.to(self.dtype).repeat_interleave(group_size(q, k), dim=1) for x in (k, v))
        self.element_bytes = q.element_size()
        self.traffic = Traffic()

    def rows(self, i: int) -> range:
        return range(i * self.Br, min((i + 1) * self.Br, self.sq))

    def keys(self, j: int) -> range:
        return range(j * self.Bc, min((j + 1) * self.Bc, self.sk))

    def blocks(self, i: int) -> BlockRange:
        return self.band.blocks(i, self.Br, self.Bc, self.sq, self.sk)

    def load(self, x: Tensor, at: range, is_statistic: bool = False) -> Tensor:
        """Load the rows or keys `at` from device memory and count the bytes.

        Q, K, V and O count with the element size of the input, the statistics m, l and LSE with their own.
        """
        tile = x[:, :, at.start : at.stop]
        self.traffic.read_bytes += tile.numel() * (x.element_size() if is_statistic else self.element_bytes)
        return tile

    def store(self, x: Tensor, at: range, tile: Tensor, is_statistic: bool = False) -> None:
        x[:, :, at.start : at.stop] = tile
        self.traffic.write_bytes += tile.numel() * (x.element_size() if is_statistic else self.element_bytes)

    def scores(self, Qi: Tensor, Kj: Tensor, i: int, j: int, blocks: BlockRange) -> Tensor:
        """S = scale Q Kᵀ of tile i and block j, masked unless the block lies inside the band."""
        heads = Qi.shape[0] * Qi.shape[1]
        self.traffic.blocks_visited += heads
        S = (Qi @ Kj.mT) * self.scale
        if blocks.is_masked(j):
            self.traffic.blocks_masked += heads
            distance = distances(self.rows(i), self.keys(j), self.sq, self.sk, S.device)
            S = S.masked_fill(~visible(self.band, distance), -torch.inf)
        return S

    def count_rescales(self, m: Tensor, m_new: Tensor) -> None:
        grew = (m_new > m) & (m > -torch.inf)
        self.traffic.rescales += int(grew.sum())
        self.traffic.block_rescales += int(grew.any(dim=2).sum())

    def per_row(self, rows: int, width: int, value: float) -> Tensor:
        return self.Q.new_full((*self.Q.shape[:2], rows, width), value)


def tiled_q_outer(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float | None = None, Br: int = 64, Bc: int = 64
) -> tuple[Tensor, Tensor, Traffic]:
    """FlashAttention-2: outer loop over Q tiles, inner loop over K/V blocks. Returns (out, lse, traffic).

    Q is read once, K and V once per Q tile, and O and the LSE are written once. Without a mask, this reads
    (Sq + 2 Tr Sk) d elements and writes Sq d elements and Sq statistics per head.
    """
    loop = _Loop(q, k, v, band, scale, Br, Bc)
    sq, d = q.shape[2], v.shape[-1]
    O, LSE = loop.per_row(sq, d, 0.0), loop.per_row(sq, 1, -torch.inf)
    Tr = ceil_div(sq, Br)
    for i in range(Tr):
        rows, blocks = loop.rows(i), loop.blocks(i)
        Oi = loop.per_row(len(rows), d, 0.0)
        m, l = loop.per_row(len(rows), 1, -torch.inf), loop.per_row(len(rows), 1, 0.0)
        # A tile that sees no key writes zeros and reads nothing.
        Qi = loop.load(loop.Q, rows) if blocks.begin < blocks.end else loop.Q[:, :, :0]
        for j in range(blocks.begin, blocks.end):
            Kj, Vj = loop.load(loop.K, loop.keys(j)), loop.load(loop.V, loop.keys(j))
            S = loop.scores(Qi, Kj, i, j, blocks)
            P, alpha, m_new, l = softmax_step(S, m, l)
            loop.count_rescales(m, m_new)
            Oi = alpha * Oi + P @ Vj
            m = m_new
        loop.store(O, rows, Oi / divisor(l))
        loop.store(LSE, rows, m + l.log(), is_statistic=True)
    return O.to(q.dtype), LSE.squeeze(-1), loop.traffic


def tiled_kv_outer(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float | None = None, Br: int = 64, Bc: int = 64
) -> tuple[Tensor, Tensor, Traffic]:
    """FlashAttention: outer loop over K/V blocks, inner loop over Q tiles. Returns (out, lse, traffic).

    K and V are read once; Q, O, m and l are read, and O, m and l are written, once per K/V block. Without a mask, this
    reads (2 Sk + 2 Tc Sq) d elements and 2 Tc Sq statistics, and writes Tc Sq d elements and 2 Tc Sq statistics, per
    head.

    As in the paper, O is normalised at each step, so it needs no final pass. O counts with the element size of the
    input, although it is wider here. The initialization of O, m and l is not counted.
    """
    loop = _Loop(q, k, v, band, scale, Br, Bc)
    sq, sk, d = q.shape[2], k.shape[2], v.shape[-1]
    O = loop.per_row(sq, d, 0.0)
    m, l = loop.per_row(sq, 1, -torch.inf), loop.per_row(sq, 1, 0.0)
    Tr, Tc = ceil_div(sq, Br), ceil_div(sk, Bc)
    block_ranges = [loop.blocks(i) for i in range(Tr)]
    for j in range(Tc):
        visitors = [i for i in range(Tr) if block_ranges[i].begin <= j < block_ranges[i].end]
        if not visitors:
            continue
        Kj, Vj = loop.load(loop.K, loop.keys(j)), loop.load(loop.V, loop.keys(j))
        for i in visitors:
            rows = loop.rows(i)
            Qi, Oi = loop.load(loop.Q, rows), loop.load(O, rows)
            mi, li = loop.load(m, rows, is_statistic=True), loop.load(l, rows, is_statistic=True)
            S = loop.scores(Qi, Kj, i, j, block_ranges[i])
            P, alpha, m_new, l_new = softmax_step(S, mi, li)
            loop.count_rescales(mi, m_new)
            loop.store(O, rows, (alpha * li * Oi + P @ Vj) / divisor(l_new))
            loop.store(m, rows, m_new, is_statistic=True)
            loop.store(l, rows, l_new, is_statistic=True)
    return O.to(q.dtype), (m + l.log()).squeeze(-1), loop.traffic
