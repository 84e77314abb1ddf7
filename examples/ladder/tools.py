"""Steps that several rungs share: tiles by cp.async, operands by ldmatrix, a product of two operands.

Rungs from 2 on use them, so that each file has only what its idea needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp

from cute_flash.device.memory.views import as_mn, as_operand_a

VECTOR = 8  # bf16 elements in 16 bytes, the widest copy of one thread


def named(kernel: Any, name: str) -> Any:
    """The kernel under a name that profilers show. ptxas compiles a kernel differently if its name has "cutlass"."""
    kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    return kernel


def tensor_core_mma(num_warps: int) -> cute.TiledMma:
    """mma.sync of 16x8x16. Each warp has its own 16 rows, and reads all columns."""
    op = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
    # 16 columns, two tiles of mma.sync, so that one ldmatrix.x4 loads operand B of both.
    return cute.make_tiled_mma(op, (num_warps, 1, 1), permutation_mnk=(16 * num_warps, 16, 16))


def row_copy(num_threads: int, head_dim: int) -> cute.TiledCopy:
    """cp.async of rows in 16-byte vectors: neighbouring threads copy neighbouring vectors of a row."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), BFloat16, num_bits_per_copy=128)
    per_row = head_dim // VECTOR
    threads = cute.make_layout((num_threads // per_row, per_row), stride=(per_row, 1))
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, VECTOR)))


@cute.jit
def load_rows(copy: cute.TiledCopy, thread: Int32, gX: cute.Tensor, sX: cute.Tensor, rows_left: Int32):
    """Start to copy the tile gX to sX. Rows from `rows_left` on are past the end, and become zeros.

    The first mode of `source` is inside a 16-byte vector, the others number the vectors of this thread. A vector has
    one predicate; cp.async writes zeros where it is false.
    """
    thr_copy = copy.get_slice(thread)
    source, target = thr_copy.partition_S(gX), thr_copy.partition_D(sX)
    position = thr_copy.partition_S(cute.make_identity_tensor(gX.shape))
    rows, cols = cute.size(source, mode=[1]), cute.size(source, mode=[2])
    exists = cute.make_rmem_tensor((source.shape[0][1], rows, cols), Boolean)
    for i in cutlass.range_constexpr(rows):
        for j in cutlass.range_constexpr(cols):
            exists[0, i, j] = position[(0, 0), i, j][0] < rows_left
    cute.copy(copy, source, target, pred=exists)


@cute.jit
def load_statistics(thread: Int32, gX: cute.Tensor, sX: cute.Tensor, rows_left: Int32):
    """Start to copy a number of each row, such as the LSE. Numbers of rows past the end become zeros."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
    exists, one = cute.make_rmem_tensor(1, Boolean), cute.make_layout(1)
    exists[0] = thread < rows_left
    if thread < cute.size(sX):
        source, target = (cute.make_tensor(x.iterator + thread, one) for x in (gX, sX))
        cute.copy(atom, source, target, pred=exists)


def row_blocks(head: Int32, rows: int, *tensors: cute.Tensor) -> tuple[cute.Tensor, ...]:
    """A head of each tensor in blocks of rows: (rows, columns, block), or (rows, block) of a statistic."""
    blocks = []
    for mX in tensors:
        cols = mX.shape[2:]
        gX = mX[(head, *[None] * (1 + len(cols)))]
        blocks.append(cute.local_tile(gX, (rows, *cols), (None, *[0] * len(cols))))
    return tuple(blocks)


@cute.jit
def load_block(copy: cute.TiledCopy, thread: Int32, sources: tuple, targets: tuple, block: Int32, seqlen: Int32):
    """Start to copy one of the `row_blocks` of each source."""
    for gX, sX in zip(sources, targets, strict=True):
        rows_left = seqlen - block * gX.shape[0]
        if cutlass.const_expr(cute.rank(gX) == 2):
            load_statistics(thread, gX[None, block], sX, rows_left)
        else:
            load_rows(copy, thread, gX[None, None, block], sX, rows_left)


def in_stage(tiles: tuple[cute.Tensor, ...], stage: Int32) -> tuple[cute.Tensor, ...]:
    """One stage of each tile; the stage is the last mode."""
    return tuple(sX[(*[None] * (cute.rank(sX) - 1), stage)] for sX in tiles)


def broadcast(sX: cute.Tensor, cols: int) -> cute.Tensor:
    """A number of each row as a tile (rows, columns): all columns of a row are the same element, by a stride of 0.

    Partitioned like an accumulator, it gives each thread the LSE, or delta, of each of its scores.
    """
    return cute.make_tensor(sX.iterator, cute.make_layout((cute.size(sX), cols), stride=(1, 0)))


class Operand(NamedTuple):
    """An operand of mma.sync: its tile in shared memory, and the registers that ldmatrix fills."""

    copy: cute.TiledCopy
    source: cute.Tensor  # this thread's part of the tile, in the order of ldmatrix
    fragment: cute.Tensor  # the registers in the order of mma.sync: (registers, tiles, k)
    view: cute.Tensor  # the same registers in the order of ldmatrix


def operand_a(mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, is_transposed: bool = False) -> Operand:
    """Operand A: rows of the product are rows of sX, or columns of sX if `is_transposed`."""
    copy = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(is_transposed, 4), BFloat16), mma)
    sX = transposed(sX) if is_transposed else sX
    fragment = mma.get_slice(thread).make_fragment_A(mma.get_slice(thread).partition_A(_one_tile(sX)))
    return _operand(copy, thread, sX, fragment)


def operand_b(mma: cute.TiledMma, thread: Int32, sX: cute.Tensor, is_transposed: bool = False) -> Operand:
    """Operand B: columns of the product are rows of sX, or columns of sX if `is_transposed`."""
    copy = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(is_transposed, 4), BFloat16), mma)
    sX = transposed(sX) if is_transposed else sX
    fragment = mma.get_slice(thread).make_fragment_B(mma.get_slice(thread).partition_B(_one_tile(sX)))
    return _operand(copy, thread, sX, fragment)


def _operand(copy: cute.TiledCopy, thread: Int32, sX: cute.Tensor, fragment: cute.Tensor) -> Operand:
    thr_copy = copy.get_slice(thread)
    return Operand(copy, thr_copy.partition_S(sX), fragment, thr_copy.retile(fragment))


def at_stage(operand: Operand, stage: Int32) -> Operand:
    """The operand in one stage of its tiles (rows, columns, stage)."""
    return operand._replace(source=operand.source[None, None, None, stage])


def transposed(sX: cute.Tensor) -> cute.Tensor:
    """The same tile, or stages of it, with rows and columns exchanged; no element moves."""
    return cute.make_tensor(sX.iterator, cute.select(sX.layout, mode=[1, 0, *range(2, cute.rank(sX))]))


def _one_tile(sX: cute.Tensor) -> cute.Tensor:
    return sX if cute.rank(sX) == 2 else sX[None, None, 0]


@cute.jit
def load_fragment(operand: Operand, k: cutlass.Constexpr):
    """ldmatrix of one k-step of an operand."""
    cute.copy(operand.copy, operand.source[None, None, k], operand.view[None, None, k])


@cute.jit
def gemm(mma: cute.TiledMma, acc: cute.Tensor, a: Operand, b: Operand, a_is_loaded: cutlass.Constexpr = False):
    """acc += A B, with both operands in shared memory, or A in its fragment."""
    for k in cutlass.range_constexpr(cute.size(a.fragment, mode=[2])):
        if cutlass.const_expr(not a_is_loaded):
            load_fragment(a, k)
        load_fragment(b, k)
        cute.gemm(mma, acc, a.fragment[None, None, k], b.fragment[None, None, k], acc)


@cute.jit
def gemm_rs(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: Operand):
    """acc += A B, with the fragment of A in registers and B in shared memory."""
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        load_fragment(b, k)
        cute.gemm(mma, acc, a[None, None, k], b.fragment[None, None, k], acc)


def zeros(mma: cute.TiledMma, rows: int, cols: int) -> cute.Tensor:
    """An accumulator of zeros."""
    acc = cute.make_rmem_tensor(mma.partition_shape_C((rows, cols)), Float32)
    acc.fill(0.0)
    return acc


@cute.jit
def apply_mask(acc_S: cute.Tensor, position: cute.Tensor, seqlen: Int32, is_causal: cutlass.Constexpr):
    """Scores of hidden keys become -inf. `position` is the (query, key) of each score."""
    for i in cutlass.range_constexpr(cute.size(acc_S)):
        row, key = position[i]
        is_hidden = key >= seqlen
        if cutlass.const_expr(is_causal):
            is_hidden = is_hidden or key > row
        acc_S[i] = cutlass.select_(is_hidden, -Float32.inf, acc_S[i])


@cute.jit
def bf16_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator in bf16 as operand A of the next product. No thread needs the registers of another."""
    result = cute.make_fragment_like(acc, BFloat16)
    result.store(acc.load().to(BFloat16))
    return as_operand_a(result)


@cute.jit
def store_tile(mma: cute.TiledMma, thread: Int32, acc: cute.Tensor, sX: cute.Tensor):
    """Store an accumulator to shared memory in bf16."""
    result = cute.make_fragment_like(acc, BFloat16)
    result.store(acc.load().to(BFloat16))
    cute.autovec_copy(result, mma.get_slice(thread).partition_C(sX))


@cute.jit
def store_block(mma: cute.TiledMma, thread: Int32, acc: cute.Tensor, gX: cute.Tensor, block: Int32, seqlen: Int32):
    """Store an accumulator to one of the `row_blocks` gX, in its dtype."""
    result = cute.make_fragment_like(acc, gX.element_type)
    result.store(acc.load().to(gX.element_type))
    source, target, position = _rows(mma, thread, result, gX[None, None, block])
    for r in cutlass.range_constexpr(cute.size(source, mode=[0])):
        if block * gX.shape[0] + position[r, 0][0] < seqlen:
            cute.autovec_copy(source[r, None], target[r, None])


@cute.jit
def add_block(mma: cute.TiledMma, thread: Int32, acc: cute.Tensor, gX: cute.Tensor, block: Int32, seqlen: Int32):
    """Add an accumulator to one of the fp32 `row_blocks` gX with atomics."""
    source, target, position = _rows(mma, thread, acc, gX[None, None, block])
    for r in cutlass.range_constexpr(cute.size(source, mode=[0])):
        if block * gX.shape[0] + position[r, 0][0] < seqlen:
            for c in cutlass.range_constexpr(cute.size(source, mode=[1])):
                address = target.iterator + target.layout((r, c))
                cute.arch.atomic_add(address, source[r, c], sem="relaxed", scope="gpu")


def _rows(mma: cute.TiledMma, thread: Int32, fragment: cute.Tensor, gX: cute.Tensor) -> tuple[cute.Tensor, ...]:
    """A fragment of an accumulator, this thread's part of gX, and the positions in gX, all as (rows, columns)."""
    thr_mma = mma.get_slice(thread)
    target, position = (thr_mma.partition_C(x) for x in (gX, cute.make_identity_tensor(gX.shape)))
    return as_mn(fragment), as_mn(target), as_mn(position)


@cute.jit
def row_max_of(value: Float32) -> Float32:
    """The maximum over the four threads that share a row of an accumulator."""
    return cute.arch.warp_reduction_max(value, threads_in_group=4)


@cute.jit
def row_sum_of(value: Float32) -> Float32:
    """The sum over the four threads that share a row of an accumulator."""
    return cute.arch.warp_reduction_sum(value, threads_in_group=4)
