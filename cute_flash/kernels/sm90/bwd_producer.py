"""The warps of the Hopper backward that only move data: K, V, Q, dO, LSE and D in, the sums of dQ out."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cute_flash.device.pipeline import Pipeline
from cute_flash.device.ptx import rederived
from cute_flash.device.tma import VarlenTmaTiles
from cute_flash.device.seqlen import SeqlenInfo
from cute_flash.device.tma import TmaTiles
from cute_flash.kernels.sm90.bwd_storage import NO_TILE, NUM_WARPGROUPS, Params, SharedStorage, Tile
from cute_flash.kernels.sm90.dq import bulk_add


@cute.jit
def load(p: Params, shared: SharedStorage):
    """For every tile of keys: its first block of queries while the tile before ends, V, K, and the others."""
    count, fill = Int32(0), Int32(0)  # of tiles; of blocks of queries
    index = p.tiles().first_tile()
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
        shared.publish_tile(count, coord)
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
        index = p.tiles().next_tile(index)
        count += 1
    p.tiles().finish(index)
    shared.k.wait_empty(count)
    shared.publish_end(count)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(shared.k.full_barrier(count))


@cute.jit
def load_keys(p: Params, tiles: TmaTiles | VarlenTmaTiles, pipeline: Pipeline, sX: cute.Tensor, tile: Tile):
    """K or V of a tile."""
    pipeline.wait_empty(tile.count)
    pipeline.expect_bytes(tile.count, p.config.k.bytes)
    tiles.load(sX, tile.n_block, tile.head_kv, tile.seqlen.k_tma_coord, pipeline.full_barrier(tile.count))


@cute.jit
def load_block(p: Params, shared: SharedStorage, tile: Tile, fill: Int32, g: Int32, i: Int32):
    """A block of Q and dO, with LSE and D: the i-th of the g-th head."""
    load_both(p, shared, fill, (tile.block(i), tile.head_kv * p.heads_per_kv + g, tile.seqlen))


@cute.jit
def load_listed(p: Params, shared: SharedStorage, tile: Tile, fill: Int32, i: Int32):
    """The same of the i-th block of the tile's list."""
    entry = p.entry(tile, i)
    load_both(p, shared, fill, (entry.m_block, tile.head_kv * p.heads_per_kv + entry.head, tile.seqlen))


@cute.jit
def load_both(p: Params, shared: SharedStorage, fill: Int32, where: tuple):
    load_rows(p, p.q, shared.q, shared.sQ, (p.mLSE, shared.sLSE), fill, where)
    load_rows(p, p.do, shared.do, shared.sdO, (p.mD, shared.sD), fill, where)


@cute.jit
def load_rows(
    p: Params,
    tiles: TmaTiles | VarlenTmaTiles,
    pipeline: Pipeline,
    sX: cute.Tensor,
    statistic: tuple,
    fill: Int32,
    where: tuple,
):
    """A block of Q or dO, and the fp32 statistic of its rows."""
    m_block, head, seqlen = where
    mY, sY = statistic
    tile_m, stage = p.config.tile.tile_m, pipeline.stage(fill)
    pipeline.wait_empty(fill)
    pipeline.expect_bytes(fill, p.config.q.bytes + 4 * tile_m)
    tiles.load(sX[None, None, stage], m_block, head, seqlen.q_tma_coord, pipeline.full_barrier(fill))
    gY = cute.local_tile(seqlen.slice_head(mY, head), (tile_m,), (seqlen.padded_q_block(m_block, tile_m),))
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    with cute.arch.elect_one():
        cute.copy(atom, gY, sY[None, stage], mbar_ptr=pipeline.full_barrier(fill))


@cute.jit
def add_dq(p: Params, shared: SharedStorage, adder: Int32):
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
                        add_parts(p, shared, sums_of(p, tile.seqlen, head, tile.block(i)), fill)
                    elif fill % p.num_adders == adder:
                        add_in_order(p, shared, tile, head, tile.block(i), fill)
                    fill += 1
        else:
            for i in cutlass.range(p.num_blocks(tile), unroll=1):
                entry = p.entry(tile, i)
                head = tile.head_kv * p.heads_per_kv + entry.head
                add_parts(p, shared, sums_of(p, tile.seqlen, head, entry.m_block), fill)
                fill += 1
        count += 1
        coord = read_tile(shared, count)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)


def sums_of(p: Params, seqlen: SeqlenInfo, head: Int32, m_block: Int32) -> cute.Tensor:
    """Of dQ, of a block of queries."""
    return seqlen.slice_head(p.mdQ, head)[seqlen.padded_q_block(m_block, p.config.tile.tile_m), None]


@cute.jit
def read_tile(shared: SharedStorage, count: Int32):
    """By a warp that adds dQ."""
    shared.k.wait_full(count)
    coord = shared.read_tile(count)
    shared.k.release_per_thread(count)
    return coord


@cute.jit
def add_in_order(p: Params, shared: SharedStorage, tile: Tile, head: Int32, m_block: Int32, fill: Int32):
    """Both parts of a block, when the tiles before have added theirs; then it is the next one's turn."""
    # Few registers: addresses are to be made anew for each block.
    head, seqlen = rederived(head), replace(tile.seqlen, batch=rederived(tile.batch))
    where = (head, 0 if seqlen.is_varlen else seqlen.batch, seqlen.padded_q_block(m_block, p.config.tile.tile_m))
    rank = p.dq_semaphore.rank(tile.n_block, m_block, seqlen if seqlen.is_varlen else None)
    with cute.arch.elect_one():
        p.dq_semaphore.wait(where, rank)
    cute.arch.sync_warp()
    add_parts(p, shared, sums_of(p, seqlen, head, m_block), fill)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)
        p.dq_semaphore.arrive(where, rank)
    cute.arch.sync_warp()


@cute.jit
def add_parts(p: Params, shared: SharedStorage, gdQ: cute.Tensor, fill: Int32):
    """Both warpgroups' parts of a block; their shared memory is free again after it."""
    part = p.config.tile.tile_m * p.config.tile.head_dim // NUM_WARPGROUPS
    for w in cutlass.range_constexpr(NUM_WARPGROUPS):
        dq_fill = fill * NUM_WARPGROUPS + w
        shared.dq.wait_full(dq_fill)
        with cute.arch.elect_one():
            bulk_add(gdQ.iterator + w * part, shared.sdQ[None, None, None, w].iterator, 4 * part)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        shared.dq.release(dq_fill)
