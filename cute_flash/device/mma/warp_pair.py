"""Two warps share the rows of a tile. A warp computes S for half of the keys, and half of the columns of O.

P and the row statistics of both warps pass through shared memory. All barriers are those of the CTA. The one after
Q K^T, which K and V need anyway, also orders P and carries a vote.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_flash.device.memory.ldmatrix import FragmentStore, MmaOperand


@dataclass(frozen=True)
class WarpPair:
    """The pair of this thread. Its warps are `num_pairs` warps apart."""

    store_p: FragmentStore  # stores this warp's half of P
    p: MmaOperand  # P of all keys
    sRows: cute.Tensor  # (threads of the CTA, rows of a thread) fp32
    thread: Int32
    num_pairs: int

    def any(self, condition: Boolean) -> Boolean:
        """Wait for all threads of the CTA. Returns whether the condition holds for any of them."""
        return barrier_any(condition, 64 * self.num_pairs)

    def load_p(self) -> cute.Tensor:
        """P of all keys, as operand A. Both warps must have stored their halves and waited."""
        for k in range(cute.size(self.p.fragment, mode=[2])):
            self.p.load(k, 0)
        return self.p.fragment

    def combine(self, values: cute.Tensor, operation: Callable[[Float32, Float32], Float32]) -> None:
        """Combine the values of this thread's rows with those of its counterpart in the other warp, in place.

        All threads of the CTA call it, and wait once more before the next call. `operation` must be commutative, so
        that both threads get the same bits.
        """
        other = self.thread ^ (32 * self.num_pairs)
        for r in range(cute.size(values)):
            self.sRows[self.thread, r] = values[r]
        cute.arch.sync_threads()
        for r in range(cute.size(values)):
            values[r] = operation(values[r], self.sRows[other, r])


@dsl_user_op
def barrier_any(condition: Boolean, num_threads: int, *, loc=None, ip=None) -> Boolean:
    """The barrier of a CTA. Returns whether the condition holds in any thread."""
    result = nvvm.barrier_cta_red(
        condition.ir_value(loc=loc, ip=ip),
        Int32(0).ir_value(loc=loc, ip=ip),
        nvvm.BarrierReduxKind.OR,
        thread_count=Int32(num_threads).ir_value(loc=loc, ip=ip),
        aligned=True,
        loc=loc,
        ip=ip,
    )
    return Boolean(result)
