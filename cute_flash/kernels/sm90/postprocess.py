"""The postprocess kernel of the Hopper backward: converts dQ to the dtype of q."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode

from cute_flash.device.mma.wgmma import make_mma
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.kernels.common.postprocess import BwdPostprocess, Params
from cute_flash.kernels.sm90.dq import add_accumulators, store_dq


class BwdPostprocessSm90(BwdPostprocess):
    arch, overlaps_previous = "sm90", True

    @property
    def num_threads(self) -> int:
        """A warpgroup for each part of dQ (`tile.dq_part`)."""
        rows, columns = self.tile.dq_part
        return WARPGROUP_THREADS * self.tile.tile_m * self.tile.head_dim // (rows * columns)

    def tiled_mma(self) -> cute.TiledMma:
        return make_mma(self.dtype, self.tile.dq_part[1], False, OperandMajorMode.MN, OperandMajorMode.MN)

    @cute.jit
    def process_block(self, p: Params, m_block: Int32, head: Int32, seqlen: SeqlenInfo):
        thread, _, _ = cute.arch.thread_idx()
        wg, thread = thread // WARPGROUP_THREADS, thread % WARPGROUP_THREADS
        rows, columns = self.tile.dq_part
        acc = cute.make_rmem_tensor(rows * columns // WARPGROUP_THREADS, Float32)
        acc.fill(0.0)
        block = seqlen.padded_q_block(m_block, self.tile.tile_m)
        # If no K/V tile sees the block, its part of `dq_accum` is uninitialised, and its gradient is 0.
        is_written = Boolean(seqlen.slice_head(p.dq_progress, head)[block] != 0)
        if cutlass.const_expr(not self.static.deterministic):
            is_written = is_written or seqlen.q_len > self.tile.max_queries_claimed
        if is_written:
            add_accumulators(seqlen.slice_head(p.dq_accum, head)[block, None], acc, wg, thread)
        acc.store(acc.load() * p.dq_scale)
        head_dim = self.static.head_dim
        store_dq(acc, p.dq, m_block, head, seqlen, p.tiled_mma, head_dim, self.tile, wg, thread)
