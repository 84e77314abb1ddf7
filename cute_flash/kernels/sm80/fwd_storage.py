"""Parameters, shared memory and main-loop state of the mma.sync forward."""

from dataclasses import dataclass
from functools import partial

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.copies import RowTiles
from cute_flash.device.memory.ldmatrix import MmaOperand
from cute_flash.device.memory.smem import allocate_stages
from cute_flash.device.mma.row_warps import RowWarps
from cute_flash.device.mma.warp_grid import WarpGrid
from cute_flash.device.scheduling.block_sparse import BlockSparseIterator
from cute_flash.device.scheduling.tile_scheduler import StaticTileScheduler, VarlenTileList
from cute_flash.device.scores.band import Band
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.philox import Dropout
from cute_flash.device.softmax.softmax import Softmax
from cute_flash.kernels.common.params import HeadScoreParams, ScoreParams
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.spec.band import BlockRange


@dataclass(frozen=True)
class Params:
    """The argument of the kernel. Tensors are (B, H, S, D), or (1, H, T, D) in a varlen batch; only D is static."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mO: cute.Tensor
    mLSE: cute.Tensor  # (B, H, Sq)
    scale_log2: Float32
    band: Band
    tiles: StaticTileScheduler | VarlenTileList
    copy_in: cute.TiledCopy
    copy_out: cute.TiledCopy
    mma_s: cute.TiledMma  # Q K^T: queries x keys
    mma_o: cute.TiledMma  # P V: queries x head_dim; the same unless warps share rows
    score_params: ScoreParams
    # (4, B, H) in fp32 calls: the largest row norms of Q, K and V; the last entry is not used. mQ, mK and mV are then
    # fp16 pieces (`device.mma.split_fp32`).
    norms: cute.Tensor | None = None


@dataclass(frozen=True)
class MainloopState:
    """The state of the main loop of a tile."""

    load_k: RowTiles
    load_v: RowTiles
    gK: cute.Tensor  # (Sk, head_dim) of this head
    gV: cute.Tensor
    sK: cute.Tensor  # (tile_n, tile_d, stage)
    sV: cute.Tensor
    q: MmaOperand
    k: MmaOperand
    v: MmaOperand
    mma_s: cute.TiledMma
    mma_o: cute.TiledMma
    acc_O: cute.Tensor
    softmax: Softmax
    mask: Mask
    blocks: BlockRange
    score_params: HeadScoreParams
    dropout: Dropout | None
    batch_head: Int32  # b H + h
    block_iter: BlockSparseIterator | None  # of a block mask
    row_warps: RowWarps | None = None  # if warps share rows
    score_factor: Float32 | None = None  # in fp32 calls, turns a product of fp16 pieces into Q K^T


@dataclass(frozen=True)
class SharedStorage:
    """The tensors in shared memory. The last two exist if warps share rows (`device/mma/row_warps.py`)."""

    sQ: cute.Tensor  # (tile_m, tile_d, 1)
    sK: cute.Tensor  # (tile_n, tile_d, stage)
    sV: cute.Tensor
    sP: cute.Tensor | None = None  # (tile_m, tile_n, 1)
    sRows: cute.Tensor | None = None  # (threads, rows of a thread) fp32

    @staticmethod
    def allocate(tile: FwdTileSm80, dtype: type) -> "SharedStorage":
        smem = SmemAllocator()
        stages_of = partial(allocate_stages, smem, dtype)
        q_tile, kv_tile = tile.smem(tile.tile_m), tile.smem(tile.tile_n)
        tensors = stages_of(q_tile, 1), stages_of(kv_tile, tile.stages), stages_of(kv_tile, tile.stages)
        if tile.row_warps == 1:
            return SharedStorage(*tensors)
        rows = cute.make_layout((tile.num_threads, tile.thread_rows))
        return SharedStorage(*tensors, stages_of(tile.smem_p, 1), smem.allocate_tensor(Float32, rows, 16))


@dataclass(frozen=True)
class WarpGrids:
    """The warp grids of Q K^T and of P V."""

    s: WarpGrid
    o: WarpGrid

    @staticmethod
    def of(tile: FwdTileSm80, dtype: type) -> "WarpGrids":
        if tile.row_warps == 1:
            grid = WarpGrid(dtype, tile.num_warps, tile.num_warps)
            return WarpGrids(grid, grid)
        # The keys of a warp are contiguous; masks and score features rely on it.
        s = WarpGrid(dtype, tile.num_warps, tile.warps_m, tile.warp_keys)
        return WarpGrids(s, WarpGrid(dtype, tile.num_warps, tile.warps_m))

    def operands(self, tile: FwdTileSm80, p: Params, thread: Int32, storage: SharedStorage):
        """Q, K and V^T as MMA operands. The rows of V are keys; ldmatrix.trans transposes them."""
        q_tile, kv_tile = tile.smem(tile.tile_m), tile.smem(tile.tile_n)
        return (
            self.s.a(p.mma_s, thread, storage.sQ, q_tile),
            self.s.b(p.mma_s, thread, storage.sK, kv_tile),
            self.o.b(p.mma_o, thread, storage.sV, kv_tile, is_transposed=True),
        )

    def row_warps(self, tile: FwdTileSm80, p: Params, thread: Int32, storage: SharedStorage) -> RowWarps | None:
        """The warps that share the rows of this thread; None if warps do not share rows."""
        if tile.row_warps == 1:
            return None
        store_p = self.s.store(p.mma_s, thread, storage.sP, tile.smem_p)
        operand_p = self.o.a(p.mma_o, thread, storage.sP, tile.smem_p)
        return RowWarps(
            store_p=store_p,
            p=operand_p,
            sRows=storage.sRows,
            thread=thread,
            count=tile.row_warps,
            distance=tile.warps_m,
            keys=tile.warp_keys,
        )
