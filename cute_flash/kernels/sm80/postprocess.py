"""After the backward with mma.sync: dQ in the inputs' type."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.copies import RowTiles, plain_row_copy, row_tile
from cute_flash.device.epilogue import Epilogue
from cute_flash.device.sequence import Sequence, read_item, unpacked
from cute_flash.device.stages import allocate_stages
from cute_flash.kernels.common.fakes import CUTE_DTYPES
from cute_flash.kernels.sm80.bwd import dq_grid
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.varlen import TILE_LIST_HEADER
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.problem import Static


@dataclass(frozen=True)
class Params:
    mdQ: cute.Tensor  # (B, H, m_block, elements of a tile) fp32
    mOut: cute.Tensor  # (B, H, Sq, D)
    scale: Float32
    tiled_mma: cute.TiledMma
    copy_out: cute.TiledCopy
    mItems: cute.Tensor | None  # the blocks of a packed batch


class BwdPostprocessSm80:
    """dQ = scale times the fp32 sums, from the order of the accumulators to rows in the inputs' type."""

    def __init__(self, static: Static, tile: BwdTileSm80):
        self.static, self.dtype = static, CUTE_DTYPES[static.dtype]
        self.tile_m, self.tile_d = tile.tile_m, tile.head_dim
        self.num_threads, self.grid = tile.num_threads, dq_grid(tile, self.dtype)
        self.out_tile = SmemTile(tile.tile_m, tile.head_dim)

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
            dq, num_blocks = unpacked(dq), q_tile_list.shape[0] - TILE_LIST_HEADER
        copy_out = plain_row_copy(self.num_threads, self.out_tile.copy_cols, self.dtype)
        self.kernel.set_name_prefix(
            f"cute_flash_bwd_postprocess_sm80_d{self.static.head_dim}_{self.static.dtype}",
            remove_cutlass_symbol=True,
            keep_mangled_name=False,
        )
        params = Params(
            mdQ=dq_accum,
            mOut=dq,
            scale=dq_scale,
            tiled_mma=self.grid.mma(),
            copy_out=copy_out,
            mItems=q_tile_list,
        )
        self.kernel(params).launch(grid=(num_blocks, heads, batch), block=(self.num_threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, p: Params):
        index, head, batch = cute.arch.block_idx()
        if cutlass.const_expr(self.static.varlen):
            if index < p.mItems[0, 0]:
                m_block, numbers = read_item(p.mItems, index)
                self.one_block(p, m_block, head, Sequence.told(numbers))
        else:
            self.one_block(p, index, head, Sequence(batch, p.mOut.shape[2], Int32(0)))

    @cute.jit
    def one_block(self, p: Params, m_block: Int32, head: Int32, span: Sequence):
        thread, _, _ = cute.arch.thread_idx()
        first_row = m_block * self.tile_m
        gdQ = span.of(p.mdQ, head)[span.q_block(m_block, self.tile_m), None]
        shape = p.tiled_mma.get_slice(thread).partition_shape_C((self.tile_m, self.tile_d))
        acc = cute.make_rmem_tensor(shape, Float32)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = gdQ[i * self.num_threads + thread] * p.scale
        sOut = allocate_stages(SmemAllocator(), self.dtype, self.out_tile, 1)[None, None, 0]
        gOut = row_tile(span.of(p.mOut, head), span.q_row(first_row), self.tile_m, self.tile_d)
        rows = RowTiles(p.copy_out, thread, self.tile_m, self.tile_d, self.static.head_dim)
        Epilogue(p.tiled_mma, rows, thread, span.q_len - first_row).store(acc, sOut, gOut)
