"""Attend: the main loop of a warp over its keys of a split.

Each warp takes `tile_n` keys of every block, with its own pipeline and softmax statistics. The loop needs no CTA
barrier, because a warp reads only keys that it has copied itself.

Head dims above 256 have teams of warps instead. The warps of a team have the same keys, and divide the columns of Q, K,
V and O. They add up the products of their columns in shared memory (`column_scores.py`), so all warps of a team compute
the same S, P and statistics.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_flash.device.memory import fp8
from cute_flash.device.memory.kv_cache import WarpLoader
from cute_flash.device.memory.ldmatrix import MmaOperand
from cute_flash.device.memory.smem import part_of
from cute_flash.device.memory.views import as_mn, as_operand_a
from cute_flash.device.mma.warp_gemm import gemm, gemm_rs
from cute_flash.device.mma.warp_grid import WarpGrid
from cute_flash.device.scheduling.kv_splits import Lengths, Split
from cute_flash.device.softmax.softmax import Softmax
from cute_flash.kernels.decode.column_scores import ColumnScores
from cute_flash.kernels.decode.score_rows import KeyRange, ScoreRows, common_keys, score_rows
from cute_flash.kernels.decode.storage import Output, Params, SharedStorage


@dataclass(frozen=True)
class WarpState:
    """The operands and accumulators of one warp."""

    warp: Int32
    lane: Int32
    memory: Int32  # address of the stages of all warps
    q: MmaOperand
    k: MmaOperand | None  # None: FP8
    v: MmaOperand | None
    acc_O: cute.Tensor
    softmax: Softmax
    rows: ScoreRows
    common: KeyRange  # the keys that all rows see
    k_scale: Float32 | None  # of an FP8 cache
    column_scores: ColumnScores | None  # None: the warp has all columns


@cute.jit
def start(p: Params, storage: SharedStorage, split: Split, sequence: Lengths, thread: Int32):
    """Start to load the first blocks of a split."""
    tile, loader = p.config.tile, warp_loader(p, storage, split, sequence, thread)
    # Wait until all lanes have read the last blocks of the previous split.
    cute.arch.sync_warp()
    blocks = [split.begin + i * tile.block_keys for i in range(tile.stages - 1)]
    pages = [loader.look_up(key) for key in blocks]
    for i in cutlass.range_constexpr(tile.stages - 1):
        loader.load_before(split.end, blocks[i], Int32(i), pages[i])


@cute.jit
def attend(p: Params, storage: SharedStorage, split: Split, sequence: Lengths, output: Output, thread: Int32):
    """Add the keys of a split to each warp's output. `start` has started the first loads."""
    state = warp_state(p, storage, split, sequence, output, thread)
    loader, tile, q_steps = warp_loader(p, storage, split, sequence, thread), p.config.tile, p.config.tile.q_steps
    for k in cutlass.range_constexpr(q_steps):
        state.q.load(k, 0)
    stage = Int32(0)
    ahead_keys = (tile.stages - 1) * tile.block_keys
    pages = loader.look_up(split.begin + ahead_keys)
    for key in cutlass.range(split.begin, split.end, tile.block_keys, unroll=1):
        cute.arch.cp_async_wait_group(tile.stages - 2)
        # Wait until the data of all lanes has landed, and all lanes have read the stage that is loaded next.
        cute.arch.sync_warp()
        ahead = stage - 1 if stage > 0 else Int32(tile.stages - 1)
        loader.load_before(split.end, key + ahead_keys, ahead, pages)
        if cutlass.const_expr(pages is not None):
            pages.store(loader.look_up(key + ahead_keys + tile.block_keys).load())
        process_block(p, state, key + loader.key_offset, key - split.begin, stage)
        stage = stage + 1 if stage < tile.stages - 1 else Int32(0)
    cute.arch.cp_async_wait_group(0)


def warp_loader(p: Params, storage: SharedStorage, split: Split, sequence: Lengths, thread: Int32) -> WarpLoader:
    tile, warp = p.config.tile, cute.arch.make_warp_uniform(thread // 32)
    last_key = cutlass.min(sequence.key_len, split.end) - 1
    caches = p.cache_heads(split)
    stages = Int32(storage.sKV.iterator.toint()) + warp * (tile.stages * 2 * tile.kv_smem.bytes)
    first_byte = None
    if cutlass.const_expr(tile.column_warps > 1):
        warp, column_warp = warp // tile.column_warps, warp % tile.column_warps
        first_byte = column_warp * (tile.warp_columns * tile.element_bytes)
    return WarpLoader(
        caches, tile, thread % 32, sequence.first_key, last_key, warp * tile.tile_n, stages, first_byte=first_byte
    )


@cute.jit
def warp_state(
    p: Params, storage: SharedStorage, split: Split, sequence: Lengths, output: Output, thread: Int32
) -> WarpState:
    tile, is_fp8 = p.config.tile, p.config.static.is_fp8
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    grid = WarpGrid(p.config.dtype, 1, 1)
    thr_mma = p.tiled_mma.get_slice(lane)
    tScS = thr_mma.partition_C(cute.make_identity_tensor((tile.tile_m, tile.tile_n)))
    rows = score_rows(p, split, sequence, tScS, Int32(0))
    sQ, column_scores = storage.sQ, None
    if cutlass.const_expr(tile.column_warps > 1):
        sQ = part_of(sQ, tile.q_smem, 0, tile.tile_m, warp % tile.column_warps * tile.warp_columns, tile.warp_columns)
        column_scores = ColumnScores.of(tile, storage.raw_q, warp, lane)
    return WarpState(
        warp=warp,
        lane=lane,
        memory=Int32(storage.sKV.iterator.toint()),
        q=grid.a(p.tiled_mma, lane, sQ, tile.q_smem),
        k=None if is_fp8 else grid.b(p.tiled_mma, lane, storage.sKV, tile.kv_smem),
        v=None if is_fp8 else grid.b(p.tiled_mma, lane, storage.sKV, tile.kv_smem, is_transposed=True),
        acc_O=output.acc_O,
        softmax=output.softmax,
        rows=rows,
        common=common_keys(p, split, sequence),
        k_scale=p.k_scale[split.head_kv] if is_fp8 else None,
        column_scores=column_scores,
    )


@cute.jit
def process_block(p: Params, state: WarpState, key: Int32, keys_seen: Int32, stage: Int32):
    """S = Q K^T, P = exp(S - m), O += P V for the warp's keys from `key` on."""
    config, tile = p.config, p.config.tile
    acc_S = cute.make_rmem_tensor(p.tiled_mma.get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n)), Float32)
    acc_S.fill(0.0)
    index = (state.warp * tile.stages + stage) * 2
    if cutlass.const_expr(config.static.is_fp8):
        fp8.add_scores(p.tiled_mma, acc_S, state.q, fp8_tile(p, state, index), tile.warp_columns // 16, tile.q_steps)
        acc_S.store(acc_S.load() * state.k_scale)
    else:
        gemm(p.tiled_mma, acc_S, state.q, state.k, index, tile.q_steps)
    if cutlass.const_expr(state.column_scores is not None):
        state.column_scores.add_up(acc_S, keys_seen // tile.block_keys)
    state.rows.transform(p, as_mn(acc_S), key)
    state.rows.mask(as_mn(acc_S), key, tile.tile_n, state.common)
    state.softmax.step(as_mn(acc_S), as_mn(state.acc_O), keys_seen)
    rP = cute.make_fragment_like(acc_S, config.dtype)
    rP.store(acc_S.load().to(config.dtype))
    if cutlass.const_expr(config.static.is_fp8):
        fp8.add_output(p.tiled_mma, state.acc_O, as_operand_a(rP), fp8_tile(p, state, index + 1))
    else:
        gemm_rs(p.tiled_mma, state.acc_O, as_operand_a(rP), state.v, index + 1)


def fp8_tile(p: Params, state: WarpState, index: Int32) -> fp8.Fp8Tile:
    """The `index`-th tile of FP8 keys or values in shared memory."""
    tile, static = p.config.tile, p.config.static
    return fp8.Fp8Tile(state.memory + index * tile.kv_smem.bytes, state.lane, tile.tile_n, static.has_fp8_cvt)
