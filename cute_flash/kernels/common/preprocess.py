"""The preprocess kernel of the backward: row statistics, and the initial state of dQ."""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.memory.copies import row_vector
from cute_flash.device.memory.epilogue import warp_max
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.kernels.common.kernel import MBlockKernel
from cute_flash.planning.tiles import AnyBwdTile
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90Wide
from cute_flash.spec.problem import Static

VECTOR = 8  # contiguous elements that a thread loads: 16 bytes, or 32 if fp32
THREADS = 128
WARP_THREADS = 32


@dataclass(frozen=True)
class Params:
    """The argument of the kernel."""

    out: cute.Tensor  # (B, H, Sq, Dv)
    dout: cute.Tensor
    lse: cute.Tensor  # (B, H, Sq)
    lse_log2: cute.Tensor  # (B, H, Sq padded)
    delta: cute.Tensor  # Δ, (B, H, Sq padded)
    dq_accum: cute.Tensor  # (B, H, m_blocks, elements of a tile) fp32
    dq_progress: cute.Tensor | None  # (B, H, m_blocks): claims, or semaphores
    dlse: cute.Tensor | None
    q_tile_list: cute.Tensor | None  # of a varlen batch
    norms: cute.Tensor | None = None  # (5, sequences, H) of an fp32 call; norms[4] is the largest |Δ|


class BwdPreprocess(MBlockKernel):
    """Computes Δ = rowsum(dO O) - dLSE (the operand `delta`), and the LSE in units of log2.

    The LSE of rows without keys, and of rows past the end, becomes +inf, so that P is 0. The kernel also sets the
    progress of dQ to 0. The accumulators of dQ become 0 too, unless the main kernel stores the first terms
    (`device.gradients.dq_claims`, `device.scheduling.semaphore`).
    """

    rows, num_threads = "out", THREADS

    def __init__(self, static: Static, tile: AnyBwdTile):
        super().__init__(static, tile)
        self.tile_m, self.tile_d = tile.tile_m, tile.head_dim
        self.dtype = CUTE_DTYPES[static.element_dtype("out")]  # of O and dO
        # The main Hopper kernel starts before this kernel ends, and waits (programmatic dependent launch).
        self.overlaps_next = not isinstance(tile, BwdTileSm80)
        vectors = -(-static.width_v // VECTOR)
        # A power of two up to a warp, large enough that the threads of a CTA cover at most `tile_m` rows at once.
        self.threads_per_row = max(min(1 << (vectors - 1).bit_length(), WARP_THREADS), THREADS // self.tile_m)
        self.columns_at_once = self.threads_per_row * VECTOR

    @property
    def name(self) -> str:
        return f"bwd_preprocess_d{self.static.width_v}"

    def params(self, args: SimpleNamespace) -> Params:
        return Params(**vars(args))

    @cute.kernel
    def kernel(self, p: Params):
        index, head, batch = cute.arch.block_idx()
        if cutlass.const_expr(self.overlaps_next):
            cute.arch.griddepcontrol_launch_dependents()
        self.process_cta(p, index, head, batch)

    @cute.jit
    def process_block(self, p: Params, m_block: Int32, head: Int32, seqlen: SeqlenInfo):
        thread, _, _ = cute.arch.thread_idx()
        block = seqlen.padded_q_block(m_block, self.tile_m)
        if cutlass.const_expr(p.dq_progress is not None):
            if thread == 0:
                seqlen.slice_head(p.dq_progress, head)[block] = Int32(0)
        gdQ = seqlen.slice_head(p.dq_accum, head)[block, None]
        if cutlass.const_expr(not self.tile.needs_wgmma):
            self.zero_dq(gdQ, thread)
        elif cutlass.const_expr(not self.static.deterministic):
            if seqlen.q_len > self.tile.max_queries_claimed:
                self.zero_dq(gdQ, thread)
            elif cutlass.const_expr(isinstance(self.tile, BwdTileSm90Wide)):
                self.zero_rest(gdQ, thread)
        rows_at_once = THREADS // self.threads_per_row
        for i in cutlass.range_constexpr(self.tile_m // rows_at_once):
            row = m_block * self.tile_m + i * rows_at_once + thread // self.threads_per_row
            self.process_row(p, seqlen, head, row, thread % self.threads_per_row * VECTOR)

    @cute.jit
    def zero_dq(self, gdQ: cute.Tensor, thread: Int32):
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        for i in cutlass.range(self.tile_m * self.tile_d // (4 * THREADS), unroll=4):
            target = (gdQ.iterator + 4 * (i * THREADS + thread)).align(16)
            cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def zero_rest(self, gdQ: cute.Tensor, thread: Int32):
        """Zero the pieces of dQ that all K/V tiles add from registers."""
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        pieces = self.tile_m * self.tile_d // (4 * THREADS)
        for i in cutlass.range_constexpr(pieces):
            if cutlass.const_expr(i % self.tile.half_pieces >= self.tile.dq_pieces):
                target = (gdQ.iterator + 4 * (i * THREADS + thread)).align(16)
                cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def process_row(self, p: Params, seqlen: SeqlenInfo, head: Int32, row: Int32, column: Int32):
        """Compute the statistics of a row.

        Called by `threads_per_row` neighbouring threads, each with the first column of its first vector.
        """
        dot, lse = Float32(0.0), Float32.inf
        if row < seqlen.q_len:
            natural = seqlen.slice_head(p.lse, head)[seqlen.q_row(row)]
            lse = Float32.inf if natural == -Float32.inf else natural * LOG2_E
            for first in cutlass.range_constexpr(0, self.static.width_v, self.columns_at_once):
                if column + first < self.static.width_v:
                    rO, rdO = (cute.make_rmem_tensor(VECTOR, self.dtype) for _ in range(2))
                    for mX, fragment in ((p.out, rO), (p.dout, rdO)):
                        gX = seqlen.slice_head(mX, head)
                        cute.autovec_copy(row_vector(gX, seqlen.q_row(row), column + first, VECTOR), fragment)
                    products = rO.load().to(Float32) * rdO.load().to(Float32)
                    dot = products.reduce(cute.ReductionOp.ADD, dot, 0)
        offset = self.threads_per_row // 2
        while cutlass.const_expr(offset > 0):
            dot = dot + cute.arch.shuffle_sync_bfly(dot, offset=offset)
            offset //= 2
        if column == 0:
            if cutlass.const_expr(self.static.has_dlse):
                # A row without keys has no gradient: the gradient of its LSE is ignored.
                dot = Float32(0.0) if lse == Float32.inf else dot
                if row < seqlen.q_len and lse != Float32.inf:
                    dot = dot - seqlen.slice_head(p.dlse, head)[seqlen.q_row(row)]
            padded_row = seqlen.padded_q_row(row, self.tile_m)
            seqlen.slice_head(p.lse_log2, head)[padded_row] = lse
            seqlen.slice_head(p.delta, head)[padded_row] = dot
        if cutlass.const_expr(self.static.is_fp32):
            largest = warp_max(cute.arch.fmax(dot, -dot))
            if cute.arch.lane_idx() == 0:
                target = p.norms[p.norms.shape[0] - 1, seqlen.batch, None].iterator + head
                cute.arch.atomic_fmax(target, largest, sem="relaxed", scope="gpu")
