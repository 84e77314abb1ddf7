"""The output warpgroups of decode with a latent cache by wgmma: O += P V, and the end of a split.

Each of the two warpgroups has half of the columns. Warp w of a warpgroup has the same rows as warp w of the scores
warpgroup.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cute_flash.device.memory.views import as_mn
from cute_flash.device.mma.wgmma import start_gemm
from cute_flash.device.ptx import pack
from cute_flash.device.scheduling.kv_splits import Split, quotient
from cute_flash.device.scores.mask import column_offset
from cute_flash.device.softmax.softmax import THREADS_PER_ROW, normalisation
from cute_flash.kernels.decode.latent_sm90_scores import first_row
from cute_flash.kernels.decode.latent_sm90_storage import SharedStorage
from cute_flash.kernels.decode.merge_splits import FLOATS, merge_if_last, workspace_slot
from cute_flash.kernels.decode.storage import Params, Team, vector_at
from cute_flash.planning.latent_sm90 import LOAD_KEYS, WARPGROUP_THREADS

ROWS = 2  # of a thread, 8 apart


class Statistics(NamedTuple):
    """m and l of a thread's rows."""

    m: cute.Tensor
    l: cute.Tensor


@cute.jit
def compute_output(p: Params, storage: SharedStorage, team: Team, thread: Int32, cta: Int32):
    """The role of the output warpgroups. `thread`: its index in both."""
    tile, half = p.config.tile, cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
    pv = p.tiled_mma.pv.get_slice(0)
    sV = cute.local_tile(storage.sV, (tile.columns, tile.tile_n, tile.stages), (half, 0, 0))
    rV, rP = pv.make_fragment_B(pv.partition_B(sV)), pv.make_fragment_A(pv.partition_A(storage.sP))
    acc_O = cute.make_rmem_tensor(pv.partition_shape_C((tile.tile_m, tile.columns)), Float32)
    statistics = Statistics(*(cute.make_rmem_tensor(ROWS, Float32) for _ in range(2)))
    count, block = Int32(0), Int32(0)  # splits and blocks so far
    exists = storage.wait_split(count)
    while exists:
        split = storage.split(count)
        num_blocks = quotient(split.end - split.begin + tile.block_keys - 1, tile.block_keys)
        acc_O.fill(0.0)
        for i in cutlass.range(block, block + num_blocks, unroll=1):
            iteration = i + count
            rV_i = rV[None, None, None, storage.stage_of_block(i)]
            num_steps = LOAD_KEYS // 16
            for half in cutlass.range_constexpr(tile.loads):
                storage.p.wait_full(tile.loads * iteration + half)
                if cutlass.const_expr(half == 0):
                    storage.wait_block(i)
                    rescale(storage, acc_O, thread)
                steps = range(half * num_steps, (half + 1) * num_steps)
                start_gemm(p.tiled_mma.pv, acc_O, rP[None, None, None, 0], rV_i, True, steps)
            for half in cutlass.range_constexpr(tile.loads):
                warpgroup.wait_group(tile.loads - 1 - half)
                storage.p.release_per_thread(tile.loads * iteration + half)
                storage.release_half(tile.loads * i + half)
        block += num_blocks
        load_statistics(storage, statistics, block + count, thread)
        finish(p, storage, team, acc_O, statistics, count, thread, cta)
        storage.release_split(count)
        count += 1
        exists = storage.wait_split(count)


@cute.jit
def rescale(storage: SharedStorage, acc_O: cute.Tensor, thread: Int32):
    """O = O alpha, if a row of this warp has outgrown m."""
    thread = thread % WARPGROUP_THREADS
    if cute.arch.make_warp_uniform(storage.rescales[thread // 32]) != 0:
        acc_O_mn = as_mn(acc_O)
        for r in cutlass.range_constexpr(ROWS):
            factor = storage.factors[first_row(thread) + 8 * r]
            acc_O_mn[r, None].store(acc_O_mn[r, None].load() * factor)


@cute.jit
def load_statistics(storage: SharedStorage, statistics: Statistics, iteration: Int32, thread: Int32):
    """Load m and l, and release their iteration of the pipeline of P."""
    loads, largest = storage.config.tile.loads, Float32(0.0)
    for half in cutlass.range_constexpr(loads):
        storage.p.wait_full(loads * iteration + half)
    for r in cutlass.range_constexpr(ROWS):
        row = first_row(thread % WARPGROUP_THREADS) + 8 * r
        statistics.m[r], statistics.l[r] = storage.factors[row], storage.sums[row]
        largest = cute.arch.fmax(largest, cute.arch.fmax(statistics.m[r], statistics.l[r]))
    loaded = cutlass.select_(largest > 0.0, Int32(1), Int32(0))
    for half in cutlass.range_constexpr(loads):
        storage.p.release_per_thread(loads * iteration + half, loaded)


@cute.jit
def finish(
    p: Params,
    storage: SharedStorage,
    team: Team,
    acc_O: cute.Tensor,
    statistics: Statistics,
    count: Int32,
    thread: Int32,
    cta: Int32,
):
    """Write out and LSE, if the split has all keys of its query tile; else write to the workspace, and maybe merge."""
    split, ctas = storage.split(count), storage.ctas(count)
    num_rows = p.num_rows(split, p.splits.sequence(split.batch))
    if ctas.first == ctas.last:
        write_output(p, split, acc_O, statistics, num_rows, thread)
    else:
        write_partial(p, workspace_slot(p, cta, split.is_first), acc_O, statistics, num_rows, thread)
        merge_if_last(p, storage, team, split, ctas, num_rows, thread, cta)


@cute.jit
def write_output(p: Params, split: Split, acc_O: cute.Tensor, statistics: Statistics, num_rows: Int32, thread: Int32):
    """Normalise and write this thread's columns of the output; the first thread of a row writes the LSE."""
    acc_O_mn, words = as_mn(acc_O), cute.make_rmem_tensor(FLOATS // 2, Int32)
    rounded = cute.recast_tensor(words, p.config.dtype)
    dtype, first_column, is_odd = p.config.dtype, column_of(p, thread), thread % 2 == 1
    for r in cutlass.range_constexpr(ROWS):
        row = first_row(thread % WARPGROUP_THREADS) + 8 * r
        query = p.query_row(split, cutlass.min(row, num_rows - 1))
        sink = None if p.sinks is None else p.sinks[query.head]
        lse, inverse = normalisation(statistics.m[r], statistics.l[r], sink)
        target = p.mO[query.batch, query.token, query.head, None]
        for c in cutlass.range_constexpr(0, cute.size(acc_O_mn, mode=[1]), FLOATS):
            x = [acc_O_mn[r, c + i] * inverse for i in range(FLOATS)]
            low, high = pack(x[0], x[1], dtype), pack(x[2], x[3], dtype)
            other = cute.arch.shuffle_sync_bfly(low if is_odd else high, offset=1)
            words[0], words[1] = (other if is_odd else low), (high if is_odd else other)
            column = first_column + 4 * c
            if row < num_rows and column < p.config.static.width_v:
                cute.autovec_copy(rounded, vector_at(target, column, FLOATS))
        if row < num_rows and thread < WARPGROUP_THREADS and thread % THREADS_PER_ROW == 0:
            p.mLSE[query.batch, query.head, query.token] = lse


@cute.jit
def write_partial(p: Params, slot: Int32, acc_O: cute.Tensor, statistics: Statistics, num_rows: Int32, thread: Int32):
    """Write this thread's columns of O to the workspace; the first thread of a row writes m and l.

    The pairs of columns of a row's four threads fill a 32-byte sector.
    """
    acc_O_mn, both = as_mn(acc_O), cute.make_rmem_tensor(2, Float32)
    first_column = thread // WARPGROUP_THREADS * p.config.tile.columns + 2 * (thread % THREADS_PER_ROW)
    for r in cutlass.range_constexpr(ROWS):
        row = first_row(thread % WARPGROUP_THREADS) + 8 * r
        target = p.partial_out[slot, row, None]
        if row < num_rows:
            for c in cutlass.range_constexpr(0, cute.size(acc_O_mn, mode=[1]), 2):
                both[0], both[1] = acc_O_mn[r, c], acc_O_mn[r, c + 1]
                cute.autovec_copy(both, vector_at(target, first_column + column_offset(c), 2))
            if thread < WARPGROUP_THREADS and thread % THREADS_PER_ROW == 0:
                p.partial_stats[slot, row, 0] = statistics.m[r]
                p.partial_stats[slot, row, 1] = statistics.l[r]


def column_of(p: Params, thread: Int32) -> Int32:
    """The first of the four columns of O that a thread writes, of every 16 columns.

    Neighbouring lanes exchange pairs of columns: of two n8 tiles, an even lane gets four columns of the first, an odd
    lane four of the second, which begin with its neighbour's pair (`epilogue.store_rows`).
    """
    lane, half = thread % THREADS_PER_ROW, thread // WARPGROUP_THREADS
    return half * p.config.tile.columns + 2 * lane + cutlass.select_(lane % 2 == 1, Int32(6), Int32(0))
