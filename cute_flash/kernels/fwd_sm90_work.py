"""What a warpgroup of the Hopper forward that multiplies works with, and on."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_flash.band import OutwardWalk, Walk
from cute_flash.device.barriers import Turns
from cute_flash.device.block_list import ListWalk
from cute_flash.device.mask import Mask
from cute_flash.device.sequence import Sequence
from cute_flash.device.softmax import Softmax
from cute_flash.kernels.extras import OfHead
from cute_flash.kernels.fwd_sm90_shared import Shared


@dataclass(frozen=True)
class Main:
    """What a warpgroup works with."""

    warpgroup: Int32
    thread: Int32
    shared: Shared
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    rQ: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, q stage)
    rK: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, stage)
    rV: cute.Tensor
    rP: cute.Tensor  # (MMA, MMA_M, MMA_N) in the inputs' type
    acc_O: cute.Tensor
    softmax: Softmax
    lse: cute.Tensor  # (rows of this thread,), of the tile that ends
    inverse: cute.Tensor  # 1 / l
    turns: Turns
    tScS: cute.Tensor  # (row, column) of every element of S
    largest: cute.Tensor | None  # (1,), the largest score of the tile that ends, of this thread


@dataclass(frozen=True)
class Tile:
    """What a warpgroup works on: its rows of one tile."""

    count: Int32  # tiles before this one
    fill: Int32  # blocks of K and V before this tile's
    head: Int32
    span: Sequence
    mask: Mask
    walk: Walk | OutwardWalk | ListWalk  # over its key blocks
    of_head: OfHead

    def has_blocks(self):
        return self.walk.num > 0
