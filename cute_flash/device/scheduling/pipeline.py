"""Barriers of warp-specialised kernels: pipelines between producers and consumers, and the order of warpgroups.

The `full` barrier of a pipeline stage completes when its data has landed (TMA counts the bytes), the `empty` barrier
when all consumers have released the stage. Both sides count their uses of the pipeline from 0: iteration i uses stage
i % stages in phase (i // stages) % 2. The number of stages of K and V is a power of two, because the main loop computes
stage and phase for every block.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

WARPGROUP_THREADS = 128


def wait_in_cluster(barrier: cute.Pointer, phase: Int32) -> None:
    """Wait for a phase of an mbarrier at which other CTAs of the cluster arrive, or to which they store data.

    The wait acquires at cluster scope. `cute.arch.mbarrier_wait` has the scope of the CTA.
    """
    cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tAGAIN:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [{$r0}], {$r1};\n\t"
        "@!p bra AGAIN;\n\t}",
        read_only_args=[Int32(barrier.toint()), Int32(phase)],
    )


def arrive_at_peer(barrier: cute.Pointer, rank: Int32 | int, order: str) -> None:
    """Arrive at the mbarrier of the CTA with this rank in the cluster.

    `order`: "release" or "relaxed", at cluster scope. A release waits until all earlier stores of the thread have been
    performed for the GPU, because ptxas emits MEMBAR.ALL.GPU for it.
    """
    cute.arch.inline_ptx(
        "{\n\t.reg .b32 remote;\n\tmapa.shared::cluster.u32 remote, {$r0}, {$r1};\n\t"
        f"mbarrier.arrive.{order}.cluster.shared::cluster.b64 _, [remote];\n\t}}",
        read_only_args=[Int32(barrier.toint()), Int32(rank)],
    )


@dataclass(frozen=True)
class Pipeline:
    """The mbarriers of a pipeline; its data is allocated elsewhere."""

    full: cute.Pointer  # one mbarrier per stage
    empty: cute.Pointer
    stages: cutlass.Constexpr

    @staticmethod
    def allocate(smem: SmemAllocator, stages: int) -> "Pipeline":
        barriers = smem.allocate_array(cutlass.Int64, 2 * stages, byte_alignment=8)
        return Pipeline(barriers, barriers + stages, stages)

    def part(self, i: Int32 | int, stages: int) -> "Pipeline":
        """The i-th of several pipelines of `stages` stages whose barriers were allocated together."""
        return Pipeline(self.full + i * stages, self.empty + i * stages, stages)

    @cute.jit
    def init(self, full_arrivals: cutlass.Constexpr, empty_arrivals: cutlass.Constexpr):
        """Called by one thread, before a fence and a CTA barrier."""
        for stage in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(self.full + stage, full_arrivals)
            cute.arch.mbarrier_init(self.empty + stage, empty_arrivals)

    def stage(self, iteration: Int32):
        """The stage of an iteration."""
        if not self._is_power_of_two:
            return iteration % self.stages
        return iteration & (self.stages - 1) if self.stages > 1 else 0

    @property
    def _is_power_of_two(self) -> bool:
        return self.stages & (self.stages - 1) == 0

    def phase(self, iteration: Int32):
        """The phase (0 or 1) of an iteration's barriers."""
        if not self._is_power_of_two:
            return (iteration // self.stages) & 1
        return (iteration >> (self.stages.bit_length() - 1)) & 1

    def full_barrier(self, iteration: Int32) -> cute.Pointer:
        return self.full + self.stage(iteration)

    @cute.jit
    def wait_full(self, iteration: Int32, in_cluster: cutlass.Constexpr = False):
        """Wait until the stage may be read. `in_cluster`: another CTA of the cluster writes it."""
        wait = wait_in_cluster if cutlass.const_expr(in_cluster) else cute.arch.mbarrier_wait
        wait(self.full_barrier(iteration), self.phase(iteration))

    @cute.jit
    def wait_empty(self, iteration: Int32, in_cluster: cutlass.Constexpr = False):
        """Wait until the stage may be written. The first use of a stage does not wait.

        `in_cluster`: another CTA of the cluster reads it.
        """
        wait = wait_in_cluster if cutlass.const_expr(in_cluster) else cute.arch.mbarrier_wait
        wait(self.empty + self.stage(iteration), self.phase(iteration) ^ 1)

    @cute.jit
    def wait_released(self, iteration: Int32):
        """Wait until the consumers have released this iteration. Iteration -1 does not wait."""
        cute.arch.mbarrier_wait(self.empty + self.stage(iteration), self.phase(iteration))

    @cute.jit
    def expect_bytes(self, iteration: Int32, num_bytes: cutlass.Constexpr):
        """Arrive at the `full` barrier, which then also waits for `num_bytes` of TMA."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full_barrier(iteration), num_bytes)

    @cute.jit
    def release_per_thread(self, iteration: Int32, loaded: Int32 | None = None):
        """Arrive at the `empty` barrier once per thread, for data that threads have read with plain loads.

        `loaded`: see `empty_barrier`; None is allowed if every loaded value has been used before, or if the memory is
        written again only after a later release of the same thread (published tiles have two slots).
        """
        cute.arch.mbarrier_arrive(self.empty_barrier(iteration, loaded))

    @cute.jit
    def release(self, iteration: Int32, loaded: Int32 | None = None):
        """Arrive at the `empty` barrier once per warp, for data that tensor cores have read.

        After plain loads, a warp barrier must come before it. `loaded`: as in `release_per_thread`.
        """
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty_barrier(iteration, loaded))

    def release_to_peer(
        self, iteration: Int32, loaded: Int32, rank: Int32 | int, order: cutlass.Constexpr = "release"
    ) -> None:
        """Arrive at the `empty` barrier of another CTA of the cluster, after plain loads. Called by one thread.

        `loaded`: as in `release_per_thread`. `order`: as in `arrive_at_peer`; "relaxed" relies on `loaded`.
        """
        arrive_at_peer(self.empty_barrier(iteration, loaded), rank, order)

    def empty_barrier(self, iteration: Int32, loaded: Int32 | None) -> cute.Pointer:
        """The `empty` barrier of an iteration, for an arrival.

        An arrival does not wait for earlier loads of its thread, and the other side may overwrite the stage before
        they have read it (profiling/notes/mods.md). `loaded` is a value computed from all loaded registers. The address
        depends on it, so the arrival waits for the loads. Its bits do not matter: addresses in shared memory have no
        sign bit, but the compiler does not know that.
        """
        barrier = self.empty + self.stage(iteration)
        return barrier if loaded is None else barrier + (loaded & (Int32(self.empty.toint()) >> 31))


@dataclass(frozen=True)
class WarpgroupOrder:
    """Warpgroup ping-pong by named barriers: warpgroups pass `wait` in cyclic order, each after the previous arrives.

    With one warpgroup `wait` and `arrive` do nothing.
    """

    first_barrier: cutlass.Constexpr  # named barrier of warpgroup 0
    num_warpgroups: cutlass.Constexpr
    warpgroup: Int32

    @cute.jit
    def start(self):
        """Let warpgroup 0 pass first: the last warpgroup arrives once."""
        if self.warpgroup == self.num_warpgroups - 1:
            self.arrive()

    @cute.jit
    def wait(self):
        if cutlass.const_expr(self.num_warpgroups > 1):
            cute.arch.barrier(barrier_id=self.first_barrier + self.warpgroup, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def arrive(self):
        """Let the next warpgroup pass."""
        if cutlass.const_expr(self.num_warpgroups > 1):
            following = self.warpgroup + 1
            following = 0 if following == self.num_warpgroups else following
            cute.arch.barrier_arrive(barrier_id=self.first_barrier + following, number_of_threads=2 * WARPGROUP_THREADS)
