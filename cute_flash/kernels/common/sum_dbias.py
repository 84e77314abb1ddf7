"""Sums the gradient of a bias that batch entries or heads share.

The main kernel of the backward stores one term per score, in 16 bits. This kernel adds the terms of each bias
element in fp32, in a fixed order. It reads no blocks that the band excludes, and writes zeros there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from cute_flash.device.memory.copies import row_vector
from cute_flash.device.scores.band import Band
from cute_flash.kernels.common.kernel import Grid, Kernel
from cute_flash.planning.plan import SumTile
from cute_flash.spec.problem import Static

VECTOR = 8  # 16-bit elements of a 16-byte load
ROWS_AT_ONCE = 4  # rows of a thread whose loads are in flight together
TERMS_AT_ONCE = 4  # terms of each of these rows


@dataclass(frozen=True)
class Params:
    """The argument of the kernel."""

    terms: cute.Tensor  # (B, H, Sq, Sk)
    sums: cute.Tensor  # (B or 1, H or 1, Sq, Sk)
    num_terms: Int32  # of one sum
    term_stride: Int64  # distance in `terms` between two terms of one sum
    band: Band  # `Band.of_keys`


class SumDbias(Kernel):
    """One CTA sums one block of the main kernel: `tile.tile_m` queries and `tile.tile_n` keys."""

    def __init__(self, static: Static, tile: SumTile):
        super().__init__(static, tile)
        self.lanes = tile.tile_n // VECTOR  # threads of a row
        self.rows_per_pass = tile.num_threads // self.lanes
        assert self.rows_per_pass * self.lanes == tile.num_threads and tile.tile_m % self.rows_per_pass == 0

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        args = self.read_operands(operands)
        (batch, heads, seqlen_q, seqlen_k), (sum_batch, sum_heads, _, _) = args.dbias_terms.shape, args.dbias_sum.shape
        by_batch, by_head, _, _ = args.dbias_terms.stride
        params = Params(
            terms=args.dbias_terms,
            sums=args.dbias_sum,
            num_terms=(batch * heads) // (sum_batch * sum_heads),
            # The heads of a batch entry are contiguous, so this is right if batch and heads share the element too.
            term_stride=cutlass.select_(sum_heads < heads, Int64(by_head), Int64(by_batch)),
            band=self.band(args).of_keys,
        )
        num_blocks = cute.ceil_div(seqlen_q, self.tile.tile_m) * cute.ceil_div(seqlen_k, self.tile.tile_n)
        symbol = f"cute_flash_bwd_sum_dbias_{self.static.dtype}_{self.mask_name}_{self.size_name}"
        self.launch(symbol, params, Grid(num_blocks, sum_heads, sum_batch), self.tile.num_threads, stream)

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        (tile_m, tile_n), (_, _, seqlen_q, seqlen_k) = (self.tile.tile_m, self.tile.tile_n), p.sums.shape
        num_n_blocks = cute.ceil_div(seqlen_k, tile_n)
        m_block, n_block = block // num_n_blocks, block % num_n_blocks
        visited = p.band.blocks(n_block, tile_n, tile_m, seqlen_k, seqlen_q)
        is_visited = (m_block >= visited.begin) & (m_block < visited.end)
        num_terms = cutlass.select_(is_visited, p.num_terms, Int32(0))
        lanes, rows_per_pass = self.lanes, self.rows_per_pass
        first, key = m_block * tile_m + thread // lanes, n_block * tile_n + thread % lanes * VECTOR
        for i in cutlass.range_constexpr(0, tile_m // rows_per_pass, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, tile_m // rows_per_pass - i)
            rows = [first + (i + j) * rows_per_pass for j in range(count)]
            self.sum_rows(p, p.terms[batch, head, None, None], p.sums[batch, head, None, None], rows, key, num_terms)

    @cute.jit
    def sum_rows(
        self, p: Params, gTerms: cute.Tensor, gSums: cute.Tensor, rows: Sequence[Int32], key: Int32, num_terms: Int32
    ):
        """Sum the vectors at `key` of some rows, and store them. Rows and keys past the end load others instead."""
        seqlen_q, seqlen_k = gSums.shape
        inside = cutlass.min(key, seqlen_k - VECTOR)
        sums = [cute.make_rmem_tensor(VECTOR, Float32) for _ in rows]
        for total in sums:
            total.fill(0.0)
        for term in cutlass.range(num_terms, unroll=TERMS_AT_ONCE):
            for row, total in zip(rows, sums):
                terms = cute.make_rmem_tensor(VECTOR, gTerms.element_type)
                row = cutlass.min(row, seqlen_q - 1)
                cute.autovec_copy(row_vector(gTerms, row, inside, VECTOR, term * p.term_stride), terms)
                total.store(total.load() + terms.load().to(Float32))
        for row, total in zip(rows, sums):
            if row < seqlen_q and key < seqlen_k:
                rounded = cute.make_rmem_tensor(VECTOR, gSums.element_type)
                rounded.store(total.load().to(gSums.element_type))
                cute.autovec_copy(rounded, row_vector(gSums, row, key, VECTOR))
