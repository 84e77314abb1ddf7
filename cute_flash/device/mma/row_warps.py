"""Two or four warps share rows of a tile. Each computes S for a part of the keys, and O for a part of the columns.

P and the row statistics of these warps pass through sP and sRows in shared memory. All barriers are those of the CTA.
In a block of keys they are:

| barrier | orders with a speculative row max                  | orders with the exact row max             |
|---------|----------------------------------------------------|-------------------------------------------|
| first   | K; the reads of V and sP in the block before       | the same                                  |
| second  | V, the last read of K, the stores of P; a vote     | V, the last read of K, the row maxima     |
| third   | after a vote for the row max: the row maxima       | the stores of P; the reads of the maxima  |
| fourth  | after a vote: P, if it was computed again          |                                           |

So each part of sP and sRows is written after a barrier that follows its last read. The third barrier of the exact row
max and the fourth of the speculative one also order the reads of sRows before its next use, which may be the row sums
after the last block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_flash.device.memory.ldmatrix import FragmentStore, MmaOperand


@dataclass(frozen=True)
class RowWarps:
    """The `count` warps with the rows of this thread. They are `distance` warps apart."""

    store_p: FragmentStore  # stores this warp's part of P
    p: MmaOperand  # P of all keys
    sRows: cute.Tensor  # (threads of the CTA, rows of a thread) fp32
    thread: Int32
    count: int
    distance: int
    keys: int  # of each warp in a block

    @property
    def first_key(self) -> Int32:
        """The first key of this warp in a block."""
        return self.thread // (32 * self.distance) * self.keys

    def any(self, condition: Boolean) -> Boolean:
        """Wait for all threads of the CTA. Returns whether the condition holds for any of them."""
        return barrier_any(condition, 32 * self.count * self.distance)

    def load_p(self) -> cute.Tensor:
        """P of all keys, as operand A. All warps must have stored their parts and waited."""
        for k in range(cute.size(self.p.fragment, mode=[2])):
            self.p.load(k, 0)
        return self.p.fragment

    def combine(self, values: cute.Tensor, operation: Callable[[Float32, Float32], Float32]) -> None:
        """Combine the values of this thread's rows with those of its counterparts in the other warps, in place.

        All threads of the CTA call it, and wait once more before the next call. `operation` must be commutative, so
        that all counterparts get the same bits.
        """
        others = [self.thread ^ (32 * self.distance * i) for i in range(1, self.count)]
        for r in range(cute.size(values)):
            self.sRows[self.thread, r] = values[r]
        cute.arch.sync_threads()
        for r in range(cute.size(values)):
            terms = [values[r], *(self.sRows[other, r] for other in others)]
            # Warp i combines terms in the order i, i ^ 1, i ^ 2, i ^ 3: pairs, then pairs of pairs.
            while len(terms) > 1:
                terms = [operation(*terms[i : i + 2]) for i in range(0, len(terms), 2)]
            values[r] = terms[0]


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
