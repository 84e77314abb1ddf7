"""What the parts of the backward with mma.sync pass on: arguments, shared memory, a block's operands."""

from dataclasses import dataclass
from functools import partial

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.band import Band
from cute_flash.device.ldmatrix import Landing, Operand
from cute_flash.device.ordered import Order
from cute_flash.device.scheduler import TileOrder
from cute_flash.device.score_bwd import Terms
from cute_flash.device.sequence import Sequence, WorkList
from cute_flash.device.stages import allocate_stages
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.smem.tile import SmemTile


@dataclass(frozen=True)
class Params:
    """All that the kernel reads, in one argument. Tensors are (B, H, S, D), all dynamic but D; packed ones
    are (1, H, T, D).
    """

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mdO: cute.Tensor
    mLSE: cute.Tensor  # (B, H, Sq padded) in units of log2, +inf for rows without keys
    mD: cute.Tensor  # (B, H, Sq padded)
    mdQ: cute.Tensor  # (B, H, m_block, elements of a tile) fp32, in the order of the accumulators
    mdK: cute.Tensor
    mdV: cute.Tensor
    scale: Float32
    scale_log2: Float32
    band: Band  # of keys over queries: left and right change places
    turns: Order | None  # where tiles of keys add in order
    order: TileOrder | None
    work: WorkList | None  # of a packed batch
    copy_in: cute.TiledCopy
    copy_out: cute.TiledCopy
    mma_s: cute.TiledMma  # K Q^T and V dO^T: keys x queries
    mma_kv: cute.TiledMma  # P^T dO and dS^T Q: keys x head_dim
    mma_q: cute.TiledMma  # dS K: queries x head_dim
    terms: Terms | None  # of scores that are more than products


@dataclass(frozen=True)
class Shared:
    """Tiles of one kind stand in one tensor, so that their operands share addresses."""

    sKV: cute.Tensor  # (tile_n, tile_d, K or V)
    sQdO: cute.Tensor  # (tile_m, tile_d, stages of Q, then those of dO)
    sdSP: cute.Tensor  # (tile_n, tile_m, dS or P)
    sRows: cute.Tensor  # (tile_m, stages of LSE, then those of D)

    @staticmethod
    def allocate(tile: BwdTileSm80, dtype, k: SmemTile, q: SmemTile, s: SmemTile) -> "Shared":
        smem = SmemAllocator()
        allocate = partial(allocate_stages, smem, dtype)
        return Shared(
            allocate(k, 2),
            allocate(q, 2 * tile.stages),
            allocate(s, 1 if tile.p_in_registers else 2),
            smem.allocate_tensor(Float32, cute.make_layout((tile.tile_m, 2 * tile.stages)), 128),
        )


@dataclass(frozen=True)
class Main:
    """What one block of the main loop works on."""

    thread: Int32
    shared: Shared
    span: Sequence
    first_row: Int32
    k: Operand  # S^T = K Q^T
    q: Operand
    v: Operand  # dP^T = V dO^T
    do: Operand
    p: Operand  # dV += P^T dO, where P is in shared memory
    do_t: Operand
    ds: Operand  # dK += dS^T Q, likewise
    q_t: Operand
    ds_t: Operand  # dQ = dS K
    k_t: Operand
    p_landing: Landing
    ds_landing: Landing
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    dslope: cute.Tensor | None  # (1), of the head at hand
