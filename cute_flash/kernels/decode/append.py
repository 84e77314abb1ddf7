"""Append: write the new keys, rotated, and the new values of a split to the cache."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cute_flash.device.memory import fp8
from cute_flash.device.memory.kv_cache import CacheHead
from cute_flash.device.memory.rotary import VECTOR, load_floats
from cute_flash.device.scheduling.kv_splits import Lengths, Split
from cute_flash.kernels.decode.storage import Params, Team
from cute_flash.spec.ds_mla import GROUP, HEAD_DIM, LATENT_DIM, NUM_SCALES, ROTARY_BYTE, SCALES_BYTE

# Threads that quantize the 128 columns of a scale together.
PART_THREADS = GROUP // VECTOR
# The least scale of `fp8_ds_mla`: the smallest normal fp32 number.
SMALLEST_SCALE = 2.0**-126


@cute.jit
def append(p: Params, team: Team, split: Split, sequence: Lengths, thread: Int32):
    """Write the new keys and values of the split's blocks to the cache.

    CTAs with other query rows of the same K/V head write the same values, so they need no synchronization.
    """
    tile, static = p.config.tile, p.config.static
    old_len = p.splits.old_len(split.batch)
    begin, end = cutlass.max(old_len, split.begin), cutlass.min(sequence.key_len, split.end)
    first_token = Int32(0)
    batch = split.batch
    if cutlass.const_expr(static.ragged):
        first_token, batch = p.splits.first_token(split.batch), Int32(0)
    keys, values = p.cache_heads(split)
    head = p.cache_head(split)
    if cutlass.const_expr(static.is_ds_mla):
        rows = p.k_new[batch, None, head, None]
        append_ds_mla(keys, rows, team, begin, end - begin, first_token - old_len, thread)
        team.sync()
        return
    vectors = tile.head_dim // VECTOR
    x = cute.make_rmem_tensor(VECTOR, Float32)
    for index in cutlass.range(thread, cutlass.max(end - begin, 0) * vectors, team.num_threads, unroll=1):
        key, vector = begin + index // vectors, index % vectors
        token = first_token + key - old_len
        if vector * VECTOR < static.head_dim:
            row = p.k_new[batch, token, head, None]
            if cutlass.const_expr(p.rotary is None):
                load_floats(row, vector, x)
            else:
                p.rotary.load(row, vector, key, x)
            write_vector(p.config, keys.address(key), vector, x, p.k_scale, head)
        if cutlass.const_expr(values is not None):
            if vector * VECTOR < static.width_v:
                load_floats(p.v_new[batch, token, head, None], vector, x)
                write_vector(p.config, values.address(key), vector, x, p.v_scale, head)
    team.sync()


@cute.jit
def append_ds_mla(
    keys: CacheHead, rows: cute.Tensor, team: Team, begin: Int32, num_keys: Int32, first: Int32, thread: Int32
):
    """Quantize and write the keys from `begin` on as rows of `fp8_ds_mla`, as `reference.ds_mla` does.

    16 threads write the 128 columns of a scale, or the rotary columns. `rows`: the new keys (token, D); key j has the
    index first + j.
    """
    parts = num_keys * (NUM_SCALES + 1)
    x = cute.make_rmem_tensor(VECTOR, Float32)
    # All lanes of a warp take part in the shuffles; those past the end repeat the last part.
    for index in cutlass.range(thread, (parts + 1) // 2 * 32, team.num_threads, unroll=1):
        part = cutlass.min(index // PART_THREADS, parts - 1)
        key, group = begin + part // (NUM_SCALES + 1), part % (NUM_SCALES + 1)
        # Half of the threads would exceed the rotary columns; they repeat the last vector.
        vector = cutlass.min(group * PART_THREADS + index % PART_THREADS, HEAD_DIM // VECTOR - 1)
        load_floats(rows[first + key, None], vector, x)
        largest = Float32(0.0)
        for i in cutlass.range_constexpr(VECTOR):
            largest = cute.arch.fmax(largest, cute.math.absf(x[i]))
        for step in cutlass.range_constexpr(4):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << step))
        address = keys.address(key)
        if group < NUM_SCALES:
            scale = cute.arch.fmax(largest / Float32(fp8.LARGEST), Float32(SMALLEST_SCALE))
            write_fp8(address + vector * VECTOR, x, scale)
            if index % PART_THREADS == 0:
                place = address + SCALES_BYTE + group * 4
                target = cute.make_ptr(Float32, place, cutlass.AddressSpace.gmem, assumed_align=4)
                cute.make_tensor(target, cute.make_layout(1))[0] = scale
        else:
            write_rounded(address + (ROTARY_BYTE - 2 * LATENT_DIM) + vector * (2 * VECTOR), x, BFloat16)


@cute.jit
def write_vector(
    config: cutlass.Constexpr, address: Int64, vector: Int32, x: cute.Tensor, scale: cute.Tensor | None, head_kv: Int32
):
    """Write eight columns of the row at `address` of the cache."""
    if cutlass.const_expr(config.static.is_fp8):
        write_fp8(address + vector * VECTOR, x, scale[head_kv])
    else:
        write_rounded(address + vector * (2 * VECTOR), x, config.dtype)


@cute.jit
def write_fp8(address: Int64, x: cute.Tensor, scale: Float32):
    """Write eight numbers divided by a scale as FP8."""
    words = cute.make_rmem_tensor(2, Int32)
    words.fill(0)
    for i in cutlass.range_constexpr(VECTOR):
        words[i // 4] = words[i // 4] | (fp8.rounded(x[i] / scale) << (8 * (i % 4)))
    target = cute.make_ptr(Int32, address, cutlass.AddressSpace.gmem, assumed_align=8)
    cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(2)))


@cute.jit
def write_rounded(address: Int64, x: cute.Tensor, dtype: cutlass.Constexpr):
    """Write eight numbers in a 16-bit dtype."""
    rounded = cute.make_rmem_tensor(VECTOR, dtype)
    rounded.store(x.load().to(dtype))
    target = cute.make_ptr(dtype, address, cutlass.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(VECTOR)))
