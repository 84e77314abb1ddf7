"""Producer warps of the Hopper backward.

They load K, V, Q, dO, LSE, Δ and a bias, add dQ to global memory, and store the gradient of the bias, with the zeros of
blocks that a band excludes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_flash.device.memory.tma import TmaTiles, VarlenTmaTiles
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduling.block_iterator import share_of
from cute_flash.device.scheduling.block_sparse import BwdBlockIndex
from cute_flash.device.scheduling.pipeline import Pipeline
from cute_flash.device.scheduling.published_tiles import NO_TILE
from cute_flash.device.scheduling.seqlen import HeadBlock, SeqlenInfo
from cute_flash.device.scores.position import ScoreBlock
from cute_flash.kernels.sm90.bwd_storage import NUM_WARPGROUPS, KVTile, Params, SharedStorage
from cute_flash.kernels.sm90.dq import DQPart, StagedPiece, bulk_add, bulk_add_or_store

VECTOR = 8  # 16-bit elements that a thread stores at once


@cute.jit
def load(p: Params, storage: SharedStorage):
    """For every K/V tile: load its first m_block, V, K, and the other m_blocks; publish the tile.

    The first m_block can be loaded while the MMA warpgroups finish the previous tile.
    """
    count, iteration = Int32(0), Int32(0)  # tiles and m_blocks so far
    index = p.tile_scheduler().first_tile()
    while index < p.tile_scheduler().num_tiles:
        coord = p.tile_coord(index)
        tile = p.tile(count, iteration, coord)
        total = p.num_m_blocks(tile)
        load_first_block(p, storage, tile, iteration, total)
        load_kv(p, p.v, storage.v, storage.sV, tile)
        storage.k.wait_empty(count)
        storage.tiles.write(count, (coord.block, coord.head, *coord.seqlen_values))
        load_kv(p, p.k, storage.k, storage.sK, tile)
        iteration = load_other_blocks(p, storage, tile, iteration, total)
        # Fetch the next tile as late as possible, so that a CTA with a long tile leaves it to other CTAs.
        index = p.tile_scheduler().next_tile(index)
        count += 1
    p.tile_scheduler().finish(index)
    storage.k.wait_empty(count)
    storage.tiles.write_end(count)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(storage.k.full_barrier(count))


@cute.jit
def load_first_block(p: Params, storage: SharedStorage, tile: KVTile, iteration: Int32, total: Int32):
    """Load the first of the `total` m_blocks of a K/V tile, if it has any."""
    if total > 0:
        if cutlass.const_expr(p.block_indices is None):
            load_block(p, storage, tile, iteration, Int32(0), Int32(0))
        else:
            load_sparse_block(p, storage, tile, iteration, Int32(0))


@cute.jit
def load_other_blocks(p: Params, storage: SharedStorage, tile: KVTile, iteration: Int32, total: Int32):
    """Load the m_blocks of a K/V tile except the first. Return the iteration after its `total` m_blocks."""
    if cutlass.const_expr(p.block_indices is None):
        for g in cutlass.range(p.heads_per_kv, unroll=1):
            for i in cutlass.range(1 if g == 0 else 0, tile.block_iter.num, unroll=1):
                load_block(p, storage, tile, iteration + i, g, i)
            iteration += tile.block_iter.num
    else:
        for i in cutlass.range(1, total, unroll=1):
            load_sparse_block(p, storage, tile, iteration + i, i)
        iteration += total
    return iteration


@cute.jit
def load_kv(p: Params, tma: TmaTiles | VarlenTmaTiles, pipeline: Pipeline, sX: cute.Tensor, tile: KVTile):
    """Load K or V of a tile."""
    pipeline.wait_empty(tile.count)
    pipeline.expect_bytes(tile.count, p.config.k.bytes)
    barrier = pipeline.full_barrier(tile.count)
    tma.load(sX, tile.n_block, tile.head_kv, tile.seqlen.k_tma_coord, barrier, p.cta_rank)


@cute.jit
def load_block(p: Params, storage: SharedStorage, tile: KVTile, iteration: Int32, g: Int32, i: Int32):
    """Load the i-th m_block of the g-th head: Q with LSE, dO with Δ."""
    load_q_and_do(p, storage, tile, iteration, tile.m_block(i), tile.head_kv * p.heads_per_kv + g)


@cute.jit
def load_sparse_block(p: Params, storage: SharedStorage, tile: KVTile, iteration: Int32, i: Int32):
    """Load the i-th m_block that a block mask lists."""
    index = p.block_index(tile, i)
    load_q_and_do(p, storage, tile, iteration, index.m_block, tile.head_kv * p.heads_per_kv + index.head)


@cute.jit
def load_q_and_do(p: Params, storage: SharedStorage, tile: KVTile, iteration: Int32, m_block: Int32, head: Int32):
    """Load Q with LSE, and dO with Δ, and the bias unless another warp loads it."""
    q = RowOperand(p.q, storage.q, storage.sQ, p.mLSE, storage.sLSE)
    do = RowOperand(p.do, storage.do, storage.sdO, p.mDelta, storage.sDelta)
    load_rows(p, q, iteration, m_block, head, tile.seqlen)
    if cutlass.const_expr(p.loads_bias_with_q):
        storage.bias.stages.load(p.bias, iteration, ScoreBlock(tile.batch, head, m_block, tile.n_block))
    load_rows(p, do, iteration, m_block, head, tile.seqlen)


class RowOperand(NamedTuple):
    """Q or dO, and the fp32 statistic of its rows."""

    tma: TmaTiles | VarlenTmaTiles
    pipeline: Pipeline
    sX: cute.Tensor
    mY: cute.Tensor  # the statistic in global memory
    sY: cute.Tensor


@cute.jit
def load_rows(p: Params, x: RowOperand, iteration: Int32, m_block: Int32, head: Int32, seqlen: SeqlenInfo):
    """Load an m_block of Q or dO, and the statistic of its rows."""
    tma, pipeline, sX, mY, sY = x
    tile_m, stage = p.config.tile.tile_m, pipeline.stage(iteration)
    pipeline.wait_empty(iteration)
    pipeline.expect_bytes(iteration, p.config.q.bytes + 4 * tile_m)
    tma.load(sX[None, None, stage], m_block, head, seqlen.q_tma_coord, pipeline.full_barrier(iteration), p.cta_rank)
    gY = cute.local_tile(seqlen.slice_head(mY, head), (tile_m,), (seqlen.padded_q_block(m_block, tile_m),))
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    with cute.arch.elect_one():
        cute.copy(atom, gY, sY[None, stage], mbar_ptr=pipeline.full_barrier(iteration))


@cute.jit
def add_dq(p: Params, storage: SharedStorage, adder: Int32):
    """Add each warpgroup's part of dQ to global memory as soon as it is in shared memory.

    With deterministic gradients `num_adders` warps alternate between blocks, and wait for the semaphore of each block.
    `adder`: the index of this warp among them.
    """
    count, iteration = Int32(0), Int32(0)  # tiles and m_blocks so far
    coord = read_tile(storage, count)
    while coord.block != NO_TILE:
        tile = p.tile(count, iteration, coord)
        if cutlass.const_expr(p.block_indices is None):
            for g in cutlass.range(p.heads_per_kv, unroll=1):
                head = tile.head_kv * p.heads_per_kv + g
                for i in cutlass.range(tile.block_iter.num, unroll=1):
                    if cutlass.const_expr(p.num_adders == 1):
                        add_block(p, storage, tile, head, tile.m_block(i), iteration)
                    elif iteration % p.num_adders == adder:
                        add_in_order(p, storage, tile, head, tile.m_block(i), iteration)
                    iteration += 1
        else:
            for i in cutlass.range(p.num_m_blocks(tile), unroll=1):
                if cutlass.const_expr(p.num_adders == 1):
                    index = p.block_index(tile, i)
                    head = tile.head_kv * p.heads_per_kv + index.head
                    add_block(p, storage, tile, head, index.m_block, iteration)
                elif iteration % p.num_adders == adder:
                    add_sparse_in_order(p, storage, tile, i, iteration)
                iteration += 1
        count += 1
        coord = read_tile(storage, count)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def for_each_block(p: Params, storage: SharedStorage, visit: cutlass.Constexpr, visit_empty: cutlass.Constexpr = None):
    """Call visit(tile, head, m_block, iteration) for every block, in a warp that reads published tiles.

    If a tile has no blocks, call visit_empty(tile, head) for every head. It must be None with a block mask.
    """
    count, iteration = Int32(0), Int32(0)  # tiles and m_blocks so far
    coord = read_tile(storage, count)
    while coord.block != NO_TILE:
        iteration = for_each_block_of_tile(p, p.tile(count, iteration, coord), iteration, visit, visit_empty)
        count += 1
        coord = read_tile(storage, count)


@cute.jit
def for_each_block_of_tile(
    p: Params, tile: KVTile, iteration: Int32, visit: cutlass.Constexpr, visit_empty: cutlass.Constexpr
):
    """`for_each_block` for one tile. Returns the iteration after its blocks."""
    if cutlass.const_expr(p.block_indices is None):
        for g in cutlass.range(p.heads_per_kv, unroll=1):
            if cutlass.const_expr(visit_empty is not None):
                if tile.block_iter.num == 0:
                    visit_empty(tile, tile.head_kv * p.heads_per_kv + g)
            for i in cutlass.range(tile.block_iter.num, unroll=1):
                visit(tile, tile.head_kv * p.heads_per_kv + g, tile.m_block(i), iteration)
                iteration += 1
    else:
        for i in cutlass.range(p.num_m_blocks(tile), unroll=1):
            index = p.block_index(tile, i)
            visit(tile, tile.head_kv * p.heads_per_kv + index.head, index.m_block, iteration)
            iteration += 1
    return iteration


@cute.jit
def load_bias(p: Params, storage: SharedStorage):
    """Load the bias of every block."""

    def load(tile: KVTile, head: Int32, m_block: Int32, iteration: Int32):
        storage.bias.stages.load(p.bias, iteration, ScoreBlock(tile.batch, head, m_block, tile.n_block))

    for_each_block(p, storage, load)


def store_dbias(p: Params, storage: SharedStorage, for_each: Callable[..., None]) -> None:
    """Store the gradient of the bias of every block, and zeros in blocks that a band excludes.

    If `bwd_sum_dbias` sums the terms, it does not read excluded blocks, and they stay uninitialized. `for_each`: calls
    the two functions that it takes, like `for_each_block`.
    """
    static = p.config.static
    excludes_blocks = static.is_bounded and p.block_indices is None and not static.mods.dbias_terms

    def store(tile: KVTile, head: Int32, m_block: Int32, iteration: Int32):
        storage.store_dbias(p.dbias, iteration, ScoreBlock(tile.batch, head, m_block, tile.n_block))
        if cutlass.const_expr(excludes_blocks):
            # Each visit stores its share of the zeros, so that the gradient of the next block does not wait for long.
            visit = (iteration - tile.iteration) % tile.block_iter.num
            store_excluded_blocks(p, tile, head, visit, tile.block_iter.num)

    def store_empty_tile(tile: KVTile, head: Int32):
        store_excluded_blocks(p, tile, head, Int32(0), Int32(1))

    for_each(store, store_empty_tile if excludes_blocks else None)


@cute.jit
def store_excluded_blocks(p: Params, tile: KVTile, head: Int32, share: Int32, shares: Int32):
    """Store zeros for some of the m_blocks that a K/V tile does not visit. `share`: which of `shares` equal parts."""
    tile_m, blocks = p.config.tile.tile_m, tile.block_iter
    excluded = (p.seqlen_q + (tile_m - 1)) // tile_m - blocks.num
    begin, end = share_of(excluded, share, shares)
    for i in cutlass.range(begin, end, unroll=1):
        m_block = cutlass.select_(i < blocks.first, i, i + blocks.num)
        store_zeros(p, ScoreBlock(tile.batch, head, m_block, tile.n_block))


@cute.jit
def store_zeros(p: Params, block: ScoreBlock):
    """Store zeros in the gradient of the bias of a block. Called by one warp."""
    batch, head, m_block, n_block = block
    tile_m, tile_n, lane = p.config.tile.tile_m, p.config.tile.tile_n, cute.arch.lane_idx()
    lanes_per_row = tile_n // VECTOR
    gdBias = p.score_params.mods.bias.mdBias[batch, head, None, None]
    key = n_block * tile_n + lane % lanes_per_row * VECTOR
    zeros = cute.make_rmem_tensor(VECTOR, gdBias.element_type)
    zeros.fill(0.0)
    for i in cutlass.range(tile_m * lanes_per_row // 32, unroll=4):
        row = m_block * tile_m + i * (32 // lanes_per_row) + lane // lanes_per_row
        if row < p.seqlen_q and key < p.seqlen_k:
            target = (gdBias.iterator + (Int64(row) * gdBias.stride[0] + key)).align(16)
            cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(VECTOR)))


def accumulators(p: Params, seqlen: SeqlenInfo, head: Int32, m_block: Int32) -> cute.Tensor:
    """The fp32 accumulators of dQ of an m_block, in global memory."""
    return seqlen.slice_head(p.mdQ_accum, head)[seqlen.padded_q_block(m_block, p.config.tile.tile_m), None]


@cute.jit
def read_tile(storage: SharedStorage, count: Int32):
    """Read the published tile in another producer warp, and release K, whose barrier protects the tile."""
    storage.k.wait_full(count)
    coord = storage.read_tile(count)
    storage.k.release_per_thread(count)
    return coord


@cute.jit
def add_in_order(p: Params, storage: SharedStorage, tile: KVTile, head: Int32, m_block: Int32, iteration: Int32):
    """Add both parts of a block, after all K/V tiles of lower rank have added theirs (`DQSemaphore`)."""
    # Addresses are recomputed for each block, for lack of registers.
    head, seqlen = rederived(head), replace(tile.seqlen, batch=rederived(tile.batch))
    block = seqlen.padded_q_block(m_block, p.config.tile.tile_m)
    coord = HeadBlock(0 if seqlen.is_varlen else seqlen.batch, head, block)
    rank = p.dq_semaphore.rank(tile.n_block, m_block, seqlen if seqlen.is_varlen else None)
    with cute.arch.elect_one():
        p.dq_semaphore.wait(coord, rank)
    cute.arch.sync_warp()
    first_stores = p.config.tile.first_tile_stores(p.config.static)
    add_parts(p, storage, accumulators(p, seqlen, head, m_block), iteration, rank if first_stores else None)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)
        p.dq_semaphore.arrive(coord, rank)
    cute.arch.sync_warp()


@cute.jit
def add_sparse_in_order(p: Params, storage: SharedStorage, tile: KVTile, i: Int32, iteration: Int32):
    """`add_in_order` for the i-th m_block that a block mask lists."""
    # The coordinate and the rank are read again for each step, for lack of registers.
    with cute.arch.elect_one():
        coord, rank = sparse_rank(p, tile, i)
        p.dq_semaphore.wait(coord, rank)
    cute.arch.sync_warp()
    (_, head, m_block), _ = sparse_rank(p, tile, rederived(i))
    add_parts(p, storage, accumulators(p, tile.seqlen, head, m_block), iteration)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)
        coord, rank = sparse_rank(p, tile, rederived(i))
        p.dq_semaphore.arrive(coord, rank)
    cute.arch.sync_warp()


def sparse_rank(p: Params, tile: KVTile, i: Int32) -> tuple[HeadBlock, Int32]:
    """The i-th m_block that a block mask lists, as the coordinate of its semaphore, and the rank of this tile."""
    batch = tile.seqlen.batch
    # `BwdBlockIndices.read` shuffles over all lanes, but a single lane may call this function.
    index = BwdBlockIndex(p.block_indices.mIndices[batch, tile.head_kv, tile.n_block, i])
    head = tile.head_kv * p.heads_per_kv + index.head
    return HeadBlock(batch, head, index.m_block), p.block_indices.rank(batch, head, index.m_block, tile.n_block)


@cute.jit
def add_block(p: Params, storage: SharedStorage, tile: KVTile, head: Int32, m_block: Int32, iteration: Int32):
    """Add a block of both warpgroups. K/V tiles add in any order; the first stores (`DQPart`)."""
    seqlen, (_, heads, blocks, elements) = tile.seqlen, p.mdQ_accum.shape
    row = head if seqlen.is_varlen else seqlen.batch * heads + head
    block = row * blocks + seqlen.padded_q_block(m_block, p.config.tile.tile_m)
    uses_claims = seqlen.q_len <= p.config.tile.max_queries_claimed
    part = DQPart(p.mdQ_accum, p.mClaims, block, 0, 1, uses_claims)
    first = iteration * NUM_WARPGROUPS
    pieces = tuple(StagedPiece(storage.sdQ[None, None, None, w].iterator, first + w) for w in range(NUM_WARPGROUPS))
    part.add_or_store(pieces, 4 * elements // NUM_WARPGROUPS, storage.dq)


@cute.jit
def add_parts(p: Params, storage: SharedStorage, gdQ: cute.Tensor, iteration: Int32, rank: Int32 | None = None):
    """Add the parts of a block of both warpgroups, or store them if `rank` is 0. Release their shared memory."""
    part = p.config.tile.tile_m * p.config.tile.head_dim // NUM_WARPGROUPS
    for w in cutlass.range_constexpr(NUM_WARPGROUPS):
        dq_iteration = iteration * NUM_WARPGROUPS + w
        storage.dq.wait_full(dq_iteration)
        with cute.arch.elect_one():
            target, source = gdQ.iterator + w * part, storage.sdQ[None, None, None, w].iterator
            if cutlass.const_expr(rank is None):
                bulk_add(target, source, 4 * part)
            else:
                bulk_add_or_store(target, source, 4 * part, rank)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        storage.dq.release(dq_iteration)
