"""The scores warpgroup of decode with a latent cache by wgmma.

For the blocks of a split: S = Q K^T, the score features, the mask, the online softmax. P and the factors that rescale O
go to shared memory; after the last block, m and l.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cute_flash.device.memory.stmatrix import load_step, store_steps
from cute_flash.device.memory.views import as_mn
from cute_flash.device.mma.wgmma import convert
from cute_flash.device.scheduling.kv_splits import Split, quotient
from cute_flash.device.softmax.softmax import THREADS_PER_ROW, Softmax
from cute_flash.kernels.decode.latent_sm90_storage import SharedStorage
from cute_flash.kernels.decode.score_rows import KeyRange, ScoreRows, common_keys, score_rows
from cute_flash.kernels.decode.storage import Params
from cute_flash.planning.latent_sm90 import LOAD_KEYS


@dataclass(frozen=True)
class Operands:
    """The operands of Q K^T, which stay the same from split to split."""

    rQ: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K)
    rQ_first: cute.Tensor | None  # registers (MMA, MMA_M, q_steps): the first k-steps
    rK: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, stage)


@dataclass(frozen=True)
class SplitRows:
    """The rows of this thread in a split."""

    scores: ScoreRows
    common: KeyRange  # the keys that all rows see
    softmax: Softmax
    thread: Int32  # in the warpgroup


class KeyBlock(NamedTuple):
    """A block of a split."""

    key: Int32  # the first
    keys_seen: Int32  # keys of the split before this block
    stage: Int32  # of K
    iteration: Int32  # of the pipeline of P, in blocks


@cute.jit
def compute_scores(p: Params, storage: SharedStorage, thread: Int32):
    """The role of the scores warpgroup. `thread`: its index in the warpgroup."""
    tile = p.config.tile
    operands = make_operands(p, storage)
    acc_S = make_scores(p)
    identity = cute.make_identity_tensor((tile.tile_m, tile.tile_n))
    tScS = p.tiled_mma.qk.get_slice(thread).partition_C(identity)
    softmax = Softmax.start(as_mn(acc_S), p.scale_log2)
    count, first = Int32(0), Int32(0)  # splits and blocks so far
    exists = storage.wait_split(count)
    while exists:
        split = storage.split(count)
        sequence = p.splits.sequence(split.batch)
        scores, common = score_rows(p, split, sequence, tScS, Int32(0)), common_keys(p, split, sequence)
        rows = SplitRows(scores, common, softmax, thread)
        softmax.restart()
        num_blocks = quotient(split.end - split.begin + tile.block_keys - 1, tile.block_keys)
        storage.wait_loaded(storage.q, count)
        load_first_steps(p, storage, operands, thread)
        for i in cutlass.range(num_blocks, unroll=1):
            block = first + i
            key_block = key_block_of(p, storage, split, i, block, count)
            # Start S when the first half of P V of the previous block is done. If both ran at once, the keys of that
            # half would be released later.
            storage.p.wait_empty(tile.loads * key_block.iteration)
            storage.wait_block(block)
            start_scores(p, operands, acc_S, key_block.stage)
            warpgroup.wait_group(0)
            compute_probs(p, storage, rows, acc_S, key_block)
        storage.q.release_per_thread(count)
        first += num_blocks
        store_statistics(p, storage, softmax, first + count, thread)
        storage.release_split(count)
        count += 1
        exists = storage.wait_split(count)


def key_block_of(p: Params, storage: SharedStorage, split: Split, i: Int32, block: Int32, count: Int32) -> KeyBlock:
    """The i-th block of a split, after `block` blocks and `count` splits in all."""
    keys_seen = i * p.config.tile.block_keys
    return KeyBlock(split.begin + keys_seen, keys_seen, storage.stage_of_block(block), block + count)


def make_operands(p: Params, storage: SharedStorage) -> Operands:
    qk, tile = p.tiled_mma.qk.get_slice(0), p.config.tile
    rQ = qk.make_fragment_A(qk.partition_A(storage.sQ))[None, None, None, 0]
    rK = qk.make_fragment_B(qk.partition_B(storage.sK))
    rQ_first = None
    if tile.q_steps > 0:
        shape = p.tiled_mma.qk_first.get_slice(0).partition_shape_A((tile.tile_m, 16 * tile.q_steps))
        rQ_first = cute.make_rmem_tensor(shape, p.config.dtype)
    return Operands(rQ, rQ_first, rK)


def make_scores(p: Params) -> cute.Tensor:
    tile = p.config.tile
    return cute.make_rmem_tensor(p.tiled_mma.qk.get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n)), Float32)


@cute.jit
def load_first_steps(p: Params, storage: SharedStorage, operands: Operands, thread: Int32):
    """Load the k-steps of Q that stay in registers. The order of an accumulator's n8 tiles is that of operand A."""
    tile = p.config.tile
    if cutlass.const_expr(tile.q_steps > 0):
        words = cute.recast_tensor(operands.rQ_first, Int32)
        for k in cutlass.range_constexpr(tile.q_steps):
            loaded = load_step(Int32(storage.sQ.iterator.toint()), tile.q_smem, thread, k)
            for i in cutlass.range_constexpr(4):
                words[4 * k + i] = loaded[i]


@cute.jit
def start_scores(p: Params, operands: Operands, acc_S: cute.Tensor, stage: Int32):
    """Start S = Q K^T as one wgmma group.

    Those of Q in shared memory come before those in registers. Q in registers must not be touched before the wait.
    """
    tile, rK = p.config.tile, operands.rK[None, None, None, stage]
    num_steps = cute.size(rK, mode=[2])
    order = [*range(tile.q_steps, num_steps), *range(tile.q_steps)]
    in_smem, in_registers = cute.make_mma_atom(p.tiled_mma.qk.op), cute.make_mma_atom(p.tiled_mma.qk_first.op)
    in_registers.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for i in cutlass.range_constexpr(num_steps):
        k = order[i]
        if cutlass.const_expr(k < tile.q_steps):
            cute.gemm(in_registers, acc_S, operands.rQ_first[None, None, k], rK[None, None, k], acc_S)
        else:
            in_smem.set(warpgroup.Field.ACCUMULATE, i > 0)
            cute.gemm(in_smem, acc_S, operands.rQ[None, None, k], rK[None, None, k], acc_S)
    warpgroup.commit_group()


@cute.jit
def compute_probs(p: Params, storage: SharedStorage, rows: SplitRows, acc_S: cute.Tensor, block: KeyBlock):
    """S of a block -> P, and the factors of O if a row has outgrown m; both to shared memory."""
    tile, softmax, thread, acc_S_mn = p.config.tile, rows.softmax, rows.thread, as_mn(acc_S)
    rows.scores.transform(p, acc_S_mn, block.key)
    rows.scores.mask(acc_S_mn, block.key, tile.tile_n, rows.common)
    if cutlass.const_expr(storage.sExists is not None):
        exists = storage.sExists.iterator + block.stage * tile.tile_n
        rows.scores.mask_missing(acc_S_mn, cute.make_tensor(exists, cute.make_layout(tile.tile_n)), Int32(0))
    # m' = max(m, rowmax S);  l = l alpha
    block_max = cute.make_fragment_like(softmax.row_max)
    softmax.block_max(acc_S_mn, block_max)
    grew = softmax.is_outgrown(block_max, softmax.threshold(block.keys_seen))
    if grew:
        softmax.raise_max(block_max)
    for half in cutlass.range_constexpr(tile.loads):
        iteration, part = tile.loads * block.iteration + half, half_of(acc_S, half, tile.loads)
        # P = exp(scale (S - m));  l += rowsum P
        softmax.exponentiate(as_mn(part))
        rP = cute.make_fragment_like(part, p.config.dtype)
        convert(part, rP)
        storage.p.wait_empty(iteration)
        store_steps(rP, Int32(storage.sP.iterator.toint()), tile.p_smem, thread, half * LOAD_KEYS // 16)
        if cutlass.const_expr(half == 0):
            if grew:
                store_row_values(storage.factors, softmax.alpha, thread)
            if thread % 32 == 0:
                storage.rescales[thread // 32] = Int32(grew)
        # Make P visible to wgmma.
        cute.arch.fence_proxy("async.shared", space="cta")
        hand_over(storage, iteration)


def half_of(acc: cute.Tensor, half: int, num: int) -> cute.Tensor:
    """A part of the columns of an accumulator of wgmma, ((2, 2, n8 tiles), 1, 1)."""
    (cols, rows, tiles), tiles_m, tiles_n = acc.layout.shape
    (_, _, tile_stride), _, _ = acc.layout.stride
    layout = cute.make_layout(((cols, rows, tiles // num), tiles_m, tiles_n), stride=acc.layout.stride)
    return cute.make_tensor(acc.iterator + half * (tiles // num) * tile_stride, layout)


@cute.jit
def store_statistics(p: Params, storage: SharedStorage, softmax: Softmax, iteration: Int32, thread: Int32):
    """Hand over m and l, in the iteration of the pipeline of P after the split's last block."""
    totals = cute.make_fragment_like(softmax.row_sum)
    for r in cutlass.range_constexpr(cute.size(totals)):
        totals[r] = softmax.row_sum[r]
        for offset in cutlass.range_constexpr(1, 3):
            totals[r] = totals[r] + cute.arch.shuffle_sync_bfly(totals[r], offset=offset)
    loads = storage.config.tile.loads
    for half in cutlass.range_constexpr(loads):
        storage.p.wait_empty(loads * iteration + half)
    store_row_values(storage.factors, softmax.row_max, thread)
    store_row_values(storage.sums, totals, thread)
    for half in cutlass.range_constexpr(loads):
        hand_over(storage, loads * iteration + half)


@cute.jit
def hand_over(storage: SharedStorage, iteration: Int32):
    """Arrive at the `full` barrier of P. Every thread does, because each has written a part."""
    cute.arch.mbarrier_arrive(storage.p.full_barrier(iteration))


@cute.jit
def store_row_values(target: cute.Tensor, values: cute.Tensor, thread: Int32):
    """Write a value for each of this thread's two rows, which are 8 apart. Four threads have the same rows."""
    if thread % THREADS_PER_ROW == 0:
        for r in cutlass.range_constexpr(2):
            target[first_row(thread) + 8 * r] = values[r]


def first_row(thread: Int32) -> Int32:
    """The first of the two rows that a thread of a warpgroup has in accumulators."""
    return thread // 32 * 16 + thread % 32 // THREADS_PER_ROW
