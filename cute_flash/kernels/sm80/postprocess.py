"""The postprocess kernel of the mma.sync backward: converts dQ to the dtype of q."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.copies import RowTiles, plain_row_copy, row_tile
from cute_flash.device.memory.epilogue import DirectStore, Epilogue
from cute_flash.device.memory.smem import allocate_stages
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.kernels.common.postprocess import BwdPostprocess, Params
from cute_flash.kernels.sm80.bwd_storage import dq_grid
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.problem import Static


class BwdPostprocessSm80(BwdPostprocess):
    arch = "sm80"

    def __init__(self, static: Static, tile: BwdTileSm80):
        super().__init__(static, tile)
        self.num_threads = tile.num_threads

    def tiled_mma(self) -> cute.TiledMma:
        return dq_grid(self.tile, self.dtype).mma()

    @cute.jit
    def process_block(self, p: Params, m_block: Int32, head: Int32, seqlen: SeqlenInfo):
        thread, _, _ = cute.arch.thread_idx()
        tile_m, tile_d = self.tile.tile_m, self.tile.head_dim
        dq_tile, first_row = SmemTile(tile_m, tile_d), m_block * tile_m
        gdQ_accum = seqlen.slice_head(p.dq_accum, head)[seqlen.padded_q_block(m_block, tile_m), None]
        acc = cute.make_rmem_tensor(p.tiled_mma.get_slice(thread).partition_shape_C((tile_m, tile_d)), Float32)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = gdQ_accum[i * self.num_threads + thread] * p.dq_scale
        gdQ = row_tile(seqlen.slice_head(p.dq, head), seqlen.q_row(first_row), tile_m, tile_d)
        if cutlass.const_expr(self.static.is_fp32):
            DirectStore(p.tiled_mma, thread, seqlen.q_len - first_row, self.static.head_dim).floats(acc, gdQ)
        else:
            sdQ = allocate_stages(SmemAllocator(), self.dtype, dq_tile, 1)[None, None, 0]
            copy_out = plain_row_copy(self.num_threads, self.tile.copy_cols, self.dtype)
            rows = RowTiles(copy_out, thread, tile_m, tile_d, self.static.head_dim)
            Epilogue(p.tiled_mma, rows, thread, seqlen.q_len - first_row).store(acc, sdQ, gdQ)
