"""wgmma products of one warpgroup, and the conversion of their accumulators."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_flash.device.ptx import pack
from cute_flash.planning.tiles.common import WARPGROUP_ROWS


def make_mma(
    dtype: type, columns: int, a_in_registers: bool, a_major: OperandMajorMode, b_major: OperandMajorMode
) -> cute.TiledMma:
    """The tiled MMA of one warpgroup: 64 rows by `columns`."""
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    shape = (WARPGROUP_ROWS, columns, 16)
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, shape, source, a_major, b_major))


@cute.jit
def start_gemm(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    rA: cute.Tensor,
    rB: cute.Tensor,
    accumulate: cutlass.Constexpr,
    steps: cutlass.Constexpr = None,
    start_extra_step: cutlass.Constexpr = None,
):
    """Start acc = A B, or acc += A B if `accumulate`, as one wgmma group.

    Registers of the product must not be touched before the wait for the group. `steps`: range of k-steps; None: all.
    `start_extra_step`: a function that starts a k-step with other operands in the same group.
    """
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    steps = range(cute.size(rB, mode=[2])) if steps is None else steps
    for k in cutlass.range_constexpr(steps.start, steps.stop):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > steps.start)
        cute.gemm(atom, acc, rA[None, None, k], rB[None, None, k], acc)
    if cutlass.const_expr(start_extra_step is not None):
        start_extra_step()
    warpgroup.commit_group()


@cute.jit
def convert(acc: cute.Tensor, fragment: cute.Tensor, steps: range | None = None):
    """Convert `acc` to the dtype of `fragment`, for some k-steps or all. A k-step is 8 contiguous elements."""
    packed = cute.recast_tensor(fragment, Int32)
    pairs = range(cute.size(acc) // 2) if steps is None else range(4 * steps.start, 4 * steps.stop)
    for i in cutlass.range_constexpr(pairs.start, pairs.stop):
        packed[i] = pack(acc[2 * i], acc[2 * i + 1], fragment.element_type)
