"""Barriers of a warp-specialised kernel, named by the event they tell of.

A ring is a buffer of stages between a producer and its consumers: `full` of a stage is told by the copy
engine when the bytes have landed, `empty` by the consumers when they are done with them. Both sides count
fills from 0 on; fill i uses stage i % stages, in its (i // stages)-th round. Stages are a power of two: the
main loop asks for stage and round in every block.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

WARPGROUP_THREADS = 128


@dataclass(frozen=True)
class Ring:
    full: cute.Pointer  # one mbarrier a stage
    empty: cute.Pointer
    stages: cutlass.Constexpr

    @staticmethod
    def allocate(smem, stages: int) -> "Ring":
        barriers = smem.allocate_array(cutlass.Int64, 2 * stages, byte_alignment=8)
        return Ring(barriers, barriers + stages, stages)

    @cute.jit
    def init(self, full_arrivals: cutlass.Constexpr, empty_arrivals: cutlass.Constexpr):
        """By one thread, before a fence and a barrier of all."""
        for stage in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(self.full + stage, full_arrivals)
            cute.arch.mbarrier_init(self.empty + stage, empty_arrivals)

    def stage(self, fill: Int32):
        return fill & (self.stages - 1) if self.stages > 1 else 0

    def parity(self, fill: Int32):
        return (fill >> (self.stages.bit_length() - 1)) & 1

    def full_of(self, fill: Int32) -> cute.Pointer:
        return self.full + self.stage(fill)

    @cute.jit
    def wait_full(self, fill: Int32):
        cute.arch.mbarrier_wait(self.full_of(fill), self.parity(fill))

    @cute.jit
    def wait_empty(self, fill: Int32):
        """The stage is free for this fill; at once in the first round."""
        cute.arch.mbarrier_wait(self.empty + self.stage(fill), self.parity(fill) ^ 1)

    @cute.jit
    def wait_released(self, fill: Int32):
        """Until the consumers of this fill are done; at once if it is before the first."""
        cute.arch.mbarrier_wait(self.empty + self.stage(fill), self.parity(fill))

    @cute.jit
    def expect(self, fill: Int32, num_bytes: cutlass.Constexpr):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full_of(fill), num_bytes)

    @cute.jit
    def release_by_all(self, fill: Int32):
        """One arrival a thread: for what threads have read by themselves."""
        cute.arch.mbarrier_arrive(self.empty + self.stage(fill))

    @cute.jit
    def release(self, fill: Int32):
        """One arrival a warp: for what tensor cores have read."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.stage(fill))


@dataclass(frozen=True)
class Turns:
    """Warpgroups take turns: each waits for its own, and passes it on to the next. One alone never waits."""

    first_id: cutlass.Constexpr  # named barrier of warpgroup 0
    num_warpgroups: cutlass.Constexpr
    warpgroup: Int32

    @cute.jit
    def begin(self):
        """The first turn is warpgroup 0's: the last one passes it on, once."""
        if self.warpgroup == self.num_warpgroups - 1:
            self.pass_on()

    @cute.jit
    def wait(self):
        if cutlass.const_expr(self.num_warpgroups > 1):
            cute.arch.barrier(barrier_id=self.first_id + self.warpgroup, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def pass_on(self):
        if cutlass.const_expr(self.num_warpgroups > 1):
            following = self.warpgroup + 1
            following = 0 if following == self.num_warpgroups else following
            cute.arch.barrier_arrive(barrier_id=self.first_id + following, number_of_threads=2 * WARPGROUP_THREADS)
