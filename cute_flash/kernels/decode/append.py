"""Append: write the new keys, rotated, and the new values of a split to the cache."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_flash.device.memory import fp8
from cute_flash.device.memory.rotary import VECTOR, load_floats
from cute_flash.device.scheduling.kv_splits import Lengths, Split
from cute_flash.kernels.decode.storage import Params, Team


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
def write_vector(
    config: cutlass.Constexpr, address: Int64, vector: Int32, x: cute.Tensor, scale: cute.Tensor | None, head_kv: Int32
):
    """Write eight columns of the row at `address` of the cache."""
    if cutlass.const_expr(config.static.is_fp8):
        words = cute.make_rmem_tensor(2, Int32)
        words.fill(0)
        for i in cutlass.range_constexpr(VECTOR):
            words[i // 4] = words[i // 4] | (fp8.rounded(x[i] / scale[head_kv]) << (8 * (i % 4)))
        target = cute.make_ptr(Int32, address + vector * VECTOR, cutlass.AddressSpace.gmem, assumed_align=8)
        cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(2)))
    else:
        rounded = cute.make_rmem_tensor(VECTOR, config.dtype)
        rounded.store(x.load().to(config.dtype))
        where = address + vector * (2 * VECTOR)
        target = cute.make_ptr(config.dtype, where, cutlass.AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(VECTOR)))
