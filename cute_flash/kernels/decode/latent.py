"""Attend for a latent cache (MLA): one row per key, whose first columns are the value.

O of 16 rows has up to 512 columns, too many for the registers of one warp. So the warps that share 16 rows divide the
keys of a block for S = Q K^T, and the value columns for O += P V:

    wait       the block has landed, and every warp is done with the last one; start to load the next block
    scores     S of the warp's keys; score features; mask; P = exp(S - m) with the m of the last block, to shared memory
    vote       barrier with a vote: if a row has outgrown m, the warps combine their row maxima, and write P again
    output     O += P V, with P of all keys and the warp's columns of V

Rows of `fp8_ds_mla` have a scale for each group of 128 columns. S is the sum of the groups' products, each multiplied
by the scale of its key, and of the rotary columns' product, which is in bf16. The columns of V of a warp are in one
group. P is written four times, multiplied by the scales of a group in fp32 and rounded once, to bf16, which has the
range of the scales. So the weights have the relative error of a bf16 cache's, 2^-9, also if q is fp16.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_flash.device.memory import fp8
from cute_flash.device.memory.ldmatrix import FragmentStore, MmaOperand, ShortOperand, swizzled
from cute_flash.device.memory.smem import part_of, tile_at
from cute_flash.device.memory.views import as_mn
from cute_flash.device.mma.row_warps import barrier_any
from cute_flash.device.mma.warp_gemm import gemm_rs
from cute_flash.device.mma.warp_grid import WarpGrid
from cute_flash.device.scheduling.kv_splits import Lengths, Split
from cute_flash.device.softmax.softmax import THREADS_PER_ROW, Softmax
from cute_flash.kernels.decode.score_rows import KeyRange, ScoreRows, common_keys, score_rows
from cute_flash.kernels.decode.storage import LatentStorage, Output, Params, SharedStorage
from cute_flash.planning.decode_tiles import ATOM_BYTES, DsMlaTile
from cute_flash.planning.tiles.common import WARP_ROWS
from cute_flash.spec.ds_mla import GROUP, LATENT_DIM, NUM_SCALES, ROTARY_DIM


@dataclass(frozen=True)
class DsMlaState:
    """The operands of a warp for the rotary columns and the scales of rows of `fp8_ds_mla`."""

    tiled_mma: cute.TiledMma  # in bf16
    rotary: ShortOperand  # the rotary columns of the warp's keys
    scales: Int32  # address of the scales of this thread's first key of S

    @staticmethod
    def of(p: Params, storage: SharedStorage, first_key: Int32, lane: Int32) -> "DsMlaState":
        """The state of a warp whose scores are those of the keys from `first_key` on."""
        tile, memory = p.config.tile, Int32(storage.sKV.iterator.toint())
        rotary = tile_at(memory + tile.rotary_offset, BFloat16, tile.rotary_smem)
        first = first_key + lane % THREADS_PER_ROW * 2
        return DsMlaState(
            tiled_mma=WarpGrid(BFloat16, 1, 1).mma(),
            rotary=ShortOperand.of(rotary, tile.rotary_smem, first_key, lane),
            scales=memory + tile.scales_offset + first * (4 * NUM_SCALES),
        )

    def key_scales(self, tile: DsMlaTile, stage: Int32, group: int) -> list[Float32]:
        """The scales of a group of 128 columns, for each element of this thread's accumulator of S."""
        address = self.scales + stage * tile.stage_bytes + 4 * group
        pointer = cute.make_ptr(Float32, address, cutlass.AddressSpace.smem, assumed_align=4)
        keys = cute.make_tensor(pointer, cute.make_layout(tile.score_keys, stride=NUM_SCALES))
        # Elements 4 n ... 4 n + 3 are the keys 8 n and 8 n + 1 of two rows.
        pairs = [(keys[8 * n], keys[8 * n + 1]) for n in range(tile.score_keys // 8)]
        return [scale for pair in pairs for scale in (*pair, *pair)]


@dataclass(frozen=True)
class WarpState:
    """The operands and accumulators of one warp."""

    warp: Int32  # among the warps that share its 16 rows
    row_tile: Int32  # its 16 rows among those of the query tile
    lane: Int32
    memory: Int32  # address of the stages
    q: MmaOperand
    k: ShortOperand | None  # the warp's keys; None: FP8
    v: MmaOperand | None  # the warp's columns; None: FP8
    p: MmaOperand  # P of all keys
    store_p: FragmentStore  # P of the warp's keys
    acc_O: cute.Tensor
    softmax: Softmax
    rows: ScoreRows
    common: KeyRange  # the keys that all rows see
    k_scale: Float32 | None  # of an FP8 cache
    shared: LatentStorage
    ds_mla: DsMlaState | None


@cute.jit
def start(p: Params, storage: SharedStorage, split: Split, sequence: Lengths, thread: Int32):
    """Start to load the first blocks of a split. All warps are done with the stages."""
    tile, loader = p.config.tile, p.block_loader(split, sequence, storage.sKV, storage.latent.sExists, thread)
    blocks = [split.begin + i * tile.block_keys for i in range(tile.stages - 1)]
    pages = [loader.look_up(key) for key in blocks]
    for i in cutlass.range_constexpr(tile.stages - 1):
        loader.load_before(split.end, blocks[i], Int32(i), pages[i])


@cute.jit
def attend(p: Params, storage: SharedStorage, split: Split, sequence: Lengths, output: Output, thread: Int32):
    """Add the keys of a split to each warp's output. `start` has started the first loads."""
    state = warp_state(p, storage, split, sequence, output, thread)
    loader, tile = p.block_loader(split, sequence, storage.sKV, storage.latent.sExists, thread), p.config.tile
    load_queries(p, state)
    stage = Int32(0)
    ahead_keys = (tile.stages - 1) * tile.block_keys
    pages = loader.look_up(split.begin + ahead_keys)
    for key in cutlass.range(split.begin, split.end, tile.block_keys, unroll=1):
        cute.arch.cp_async_wait_group(tile.stages - 2)
        # Wait until the data of all warps has landed, and all warps have read the stage that is loaded next.
        cute.arch.sync_threads()
        ahead = stage - 1 if stage > 0 else Int32(tile.stages - 1)
        loader.load_before(split.end, key + ahead_keys, ahead, pages)
        if cutlass.const_expr(pages is not None):
            pages.store(loader.look_up(key + ahead_keys + tile.block_keys).load())
        process_block(p, state, key, key - split.begin, stage)
        stage = stage + 1 if stage < tile.stages - 1 else Int32(0)
    cute.arch.cp_async_wait_group(0)


@cute.jit
def warp_state(
    p: Params, storage: SharedStorage, split: Split, sequence: Lengths, output: Output, thread: Int32
) -> WarpState:
    tile, shared, lane = p.config.tile, storage.latent, thread % 32
    warp = cute.arch.make_warp_uniform(thread // 32)
    row_tile, warp = warp // tile.warps_per_row, warp % tile.warps_per_row
    grid, first_row, columns = WarpGrid(p.config.dtype, 1, 1), row_tile * WARP_ROWS, tile.output_shape[1]
    sQ = part_of(storage.sQ, tile.q_smem, first_row, WARP_ROWS, 0, tile.head_dim)
    sP = part_of(shared.sP, tile.p_smem, first_row, WARP_ROWS, 0, tile.tile_n)
    is_fp8 = p.config.static.is_fp8
    sV = None if is_fp8 else part_of(storage.sKV, tile.kv_smem, 0, tile.tile_n, warp * columns, columns)
    first_key = warp * tile.score_keys
    # The first pair of columns of this thread in P.
    row, atom = first_row + lane // THREADS_PER_ROW, tile.p_smem.atom_cols
    operand_p = grid.a(p.tiled_mma, lane, sP, tile.p_smem)
    ds_mla = None
    if cutlass.const_expr(p.config.static.is_ds_mla):
        ds_mla = DsMlaState.of(p, storage, first_key, lane)
        # P times the scales of the group that has the warp's columns of V.
        operand_p = WarpGrid(BFloat16, 1, 1).a(ds_mla.tiled_mma, lane, sP, tile.p_smem).moved(warp * columns // GROUP)
    pair = first_key // atom * (tile.p_smem.rows * atom) + row * atom + first_key % atom + lane % THREADS_PER_ROW * 2
    identity = cute.make_identity_tensor((WARP_ROWS, tile.score_keys))
    tScS = score_fragment(tile.score_keys, p.tiled_mma.get_slice(lane).partition_C(identity))
    return WarpState(
        warp=warp,
        row_tile=row_tile,
        lane=lane,
        memory=Int32(storage.sKV.iterator.toint()),
        q=grid.a(p.tiled_mma, lane, sQ, tile.q_smem),
        k=None if is_fp8 else ShortOperand.of(storage.sKV, tile.kv_smem, first_key, lane),
        v=None if is_fp8 else grid.b(p.tiled_mma, lane, sV, tile.kv_smem, is_transposed=True),
        p=operand_p,
        store_p=FragmentStore(swizzled(Int32(shared.sP.iterator.toint()) + 2 * pair, tile.p_smem), tile.p_smem, 0),
        acc_O=output.acc_O,
        softmax=output.softmax,
        rows=score_rows(p, split, sequence, tScS, first_row),
        common=common_keys(p, split, sequence),
        k_scale=None if p.k_scale is None else p.k_scale[p.cache_head(split)],
        shared=shared,
        ds_mla=ds_mla,
    )


@cute.jit
def load_queries(p: Params, state: WarpState):
    """Load Q to registers, and write the k-steps that do not stay there to `q_tail`, as fragments."""
    tile = p.config.tile
    for k in cutlass.range_constexpr(tile.head_dim // 16):
        state.q.load(k, 0)
        if cutlass.const_expr(k >= tile.q_steps):
            words = cute.recast_tensor(state.q.fragment[None, None, k], Int32)
            if state.warp == 0:
                cute.autovec_copy(words, q_tail(p, state, k))


def q_tail(p: Params, state: WarpState, k: int) -> cute.Tensor:
    """The words of this thread's fragment of Q's k-step k."""
    words = state.shared.q_tail[None, state.lane, k - p.config.tile.q_steps, state.row_tile]
    pointer = cute.make_ptr(Int32, words.iterator.toint(), cutlass.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(4))


@cute.jit
def process_block(p: Params, state: WarpState, block_key: Int32, keys_seen: Int32, stage: Int32):
    """S = Q K^T, P = exp(S - m), O += P V for a block of keys."""
    tile, softmax = p.config.tile, state.softmax
    key = block_key + state.warp * tile.score_keys
    acc_S = scores(p, state, stage)
    if cutlass.const_expr(state.k_scale is not None):
        acc_S.store(acc_S.load() * state.k_scale)
    state.rows.transform(p, as_mn(acc_S), key)
    state.rows.mask(as_mn(acc_S), key, tile.score_keys, state.common)
    if cutlass.const_expr(state.shared.sExists is not None):
        state.rows.mask_missing(as_mn(acc_S), state.shared.sExists[stage, None], state.warp * tile.score_keys)
    block_max, threshold = cute.make_fragment_like(softmax.row_max), softmax.threshold(keys_seen)
    softmax.block_max(as_mn(acc_S), block_max)
    scores_copy, sum_before = cute.make_fragment_like(acc_S), cute.make_fragment_like(softmax.row_sum)
    scores_copy.store(acc_S.load())
    sum_before.store(softmax.row_sum.load())
    write_probs(p, state, acc_S, stage)
    if barrier_any(softmax.is_outgrown(block_max, threshold), tile.num_threads):
        combine_max(p, state, block_max)
        softmax.row_sum.store(sum_before.load())
        softmax.raise_max(block_max, as_mn(state.acc_O))
        acc_S.store(scores_copy.load())
        write_probs(p, state, acc_S, stage)
        cute.arch.sync_threads()
    for k in cutlass.range_constexpr(tile.tile_n // 16):
        state.p.load(k, 0)
    if cutlass.const_expr(p.config.static.is_fp8):
        columns = tile.output_shape[1]
        values = fp8_tile(p, state, stage)
        tiled_mma = p.tiled_mma if state.ds_mla is None else state.ds_mla.tiled_mma
        fp8.add_output(tiled_mma, state.acc_O, state.p.fragment, values, state.warp * (columns // 16))
    else:
        gemm_rs(p.tiled_mma, state.acc_O, state.p.fragment, state.v, stage)


def fp8_tile(p: Params, state: WarpState, stage: Int32) -> fp8.Fp8Tile:
    """A block of an FP8 cache in shared memory."""
    tile, static = p.config.tile, p.config.static
    return fp8.Fp8Tile(state.memory + stage * tile.stage_bytes, state.lane, tile.tile_n, static.has_fp8_cvt)


def score_fragment(num_keys: int, tScS: cute.Tensor) -> cute.Tensor:
    """The first n8 tiles of a partition in steps of 16 columns."""
    return tScS if num_keys >= 16 else cute.logical_divide(tScS, (None, None, 1))[None, None, (None, 0)]


@cute.jit
def scores(p: Params, state: WarpState, stage: Int32) -> cute.Tensor:
    """S = Q K^T for the warp's keys."""
    if cutlass.const_expr(not p.config.static.is_ds_mla):
        return products(p, state, stage, 0, p.config.tile.head_dim // 16)
    acc_S = rotary_products(p, state, stage)
    for group in cutlass.range_constexpr(NUM_SCALES):
        acc_group = products(p, state, stage, group * GROUP // 16, (group + 1) * GROUP // 16)
        key_scales = state.ds_mla.key_scales(p.config.tile, stage, group)
        for i in cutlass.range_constexpr(cute.size(acc_S)):
            acc_S[i] = cute.math.fma(acc_group[i], key_scales[i], acc_S[i])
    return acc_S


@cute.jit
def rotary_products(p: Params, state: WarpState, stage: Int32) -> cute.Tensor:
    """The product of the rotary columns of Q and of rows of `fp8_ds_mla`, for the warp's keys."""
    tile, tiles = p.config.tile, p.config.tile.score_keys // 8
    sums = [cute.make_rmem_tensor(cute.make_layout(((2, 2), 1, 1)), Float32) for _ in range(tiles)]
    for n in cutlass.range_constexpr(tiles):
        sums[n].fill(0.0)
    fragment = cute.make_rmem_tensor(cute.make_layout(((2, 2), 1)), BFloat16)
    registers = cute.recast_tensor(fragment, Int32)
    rotary = replace(state.ds_mla.rotary, address=state.ds_mla.rotary.address + stage * tile.stage_bytes)
    for first in cutlass.range_constexpr(0, ROTARY_DIM // 16, 2):
        words = [rotary.load(first, 8 * n, Int32(0)) for n in range(tiles)]
        for i in cutlass.range_constexpr(2):
            k = LATENT_DIM // 16 + first + i
            q = state.q.fragment[None, None, k]
            if cutlass.const_expr(k >= tile.q_steps):
                cute.autovec_copy(q_tail(p, state, k), cute.recast_tensor(q, Int32))
            for n in cutlass.range_constexpr(tiles):
                registers[0], registers[1] = words[n][2 * i], words[n][2 * i + 1]
                cute.gemm(state.ds_mla.tiled_mma, sums[n], cute.recast_tensor(q, BFloat16), fragment, sums[n])
    acc_S = cute.make_rmem_tensor(cute.make_layout(((2, 2), 1, tiles)), Float32)
    for n in cutlass.range_constexpr(tiles):
        for i in cutlass.range_constexpr(4):
            acc_S[4 * n + i] = sums[n][i]
    return acc_S


@cute.jit
def products(
    p: Params, state: WarpState, stage: Int32, first_step: cutlass.Constexpr, end_step: cutlass.Constexpr
) -> cute.Tensor:
    """The product of Q and the warp's keys over the k-steps from `first_step` to `end_step`."""
    tile, tiles = p.config.tile, p.config.tile.score_keys // 8
    # Even and odd k-steps have their own sums, which halves the chain of dependent MMAs.
    layout = cute.make_layout(((2, 2), 1, 1))
    sums = [[cute.make_rmem_tensor(layout, Float32) for _ in range(2)] for _ in range(tiles)]
    fragment = cute.make_rmem_tensor(cute.make_layout(((2, 2), 1)), p.config.dtype)
    registers = cute.recast_tensor(fragment, Int32)
    words = [cute.make_rmem_tensor(4, Int32) for _ in range(tiles)]
    # Four words of a thread are the operands of two k-steps in 16 bits, or of four in 8 bits.
    at_once = 4 if p.config.static.is_fp8 else 2
    for n in cutlass.range_constexpr(tiles):
        for parity in cutlass.range_constexpr(2):
            sums[n][parity].fill(0.0)
    for first in cutlass.range_constexpr(first_step, end_step, at_once):
        for n in cutlass.range_constexpr(tiles):
            load_keys(p, state, first, n, stage, words[n])
        for i in cutlass.range_constexpr(at_once):
            k = first + i
            q = state.q.fragment[None, None, k]
            if cutlass.const_expr(k >= tile.q_steps):
                cute.autovec_copy(q_tail(p, state, k), cute.recast_tensor(q, Int32))
            for n in cutlass.range_constexpr(tiles):
                if cutlass.const_expr(p.config.static.is_fp8):
                    registers[0], registers[1] = fp8.widened(words[n][i], p.config.static.has_fp8_cvt)
                else:
                    registers[0], registers[1] = words[n][2 * i], words[n][2 * i + 1]
                cute.gemm(p.tiled_mma, sums[n][k % 2], q, fragment, sums[n][k % 2])
    acc_S = cute.make_rmem_tensor(cute.make_layout(((2, 2), 1, tiles)), Float32)
    for n in cutlass.range_constexpr(tiles):
        for i in cutlass.range_constexpr(4):
            acc_S[4 * n + i] = sums[n][0][i] + sums[n][1][i]
    return acc_S


@cute.jit
def load_keys(
    p: Params, state: WarpState, step: cutlass.Constexpr, n: cutlass.Constexpr, stage: Int32, words: cute.Tensor
):
    """Load four words of the operand K, from k-step `step` on, for the warp's n-th 8 keys."""
    if cutlass.const_expr(p.config.static.is_fp8):
        keys, row = fp8_tile(p, state, stage), state.warp * p.config.tile.score_keys + 8 * n + state.lane // 4
        fp8.load_words(keys.address + fp8.run_offset(keys, step // 4) + row * ATOM_BYTES, words)
    else:
        loaded = state.k.load(step, 8 * n, stage)
        for i in cutlass.range_constexpr(4):
            words[i] = loaded[i]


@cute.jit
def write_probs(p: Params, state: WarpState, acc_S: cute.Tensor, stage: Int32):
    """P = exp(S - m) to shared memory, and l += rowsum P. With `fp8_ds_mla`, P times the scales of each group."""
    state.softmax.exponentiate(as_mn(acc_S))
    rP = cute.make_fragment_like(acc_S, p.config.p_dtype)
    if cutlass.const_expr(p.config.static.is_ds_mla):
        scaled = cute.make_fragment_like(acc_S)
        for group in cutlass.range_constexpr(NUM_SCALES):
            key_scales = state.ds_mla.key_scales(p.config.tile, stage, group)
            for i in cutlass.range_constexpr(cute.size(acc_S)):
                scaled[i] = acc_S[i] * key_scales[i]
            rP.store(scaled.load().to(p.config.p_dtype))
            state.store_p.shifted(group).store(rP)
    else:
        rP.store(acc_S.load().to(p.config.p_dtype))
        state.store_p.store(rP)


@cute.jit
def combine_max(p: Params, state: WarpState, block_max: cute.Tensor):
    """Combine the row maxima of the warps that share rows. All threads of the CTA call it."""
    row_max, tile = state.shared.row_max, p.config.tile
    for r in cutlass.range_constexpr(2):
        row = state.row_tile * WARP_ROWS + state.lane // THREADS_PER_ROW + 8 * r
        for offset in cutlass.range_constexpr(1, 3):
            block_max[r] = cute.arch.fmax(block_max[r], cute.arch.shuffle_sync_bfly(block_max[r], offset=offset))
        if state.lane % THREADS_PER_ROW == 0:
            row_max[state.warp, row] = block_max[r]
    cute.arch.sync_threads()
    for r in cutlass.range_constexpr(2):
        row = state.row_tile * WARP_ROWS + state.lane // THREADS_PER_ROW + 8 * r
        for w in cutlass.range_constexpr(tile.warps_per_row):
            block_max[r] = cute.arch.fmax(block_max[r], row_max[w, row])
