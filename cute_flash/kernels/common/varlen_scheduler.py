"""The varlen tile scheduler: a kernel that writes the list of the tiles of all sequences (`planning.varlen`).

The length of a tile is the number of blocks that it visits. Tiles of similar lengths are one length class. One CTA
writes one list, sorted by length class, in three steps:

| step  | unit                       | work                                                                   |
|-------|----------------------------|------------------------------------------------------------------------|
| count | a warp per 32 sequences    | counts the tiles of each length class                                  |
| sum   | a thread per length class  | adds up the tiles of longer classes, which come first                  |
| write | a warp per 32 sequences    | reserves entries in the classes of its tiles, then all lanes write     |
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.scores.band import Band, minimum
from cute_flash.kernels.common.kernel import Grid, Kernel
from cute_flash.planning.varlen import (
    ASCENDING,
    BY_LENGTH,
    NUM_LENGTH_CLASSES,
    TILE_LIST_HEADER,
    TILE_LIST_WIDTH,
    descends_by_length,
    length_class,
    longest_tile,
    num_blocks,
)
from cute_flash.spec.band import ceil_div
from cute_flash.spec.problem import Static

THREADS = NUM_LENGTH_CLASSES
WARPS = THREADS // 32


@dataclass(frozen=True)
class VarlenBatch:
    """The offsets of the sequences, clamped so that no tile is outside of the tensors.

    If offsets decrease, sequences overlap. They would share blocks of the backward's workspace and their semaphores,
    and CTAs would wait forever for a count that another sequence overwrote. So all rows then count as rows after the
    last sequence, and all sequences are empty.
    """

    mCuSeqlensQ: cute.Tensor  # (B + 1)
    mCuSeqlensK: cute.Tensor
    mSeqUsedK: cute.Tensor | None  # (B)
    total_q: Int32
    total_k: Int32

    @property
    def size(self) -> Int32:
        return self.mCuSeqlensQ.shape[0] - 1

    @cute.jit
    def offsets(self, mCuSeqlens: cute.Tensor, b: Int32, total: Int32):
        """(first row, one past the last row) of sequence b, clamped to [0, total]."""
        begin = cutlass.max(cutlass.min(mCuSeqlens[b], total), 0)
        return begin, cutlass.max(cutlass.min(mCuSeqlens[b + 1], total), begin)

    @cute.jit
    def decreases(self, first: Int32, step: Int32) -> cutlass.Boolean:
        """Whether an offset is less than the one before, among the sequences first, first + step, …"""
        found = cutlass.Boolean(False)
        for b in cutlass.range(first, self.size, step, unroll=1):
            # Without short circuits, so that all loads are in flight at once.
            found |= self.mCuSeqlensQ[b + 1] < self.mCuSeqlensQ[b]
            found |= self.mCuSeqlensK[b + 1] < self.mCuSeqlensK[b]
        return found

    @cute.jit
    def used_keys(self, b: Int32, k_len: Int32) -> Int32:
        if cutlass.const_expr(self.mSeqUsedK is None):
            return k_len
        return cutlass.max(cutlass.min(self.mSeqUsedK[b], k_len), 0)


class Segment(NamedTuple):
    """Rows of the varlen tensors. The fields have the order of a tile-list entry."""

    sequence: Int32
    q_begin: Int32
    q_len: Int32
    k_begin: Int32
    k_len: Int32


class SegmentTiles(NamedTuple):
    """The tiles of a segment."""

    num: Int32
    longest: Int32  # blocks that the longest tile visits


@dataclass(frozen=True)
class TileListBuilder:
    """Builds a list of query tiles, or of K/V tiles.

    Tiles come from segments: the sequences; with `seqused_k` the unused keys of each sequence; and the rows after the
    last sequence. Tiles of unused keys and of the rows after the last sequence see no queries or keys, so kernels write
    zeros there.
    """

    mTiles: cute.Tensor  # (TILE_LIST_HEADER + tiles, TILE_LIST_WIDTH)
    batch: VarlenBatch
    of_keys: cutlass.Constexpr  # True: K/V tiles; False: query tiles
    # The sequence index of the rows after the last sequence. True: B, which has its own blocks of the workspace. False:
    # B - 1, which is a valid index of per-sequence tensors, such as ALiBi slopes.
    rest_has_index: cutlass.Constexpr
    tile_rows: Int32  # tile_m, or tile_n for K/V tiles
    tile_columns: Int32
    band: Band  # for K/V tiles, `Band.of_keys`
    tile_order: Int32  # ASCENDING, DESCENDING or BY_LENGTH

    @property
    def num_segments(self) -> Int32:
        size = self.batch.size
        return (2 * size if self.of_keys and self.batch.mSeqUsedK is not None else size) + 1

    @cute.jit
    def segment(self, index: Int32, is_ordered: cutlass.Boolean) -> Segment:
        """The index-th segment: sequences first, then unused keys, then the rows after the last sequence.

        `is_ordered`: no offset of the batch is less than the one before; see `VarlenBatch`.
        """
        batch, size = self.batch, self.batch.size
        b = cutlass.min(index, size - 1)
        is_rest = index == self.num_segments - 1
        is_unused = cutlass.Boolean(False)
        if cutlass.const_expr(self.of_keys and batch.mSeqUsedK is not None):
            is_unused = index >= size and not is_rest
            b = index - size if is_unused else b
        q_begin, q_end = batch.offsets(batch.mCuSeqlensQ, b, batch.total_q if is_ordered else 0)
        k_begin, k_end = batch.offsets(batch.mCuSeqlensK, b, batch.total_k if is_ordered else 0)
        k_len = batch.used_keys(b, k_end - k_begin)
        q_len = q_end - q_begin
        if cutlass.const_expr(self.of_keys):
            k_begin = k_begin + k_len if is_unused else k_begin
            k_len = k_end - k_begin if is_unused else k_len
            k_begin = k_end if is_rest else k_begin
            k_len = batch.total_k - k_end if is_rest else k_len
            q_len = 0 if is_rest or is_unused else q_len
        else:
            q_begin = q_end if is_rest else q_begin
            q_len = batch.total_q - q_end if is_rest else q_len
            k_len = 0 if is_rest else k_len
        if cutlass.const_expr(self.rest_has_index):
            b = size if is_rest else b
        return Segment(b, q_begin, q_len, k_begin, k_len)

    @cute.jit
    def segment_tiles(self, segment: Segment) -> SegmentTiles:
        rows, columns = self.lengths(segment)
        longest = longest_tile(self.band, rows, columns, self.tile_rows, self.tile_columns)
        return SegmentTiles(ceil_div(rows, self.tile_rows), longest)

    def lengths(self, segment: Segment) -> tuple[Int32, Int32]:
        """The numbers of rows and columns of a segment's scores."""
        return (segment.k_len, segment.q_len) if self.of_keys else (segment.q_len, segment.k_len)

    @cute.jit
    def build(self, classes: cute.Tensor, sums: cute.Tensor):
        """Build the list with one CTA. `classes` (NUM_LENGTH_CLASSES) and `sums` (WARPS) are in shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32
        classes[thread] = 0
        decreases = cute.arch.vote_any_sync(self.batch.decreases(thread, THREADS))
        if lane == 0:
            sums[warp] = Int32(decreases)
        cute.arch.sync_threads()
        is_ordered = not cute.arch.vote_any_sync(sums[cutlass.min(lane, WARPS - 1)] != 0)
        self.visit_segments(classes, thread, is_ordered, False)
        cute.arch.sync_threads()
        self.sum_classes(classes, sums, thread)
        cute.arch.sync_threads()
        self.visit_segments(classes, thread, is_ordered, True)

    @cute.jit
    def sum_classes(self, classes: cute.Tensor, sums: cute.Tensor, thread: Int32):
        """Replace the number of tiles of each class by its first index: the number of tiles of longer classes."""
        lane, warp = thread % 32, thread // 32
        own = classes[NUM_LENGTH_CLASSES - 1 - thread]
        prefix = own
        for step in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(prefix, 1 << step)
            prefix = prefix + before if lane >= (1 << step) else prefix
        if lane == 31:
            sums[warp] = prefix
        cute.arch.sync_threads()
        for other in cutlass.range_constexpr(WARPS):
            prefix = prefix + sums[other] if other < warp else prefix
        classes[NUM_LENGTH_CLASSES - 1 - thread] = prefix - own
        if thread == THREADS - 1:
            self.mTiles[0, 0] = cutlass.min(prefix, self.mTiles.shape[0] - TILE_LIST_HEADER)

    @cute.jit
    def visit_segments(
        self, classes: cute.Tensor, thread: Int32, is_ordered: cutlass.Boolean, writes: cutlass.Constexpr
    ):
        """Reserve an entry in its length class for every tile. `writes`: also write the tiles to their entries.

        Without `writes`, the reservations only count the tiles of each class.
        """
        lane = thread % 32
        for first in cutlass.range(thread - lane, self.num_segments, THREADS, unroll=1):
            segment = self.segment(cutlass.min(first + lane, self.num_segments - 1), is_ordered)
            tiles, longest = self.segment_tiles(segment)
            tiles = tiles if first + lane < self.num_segments else 0
            if tiles == 1:
                entry = _reserve(classes, length_class(longest, minimum), Int32(1))
                if cutlass.const_expr(writes):
                    self.write(Int32(0), segment, entry)
            own = (*segment, tiles, longest)
            for other in cutlass.range(cutlass.min(self.num_segments - first, 32), unroll=1):
                *values, num, longest_of_other = (cute.arch.shuffle_sync(x, other) for x in own)
                if num > 1:
                    self.visit_tiles(classes, lane, Segment(*values), SegmentTiles(num, longest_of_other), writes)

    @cute.jit
    def visit_tiles(
        self, classes: cute.Tensor, lane: Int32, segment: Segment, tiles: SegmentTiles, writes: cutlass.Constexpr
    ):
        """Visit the tiles of a segment with one warp.

        Tiles at least half as long as the longest share its class, and up to 32 of them reserve neighbouring entries
        with one addition. Shorter tiles reserve an entry in the class of their own length.
        """
        num, longest = tiles
        sizes = (*self.lengths(segment), self.tile_rows, self.tile_columns)
        order = descends_by_length(self.band, num, *sizes) if self.tile_order == BY_LENGTH else self.tile_order
        for start in cutlass.range(0, num, 32, unroll=1):
            i = start + lane
            block = i if order == ASCENDING else num - 1 - i
            own = num_blocks(self.band, block, *sizes) if self.tile_order == BY_LENGTH else longest
            is_short = i < num and 2 * own < longest
            together = cute.arch.vote_ballot_sync(i < num and not is_short)
            entry = Int32(0)
            if lane == 0:
                entry = _reserve(classes, length_class(longest, minimum), cute.arch.popc(together))
            before = cute.arch.popc(together & ((Int32(1) << lane) - 1))
            entry = cute.arch.shuffle_sync(entry, 0) + before
            if is_short:
                entry = _reserve(classes, length_class(own, minimum), Int32(1))
            if cutlass.const_expr(writes):
                if i < num:
                    self.write(block, segment, entry)

    @cute.jit
    def write(self, block: Int32, segment: Segment, entry: Int32):
        """Write a block of a segment to an entry of the list, if the list is long enough."""
        values = (block, *segment)
        row = cute.make_rmem_tensor(TILE_LIST_WIDTH, Int32)
        row.fill(0)
        for i in cutlass.range_constexpr(len(values)):
            row[i] = values[i]
        if entry < self.mTiles.shape[0] - TILE_LIST_HEADER:
            target = (self.mTiles.iterator + (entry + TILE_LIST_HEADER) * TILE_LIST_WIDTH).align(16)
            cute.autovec_copy(row, cute.make_tensor(target, cute.make_layout(TILE_LIST_WIDTH)))


@cute.jit
def _reserve(classes: cute.Tensor, index: Int32, num: Int32) -> Int32:
    """Reserve `num` entries of a length class, and return the index of the first."""
    return cute.arch.atomic_add(classes.iterator + index, num, sem="relaxed", scope="cta")


@dataclass(frozen=True)
class Params:
    """The argument of the kernel."""

    keys: TileListBuilder | None  # of the backward
    queries: TileListBuilder


class VarlenScheduler(Kernel):
    """Lists the tiles of a varlen batch, one list per CTA.

    The forward has a list of query tiles. The backward has a list of K/V tiles, and one of query tiles for preprocess
    and postprocess.
    """

    def __init__(self, static: Static, tile: Any):
        self.static = static

    @cute.jit
    def __call__(self, stream: CUstream, **operands):
        args = SimpleNamespace(**operands)
        of_backward = "kv_tile_list" in operands
        batch = VarlenBatch(args.cu_seqlens_q, args.cu_seqlens_k, args.seqused_k, args.total_q, args.total_k)
        band, (m, n) = self.band(args), (args.tile_m, args.tile_n)
        queries = TileListBuilder(args.q_tile_list, batch, False, of_backward, m, n, band, args.tile_order)
        keys = None
        if cutlass.const_expr(of_backward):
            keys = TileListBuilder(args.kv_tile_list, batch, True, False, n, m, band.of_keys, args.tile_order)
        symbol = "cute_flash_varlen_scheduler_" + ("bwd" if of_backward else "fwd")
        symbol += "_seqused_k" * self.static.seqused_k + "_chunk" * self.static.has_chunk
        self.launch(symbol, Params(keys, queries), Grid(2 if of_backward else 1), THREADS, stream)

    def band(self, args: SimpleNamespace) -> Band:
        """The band, whose absent bounds exceed all lengths, so that one kernel schedules tiles of any window."""
        return Band(args.scheduler_left, args.scheduler_right, args.attention_chunk if self.static.has_chunk else None)

    @cute.kernel
    def kernel(self, p: Params):
        if cutlass.const_expr(self.static.overlaps_next):
            cute.arch.griddepcontrol_launch_dependents()
        smem = SmemAllocator()
        classes = smem.allocate_tensor(Int32, cute.make_layout(NUM_LENGTH_CLASSES), 16)
        sums = smem.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
        lists = [p.queries] if p.keys is None else [p.keys, p.queries]
        for i in cutlass.range_constexpr(len(lists)):
            if cute.arch.block_idx()[0] == i:
                lists[i].build(classes, sums)
