"""Before the main kernel of the backward: the statistics of rows, and a zeroed dQ."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from cute_flash.device.sequence import Sequence, read_item, unpacked
from cute_flash.device.softmax import LOG2_E
from cute_flash.kernels.common.fakes import CUTE_DTYPES, out_dtype
from cute_flash.planning.tiles import AnyBwdTile
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.varlen import TILE_LIST_HEADER
from cute_flash.spec.problem import Static

VECTOR = 8  # elements in 16 bytes, or in 32 where they are fp32
THREADS = 128


@dataclass(frozen=True)
class Params:
    mO: cute.Tensor  # (B, H, Sq, Dv)
    mdO: cute.Tensor
    mLSE: cute.Tensor  # (B, H, Sq)
    mLSE_log2: cute.Tensor  # (B, H, Sq padded)
    mD: cute.Tensor
    mdQ: cute.Tensor  # sums (B, H, m_block, elements of a tile) in fp32
    mCounters: cute.Tensor | None  # (B, H, m_block)
    mdLSE: cute.Tensor | None
    mItems: cute.Tensor | None  # the blocks of a packed batch


class BwdPreprocess:
    """D = rowsum(dO O) - dLSE; LSE in units of log2, +inf for rows without keys and past the end.

    The accumulators of dQ become 0, and so does its semaphore.
    """

    def __init__(self, static: Static, tile: AnyBwdTile):
        self.static, self.tile_m, self.tile_d = static, tile.tile_m, tile.head_dim
        self.dtype = CUTE_DTYPES[out_dtype(static)]  # of O and dO
        # Where the main kernel may be launched before this one ends, and waits for its end by itself.
        self.is_followed_early = not isinstance(tile, BwdTileSm80)
        vectors = -(-static.width_v // VECTOR)
        # Threads of a row; more than it has vectors, if there are more threads than those of all rows.
        self.per_row = max(1 << (vectors - 1).bit_length(), THREADS // self.tile_m)

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_accum: cute.Tensor,
        dq_semaphore: cute.Tensor | None,
        dlse: cute.Tensor | None,
        q_tile_list: cute.Tensor | None,
        stream: CUstream,
    ):
        batch, heads, padded = lse_log2.shape
        num_blocks = padded // self.tile_m
        if cutlass.const_expr(self.static.varlen):
            out, dout, lse = (unpacked(x) for x in (out, dout, lse))
            dlse = unpacked(dlse) if self.static.has_dlse else None
            num_blocks = q_tile_list.shape[0] - TILE_LIST_HEADER
        params = Params(
            mO=out,
            mdO=dout,
            mLSE=lse,
            mLSE_log2=lse_log2,
            mD=delta,
            mdQ=dq_accum,
            mCounters=dq_semaphore,
            mdLSE=dlse,
            mItems=q_tile_list,
        )
        self.kernel.set_name_prefix(
            f"cute_flash_bwd_preprocess_d{self.static.width_v}_{self.static.dtype}",
            remove_cutlass_symbol=True,
            keep_mangled_name=False,
        )
        self.kernel(params).launch(grid=(num_blocks, heads, batch), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        index, head, batch = cute.arch.block_idx()
        if cutlass.const_expr(self.is_followed_early):
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.static.varlen):
            if index < p.mItems[0, 0]:
                m_block, numbers = read_item(p.mItems, index)
                self.one_block(p, thread, m_block, head, Sequence.told(numbers))
        else:
            self.one_block(p, thread, index, head, Sequence(batch, p.mO.shape[2], Int32(0)))

    @cute.jit
    def one_block(self, p: Params, thread: Int32, m_block: Int32, head: Int32, span: Sequence):
        block = span.q_block(m_block, self.tile_m)
        if cutlass.const_expr(self.static.deterministic):
            if thread == 0:
                span.of(p.mCounters, head)[block] = Int32(0)
        self.zero_sums(span.of(p.mdQ, head)[block, None], thread)
        rows_at_once = THREADS // self.per_row
        for i in cutlass.range_constexpr(self.tile_m // rows_at_once):
            row = m_block * self.tile_m + i * rows_at_once + thread // self.per_row
            self.one_row(p, (span, head), row, thread % self.per_row * VECTOR)

    @cute.jit
    def zero_sums(self, gdQ: cute.Tensor, thread: Int32):
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        for i in cutlass.range(self.tile_m * self.tile_d // (4 * THREADS), unroll=4):
            target = (gdQ.iterator + 4 * (i * THREADS + thread)).align(16)
            cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def one_row(self, p: Params, where: tuple, row: Int32, column: Int32):
        """By as many neighbouring threads as a row has vectors, or a few more."""
        span, head = where
        seqlen = span.q_len
        dot, lse = Float32(0.0), Float32.inf
        if row < seqlen:
            found = span.of(p.mLSE, head)[span.q_row(row)]
            lse = Float32.inf if found == -Float32.inf else found * LOG2_E
            if column < self.static.width_v:
                rO, rdO = (cute.make_rmem_tensor(VECTOR, self.dtype) for _ in range(2))
                cute.autovec_copy(self.vector(span.of(p.mO, head), span.q_row(row), column), rO)
                cute.autovec_copy(self.vector(span.of(p.mdO, head), span.q_row(row), column), rdO)
                products = rO.load().to(Float32) * rdO.load().to(Float32)
                dot = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        offset = self.per_row // 2
        while cutlass.const_expr(offset > 0):
            dot = dot + cute.arch.shuffle_sync_bfly(dot, offset=offset)
            offset //= 2
        if column == 0:
            if cutlass.const_expr(self.static.has_dlse):
                # A row without keys has no gradient, whatever that of its LSE is.
                dot = Float32(0.0) if lse == Float32.inf else dot
                if row < seqlen and lse != Float32.inf:
                    dot = dot - span.of(p.mdLSE, head)[span.q_row(row)]
            at = span.padded_row(row, self.tile_m)
            span.of(p.mLSE_log2, head)[at] = lse
            span.of(p.mD, head)[at] = dot

    def vector(self, gX: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
        pointer = (gX.iterator + (Int64(row) * gX.stride[0] + column)).align(16)
        return cute.make_tensor(pointer, cute.make_layout(VECTOR))
