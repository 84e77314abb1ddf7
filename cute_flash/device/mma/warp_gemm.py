"""mma.sync products of the forward and of decode, with operands in shared memory or in registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.memory.ldmatrix import MmaOperand


@cute.jit
def gemm(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, a: MmaOperand, b: MmaOperand, stage: Int32, q_steps: cutlass.Constexpr
):
    """acc += A B, both in shared memory, except the first `q_steps` k-steps of A, which stay in registers.

    Loads come right before their use; ptxas hoists them over earlier MMAs as far as registers allow. An explicit
    double buffer would only restrict ptxas.
    """
    for k in cutlass.range_constexpr(cute.size(b.fragment, mode=[2])):
        if cutlass.const_expr(k >= q_steps):
            a.load(k, 0)
        b.load(k, stage)
        cute.gemm(tiled_mma, acc, a.fragment[None, None, k], b.fragment[None, None, k], acc)


@cute.jit
def gemm_rs(tiled_mma: cute.TiledMma, acc: cute.Tensor, rA: cute.Tensor, b: MmaOperand, stage: Int32):
    """acc += A B with A in registers: two n16 tiles of B at a time, with all their k-steps.

    The k-steps of an n16 tile are 16 rows apart, and the swizzle repeats after 8 rows, so they need one address and
    immediate offsets. `group` is 2 because the tile tables were measured with it, and 1 for an odd number of tiles.
    """
    group = 2 if cute.size(b.view, mode=[1]) % 2 == 0 else 1
    # One ldmatrix.x4 loads the operands of two n8 tiles.
    acc_groups = cute.logical_divide(acc, (None, None, 2 * group))
    b_groups = cute.logical_divide(b.fragment, (None, 2 * group, None))
    for n in cutlass.range_constexpr(cute.size(b.view, mode=[1]) // group):
        for i in cutlass.range_constexpr(group):
            b.load(n * group + i, stage)
        acc_n = acc_groups[None, None, (None, n)]
        for k in cutlass.range_constexpr(cute.size(b.fragment, mode=[2])):
            cute.gemm(tiled_mma, acc_n, rA[None, None, k], b_groups[None, (None, n), k], acc_n)
