"""Before the kernels of a packed batch: the list of its tiles, see `cute_flash/work.py`. One block a list.

| step  | who                 | what                                                                    |
|-------|---------------------|-------------------------------------------------------------------------|
| count | a warp 32 sequences | tiles of each class of length                                           |
| sum   | a thread a class    | how many tiles are of longer classes, which come before                 |
| write | a warp 32 sequences | each claims its places among those of its class, then all lanes write   |
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.band import Band, minimum
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
class Batch:
    """Where the sequences lie; what the caller says is taken within bounds, for no tile to leave memory."""

    mCuQ: cute.Tensor  # (B + 1)
    mCuK: cute.Tensor
    mUsedK: cute.Tensor | None  # (B)
    total_q: Int32
    total_k: Int32

    @property
    def size(self) -> Int32:
        return self.mCuQ.shape[0] - 1

    @cute.jit
    def offsets(self, mCu: cute.Tensor, b: Int32, total: Int32):
        """Where sequence b begins and ends."""
        begin = cutlass.max(cutlass.min(mCu[b], total), 0)
        return begin, cutlass.max(cutlass.min(mCu[b + 1], total), begin)

    @cute.jit
    def used(self, b: Int32, slot: Int32) -> Int32:
        if cutlass.const_expr(self.mUsedK is None):
            return slot
        return cutlass.max(cutlass.min(self.mUsedK[b], slot), 0)


@dataclass(frozen=True)
class Tiles:
    """One list: the tiles of queries, or those of keys."""

    mItems: cute.Tensor  # (TILE_LIST_HEADER + items, TILE_LIST_WIDTH)
    batch: Batch
    of_keys: cutlass.Constexpr
    counts_rest: cutlass.Constexpr  # what comes after the last sequence is one with a number of its own
    tile_rows: Int32
    tile_columns: Int32
    band: Band  # of rows over columns
    order: Int32  # ASCENDING, DESCENDING or BY_LENGTH

    @property
    def num_runs(self) -> Int32:
        """Sequences, perhaps the unused keys of each, and what comes after the last."""
        size = self.batch.size
        return (2 * size if self.of_keys and self.batch.mUsedK is not None else size) + 1

    @cute.jit
    def run(self, r: Int32):
        """(sequence, q_begin, q_len, k_begin, k_len)"""
        batch, size = self.batch, self.batch.size
        b = cutlass.min(r, size - 1)
        is_rest = r == self.num_runs - 1
        is_unused = cutlass.Boolean(False)
        if cutlass.const_expr(self.of_keys and batch.mUsedK is not None):
            is_unused = r >= size and not is_rest
            b = r - size if is_unused else b
        q_begin, q_end = batch.offsets(batch.mCuQ, b, batch.total_q)
        k_begin, k_end = batch.offsets(batch.mCuK, b, batch.total_k)
        k_len = batch.used(b, k_end - k_begin)
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
        if cutlass.const_expr(self.counts_rest):
            b = size if is_rest else b
        return b, q_begin, q_len, k_begin, k_len

    @cute.jit
    def size(self, run: tuple):
        """Tiles of a run, and the blocks of its longest."""
        rows, columns = self.lengths(run)
        longest = longest_tile(self.band, rows, columns, self.tile_rows, self.tile_columns)
        return ceil_div(rows, self.tile_rows), longest

    def lengths(self, run: tuple) -> tuple:
        """Of its rows, and of its columns."""
        _b, _q_begin, q_len, _k_begin, k_len = run
        return (k_len, q_len) if self.of_keys else (q_len, k_len)

    @cute.jit
    def build(self, classes: cute.Tensor, sums: cute.Tensor):
        """By a thread block. `classes` (NUM_LENGTH_CLASSES), `sums` (WARPS): shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        classes[thread] = 0
        cute.arch.sync_threads()
        self.visit(classes, thread, False)
        cute.arch.sync_threads()
        self.sum(classes, sums, thread)
        cute.arch.sync_threads()
        self.visit(classes, thread, True)

    @cute.jit
    def sum(self, classes: cute.Tensor, sums: cute.Tensor, thread: Int32):
        """classes: from numbers of tiles to the place of the first; those of longer ones come before."""
        lane, warp = thread % 32, thread // 32
        mine = classes[NUM_LENGTH_CLASSES - 1 - thread]
        until = mine
        for step in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(until, 1 << step)
            until = until + before if lane >= (1 << step) else until
        if lane == 31:
            sums[warp] = until
        cute.arch.sync_threads()
        for other in cutlass.range_constexpr(WARPS):
            until = until + sums[other] if other < warp else until
        classes[NUM_LENGTH_CLASSES - 1 - thread] = until - mine
        if thread == THREADS - 1:
            self.mItems[0, 0] = cutlass.min(until, self.mItems.shape[0] - TILE_LIST_HEADER)

    @cute.jit
    def visit(self, classes: cute.Tensor, thread: Int32, writes: cutlass.Constexpr):
        """Every tile claims a place in its class, which counts them, and is written there or not."""
        lane = thread % 32
        for first in cutlass.range(thread - lane, self.num_runs, THREADS, unroll=1):
            run = self.run(cutlass.min(first + lane, self.num_runs - 1))
            tiles, longest = self.size(run)
            tiles = tiles if first + lane < self.num_runs else 0
            if tiles == 1:
                place = _claim(classes, length_class(longest, minimum), Int32(1))
                if cutlass.const_expr(writes):
                    self.write((Int32(0), *run), place)
            mine = (*run, tiles, longest)
            for other in cutlass.range(cutlass.min(self.num_runs - first, 32), unroll=1):
                *numbers, num, most = (cute.arch.shuffle_sync(x, other) for x in mine)
                if num > 1:
                    self.visit_run(classes, lane, tuple(numbers), (num, most), writes)

    @cute.jit
    def visit_run(self, classes: cute.Tensor, lane: Int32, run: tuple, size: tuple, writes: cutlass.Constexpr):
        """The tiles of a run, by a warp. Those that lie side by side claim their places together."""
        num, longest = size
        sizes = (*self.lengths(run), self.tile_rows, self.tile_columns)
        descends = descends_by_length(self.band, num, *sizes) if self.order == BY_LENGTH else self.order
        for start in cutlass.range(0, num, 32, unroll=1):
            i = start + lane
            block = i if descends == ASCENDING else num - 1 - i
            own = num_blocks(self.band, block, *sizes) if self.order == BY_LENGTH else longest
            is_apart = i < num and 2 * own < longest
            together = cute.arch.vote_ballot_sync(i < num and not is_apart)
            place = Int32(0)
            if lane == 0:
                place = _claim(classes, length_class(longest, minimum), cute.arch.popc(together))
            before = cute.arch.popc(together & ((Int32(1) << lane) - 1))
            place = cute.arch.shuffle_sync(place, 0) + before
            if is_apart:
                place = _claim(classes, length_class(own, minimum), Int32(1))
            if cutlass.const_expr(writes):
                if i < num:
                    self.write((block, *run), place)

    @cute.jit
    def write(self, numbers: tuple, item: Int32):
        row = cute.make_rmem_tensor(TILE_LIST_WIDTH, Int32)
        row.fill(0)
        for i in cutlass.range_constexpr(len(numbers)):
            row[i] = numbers[i]
        if item < self.mItems.shape[0] - TILE_LIST_HEADER:
            target = (self.mItems.iterator + (item + TILE_LIST_HEADER) * TILE_LIST_WIDTH).align(16)
            cute.autovec_copy(row, cute.make_tensor(target, cute.make_layout(TILE_LIST_WIDTH)))


@cute.jit
def _claim(classes: cute.Tensor, place: Int32, number: Int32) -> Int32:
    """The first of so many places in a class."""
    return cute.arch.atomic_add(classes.iterator + place, number, sem="relaxed", scope="cta")


class VarlenScheduler:
    """Lists the tiles of a varlen batch: one CTA a list."""

    direction: str

    def __init__(self, static: Static, tile):
        self.static = static

    @property
    def name(self) -> str:
        return f"cute_flash_varlen_scheduler_{self.direction}" + ("_seqused_k" if self.static.seqused_k else "")

    def launch(self, lists: tuple, stream: CUstream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(lists).launch(grid=(len(lists), 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, lists: tuple):
        if cutlass.const_expr(self.static.overlaps_next):
            cute.arch.griddepcontrol_launch_dependents()
        smem = SmemAllocator()
        classes = smem.allocate_tensor(Int32, cute.make_layout(NUM_LENGTH_CLASSES), 16)
        sums = smem.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
        for i in cutlass.range_constexpr(len(lists)):
            if cute.arch.block_idx()[0] == i:
                lists[i].build(classes, sums)


class VarlenSchedulerFwd(VarlenScheduler):
    """The tiles of queries."""

    direction = "fwd"

    @cute.jit
    def __call__(
        self,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor | None,
        q_tile_list: cute.Tensor,
        total_q: Int32,
        total_k: Int32,
        tile_m: Int32,
        tile_n: Int32,
        scheduler_left: Int32,
        scheduler_right: Int32,
        tile_order: Int32,
        stream: CUstream,
    ):
        batch = Batch(cu_seqlens_q, cu_seqlens_k, seqused_k, total_q, total_k)
        band = Band(scheduler_left, scheduler_right)
        tiles = Tiles(q_tile_list, batch, False, False, tile_m, tile_n, band, tile_order)
        self.launch((tiles,), stream)


class VarlenSchedulerBwd(VarlenScheduler):
    """The tiles of keys, and those of queries for preprocess and postprocess."""

    direction = "bwd"

    @cute.jit
    def __call__(
        self,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor | None,
        kv_tile_list: cute.Tensor,
        q_tile_list: cute.Tensor,
        total_q: Int32,
        total_k: Int32,
        tile_m: Int32,
        tile_n: Int32,
        scheduler_left: Int32,
        scheduler_right: Int32,
        tile_order: Int32,
        stream: CUstream,
    ):
        batch = Batch(cu_seqlens_q, cu_seqlens_k, seqused_k, total_q, total_k)
        left, right = scheduler_left, scheduler_right
        keys = Tiles(kv_tile_list, batch, True, False, tile_n, tile_m, Band(right, left), tile_order)
        queries = Tiles(q_tile_list, batch, False, True, tile_m, tile_n, Band(left, right), tile_order)
        self.launch((keys, queries), stream)
