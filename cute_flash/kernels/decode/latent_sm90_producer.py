"""The producer warpgroup of decode with a latent cache by wgmma: finds splits, appends new keys, loads Q and K."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_flash.device.memory.kv_cache import LANES_PER_ROW, VECTOR_BYTES, WarpLoader, copy_if_less
from cute_flash.device.memory.rotary import VECTOR
from cute_flash.device.memory.smem import affine_layout
from cute_flash.device.scheduling.kv_splits import Division, Lengths, Split, rounded_up
from cute_flash.kernels.decode.append import append
from cute_flash.kernels.decode.latent_sm90_storage import SharedStorage
from cute_flash.kernels.decode.storage import Params, Team
from cute_flash.planning.decode_tiles import ATOM_BYTES
from cute_flash.planning.latent_sm90 import LOAD_KEYS, TMA_BOX, WARPGROUP_THREADS

PUBLISHING_WARP = 0
PRODUCER_BARRIER = 2  # named barrier


@cute.jit
def produce(p: Params, storage: SharedStorage, division: Division, thread: Int32):
    """Find the CTA's splits, publish each, and load its Q and its blocks, as far ahead as the pipelines allow."""
    tile, warp = p.config.tile, cute.arch.make_warp_uniform(thread // 32)
    unit = division.interval * division.per_cta
    cta_unit_end = unit + division.per_cta
    count, load = Int32(0), Int32(0)  # splits and loads of keys so far
    while unit < cta_unit_end:
        exists, split, sequence = p.splits.split(unit, cta_unit_end, division)
        unit = cta_unit_end
        if exists:
            unit = split.unit_end
            if warp == PUBLISHING_WARP:
                storage.publish(count, split, p.splits.ctas(split, division))
            if cutlass.const_expr(p.config.static.appends):
                append(p, Team(WARPGROUP_THREADS, PRODUCER_BARRIER), split, sequence, thread)
            storage.q.wait_empty(count)
            load_queries(p, storage, split, sequence, thread)
            arrive_by_copies(storage.q.full_barrier(count))
            loader = p.block_loader(split, sequence, storage.sK, storage.sExists, thread)
            pages = loader.look_up(split.begin)
            blocks_end = split.begin + rounded_up(split.end - split.begin, Int32(tile.block_keys))
            for key in cutlass.range(split.begin, blocks_end, LOAD_KEYS, unroll=1):
                storage.kv.wait_empty(load)
                if cutlass.const_expr(p.k_tma is not None):
                    if takes_tma(p, loader, key):
                        load_by_tma(p, storage, loader, key, load, pages, thread)
                    else:
                        load_by_copies(p, storage, loader, key, load, pages)
                else:
                    load_by_copies(p, storage, loader, key, load, pages)
                if cutlass.const_expr(pages is not None):
                    pages.store(loader.look_up(key + LOAD_KEYS).load())
                load += 1
            count += 1
    cute.arch.cp_async_wait_group(0)
    if warp == PUBLISHING_WARP:
        storage.publish_end(count)


@cute.jit
def load_by_copies(
    p: Params, storage: SharedStorage, loader: WarpLoader, key: Int32, load: Int32, pages: cute.Tensor | None
):
    """Start to copy a half of a block, from `key` on; keys that do not exist are zero-filled."""
    at_half(p, storage, loader, storage.kv.stage(load)).load(key, Int32(0), pages)
    arrive_by_copies(storage.kv.full_barrier(load))
    if cutlass.const_expr(storage.sExists is not None):
        # Copies do not order the stores to sExists.
        cute.arch.mbarrier_arrive(storage.kv.full_barrier(load))


@cute.jit
def takes_tma(p: Params, loader: WarpLoader, key: Int32) -> cutlass.Boolean:
    """Whether TMA may load the half from `key` on: all its keys exist, and are in one page.

    The CTAs of a cluster must decide alike, so it depends on the sequence and the keys only.
    """
    exist = key >= loader.first_key and key + LOAD_KEYS - 1 <= loader.last_key
    if cutlass.const_expr(p.page_size is not None):
        exist = exist and p.page_size.divisor % LOAD_KEYS == 0
    return exist


@cute.jit
def load_by_tma(
    p: Params,
    storage: SharedStorage,
    loader: WarpLoader,
    key: Int32,
    load: Int32,
    pages: cute.Tensor | None,
    thread: Int32,
):
    """Start to load a half of a block by TMA. All threads of the producer arrive; one also announces the bytes.

    In a cluster, the CTAs load different halves of the block, each for both.
    """
    tile, keys, full = p.config.tile, loader.caches.k, storage.kv.full_barrier(load)
    num_boxes = tile.kv_smem.cols // TMA_BOX.cols
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, num_boxes * TMA_BOX.bytes)
    else:
        cute.arch.mbarrier_arrive(full)
    half, is_loading = storage.kv.stage(load), thread < 32
    if cutlass.const_expr(storage.rank is not None):
        is_loading = is_loading and half % tile.loads == storage.rank
    if is_loading:
        cute.arch.sync_warp()
        batch = keys.batch
        if cutlass.const_expr(pages is not None):
            batch = cutlass.min(cutlass.max(pages[0], 0), keys.mX.shape[0] - 1)
        first = half // tile.loads * tile.kv_smem.cosize + half % tile.loads * (LOAD_KEYS * TMA_BOX.cols)
        for j in cutlass.range_constexpr(num_boxes):
            offset = cute.assume(first + j * tile.tile_n * TMA_BOX.cols, divby=TMA_BOX.cosize)
            sX = cute.make_tensor(storage.sK.iterator + offset, affine_layout(TMA_BOX))
            p.k_tma.load(sX, keys.row(key) // LOAD_KEYS, keys.head_kv, batch, full, j)


def arrive_by_copies(barrier: cute.Pointer):
    """Arrive at a `full` barrier when all copies that this thread has started have landed."""
    cute.arch.cp_async_mbarrier_arrive_noinc(barrier)


@cute.jit
def load_queries(p: Params, storage: SharedStorage, split: Split, sequence: Lengths, thread: Int32):
    """Start to copy the tile's queries to the operand of the MMA; rows and columns past the end are zero-filled.

    Eight lanes copy 128 bytes of a row, as for keys.
    """
    tile, lane = p.config.tile, thread % 32
    num_rows, chunk = p.num_rows(split, sequence), lane % LANES_PER_ROW
    memory, first = Int32(storage.sQ.iterator.toint()), thread // LANES_PER_ROW
    rows_at_once = WARPGROUP_THREADS // LANES_PER_ROW
    for i in cutlass.range(tile.tile_m // rows_at_once, unroll=1):
        row = first + i * rows_at_once
        query = p.query_row(split, cutlass.min(row, num_rows - 1))
        source = p.mQ[query.batch, query.token, query.head, None].iterator.toint() + chunk * VECTOR_BYTES
        target = memory + row * ATOM_BYTES + (chunk ^ (row % 8)) * VECTOR_BYTES
        copy_row(target, source, row, num_rows, chunk, tile.q_smem, p.config.static.head_dim)


@cute.jit
def copy_row(
    target: Int32,
    source: Int64,
    row: Int32,
    num_rows: Int32,
    chunk: Int32,
    smem: cutlass.Constexpr,
    head_dim: cutlass.Constexpr,
):
    """Start to copy 16 bytes of every 128 bytes of a row, if row < num_rows as unsigned numbers; else write zeros.

    `target`, `source`: the row's `chunk`-th 16 bytes. Columns past `head_dim` are zero-filled.
    """
    for j in cutlass.range_constexpr(smem.cols // smem.atom_cols):
        index = row
        if cutlass.const_expr((j + 1) * smem.atom_cols > head_dim):
            # As an unsigned number -1 exceeds `num_rows`.
            index = cutlass.select_(j * smem.atom_cols + chunk * VECTOR < head_dim, row, Int32(-1))
        copy_if_less(target + j * smem.rows * ATOM_BYTES, source + j * ATOM_BYTES, index, num_rows)


def at_half(p: Params, storage: SharedStorage, loader: WarpLoader, half: Int32) -> WarpLoader:
    """The loader for a half of a stage. `loader` is that of the first half of the first stage."""
    tile, exists = p.config.tile, None
    offset = half // tile.loads * tile.kv_smem.bytes + half % tile.loads * (LOAD_KEYS * ATOM_BYTES)
    if storage.sExists is not None:
        layout = cute.make_layout((1, LOAD_KEYS), stride=(LOAD_KEYS, 1))
        exists = cute.make_tensor(storage.sExists.iterator + half * LOAD_KEYS, layout)
    return replace(loader, stages=loader.stages + offset, sExists=exists)
