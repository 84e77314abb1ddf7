"""The warps of the Hopper forward that only move data: Q, K, V and a bias in, the output out.

They decide what a block works on: the warp of Q and K draws the tiles and writes each one down beside its Q,
where all others read it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.barriers import Ring
from cute_flash.device.block_iterator import AnyBlockIterator
from cute_flash.device.drawn import RECTANGLES
from cute_flash.device.ragged import RaggedTiles
from cute_flash.device.sequence import Sequence
from cute_flash.device.tma import TmaTiles
from cute_flash.kernels.sm90.fwd_storage import NO_TILE, Params, Shared


@dataclass(frozen=True)
class Told:
    """A tile as the warp of Q and K tells it to others that go through its blocks."""

    m_block: Int32
    head: Int32
    span: Sequence
    block_iter: AnyBlockIterator


@cute.jit
def follow(p: Params, shared: Shared, work: Callable):
    """`work(fill, tile, i)` for the i-th block of every tile, in the order in which they are multiplied."""
    count, fill = Int32(0), Int32(0)  # of tiles; of blocks
    shared.q.wait_full(count)
    m_block = shared.m_block(count)
    while m_block != NO_TILE:
        head, span, counts = shared.head(count), p.sequence(shared.sequence(count)), shared.counts(count)
        shared.release_q(count)
        tile = Told(m_block, head, span, p.block_iterator(m_block, head, span, counts))
        for i in cutlass.range(tile.block_iter.num, unroll=1):
            work(fill + i, tile, i)
        fill += tile.block_iter.num
        count += 1
        shared.q.wait_full(count)
        m_block = shared.m_block(count)


@cute.jit
def load_qk(p: Params, shared: Shared):
    """For every tile of this block: K of the first visible keys, Q, and the other blocks of K."""
    count, fill = Int32(0), Int32(0)  # of tiles; of blocks of K
    index = p.tiles().first()
    while index < p.tiles().num_tiles:
        m_block, head, numbers = p.tile(index)
        span = p.sequence(numbers)
        head_kv = head // p.heads_per_kv
        counts = p.counts(m_block, head, span)
        block_iter = p.block_iterator(m_block, head, span, counts)
        if block_iter.num > 0:
            load_k(p, shared, fill, (block_iter.first, head_kv, span.keys))
        load_q(p, shared, count, (m_block, head), span, counts)
        for i in cutlass.range(1, block_iter.num, unroll=1):
            load_k(p, shared, fill + i, (block_iter.block(i), head_kv, span.keys))
        fill += block_iter.num
        # Late, for a block with a long tile to leave the next one to others.
        index = p.tiles().following(index)
        count += 1
    p.tiles().close(index)
    shared.q.wait_empty(count)
    shared.tell_end(count)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(shared.q.full_of(count))


@cute.jit
def load_v(p: Params, shared: Shared):
    """V, by a warp of its own: K of the next tile must not wait until there is room for V of this one."""

    def load(fill: Int32, tile: Told, i: Int32):
        coord = (tile.block_iter.block(i), tile.head // p.heads_per_kv, tile.span.keys)
        load_block(p.v, shared.v, shared.sV, fill, coord)

    follow(p, shared, load)


@cute.jit
def load_bias(p: Params, shared: Shared):
    """A bias in blocks, as they are multiplied, by a warp of its own too: it is used up the latest."""

    def load(fill: Int32, tile: Told, i: Int32):
        place = tile.m_block, tile.block_iter.block(i)
        shared.bias.load(p.bias, fill, place, (tile.head, tile.span.batch))

    follow(p, shared, load)


@cute.jit
def load_q(p: Params, shared: Shared, count: Int32, coord: tuple, span: Sequence, counts: tuple):
    ring, num = shared.q, shared.shapes.tile.num_warpgroups
    m_block, head = coord
    ring.wait_empty(count)
    shared.tell_tile(count, (*coord, *span.numbers, *counts))
    ring.expect(count, num * shared.shapes.q.bytes)
    for w in cutlass.range_constexpr(num):
        sQ = shared.sQ[None, None, (w, ring.stage(count))]
        p.q.load(sQ, m_block * num + w, head, span.queries, ring.full_of(count))


@cute.jit
def load_k(p: Params, shared: Shared, fill: Int32, coord: tuple):
    if cutlass.const_expr(shared.blocks is not None):
        shared.k.wait_empty(fill)
        shared.tell_block(fill, coord[0])
    load_block(p.k, shared.k, shared.sK, fill, coord)


@cute.jit
def load_block(tiles: TmaTiles | RaggedTiles, ring: Ring, sX: cute.Tensor, fill: Int32, coord: tuple):
    """Block (n_block, head, where the keys lie) of K or V."""
    ring.wait_empty(fill)
    ring.expect(fill, tiles.rows * tiles.cols * sX.element_type.width // 8)
    tiles.load(sX[None, None, ring.stage(fill)], *coord, ring.full_of(fill))


@cute.jit
def store(p: Params, shared: Shared):
    """Send each warpgroup's output off as soon as it stands; then give the stage back to Q."""
    num = shared.shapes.tile.num_warpgroups
    count = Int32(0)
    wait_output(shared, count, 0)
    m_block = shared.m_block(count)
    while m_block != NO_TILE:
        head, span = shared.head(count), p.sequence(shared.sequence(count))
        for w in cutlass.range_constexpr(num):
            if cutlass.const_expr(w > 0):
                wait_output(shared, count, w)
            if cutlass.const_expr(p.o is not None):
                with cute.arch.elect_one():
                    p.o.store(shared.output_stage(w, count), m_block * num + w, head, span.queries)
                    cute.arch.cp_async_bulk_commit_group()
        if cutlass.const_expr(p.o is not None):
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        shared.release_q(count)
        count += 1
        wait_output(shared, count, 0)
        m_block = shared.m_block(count)


@cute.jit
def wait_output(shared: Shared, count: Int32, warpgroup: cutlass.Constexpr):
    cute.arch.mbarrier_wait(shared.output_barrier(warpgroup, count), shared.q.parity(count))


@cute.jit
def produce_dropout(p: Params, shared: Shared, warp: Int32, lane: Int32):
    tile, drawn = p.shapes.tile, shared.drawn
    cute.arch.setmaxregister_decrease(tile.dropout_producer_registers)
    dropout = p.score_params.dropout()

    def draw_block(fill: Int32, told: Told, i: Int32):
        sequence = told.span.batch * p.order.heads + told.head
        for w in cutlass.range_constexpr(tile.num_warpgroups):
            rectangle = (told.m_block * tile.num_warpgroups + w) * RECTANGLES
            drawn.ring(w).wait_empty(fill)
            where = drawn.stage(fill), w, warp, lane
            drawn.draw(dropout, sequence, rectangle, told.block_iter.block(i) * tile.tile_n, where)
            drawn.tell(w, fill)

    follow(p, shared, draw_block)
