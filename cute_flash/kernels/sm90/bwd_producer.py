"""The warps of the Hopper backward that only move data: K, V, Q, dO, LSE and D in, the sums of dQ out."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cute_flash.device.barriers import Ring
from cute_flash.device.ptx import rederived
from cute_flash.device.ragged import RaggedTiles
from cute_flash.device.sequence import Sequence
from cute_flash.device.tma import TmaTiles
from cute_flash.kernels.sm90.bwd_storage import NO_TILE, NUM_WARPGROUPS, Params, Shared, Tile
from cute_flash.kernels.sm90.dq import bulk_add


@cute.jit
def load(p: Params, shared: Shared):
    """For every tile of keys: its first block of queries while the tile before ends, V, K, and the others."""
    count, fill = Int32(0), Int32(0)  # of tiles; of blocks of queries
    index = p.tiles().first()
    while index < p.tiles().num_tiles:
        coord = p.coord(index)
        tile = p.tile(count, fill, coord)
        total = p.num_blocks(tile)
        if total > 0:
            if cutlass.const_expr(p.lists is None):
                load_block(p, shared, tile, fill, Int32(0), Int32(0))
            else:
                load_listed(p, shared, tile, fill, Int32(0))
        load_keys(p, p.v, shared.v, shared.sV, tile)
        shared.k.wait_empty(count)
        shared.tell_tile(count, coord)
        load_keys(p, p.k, shared.k, shared.sK, tile)
        if cutlass.const_expr(p.lists is None):
            for g in cutlass.range(p.heads_per_kv, unroll=1):
                for i in cutlass.range(1 if g == 0 else 0, tile.block_iter.num, unroll=1):
                    load_block(p, shared, tile, fill + i, g, i)
                fill += tile.block_iter.num
        else:
            for i in cutlass.range(1, total, unroll=1):
                load_listed(p, shared, tile, fill + i, i)
            fill += total
        # Late, for a block with a long tile to leave the next one to others.
        index = p.tiles().following(index)
        count += 1
    p.tiles().close(index)
    shared.k.wait_empty(count)
    shared.tell_end(count)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(shared.k.full_of(count))


@cute.jit
def load_keys(p: Params, tiles: TmaTiles | RaggedTiles, ring: Ring, sX: cute.Tensor, tile: Tile):
    """K or V of a tile."""
    ring.wait_empty(tile.count)
    ring.expect(tile.count, p.shapes.k.bytes)
    tiles.load(sX, tile.n_block, tile.head_kv, tile.span.keys, ring.full_of(tile.count))


@cute.jit
def load_block(p: Params, shared: Shared, tile: Tile, fill: Int32, g: Int32, i: Int32):
    """A block of Q and dO, with LSE and D: the i-th of the g-th head."""
    load_both(p, shared, fill, (tile.block(i), tile.head_kv * p.heads_per_kv + g, tile.span))


@cute.jit
def load_listed(p: Params, shared: Shared, tile: Tile, fill: Int32, i: Int32):
    """The same of the i-th block of the tile's list."""
    entry = p.entry(tile, i)
    load_both(p, shared, fill, (entry.m_block, tile.head_kv * p.heads_per_kv + entry.head, tile.span))


@cute.jit
def load_both(p: Params, shared: Shared, fill: Int32, where: tuple):
    load_rows(p, p.q, shared.q, shared.sQ, (p.mLSE, shared.sLSE), fill, where)
    load_rows(p, p.do, shared.do, shared.sdO, (p.mD, shared.sD), fill, where)


@cute.jit
def load_rows(
    p: Params,
    tiles: TmaTiles | RaggedTiles,
    ring: Ring,
    sX: cute.Tensor,
    statistic: tuple,
    fill: Int32,
    where: tuple,
):
    """A block of Q or dO, and the fp32 statistic of its rows."""
    m_block, head, span = where
    mY, sY = statistic
    tile_m, stage = p.shapes.tile.tile_m, ring.stage(fill)
    ring.wait_empty(fill)
    ring.expect(fill, p.shapes.q.bytes + 4 * tile_m)
    tiles.load(sX[None, None, stage], m_block, head, span.queries, ring.full_of(fill))
    gY = cute.local_tile(span.of(mY, head), (tile_m,), (span.q_block(m_block, tile_m),))
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    with cute.arch.elect_one():
        cute.copy(atom, gY, sY[None, stage], mbar_ptr=ring.full_of(fill))


@cute.jit
def add_dq(p: Params, shared: Shared, adder: Int32):
    """Add each warpgroup's part of dQ to global memory: of every block as soon as it stands, or, by one of
    several warps, of its share of them in turn.
    """
    count, fill = Int32(0), Int32(0)  # of tiles; of blocks
    coord = read_tile(shared, count)
    while coord[0] != NO_TILE:
        tile = p.tile(count, fill, coord)
        if cutlass.const_expr(p.lists is None):
            for g in cutlass.range(p.heads_per_kv, unroll=1):
                head = tile.head_kv * p.heads_per_kv + g
                for i in cutlass.range(tile.block_iter.num, unroll=1):
                    if cutlass.const_expr(p.num_adders == 1):
                        add_parts(p, shared, sums_of(p, tile.span, head, tile.block(i)), fill)
                    elif fill % p.num_adders == adder:
                        add_in_turn(p, shared, tile, head, tile.block(i), fill)
                    fill += 1
        else:
            for i in cutlass.range(p.num_blocks(tile), unroll=1):
                entry = p.entry(tile, i)
                head = tile.head_kv * p.heads_per_kv + entry.head
                add_parts(p, shared, sums_of(p, tile.span, head, entry.m_block), fill)
                fill += 1
        count += 1
        coord = read_tile(shared, count)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)


def sums_of(p: Params, span: Sequence, head: Int32, m_block: Int32) -> cute.Tensor:
    """Of dQ, of a block of queries."""
    return span.of(p.mdQ, head)[span.q_block(m_block, p.shapes.tile.tile_m), None]


@cute.jit
def read_tile(shared: Shared, count: Int32):
    """By a warp that adds dQ."""
    shared.k.wait_full(count)
    coord = shared.told_tile(count)
    shared.k.release_by_all(count)
    return coord


@cute.jit
def add_in_turn(p: Params, shared: Shared, tile: Tile, head: Int32, m_block: Int32, fill: Int32):
    """Both parts of a block, when the tiles before have added theirs; then it is the next one's turn."""
    # Few registers: addresses are to be made anew for each block.
    head, span = rederived(head), replace(tile.span, batch=rederived(tile.batch))
    where = (head, 0 if span.is_packed else span.batch, span.q_block(m_block, p.shapes.tile.tile_m))
    rank = p.turns.turn(tile.n_block, m_block, span if span.is_packed else None)
    with cute.arch.elect_one():
        p.turns.wait(where, rank)
    cute.arch.sync_warp()
    add_parts(p, shared, sums_of(p, span, head, m_block), fill)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)
        p.turns.pass_on(where, rank)
    cute.arch.sync_warp()


@cute.jit
def add_parts(p: Params, shared: Shared, gdQ: cute.Tensor, fill: Int32):
    """Both warpgroups' parts of a block; their shared memory is free again after it."""
    part = p.shapes.tile.tile_m * p.shapes.tile.head_dim // NUM_WARPGROUPS
    for w in cutlass.range_constexpr(NUM_WARPGROUPS):
        dq_fill = fill * NUM_WARPGROUPS + w
        shared.dq.wait_full(dq_fill)
        with cute.arch.elect_one():
            bulk_add(gdQ.iterator + w * part, shared.sdQ[None, None, None, w].iterator, 4 * part)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        shared.dq.release(dq_fill)
