"""Two warps that share the rows of a tile: each has half of the keys of S, and half of the columns of O.

P and the row statistics of both warps pass through shared memory.

racecheck reports hazards between warps of different pairs, for copies of K and V that a CTA barrier orders. Pairs pass
different numbers of named barriers, which seems to confuse it (profiling/notes/fwd_sm80.md).
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_flash.device.ldmatrix import FragmentStore, MmaOperand

THREADS = 64  # of a pair


@dataclass(frozen=True)
class WarpPair:
    """The pair of this thread. Its warps are `num_pairs` warps apart."""

    store_p: FragmentStore  # stores this warp's half of P
    p: MmaOperand  # P of all keys
    sRows: cute.Tensor  # (threads of the CTA, rows of a thread) fp32
    thread: Int32
    num_pairs: int

    @property
    def barrier_id(self) -> Int32:
        """Barrier 0 is that of the CTA."""
        return self.thread // 32 % self.num_pairs + 1

    def wait(self) -> None:
        """Wait for both warps."""
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=THREADS)

    def any(self, condition: Boolean) -> Boolean:
        """Wait for both warps. Returns whether the condition holds for any of their threads."""
        return _barrier_any(self.barrier_id, condition)

    def load_p(self) -> cute.Tensor:
        """P of all keys, as operand A. Both warps must have stored their halves and waited."""
        for k in range(cute.size(self.p.fragment, mode=[2])):
            self.p.load(k, 0)
        return self.p.fragment

    def combine(self, values: cute.Tensor, operation: Callable[[Float32, Float32], Float32]) -> None:
        """Combine the values of this thread's rows with those of its counterpart in the other warp, in place.

        `operation` must be commutative, so that both threads get the same bits. Before the next call, the pair must
        have waited once more.
        """
        other = self.thread ^ (32 * self.num_pairs)
        for r in range(cute.size(values)):
            self.sRows[self.thread, r] = values[r]
        self.wait()
        for r in range(cute.size(values)):
            values[r] = operation(values[r], self.sRows[other, r])


@dsl_user_op
def _barrier_any(barrier_id: Int32, condition: Boolean, *, loc=None, ip=None) -> Boolean:
    """A barrier of a pair. Returns whether the condition holds in any thread."""
    result = nvvm.barrier_cta_red(
        condition.ir_value(loc=loc, ip=ip),
        barrier_id.ir_value(loc=loc, ip=ip),
        nvvm.BarrierReduxKind.OR,
        thread_count=Int32(THREADS).ir_value(loc=loc, ip=ip),
        aligned=True,
        loc=loc,
        ip=ip,
    )
    return Boolean(result)
