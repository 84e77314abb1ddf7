"""Steps that several rungs share: tiles by cp.async, operands by ldmatrix, a product of two operands.

Rungs from 2 on use them, so that each file has only what its idea needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp

VECTOR = 8  # bf16 elements in 16 bytes, the widest copy of one thread


def named(kernel: Any, name: str) -> Any:
    """The kernel under a name that profilers show. ptxas compiles a kernel differently if its name has "cutlass"."""
    kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    return kernel


def tensor_core_mma(num_warps: int) -> cute.TiledMma:
    """mma.sync of 16x8x16. Each warp has its own 16 rows, and reads all columns."""
    op = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
    return cute.make_tiled_mma(op, (num_warps, 1, 1), permutation_mnk=(16 * num_warps, 16, 16))


def row_copy(num_threads: int, head_dim: int) -> cute.TiledCopy:
    """cp.async of rows in 16-byte vectors: neighbouring threads copy neighbouring vectors of a row."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), BFloat16, num_bits_per_copy=128)
    per_row = head_dim // VECTOR
    threads = cute.make_layout((num_threads // per_row, per_row), stride=(per_row, 1))
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, VECTOR)))


@cute.jit
def load_rows(copy: cute.TiledCopy, thread: Int32, gX: cute.Tensor, sX: cute.Tensor, rows_left: Int32):
    """Start to copy the tile gX to sX. Rows from `rows_left` on are past the end, and become zeros."""
    thr_copy = copy.get_slice(thread)
    source, target = thr_copy.partition_S(gX), thr_copy.partition_D(sX)
    position = thr_copy.partition_S(cute.make_identity_tensor(gX.shape))
    rows, cols = cute.size(source, mode=[1]), cute.size(source, mode=[2])
    exists = cute.make_rmem_tensor((source.shape[0][1], rows, cols), Boolean)
    for i in cutlass.range_constexpr(rows):
        for j in cutlass.range_constexpr(cols):
            exists[0, i, j] = position[(0, 0), i, j][0] < rows_left
    cute.copy(copy, source, target, pred=exists)


class Operand(NamedTuple):
    """An operand of mma.sync: its tile in shared memory, and the registers that ldmatrix fills."""

    copy: cute.TiledCopy
    source: cute.Tensor  # this thread's part of the tile, in the order of ldmatrix
    fragment: cute.Tensor  # the registers in the order of mma.sync: (registers, tiles, k)
    view: cute.Tensor  # the same registers in the order of ldmatrix


def operand_a(mma: cute.TiledMma, thread: Int32, sX: cute.Tensor) -> Operand:
    """Operand A: rows of the product are rows of sX."""
    copy = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16), mma)
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
def gemm(mma: cute.TiledMma, acc: cute.Tensor, a: Operand, b: Operand):
    """acc += A B, with both operands in shared memory."""
    for k in cutlass.range_constexpr(cute.size(a.fragment, mode=[2])):
        load_fragment(a, k)
        load_fragment(b, k)
        cute.gemm(mma, acc, a.fragment[None, None, k], b.fragment[None, None, k], acc)


@cute.jit
def gemm_rs(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: Operand):
    """acc += A B, with the fragment of A in registers and B in shared memory."""
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        load_fragment(b, k)
        cute.gemm(mma, acc, a[None, None, k], b.fragment[None, None, k], acc)


@cute.jit
def row_max_of(value: Float32) -> Float32:
    """The maximum over the four threads that share a row of an accumulator."""
    return cute.arch.warp_reduction_max(value, threads_in_group=4)


@cute.jit
def row_sum_of(value: Float32) -> Float32:
    """The sum over the four threads that share a row of an accumulator."""
    return cute.arch.warp_reduction_sum(value, threads_in_group=4)
