"""Before and after the Hopper backward: the statistics of rows and a zeroed dQ; dQ in the inputs' type."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_flash.device.sequence import Sequence, read_item, unpacked
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.wgmma import make_mma
from cute_flash.kernels.arguments import DTYPES, fake_items, fake_rows, fake_statistics, out_dtype
from cute_flash.kernels.bwd_dq import add_sums, store_dq
from cute_flash.planning.tiles import AnyBwdTile
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90, BwdTileSm90Wide
from cute_flash.planning.varlen import HEADER
from cute_flash.spec.problem import Static

VECTOR = 8  # elements in 16 bytes, or in 32 where they are fp32
THREADS = 128


@dataclass(frozen=True)
class BeforeParams:
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

    And the sums of dQ = 0, and the counters of `BwdSm90Ordered`.
    """

    has_dlse = False
    is_ordered = False

    def __init__(self, static: Static, tile: AnyBwdTile):
        self.static, self.tile_m, self.tile_d = static, tile.tile_m, tile.head_dim
        self.dtype = out_dtype(static)  # of O and dO
        # Where the main kernel may be launched before this one ends, and waits for its end by itself.
        self.is_followed_early = not isinstance(tile, BwdTileSm80)
        vectors = -(-static.width_v // VECTOR)
        # Threads of a row; more than it has vectors, if there are more threads than those of all rows.
        self.per_row = max(1 << (vectors - 1).bit_length(), THREADS // self.tile_m)

    def fake_arguments(self) -> tuple:
        batch, heads, seqlen, padded, blocks = (cute.sym_int() for _ in range(5))

        def compact(dtype, *shape):
            order = tuple(reversed(range(len(shape))))
            align = 16 if len(shape) == 4 else 4
            return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

        def x():
            return fake_rows(self.static, (batch, heads, seqlen, self.static.width_v), self.dtype)

        def rows():
            return fake_statistics(self.static, (batch, heads, seqlen))

        def padded_rows():
            return compact(Float32, batch, heads, padded)

        sums = compact(Float32, batch, heads, blocks, self.tile_m * self.tile_d)
        return (
            x(),
            x(),
            rows(),
            padded_rows(),
            padded_rows(),
            sums,
            compact(Int32, batch, heads, blocks) if self.is_ordered else None,
            rows() if self.has_dlse else None,
            fake_items() if self.static.features.varlen else None,
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mLSE_log2: cute.Tensor,
        mD: cute.Tensor,
        mdQ: cute.Tensor,
        mCounters: cute.Tensor | None,
        mdLSE: cute.Tensor | None,
        mItems: cute.Tensor | None,
        stream: CUstream,
    ):
        batch, heads, padded = mLSE_log2.shape
        num_blocks = padded // self.tile_m
        if cutlass.const_expr(self.static.features.varlen):
            mO, mdO, mLSE = (unpacked(mX) for mX in (mO, mdO, mLSE))
            mdLSE = unpacked(mdLSE) if self.has_dlse else None
            num_blocks = mItems.shape[0] - HEADER
        self.kernel.set_name_prefix(
            f"cute_flash_bwd_preprocess_d{self.static.width_v}_{self.static.dtype}",
            remove_cutlass_symbol=True,
            keep_mangled_name=False,
        )
        self.kernel(BeforeParams(mO, mdO, mLSE, mLSE_log2, mD, mdQ, mCounters, mdLSE, mItems)).launch(
            grid=(num_blocks, heads, batch), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, p: BeforeParams):
        thread, _, _ = cute.arch.thread_idx()
        index, head, batch = cute.arch.block_idx()
        if cutlass.const_expr(self.is_followed_early):
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.static.features.varlen):
            if index < p.mItems[0, 0]:
                m_block, numbers = read_item(p.mItems, index)
                self.one_block(p, thread, m_block, head, Sequence.told(numbers))
        else:
            self.one_block(p, thread, index, head, Sequence(batch, p.mO.shape[2], Int32(0)))

    @cute.jit
    def one_block(self, p: BeforeParams, thread: Int32, m_block: Int32, head: Int32, span: Sequence):
        block = span.q_block(m_block, self.tile_m)
        if cutlass.const_expr(self.is_ordered):
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
    def one_row(self, p: BeforeParams, where: tuple, row: Int32, column: Int32):
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
            if cutlass.const_expr(self.has_dlse):
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


class BwdPreprocessWithDLSE(BwdPreprocess):
    """The same for an LSE that has a gradient of its own."""

    has_dlse = True


class BwdPreprocessOrdered(BwdPreprocess):
    is_ordered = True


class BwdPreprocessOrderedWithDLSE(BwdPreprocess):
    has_dlse = True
    is_ordered = True


@dataclass(frozen=True)
class AfterParams:
    mdQ: cute.Tensor  # (B, H, m_block, elements of a tile) fp32
    mOut: cute.Tensor  # (B, H, Sq, D)
    scale: Float32
    tiled_mma: cute.TiledMma
    mItems: cute.Tensor | None  # the blocks of a packed batch


class BwdPostprocess:
    """dQ = scale times the fp32 sums, from the order of the accumulators to rows in the inputs' type."""

    def __init__(self, static: Static, tile: BwdTileSm90 | BwdTileSm90Wide):
        self.static, self.tile = static, tile
        self.dtype = DTYPES[static.dtype]

    def fake_arguments(self) -> tuple:
        batch, heads, seqlen, blocks = (cute.sym_int() for _ in range(4))
        size = self.tile.tile_m * self.tile.head_dim
        mdQ = make_fake_compact_tensor(
            Float32, (batch, heads, blocks, size), stride_order=(3, 2, 1, 0), assumed_align=16
        )
        out = fake_rows(self.static, (batch, heads, seqlen, self.static.head_dim))
        items = fake_items() if self.static.features.varlen else None
        return mdQ, out, Float32(1.0), items, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(
        self,
        mdQ: cute.Tensor,
        mOut: cute.Tensor,
        scale: Float32,
        mItems: cute.Tensor | None,
        stream: CUstream,
    ):
        batch, heads, blocks, _ = mdQ.shape
        if cutlass.const_expr(self.static.features.varlen):
            mOut, blocks = unpacked(mOut), mItems.shape[0] - HEADER
        MN = OperandMajorMode.MN
        tiled_mma = make_mma(self.dtype, self.tile.dq_part[1], False, MN, MN)
        self.kernel.set_name_prefix(
            f"cute_flash_bwd_postprocess_d{self.static.head_dim}_{self.static.dtype}",
            remove_cutlass_symbol=True,
            keep_mangled_name=False,
        )
        self.kernel(AfterParams(mdQ, mOut, scale, tiled_mma, mItems)).launch(
            grid=(blocks, heads, batch), block=(2 * THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, p: AfterParams):
        index, head, batch = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.static.features.varlen):
            if index < p.mItems[0, 0]:
                m_block, numbers = read_item(p.mItems, index)
                self.one_block(p, m_block, head, Sequence.told(numbers))
        else:
            self.one_block(p, index, head, Sequence(batch, p.mOut.shape[2], Int32(0)))

    @cute.jit
    def one_block(self, p: AfterParams, m_block: Int32, head: Int32, span: Sequence):
        thread, _, _ = cute.arch.thread_idx()
        wg, thread = thread // THREADS, thread % THREADS
        rows, columns = self.tile.dq_part
        acc = cute.make_rmem_tensor(rows * columns // THREADS, Float32)
        acc.fill(0.0)
        add_sums(span.of(p.mdQ, head)[span.q_block(m_block, self.tile.tile_m), None], acc, wg, thread)
        acc.store(acc.load() * p.scale)
        where, shape = (head, span, m_block), (self.static, self.tile)
        store_dq(acc, p.mOut, where, p.tiled_mma, shape, wg, thread)
