"""Two warps that share the rows of a tile: each has half of the keys of S, and half of the columns of O.

P, the row statistics and the votes of both warps pass through shared memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_flash.device.ldmatrix import FragmentStore, MmaOperand

THREADS = 64  # of a pair


@dataclass(frozen=True)
class WarpPair:
    """The pair of this thread. Its warps are `num_pairs` warps apart."""

    store_p: FragmentStore  # stores this warp's half of P
    p: MmaOperand  # P of all keys
    sRows: cute.Tensor  # (threads of the CTA, rows of a thread) fp32
    sVotes: cute.Tensor  # (warps of the CTA) int32
    thread: Int32
    num_pairs: int

    def wait(self) -> None:
        """Wait for both warps. Barrier 0 is that of the CTA."""
        barrier_id = self.thread // 32 % self.num_pairs + 1
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=THREADS)

    @cute.jit
    def any(self, condition: Boolean) -> Boolean:
        """Wait for both warps. Returns whether the condition holds for any of their threads.

        Before the next call, the pair must have waited once more. `barrier.red` would need no shared memory, but
        racecheck reports hazards with it.
        """
        warp, votes = self.thread // 32, self.sVotes
        vote = Int32(cute.arch.vote_any_sync(condition))
        if cute.arch.lane_idx() == 0:
            votes[warp] = vote
        self.wait()
        return (vote | votes[warp ^ self.num_pairs]) != 0

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
