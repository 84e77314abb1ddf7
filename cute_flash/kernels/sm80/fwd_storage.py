"""Parameters, shared memory, main-loop state and products of the mma.sync forward."""

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.band import Band
from cute_flash.device.block_sparse import BlockSparseIterator
from cute_flash.device.copies import RowTiles
from cute_flash.device.ldmatrix import MmaOperand
from cute_flash.device.mask import Mask
from cute_flash.device.philox import Dropout
from cute_flash.device.smem import allocate_stages
from cute_flash.device.softmax import Softmax
from cute_flash.device.tile_scheduler import StaticTileScheduler, VarlenTileList
from cute_flash.device.warp_grid import WarpGrid
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
    scheduler: StaticTileScheduler | None
    tile_list: VarlenTileList | None  # of a varlen batch
    copy_in: cute.TiledCopy
    copy_out: cute.TiledCopy
    tiled_mma: cute.TiledMma
    score_params: ScoreParams
    # (4, B, H) in fp32 calls: the largest row norms of Q, K and V; the last entry is not used. mQ, mK and mV are then
    # fp16 pieces (`device.split_fp32`).
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
    tiled_mma: cute.TiledMma
    acc_O: cute.Tensor
    softmax: Softmax
    mask: Mask
    blocks: BlockRange
    score_params: HeadScoreParams
    dropout: Dropout | None
    batch_head: Int32  # b H + h
    block_iter: BlockSparseIterator | None  # of a block mask
    score_factor: Float32 | None = None  # in fp32 calls, turns a product of fp16 pieces into Q K^T


def allocate(tile: FwdTileSm80, dtype):
    """Allocate sQ (tile_m, tile_d, 1), and sK and sV (tile_n, tile_d, stage)."""
    stages_of = partial(allocate_stages, SmemAllocator(), dtype)
    q_tile, kv_tile = tile.smem(tile.tile_m), tile.smem(tile.tile_n)
    return stages_of(q_tile, 1), stages_of(kv_tile, tile.stages), stages_of(kv_tile, tile.stages)


def operands(tile: FwdTileSm80, tiled_mma: cute.TiledMma, thread: Int32, sQ, sK, sV):
    """Q, K and V^T as MMA operands. The rows of V are keys; ldmatrix.trans transposes them."""
    grid = WarpGrid(sQ.element_type, tile.num_warps, tile.num_warps)
    q_tile, kv_tile = tile.smem(tile.tile_m), tile.smem(tile.tile_n)
    return (
        grid.a(tiled_mma, thread, sQ, q_tile),
        grid.b(tiled_mma, thread, sK, kv_tile),
        grid.b(tiled_mma, thread, sV, kv_tile, is_transposed=True),
    )


@cute.jit
def gemm(tiled_mma: cute.TiledMma, acc: cute.Tensor, operands: tuple, stage: Int32, q_steps: cutlass.Constexpr):
    """acc += A B, both in shared memory, except the first `q_steps` k-steps of A, which stay in registers.

    Loads come right before their use; ptxas hoists them over earlier MMAs as far as registers allow. An explicit
    double buffer would only restrict ptxas.
    """
    a, b = operands
    for k in cutlass.range_constexpr(cute.size(b.fragment, mode=[2])):
        if cutlass.const_expr(k >= q_steps):
            a.load(k, 0)
        b.load(k, stage)
        cute.gemm(tiled_mma, acc, a.fragment[None, None, k], b.fragment[None, None, k], acc)


@cute.jit
def gemm_rs(tiled_mma: cute.TiledMma, acc: cute.Tensor, rA: cute.Tensor, b: MmaOperand, stage: Int32):
    """acc += A B with A in registers: two n16 tiles of B at a time, with all their k-steps.

    The k-steps of an n16 tile are 16 rows apart, and the swizzle repeats after 8 rows, so they need one address and
    immediate offsets. `group` is 2 because the tile tables were measured with it.
    """
    group = 2
    # One ldmatrix.x4 loads the operands of two n8 tiles.
    acc_groups = cute.logical_divide(acc, (None, None, 2 * group))
    b_groups = cute.logical_divide(b.fragment, (None, 2 * group, None))
    for n in cutlass.range_constexpr(cute.size(b.view, mode=[1]) // group):
        for i in cutlass.range_constexpr(group):
            b.load(n * group + i, stage)
        acc_n = acc_groups[None, None, (None, n)]
        for k in cutlass.range_constexpr(cute.size(b.fragment, mode=[2])):
            cute.gemm(tiled_mma, acc_n, rA[None, None, k], b_groups[None, (None, n), k], acc_n)
