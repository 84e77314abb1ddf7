"""Merge: combine the warps of a CTA, then the splits of a query tile, and write out and LSE.

The CTAs of a query tile write m, l and O of their splits to the workspace, and the last CTAs to arrive merge them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_flash.device.memory import fp8
from cute_flash.device.memory.views import as_mn
from cute_flash.device.ptx import instruction
from cute_flash.device.scheduling.kv_splits import Split, TileCtas, quotient
from cute_flash.device.scores.mask import column_offset
from cute_flash.device.softmax.softmax import THREADS_PER_ROW, normalisation
from cute_flash.kernels.decode.storage import Output, Params, SharedStorage, Team, vector_at
from cute_flash.planning.decode_tiles import EXCHANGE_ROWS
from cute_flash.planning.tiles.common import WARP_ROWS

FLOATS = 4  # floats of O that a thread combines at once
# The first bits of the second and the third field of an arrival counter (`counter`).
FINAL_BIT, SHARE_BIT = 12, 24


class RowSums(NamedTuple):
    """FLOATS columns of a row of O, with the row's m and l."""

    columns: cute.Tensor
    m: Float32
    l: Float32


@cute.jit
def finish(p: Params, storage: SharedStorage, split: Split, ctas: TileCtas, output: Output, cta: Int32):
    """Combine the warps, and merge the splits of the query tile if this CTA is one of the last to arrive."""
    thread, _, _ = cute.arch.thread_idx()
    tile, sequence = p.config.tile, p.splits.sequence(split.batch)
    is_whole, slot = ctas.first == ctas.last, workspace_slot(p, cta, split.is_first)
    if cutlass.const_expr(not tile.own_exchange):
        # The exchange overwrites the stages: wait until every warp has read its last stage.
        cute.arch.sync_threads()
    for i in cutlass.range_constexpr(tile.tile_m // EXCHANGE_ROWS):
        rows = cutlass.min(p.num_rows(split, sequence) - i * EXCHANGE_ROWS, EXCHANGE_ROWS)
        if rows > 0:
            exchange(p, storage, output, thread, i, rows)
            combine(p, storage, split, thread, Int32(i * EXCHANGE_ROWS), rows, is_whole, slot)
            # The next rows, or the next split, reuse the memory.
            cute.arch.sync_threads()
    output.reset()
    if not is_whole:
        num_rows, team = p.num_rows(split, sequence), Team(tile.num_threads)
        merge_if_last(p, storage, team, split, ctas, num_rows, thread, cta)


# ---- warps


@cute.jit
def exchange(p: Params, storage: SharedStorage, output: Output, thread: Int32, part: cutlass.Constexpr, rows: Int32):
    """Write eight rows of every warp's output and statistics to shared memory: the `part`-th row of each thread."""
    warp, lane = thread // 32, thread % 32
    tile, acc, row = p.config.tile, as_mn(output.acc_O), lane // THREADS_PER_ROW
    first = coordinates(p, lane)[0, 0][1]
    own_part, own_sum, offset, column_warp = part % cute.size(acc, mode=[0]), warp, 0, None
    if cutlass.const_expr(tile.column_warps > 1):
        # The warps of a team have different columns, and the same statistics.
        warp, column_warp = warp // tile.column_warps, warp % tile.column_warps
        offset, own_sum = column_warp * tile.warp_columns, warp
    elif cutlass.const_expr(tile.num_sums == 1):
        # The warps that share 16 rows have different columns of them.
        row_tile, warp = warp // tile.num_stats, warp % tile.num_stats
        offset, own_sum = warp * tile.output_shape[1], Int32(0)
        row = cutlass.select_(row_tile == part * EXCHANGE_ROWS // WARP_ROWS, row, Int32(EXCHANGE_ROWS))
    total = output.softmax.row_sum[own_part]
    for distance in cutlass.range_constexpr(1, 3):
        total += cute.arch.shuffle_sync_bfly(total, offset=distance)
    if row < rows:
        for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            storage.exchange[offset + output_column(p, first, c), row, own_sum] = acc[own_part, c]
        has_stats = lane % THREADS_PER_ROW == 0
        if cutlass.const_expr(column_warp is not None):
            has_stats = has_stats & (column_warp == 0)
        if has_stats:
            storage.stats[0, row, warp] = output.softmax.row_max[own_part]
            storage.stats[1, row, warp] = total
    cute.arch.sync_threads()


def output_column(p: Params, first: Int32, c: int) -> Int32:
    """The output column of this thread's c-th accumulator; `first`: the thread's first column in an n8 tile."""
    return fp8.output_column(c // 2, first + c % 2) if p.config.static.is_fp8 else first + column_offset(c)


def coordinates(p: Params, lane: Int32) -> cute.Tensor:
    """(row, column) of every element of the output accumulator."""
    identity = cute.make_identity_tensor(p.config.tile.output_shape)
    return as_mn(p.tiled_mma.get_slice(lane).partition_C(identity))


@cute.jit
def combined(p: Params, storage: SharedStorage, row: Int32, column: Int32, columns: cute.Tensor) -> RowSums:
    """The sums of a row over all warps, with `columns` as their memory."""
    tile = p.config.tile
    m = storage.stats[0, row, 0]
    for w in cutlass.range_constexpr(1, tile.num_stats):
        m = cute.arch.fmax(m, storage.stats[0, row, w])
    total, part = Float32(0.0), cute.make_rmem_tensor(FLOATS, Float32)
    columns.fill(0.0)
    for w in cutlass.range_constexpr(tile.num_stats):
        factor = cute.math.exp2(storage.stats[0, row, w] - or_zero(m), fastmath=True)
        total += storage.stats[1, row, w] * factor
        if cutlass.const_expr(w < tile.num_sums):
            cute.autovec_copy(vector_at(storage.exchange[None, row, w], column, FLOATS), part)
            columns.store(columns.load() + part.load() * factor)
    return RowSums(columns, m, total)


@cute.jit
def combine(
    p: Params,
    storage: SharedStorage,
    split: Split,
    thread: Int32,
    first_row: Int32,
    num_rows: Int32,
    is_whole: cutlass.Boolean,
    slot: Int32,
):
    """Combine the warps' sums of the exchanged rows, which begin at `first_row` of the query tile.

    If the split has all keys of its query tile (`is_whole`), write the output; else write to the workspace slot.
    """
    vectors, columns = p.config.tile.width_v // FLOATS, cute.make_rmem_tensor(FLOATS, Float32)
    for index in cutlass.range(thread, num_rows * vectors, p.config.tile.num_threads, unroll=1):
        row = quotient(index, vectors)
        column = (index - row * vectors) * FLOATS
        sums = combined(p, storage, row, column, columns)
        row += first_row
        if is_whole:
            write_row(p, split, row, column, sums)
        else:
            cute.autovec_copy(sums.columns, vector_at(p.partial_out[slot, row, None], column, FLOATS))
            if column == 0:
                p.partial_stats[slot, row, 0] = sums.m
                p.partial_stats[slot, row, 1] = sums.l


@cute.jit
def write_row(p: Params, split: Split, row: Int32, column: Int32, sums: RowSums):
    """Normalise and write `FLOATS` columns of a row of the output; the thread of column 0 writes the LSE."""
    columns, m, row_sum = sums
    query = p.query_row(split, row)
    lse, inverse = normalisation(m, row_sum, None if p.sinks is None else p.sinks[query.head])
    v_scale = p.k_scale if p.config.static.is_latent else p.v_scale
    if cutlass.const_expr(v_scale is not None):
        inverse = inverse * v_scale[p.cache_head(split)]
    if column < p.config.static.width_v:
        rounded = cute.make_rmem_tensor(FLOATS, p.mO.element_type)
        rounded.store((columns.load() * inverse).to(p.mO.element_type))
        cute.autovec_copy(rounded, vector_at(p.mO[query.batch, query.token, query.head, None], column, FLOATS))
    if column == 0:
        p.mLSE[query.batch, query.head, query.token] = lse


# ---- splits


def workspace_slot(p: Params, cta: Int32, is_first: cutlass.Boolean) -> Int32:
    """The workspace slot of a CTA's split.

    A CTA shares at most two query tiles with other CTAs: it has the end of one and the beginning of another. So it
    needs two slots. With a fixed number of splits it has one split.
    """
    own = 2 * cta + cutlass.select_(is_first, Int32(1), Int32(0))
    return cutlass.select_(p.splits.num_splits > 0, cta, own)


@cute.jit
def merge_if_last(
    p: Params,
    storage: SharedStorage,
    team: Team,
    split: Split,
    ctas: TileCtas,
    num_rows: Int32,
    thread: Int32,
    cta: Int32,
):
    """Arrive with a split that the team has written to the workspace; merge a share if the CTA is one of the last."""
    at_once = p.config.tile.merged_rows
    num_shares = cutlass.min(quotient(num_rows + at_once - 1, at_once), ctas.num_final)
    if p.splits.num_splits > 0:
        # The grid may have more CTAs than the GPU runs at once, so no CTA waits for another.
        num_shares = Int32(1)
    share = arrive(p, storage, team, split, ctas, thread, cta, num_shares)
    if share >= 0:
        merge(p, team, split, ctas, num_rows, thread, share, num_shares)
        leave(p, split, thread, num_shares)


@cute.jit
def arrive(
    p: Params,
    storage: SharedStorage,
    team: Team,
    split: Split,
    ctas: TileCtas,
    thread: Int32,
    cta: Int32,
    num_shares: Int32,
) -> Int32:
    """Count this CTA's split of the query tile as written; return the CTA's share of the merge, or -1 for none.

    The rows of the query tile are divided into `num_shares` shares, and each of the last CTAs to arrive merges one
    share. If there are several shares, these CTAs wait until all CTAs have arrived. `ctas.last` is not one of them
    if it has another split to compute. The CTAs of the grid run at the same time. If another process or a limit on
    SMs prevents that, waiting is still safe while more than `num_shares` CTAs run: CTAs start in the order of the
    grid, so only one query tile has both waiting CTAs and CTAs that have not started, and at most `num_shares` CTAs
    wait for it. Of a cluster of two CTAs both stay until both are done, and the query tiles of both head groups may
    wait at the same time. So waiting is then safe while more than 2 `num_shares` clusters run.

    The barriers order the memory accesses of all threads before and after the accesses of thread 0.
    """
    team.sync()
    if thread == 0:
        total, share, address = ctas.last - ctas.first + 1, Int32(-1), counter(p, split)
        if num_shares == 1:
            before = cute.arch.atomic_add(address, Int32(1), sem="acq_rel", scope="gpu")
            if before == total - 1:
                share = Int32(0)
                p.arrivals[split.query_tile] = 0
        else:
            is_final = cta < ctas.last or ctas.num_final == total
            added = Int32(1 + (1 << FINAL_BIT)) if is_final else Int32(1)
            before = cute.arch.atomic_add(address, added, sem="acq_rel", scope="gpu")
            rank = ctas.num_final - 1 - (before >> FINAL_BIT)  # the last of these CTAs to arrive has rank 0
            if is_final and rank < num_shares:
                share = rank
                arrived = before + 1
                while arrived & ((1 << FINAL_BIT) - 1) != total:
                    arrived = instruction("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", Int32, address.toint())
        storage.merge_share[0] = share
    team.sync()
    return storage.merge_share[0]


def counter(p: Params, split: Split) -> cute.Pointer:
    """The arrival counter of the split's query tile.

    Bits 0 to 11 count arrivals, 12 to 23 those of CTAs without another split, 24 to 30 merged shares.
    """
    return p.arrivals.iterator + split.query_tile


@cute.jit
def leave(p: Params, split: Split, thread: Int32, num_shares: Int32):
    """Count a share as merged. The last of several shares resets the counter."""
    if thread == 0 and num_shares > 1:
        before = cute.arch.atomic_add(counter(p, split), Int32(1 << SHARE_BIT), sem="relaxed", scope="gpu")
        if (before >> SHARE_BIT) == num_shares - 1:
            p.arrivals[split.query_tile] = 0


@cute.jit
def merge(
    p: Params, team: Team, split: Split, ctas: TileCtas, num_rows: Int32, thread: Int32, share: Int32, num_shares: Int32
):
    """Merge a share of the rows of a query tile, and write their output."""
    tile = p.config.tile
    vectors, sums = tile.width_v // FLOATS, cute.make_rmem_tensor(FLOATS, Float32)
    at_once = 16 if tile.tile_m == 16 else 8  # splits that a thread loads at once; more would spill with 32 rows
    parts = [cute.make_rmem_tensor(FLOATS, Float32) for _ in range(at_once)]
    stats = [cute.make_rmem_tensor(2, Float32) for _ in range(at_once)]
    threads = team.num_threads
    for index in cutlass.range(share * threads + thread, num_rows * vectors, num_shares * threads, unroll=1):
        row = quotient(index, vectors)
        column = (index - row * vectors) * FLOATS
        m, total = -Float32.inf, Float32(0.0)
        sums.fill(0.0)
        for first in cutlass.range(ctas.first, ctas.last + 1, at_once, unroll=1):
            # Issue all loads before the first use. Indices past the last split load the last split again.
            for i in cutlass.range_constexpr(at_once):
                cta = cutlass.min(first + i, ctas.last)
                slot = workspace_slot(p, cta, first == ctas.first if i == 0 else cutlass.Boolean(False))
                load_from(p.partial_stats, slot, 2 * row, stats[i])
                load_from(p.partial_out, slot, tile.width_v * row + column, parts[i])
            largest = m
            for i in cutlass.range_constexpr(at_once):
                # A statistic of -inf excludes a split that was loaded again.
                stats[i][0] = cutlass.select_(first + i <= ctas.last, stats[i][0], -Float32.inf)
                largest = cute.arch.fmax(largest, stats[i][0])
            factor = cute.math.exp2(m - or_zero(largest), fastmath=True)
            total = total * factor
            sums.store(sums.load() * factor)
            for i in cutlass.range_constexpr(at_once):
                factor = cute.math.exp2(stats[i][0] - or_zero(largest), fastmath=True)
                total += stats[i][1] * factor
                sums.store(sums.load() + parts[i].load() * factor)
            m = largest
        write_row(p, split, row, column, RowSums(sums, m, total))


def load_from(partial: cute.Tensor, slot: Int32, offset: Int32, target: cute.Tensor):
    """Load consecutive floats of a workspace slot, with one multiplication and one load."""
    num, slot_bytes = cute.size(target), partial.stride[0] * 4
    address = partial.iterator.toint() + Int64(offset) * 4 + Int64(slot) * slot_bytes
    pointer = cute.make_ptr(Float32, address, cutlass.AddressSpace.gmem, assumed_align=4 * num)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(num)), target)


def or_zero(m: Float32) -> Float32:
    """m, or 0 if there are no keys (-inf), because -inf - -inf would be NaN."""
    return cutlass.select_(m == -Float32.inf, Float32(0.0), m)
