"""Postprocess of the Hopper backward: dQ in the type of q."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode

from cute_flash.device.seqlen import SeqlenInfo, with_batch_mode
from cute_flash.device.tile_scheduler import read_tile
from cute_flash.device.wgmma import make_mma
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.kernels.sm90.dq import add_accumulators, store_dq
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90, BwdTileSm90Wide
from cute_flash.planning.varlen import TILE_LIST_HEADER
from cute_flash.spec.problem import Static

THREADS = 128  # of a warpgroup


@dataclass(frozen=True)
class Params:
    mdQ_accum: cute.Tensor  # (B, H, m_block, elements of a tile) fp32
    mdQ: cute.Tensor  # (B, H, Sq, D)
    scale: Float32
    tiled_mma: cute.TiledMma
    mTiles: cute.Tensor | None  # the tile list of a varlen batch


class BwdPostprocessSm90:
    """dQ = scale times the fp32 accumulators, from the order of the registers to rows in the type of q."""

    def __init__(self, static: Static, tile: BwdTileSm90 | BwdTileSm90Wide):
        self.static, self.tile = static, tile
        self.dtype = CUTE_DTYPES[static.dtype]

    @cute.jit
    def __call__(
        self,
        dq_accum: cute.Tensor,
        dq: cute.Tensor,
        dq_scale: Float32,
        q_tile_list: cute.Tensor | None,
        stream: CUstream,
    ):
        batch, heads, num_blocks, _ = dq_accum.shape
        if cutlass.const_expr(self.static.varlen):
            dq, num_blocks = with_batch_mode(dq), q_tile_list.shape[0] - TILE_LIST_HEADER
        MN = OperandMajorMode.MN
        tiled_mma = make_mma(self.dtype, self.tile.dq_part[1], False, MN, MN)
        self.kernel.set_name_prefix(
            f"cute_flash_bwd_postprocess_sm90_d{self.static.head_dim}_{self.static.dtype}",
            remove_cutlass_symbol=True,
            keep_mangled_name=False,
        )
        params = Params(mdQ_accum=dq_accum, mdQ=dq, scale=dq_scale, tiled_mma=tiled_mma, mTiles=q_tile_list)
        self.kernel(params).launch(
            grid=(num_blocks, heads, batch), block=(2 * THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, p: Params):
        index, head, batch = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.static.varlen):
            if index < p.mTiles[0, 0]:
                m_block, seqlen_values = read_tile(p.mTiles, index)
                self.process_block(p, m_block, head, SeqlenInfo.of_values(seqlen_values))
        else:
            self.process_block(p, index, head, SeqlenInfo(batch, p.mdQ.shape[2], Int32(0)))

    @cute.jit
    def process_block(self, p: Params, m_block: Int32, head: Int32, seqlen: SeqlenInfo):
        thread, _, _ = cute.arch.thread_idx()
        wg, thread = thread // THREADS, thread % THREADS
        rows, columns = self.tile.dq_part
        acc = cute.make_rmem_tensor(rows * columns // THREADS, Float32)
        acc.fill(0.0)
        add_accumulators(
            seqlen.slice_head(p.mdQ_accum, head)[seqlen.padded_q_block(m_block, self.tile.tile_m), None],
            acc,
            wg,
            thread,
        )
        acc.store(acc.load() * p.scale)
        store_dq(acc, p.mdQ, (head, seqlen, m_block), p.tiled_mma, (self.static, self.tile), wg, thread)
