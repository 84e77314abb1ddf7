"""The warps of the Hopper backward that only move data: K, V, Q, dO, LSE and D in, the sums of dQ out."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cute_flash.device.barriers import Ring
from cute_flash.device.tma import TmaTiles
from cute_flash.kernels.bwd_dq import bulk_add, bulk_store
from cute_flash.kernels.bwd_sm90_shared import NO_TILE, NUM_WARPGROUPS, Params, Shared, Tile


@cute.jit
def load(p: Params, shared: Shared):
    """For every tile of keys: its first block of queries while the tile before ends, V, K, and the others."""
    count, fill = Int32(0), Int32(0)  # of tiles; of blocks of queries
    index = p.queue.first()
    while index < p.queue.num_tiles:
        coord = p.order.decode(index)
        tile = p.tile(count, fill, coord)
        total = tile.walk.num * p.heads_per_kv
        if total > 0:
            load_block(p, shared, tile, fill, Int32(0), Int32(0))
        load_keys(p, p.v, shared.v, shared.sV, tile)
        shared.k.wait_empty(count)
        shared.tell_tile(count, coord)
        load_keys(p, p.k, shared.k, shared.sK, tile)
        for g in cutlass.range(p.heads_per_kv, unroll=1):
            for i in cutlass.range(1 if g == 0 else 0, tile.walk.num, unroll=1):
                load_block(p, shared, tile, fill + i, g, i)
            fill += tile.walk.num
        # Late, for a block with a long tile to leave the next one to others.
        index = p.queue.following(index)
        count += 1
    p.queue.close(index)
    shared.k.wait_empty(count)
    shared.tell_tile(count, (Int32(NO_TILE), Int32(0), Int32(0)))
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(shared.k.full_of(count))


@cute.jit
def load_keys(p: Params, tiles: TmaTiles, ring: Ring, sX: cute.Tensor, tile: Tile):
    """K or V of a tile."""
    ring.wait_empty(tile.count)
    ring.expect(tile.count, p.shapes.k.bytes)
    tiles.load(sX, tile.n_block, tile.head_kv, tile.batch, ring.full_of(tile.count))


@cute.jit
def load_block(p: Params, shared: Shared, tile: Tile, fill: Int32, g: Int32, i: Int32):
    """A block of Q and dO, with LSE and D: the i-th of the g-th head."""
    where = (tile.walk.block(i), tile.head_kv * p.heads_per_kv + g, tile.batch)
    load_rows(p, p.q, shared.q, shared.sQ, (p.mLSE, shared.sLSE), fill, where)
    load_rows(p, p.do, shared.do, shared.sdO, (p.mD, shared.sD), fill, where)


@cute.jit
def load_rows(
    p: Params, tiles: TmaTiles, ring: Ring, sX: cute.Tensor, statistic: tuple, fill: Int32, where: tuple
):
    """A block of Q or dO, and the fp32 statistic of its rows."""
    m_block, head, batch = where
    mY, sY = statistic
    tile_m, stage = p.shapes.tile.tile_m, ring.stage(fill)
    ring.wait_empty(fill)
    ring.expect(fill, p.shapes.q.bytes + 4 * tile_m)
    tiles.load(sX[None, None, stage], *where, ring.full_of(fill))
    gY = cute.local_tile(mY[batch, head, None], (tile_m,), (m_block,))
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    with cute.arch.elect_one():
        cute.copy(atom, gY, sY[None, stage], mbar_ptr=ring.full_of(fill))


@cute.jit
def add_dq(p: Params, shared: Shared):
    """Add each warpgroup's part of dQ to global memory as soon as it stands."""
    count, fill = Int32(0), Int32(0)  # of tiles; of blocks
    coord = read_tile(shared, count)
    while coord[0] != NO_TILE:
        tile = p.tile(count, fill, coord)
        for g in cutlass.range(p.heads_per_kv, unroll=1):
            head = tile.head_kv * p.heads_per_kv + g
            for i in cutlass.range(tile.walk.num, unroll=1):
                gdQ = p.mdQ[tile.batch, head, tile.walk.block(i), None]
                add_parts(p, shared, gdQ, fill + i, False)
            fill += tile.walk.num
        count += 1
        coord = read_tile(shared, count)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def read_tile(shared: Shared, count: Int32):
    """By the warp that adds dQ."""
    shared.k.wait_full(count)
    coord = shared.told_tile(count)
    cute.arch.sync_warp()
    shared.k.release(count)
    return coord


@cute.jit
def add_dq_in_order(p: Params, shared: Shared):
    """The same in turn, of one tile: the first stores, and the last writes the result, in `close_dq`.

    The turn at a block is passed on when its additions are complete, and that is waited for only after those
    of the next block have been started. The blocks that are not this tile's to close come first.
    """
    tile = p.tile(Int32(0), Int32(0), read_tile(shared, Int32(0)))
    fill = Int32(0)
    for g in cutlass.range(p.heads_per_kv, unroll=1):
        head, begin = tile.head_kv * p.heads_per_kv + g, fill
        for i in cutlass.range(tile.walk.num, unroll=1):
            m_block = tile.walk.block(i)
            rank, last = p.turns.turn(tile.n_block, m_block)
            if rank < last:
                gdQ = p.mdQ[tile.batch, head, m_block, None]
                if rank == 0:
                    add_parts(p, shared, gdQ, fill, True)
                else:
                    with cute.arch.elect_one():
                        p.turns.wait((head, tile.batch, m_block), rank)
                    add_parts(p, shared, gdQ, fill, False)
                if i > 0:
                    pass_on(p, tile, head, m_block - 1, NUM_WARPGROUPS)
                fill += 1
        if fill > begin:
            pass_on(p, tile, head, tile.walk.block(fill - begin - 1), 0)


@cute.jit
def pass_on(p: Params, tile: Tile, head: Int32, m_block: Int32, later: cutlass.Constexpr):
    """The turn at a block whose additions were started before the last `later` ones."""
    rank, _ = p.turns.turn(tile.n_block, m_block)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(later)
        p.turns.pass_on((head, tile.batch, m_block), rank)


@cute.jit
def add_parts(p: Params, shared: Shared, gdQ: cute.Tensor, fill: Int32, is_first: cutlass.Constexpr):
    """Both warpgroups' parts of a block; their shared memory is free again after it."""
    part = p.shapes.tile.tile_m * p.shapes.tile.head_dim // NUM_WARPGROUPS
    start = bulk_store if is_first else bulk_add
    for w in cutlass.range_constexpr(NUM_WARPGROUPS):
        dq_fill = fill * NUM_WARPGROUPS + w
        shared.dq.wait_full(dq_fill)
        with cute.arch.elect_one():
            start(gdQ.iterator + w * part, shared.sdQ[None, None, None, w].iterator, 4 * part)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        shared.dq.release(dq_fill)
