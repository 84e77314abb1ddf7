"""What the warps of the Hopper forward work on, and those that multiply with."""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.barriers import Turns
from cute_flash.device.block_list import ListWalk
from cute_flash.device.mask import Mask
from cute_flash.device.sequence import Sequence
from cute_flash.device.softmax import Softmax
from cute_flash.kernels.extras import OfHead
from cute_flash.kernels.fwd_sm90_shared import NO_TILE, Params, Shared
from cute_flash.spec.band import OutwardWalk, Walk


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


@dataclass(frozen=True)
class Told:
    """A tile as the warp of Q and K tells it to others that go through its blocks."""

    m_block: Int32
    head: Int32
    span: Sequence
    walk: Walk | OutwardWalk | ListWalk


@cute.jit
def follow(p: Params, shared: Shared, work: Callable):
    """`work(fill, tile, i)` for the i-th block of every tile, in the order in which they are multiplied."""
    count, fill = Int32(0), Int32(0)  # of tiles; of blocks
    shared.q.wait_full(count)
    m_block = shared.m_block(count)
    while m_block != NO_TILE:
        head, span, counts = shared.head(count), p.sequence(shared.sequence(count)), shared.counts(count)
        shared.release_q(count)
        tile = Told(m_block, head, span, p.walk(m_block, head, span, counts))
        for i in cutlass.range(tile.walk.num, unroll=1):
            work(fill + i, tile, i)
        fill += tile.walk.num
        count += 1
        shared.q.wait_full(count)
        m_block = shared.m_block(count)
