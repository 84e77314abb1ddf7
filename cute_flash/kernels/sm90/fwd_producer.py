"""Producer warps of the Hopper forward: loads of Q, K, V and the bias, stores of the output, and dropout masks.

The warp that loads Q and K gets tiles from the scheduler. It publishes the coordinates of each tile together with its
Q; the other warps read them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.memory.tma import TmaTiles, VarlenTmaTiles
from cute_flash.device.scheduling.block_sparse import AnyBlockIterator, BlockCounts
from cute_flash.device.scheduling.pipeline import Pipeline
from cute_flash.device.scheduling.published_tiles import NO_TILE
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.device.scores.dropout_mask import RECTANGLES
from cute_flash.device.scores.philox import batch_head_index
from cute_flash.device.scores.position import ScoreBlock
from cute_flash.kernels.sm90.fwd_storage import Params, SharedStorage


@dataclass(frozen=True)
class PublishedTile:
    """A tile, as published by the warp that loads Q and K."""

    m_block: Int32
    head: Int32
    seqlen: SeqlenInfo
    block_iter: AnyBlockIterator


@cute.jit
def for_each_block(p: Params, storage: SharedStorage, visit: Callable):
    """Call `visit(iteration, tile, i)` for the i-th block of every tile, in the order in which they are computed."""
    count, iteration = Int32(0), Int32(0)  # tiles and K/V blocks so far
    storage.q.wait_full(count)
    m_block = storage.m_block(count)
    while m_block != NO_TILE:
        head, seqlen = storage.head(count), p.seqlen_info(storage.seqlen_values(count))
        block_counts = storage.block_counts(count)
        storage.release_q(count)
        tile = PublishedTile(m_block, head, seqlen, p.block_iterator(m_block, head, seqlen, block_counts))
        for i in cutlass.range(tile.block_iter.num, unroll=1):
            visit(iteration + i, tile, i)
        iteration += tile.block_iter.num
        count += 1
        storage.q.wait_full(count)
        m_block = storage.m_block(count)


@cute.jit
def load_qk(p: Params, storage: SharedStorage):
    """For every tile of this CTA: load K of the first block, Q, and K of the other blocks; publish the tile."""
    count, iteration = Int32(0), Int32(0)  # tiles and K/V blocks so far
    index = p.tile_scheduler().first_tile()
    while index < p.tile_scheduler().num_tiles:
        m_block, head, seqlen_values = p.tile_coord(index)
        seqlen = p.seqlen_info(seqlen_values)
        head_kv = head // p.heads_per_kv
        block_counts = p.block_counts(m_block, head, seqlen)
        block_iter = p.block_iterator(m_block, head, seqlen, block_counts)
        if block_iter.num > 0:
            load_k(p, storage, iteration, block_iter.first, head_kv, seqlen)
        load_q(p, storage, count, m_block, head, seqlen, block_counts)
        for i in cutlass.range(1, block_iter.num, unroll=1):
            load_k(p, storage, iteration + i, block_iter.block(i), head_kv, seqlen)
        iteration += block_iter.num
        # Fetch the next tile as late as possible, so that a CTA with a long tile leaves it to other CTAs.
        index = p.tile_scheduler().next_tile(index)
        count += 1
    p.tile_scheduler().finish(index)
    storage.q.wait_empty(count)
    storage.tiles.write_end(count)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(storage.q.full_barrier(count))


@cute.jit
def load_v(p: Params, storage: SharedStorage):
    """Load V. It has its own warp, because K of the next tile must not wait until there is room for V of this tile."""

    def load(iteration: Int32, tile: PublishedTile, i: Int32):
        n_block, head_kv = tile.block_iter.block(i), tile.head // p.heads_per_kv
        load_block(p.v, storage.v, storage.sV, iteration, n_block, head_kv, tile.seqlen)

    for_each_block(p, storage, load)


@cute.jit
def load_bias(p: Params, storage: SharedStorage):
    """Load the bias. It has its own warp too, because its stages are released at other times than stages of K and V."""

    def load(iteration: Int32, tile: PublishedTile, i: Int32):
        block = ScoreBlock(tile.seqlen.batch, tile.head, tile.m_block, tile.block_iter.block(i))
        storage.bias.stages.load(p.bias, iteration, block)

    for_each_block(p, storage, load)


@cute.jit
def load_q(
    p: Params,
    storage: SharedStorage,
    count: Int32,
    m_block: Int32,
    head: Int32,
    seqlen: SeqlenInfo,
    block_counts: BlockCounts | None,
):
    """Publish a tile and load its Q."""
    pipeline, tile = storage.q, storage.config.tile
    num = tile.num_warpgroups
    pipeline.wait_empty(count)
    values = (m_block, head, *seqlen.values)
    if cutlass.const_expr(block_counts is not None):
        values = (*values, *block_counts)
    storage.tiles.write(count, values)
    pipeline.expect_bytes(count, num * tile.operand_smem("Q").bytes)
    for w in cutlass.range_constexpr(num):
        sQ = storage.sQ[None, None, (w, pipeline.stage(count))]
        p.q.load(sQ, m_block * num + w, head, seqlen.q_tma_coord, pipeline.full_barrier(count))


@cute.jit
def load_k(p: Params, storage: SharedStorage, iteration: Int32, n_block: Int32, head_kv: Int32, seqlen: SeqlenInfo):
    """Load a block of K and, with a block mask, publish its n_block."""
    if cutlass.const_expr(storage.n_blocks is not None):
        storage.k.wait_empty(iteration)
        storage.publish_block(iteration, n_block)
    load_block(p.k, storage.k, storage.sK, iteration, n_block, head_kv, seqlen)


@cute.jit
def load_block(
    tma: TmaTiles | VarlenTmaTiles,
    pipeline: Pipeline,
    sX: cute.Tensor,
    iteration: Int32,
    n_block: Int32,
    head_kv: Int32,
    seqlen: SeqlenInfo,
):
    """Load a block of K or V."""
    pipeline.wait_empty(iteration)
    pipeline.expect_bytes(iteration, tma.rows * tma.cols * sX.element_type.width // 8)
    sX, rows = sX[None, None, pipeline.stage(iteration)], seqlen.k_tma_coord
    tma.load(sX, n_block, head_kv, rows, pipeline.full_barrier(iteration))


@cute.jit
def store_output(p: Params, storage: SharedStorage):
    """Store the output of each warpgroup as soon as it is in shared memory, then release the stage of Q."""
    num = storage.config.tile.num_warpgroups
    count = Int32(0)
    wait_output(storage, count, 0)
    m_block = storage.m_block(count)
    while m_block != NO_TILE:
        head, seqlen = storage.head(count), p.seqlen_info(storage.seqlen_values(count))
        for w in cutlass.range_constexpr(num):
            if cutlass.const_expr(w > 0):
                wait_output(storage, count, w)
            if cutlass.const_expr(p.o is not None):
                with cute.arch.elect_one():
                    p.o.store(storage.output_stage(w, count), m_block * num + w, head, seqlen.q_tma_coord)
                    cute.arch.cp_async_bulk_commit_group()
        if cutlass.const_expr(p.o is not None):
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        storage.release_q(count)
        count += 1
        wait_output(storage, count, 0)
        m_block = storage.m_block(count)


@cute.jit
def wait_output(storage: SharedStorage, count: Int32, warpgroup: cutlass.Constexpr):
    """Wait until the output of a warpgroup is in shared memory."""
    cute.arch.mbarrier_wait(storage.output_barrier(warpgroup, count), storage.q.phase(count))


@cute.jit
def produce_dropout_masks(p: Params, storage: SharedStorage, warp: Int32, lane: Int32):
    """The role of the dropout producer warpgroup: compute masks of P, as many blocks ahead as there are stages."""
    tile, masks = p.config.tile, storage.dropout_masks
    cute.arch.setmaxregister_decrease(tile.dropout_producer_registers)
    dropout = p.score_params.dropout()

    def produce(iteration: Int32, published: PublishedTile, i: Int32):
        batch_head = batch_head_index(dropout.origin, published.seqlen.batch, published.head, p.static_scheduler.heads)
        for w in cutlass.range_constexpr(tile.num_warpgroups):
            rectangle = (published.m_block * tile.num_warpgroups + w) * RECTANGLES
            masks.pipeline(w).wait_empty(iteration)
            stage, first_key = masks.stage(iteration), published.block_iter.block(i) * tile.tile_n
            masks.produce(dropout, batch_head, rectangle, first_key, stage, w, warp, lane)
            masks.publish(w, iteration)

    for_each_block(p, storage, produce)
