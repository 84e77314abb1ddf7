"""Parameters, shared memory and main-loop state of the mma.sync backward."""

from dataclasses import dataclass
from functools import partial

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.gradients.score_bwd import BwdScoreParams
from cute_flash.device.memory.ldmatrix import FragmentStore, MmaOperand
from cute_flash.device.memory.smem import allocate_stages
from cute_flash.device.mma import split_fp32
from cute_flash.device.mma.warp_grid import WarpGrid
from cute_flash.device.scheduling.semaphore import DQSemaphore
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.device.scheduling.tile_scheduler import StaticTileScheduler, VarlenTileList
from cute_flash.device.scores.band import Band
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.smem.tile import SmemTile


def dq_grid(tile: BwdTileSm80, dtype: type) -> WarpGrid:
    """The warp grid of dS K. Its accumulator layout is the order of dQ in the fp32 workspace."""
    return WarpGrid(dtype, tile.num_warps, tile.warps_q)


@dataclass(frozen=True)
class Params:
    """The argument of the kernel. Tensors are (B, H, S, D), or (1, H, T, D) in a varlen batch; only D is static."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mdO: cute.Tensor
    mLSE: cute.Tensor  # (B, H, Sq padded) in units of log2, +inf for rows without keys
    mDelta: cute.Tensor  # (B, H, Sq padded)
    mdQ_accum: cute.Tensor  # (B, H, m_blocks, elements of a tile) fp32, in register order
    mdK: cute.Tensor
    mdV: cute.Tensor
    scale: Float32
    scale_log2: Float32
    band: Band  # `Band.of_keys`
    dq_semaphore: DQSemaphore | None  # for deterministic gradients
    tiles: StaticTileScheduler | VarlenTileList
    copy_in: cute.TiledCopy
    copy_out: cute.TiledCopy
    mma_s: cute.TiledMma  # K Q^T and V dO^T: keys x queries
    mma_kv: cute.TiledMma  # P^T dO and dS^T Q: keys x head_dim
    mma_q: cute.TiledMma  # dS K: queries x head_dim
    score_params: BwdScoreParams | None  # None: without score features
    # (5, B, H) in fp32 calls: the largest row norms of Q, K, V and dO, and the largest |Δ|. mQ, mK, mV and mdO are
    # then fp16 pieces (`device.mma.split_fp32`).
    norms: cute.Tensor | None = None


@dataclass(frozen=True)
class Factors:
    """The factors that turn products of fp16 pieces into the true products, for one head. See `device.mma.split_fp32`.

    In 16-bit calls there are no pieces, and all factors are None.
    """

    s: Float32 | None = None  # of K Q^T
    dp: Float32 | None = None  # of V dO^T
    ds: Float32 | None = None  # multiplies dS before it is split
    dv: Float32 | None = None
    dk: Float32 | None = None
    dq: Float32 | None = None

    @staticmethod
    def read(p: Params, seqlen: SeqlenInfo, head: Int32) -> "Factors":
        if p.norms is None:
            return Factors()
        head_kv = head // (p.mQ.shape[1] // p.mK.shape[1])
        norms = [p.norms[i, seqlen.batch, head_kv if i in (1, 2) else head] for i in range(5)]
        q, k, v, do = (split_fp32.factor(norm) for norm in norms[:4])
        # |dS| <= |dP| + |Δ| <= 2 bound, because P is at most 1. The scaled dS is then below 2^15, in the range of fp16.
        # Dropout scales dP.
        dp = norms[2] * norms[3]
        if p.score_params is not None and p.score_params.dropout_scale is not None:
            dp = dp * p.score_params.dropout_scale
        bound = cute.arch.fmax(dp, norms[4])
        ds = split_fp32.factor(bound)
        return Factors(
            s=q * k, dp=v * do, ds=split_fp32.inverse_factor(bound), dv=do * (1 / split_fp32.PROB_SCALE),
            dk=ds * q, dq=ds * k,
        )  # fmt: skip


@dataclass(frozen=True)
class SharedStorage:
    """Tiles of one shape share a tensor, so that their MMA operands share address registers."""

    sKV: cute.Tensor  # (tile_n, tile_d, K or V)
    sQdO: cute.Tensor  # (tile_m, tile_d, stages of Q, then those of dO)
    sdSP: cute.Tensor  # (tile_n, tile_m, pieces of dS, then those of P)
    sRows: cute.Tensor  # (tile_m, stages of LSE, then those of Δ)

    @staticmethod
    def allocate(tile: BwdTileSm80, dtype: type, k: SmemTile, q: SmemTile, s: SmemTile) -> "SharedStorage":
        smem = SmemAllocator()
        allocate = partial(allocate_stages, smem, dtype)
        return SharedStorage(
            allocate(k, 2),
            allocate(q, 2 * tile.stages),
            allocate(s, tile.pieces * (1 if tile.p_in_registers else 2)),
            smem.allocate_tensor(Float32, cute.make_layout((tile.tile_m, 2 * tile.stages)), 128),
        )


@dataclass(frozen=True)
class GradientKV:
    """The accumulators of dK (+= dS^T Q) or of dV (+= P^T dO), and the operands in shared memory."""

    acc: cute.Tensor
    a: MmaOperand  # dS or P, unless it is in registers; in fp32 calls the high piece, which the low one follows
    b: MmaOperand  # Q or dO


@dataclass(frozen=True)
class MainloopState:
    """The state of the main loop of a K/V tile."""

    thread: Int32
    storage: SharedStorage
    seqlen: SeqlenInfo
    first_row: Int32  # first key of the tile
    k: MmaOperand  # S^T = K Q^T
    q: MmaOperand
    v: MmaOperand  # dP^T = V dO^T
    do: MmaOperand
    ds_t: MmaOperand  # dQ = dS K
    k_t: MmaOperand
    store_p: FragmentStore
    store_ds: FragmentStore
    gradients: tuple[GradientKV, ...]  # dK and dV; or one of them, if half of the warps compute dK, the others dV
    dalibi: cute.Tensor | None  # (1), of the current head
