"""Postprocess of the backward with mma.sync: dQ in the type of q."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.copies import RowTiles, plain_row_copy, row_tile
from cute_flash.device.epilogue import Epilogue
from cute_flash.device.seqlen import SeqlenInfo, with_batch_mode
from cute_flash.device.smem import allocate_stages
from cute_flash.device.tile_scheduler import read_tile
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.kernels.sm80.bwd_storage import dq_grid
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.varlen import TILE_LIST_HEADER
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.problem import Static


@dataclass(frozen=True)
class Params:
    mdQ_accum: cute.Tensor  # (B, H, m_block, elements of a tile) fp32
    mdQ: cute.Tensor  # (B, H, Sq, D)
    scale: Float32
    tiled_mma: cute.TiledMma
    copy_out: cute.TiledCopy
    mTiles: cute.Tensor | None  # the tile list of a varlen batch


class BwdPostprocessSm80:
    """dQ = scale times the fp32 accumulators, from the order of the registers to rows in the type of q."""

    def __init__(self, static: Static, tile: BwdTileSm80):
        self.static, self.dtype = static, CUTE_DTYPES[static.dtype]
        self.tile_m, self.tile_d = tile.tile_m, tile.head_dim
        self.num_threads, self.grid = tile.num_threads, dq_grid(tile, self.dtype)
        self.dq_tile = SmemTile(tile.tile_m, tile.head_dim)

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
        copy_out = plain_row_copy(self.num_threads, self.dq_tile.copy_cols, self.dtype)
        self.kernel.set_name_prefix(
            f"cute_flash_bwd_postprocess_sm80_d{self.static.head_dim}_{self.static.dtype}",
            remove_cutlass_symbol=True,
            keep_mangled_name=False,
        )
        params = Params(
            mdQ_accum=dq_accum, mdQ=dq, scale=dq_scale, tiled_mma=self.grid.mma(), copy_out=copy_out, mTiles=q_tile_list
        )
        self.kernel(params).launch(grid=(num_blocks, heads, batch), block=(self.num_threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, p: Params):
        index, head, batch = cute.arch.block_idx()
        if cutlass.const_expr(self.static.varlen):
            if index < p.mTiles[0, 0]:
                m_block, seqlen_values = read_tile(p.mTiles, index)
                self.process_block(p, m_block, head, SeqlenInfo.of_values(seqlen_values))
        else:
            self.process_block(p, index, head, SeqlenInfo(batch, p.mdQ.shape[2], Int32(0)))

    @cute.jit
    def process_block(self, p: Params, m_block: Int32, head: Int32, seqlen: SeqlenInfo):
        thread, _, _ = cute.arch.thread_idx()
        first_row = m_block * self.tile_m
        gdQ_accum = seqlen.slice_head(p.mdQ_accum, head)[seqlen.padded_q_block(m_block, self.tile_m), None]
        shape = p.tiled_mma.get_slice(thread).partition_shape_C((self.tile_m, self.tile_d))
        acc = cute.make_rmem_tensor(shape, Float32)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = gdQ_accum[i * self.num_threads + thread] * p.scale
        sdQ = allocate_stages(SmemAllocator(), self.dtype, self.dq_tile, 1)[None, None, 0]
        gdQ = row_tile(seqlen.slice_head(p.mdQ, head), seqlen.q_row(first_row), self.tile_m, self.tile_d)
        rows = RowTiles(p.copy_out, thread, self.tile_m, self.tile_d, self.static.head_dim)
        Epilogue(p.tiled_mma, rows, thread, seqlen.q_len - first_row).store(acc, sdQ, gdQ)
