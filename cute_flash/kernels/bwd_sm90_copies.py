"""The warps of the Hopper backward that only move data: K, V, Q, dO, LSE and D in, the sums of dQ out."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cute_flash.device.barriers import Ring
from cute_flash.device.tma import TmaTiles
from cute_flash.kernels.bwd_dq import bulk_add, bulk_store
from cute_flash.kernels.bwd_sm90_shared import NUM_WARPGROUPS, Params, Shared, Tile


@cute.jit
def load(p: Params, shared: Shared, tile: Tile):
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(shared.kv_full, 2 * p.shapes.k.bytes)
    p.k.load(shared.sK, tile.n_block, tile.head_kv, tile.batch, shared.kv_full)
    p.v.load(shared.sV, tile.n_block, tile.head_kv, tile.batch, shared.kv_full)
    num = tile.walk.num
    for g in cutlass.range(p.heads_per_kv, unroll=1):
        head = tile.head_kv * p.heads_per_kv + g
        for i in cutlass.range(num, unroll=1):
            fill, where = g * num + i, (tile.walk.block(i), head, tile.batch)
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
def add_dq(p: Params, shared: Shared, tile: Tile):
    """Add each warpgroup's part of dQ to global memory as soon as it stands."""
    num = tile.walk.num
    for g in cutlass.range(p.heads_per_kv, unroll=1):
        head = tile.head_kv * p.heads_per_kv + g
        for i in cutlass.range(num, unroll=1):
            gdQ = p.mdQ[tile.batch, head, tile.walk.block(i), None]
            add_parts(p, shared, gdQ, g * num + i, False)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def add_dq_in_order(p: Params, shared: Shared, tile: Tile):
    """The same in turn. The first tile of keys stores; the last writes the result, in `close_dq`."""
    count = Int32(0)  # of blocks handed over
    for g in cutlass.range(p.heads_per_kv, unroll=1):
        head = tile.head_kv * p.heads_per_kv + g
        for i in cutlass.range(tile.walk.num, unroll=1):
            m_block = tile.walk.block(i)
            where = (head, tile.batch, m_block)
            rank, last = p.turns.turn(tile.n_block, m_block)
            gdQ = p.mdQ[tile.batch, head, m_block, None]
            if rank < last:
                if rank == 0:
                    add_parts(p, shared, gdQ, count, True)
                else:
                    with cute.arch.elect_one():
                        p.turns.wait(where, rank)
                    add_parts(p, shared, gdQ, count, False)
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0)
                    p.turns.pass_on(where, rank)
                count += 1


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
