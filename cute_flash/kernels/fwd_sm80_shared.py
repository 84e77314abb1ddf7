"""What the parts of the forward with mma.sync pass on: arguments, and what a block works with."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.band import Band, BlockRange
from cute_flash.device.copies import RowTiles
from cute_flash.device.ldmatrix import Operand
from cute_flash.device.mask import Mask
from cute_flash.device.philox import Dropout
from cute_flash.device.scheduler import TileOrder
from cute_flash.device.sequence import WorkList
from cute_flash.device.softmax import Softmax
from cute_flash.kernels.extras import Extras, OfHead


@dataclass(frozen=True)
class Params:
    """All that the kernel reads, in one argument. Tensors are (B, H, S, D), all dynamic but D; packed ones
    are (1, H, T, D).
    """

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mO: cute.Tensor
    mLSE: cute.Tensor  # (B, H, Sq)
    scale_log2: Float32
    band: Band
    order: TileOrder | None
    work: WorkList | None  # of a packed batch
    copy_in: cute.TiledCopy
    copy_out: cute.TiledCopy
    tiled_mma: cute.TiledMma
    extras: Extras


@dataclass(frozen=True)
class Main:
    """What one block of the main loop works on."""

    load_k: RowTiles
    load_v: RowTiles
    gK: cute.Tensor  # (Sk, head_dim) of this head
    gV: cute.Tensor
    sK: cute.Tensor  # (tile_n, tile_d, stage)
    sV: cute.Tensor
    q: Operand
    k: Operand
    v: Operand
    tiled_mma: cute.TiledMma
    acc_O: cute.Tensor
    softmax: Softmax
    mask: Mask
    blocks: BlockRange
    head: OfHead
    dropout: Dropout | None
    sequence: Int32  # b H + h
