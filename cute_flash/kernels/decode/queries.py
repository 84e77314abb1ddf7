"""Queries: from global memory to the operand of the MMA, rotated. The tokens of all heads of a K/V head are rows."""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_flash.device.memory import fp8
from cute_flash.device.memory.kv_cache import copy_if_less
from cute_flash.device.memory.rotary import VECTOR, load_floats
from cute_flash.device.memory.smem import element_at
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduling.kv_splits import Lengths, Split
from cute_flash.kernels.decode.storage import Params, SharedStorage
from cute_flash.planning.decode_tiles import ATOM_BYTES
from cute_flash.spec.band import ceil_div
from cute_flash.spec.ds_mla import LATENT_DIM


@cute.jit
def load(p: Params, storage: SharedStorage, split: Split, sequence: Lengths, thread: Int32):
    """Start to copy the tile's queries to shared memory; rows and columns past the end are zero-filled."""
    for_vectors(p, thread, partial(load_vector, p, storage, split, sequence))
    cute.arch.cp_async_commit_group()


@cute.jit
def load_vector(p: Params, storage: SharedStorage, split: Split, sequence: Lengths, index: Int32):
    """Start to copy a vector of eight columns."""
    vectors, num_rows = p.config.tile.head_dim // VECTOR, p.num_rows(split, sequence)
    memory = Int32(storage.raw_q.iterator.toint())
    row, vector = index // vectors, index % vectors
    query = p.query_row(split, cutlass.min(row, num_rows - 1))
    source = p.mQ[query.batch, query.token, query.head, None].iterator.toint() + vector * (2 * VECTOR)
    # As an unsigned number -1 exceeds `num_rows`, so `copy_if_less` writes zeros.
    row = cutlass.select_(vector * VECTOR < p.config.static.head_dim, row, Int32(-1))
    copy_if_less(memory + index * (2 * VECTOR), source, row, num_rows)


@cute.jit
def stage(p: Params, storage: SharedStorage, split: Split, sequence: Lengths, thread: Int32):
    """Wait for the queries that `load` copied, apply rotary, and write them as the operand of the MMA."""
    if cutlass.const_expr(p.config.static.is_ds_mla):
        # Else the addresses of all elements, which are those of every split, would stay in registers.
        thread = rederived(thread)
    # The blocks that were requested after the queries may still be in flight.
    cute.arch.cp_async_wait_group(p.config.tile.stages - 1)
    cute.arch.sync_threads()
    for_vectors(p, thread, partial(stage_vector, p, storage, split, sequence))
    cute.arch.sync_threads()


@cute.jit
def stage_vector(p: Params, storage: SharedStorage, split: Split, sequence: Lengths, index: Int32):
    """Rotate a vector of eight columns, and write it as the operand of the MMA."""
    vectors = p.config.tile.head_dim // VECTOR
    row, vector = index // vectors, index % vectors
    raw, x = storage.raw_q[row, None], cute.make_rmem_tensor(VECTOR, Float32)
    load_floats(raw, vector, x)
    if cutlass.const_expr(p.rotary is not None):
        # Rows and columns past the end are zeros.
        if row < p.num_rows(split, sequence) and vector * VECTOR < p.config.static.head_dim:
            position = sequence.key_len - sequence.tokens + p.query_row(split, row).token_in_sequence
            if cutlass.const_expr(p.window_left is None and p.window_right is None):
                # Without a mask, all queries have the position after the old keys, as in flash-attn.
                position = p.splits.old_len(split.batch)
            p.rotary.load(raw, vector, position, x)
    # Rotated queries are rounded once, to the dtype of the MMA; others are exact in the dtype of q.
    rounded = cute.make_rmem_tensor(VECTOR, p.config.dtype)
    rounded.store(x.load().to(p.config.dtype))
    if cutlass.const_expr(p.config.static.is_ds_mla):
        if vector * VECTOR < LATENT_DIM:
            for j in cutlass.range_constexpr(VECTOR):
                column = fp8.query_column(vector * VECTOR + j)
                element_at(storage.sQ, p.config.tile.q_smem, row, column)[0] = rounded[j]
        else:
            rotary = cute.make_rmem_tensor(VECTOR, BFloat16)
            rotary.store(x.load().to(BFloat16))
            store_chunk(p, storage, row, vector, rotary)
    elif cutlass.const_expr(p.config.static.is_fp8):
        for j in cutlass.range_constexpr(VECTOR):
            column = fp8.query_column(vector * VECTOR + j)
            if cutlass.const_expr(p.config.static.is_latent):
                element_at(storage.sQ, p.config.tile.q_smem, row, column)[0] = rounded[j]
            else:
                storage.sQ[row, column, 0] = rounded[j]
    else:
        store_chunk(p, storage, row, vector, rounded)


def store_chunk(p: Params, storage: SharedStorage, row: Int32, vector: Int32, rounded: cute.Tensor):
    """Store eight columns of a row to the operand of the MMA."""
    # The swizzle of the tile: the 16-byte chunk c of row r is at c ^ (r mod 8).
    columns, chunk = vector // 8, (vector % 8) ^ (row % 8)
    address = Int32(storage.sQ.iterator.toint()) + (columns * p.config.tile.tile_m + row) * ATOM_BYTES + chunk * 16
    target = cute.make_ptr(rounded.element_type, address, cutlass.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(VECTOR)))


@cute.jit
def for_vectors(p: Params, thread: Int32, function: cutlass.Constexpr):
    """Call `function` with the index of each vector of eight columns that this thread has."""
    threads, num = p.config.tile.num_threads, p.config.tile.tile_m * p.config.tile.head_dim // VECTOR
    for i in cutlass.range_constexpr(ceil_div(num, threads)):
        index = i * threads + thread
        if cutlass.const_expr((i + 1) * threads <= num):
            function(index)
        elif index < num:
            function(index)
