"""Dropout masks in shared memory: a producer warpgroup computes them for the consumer warpgroups.

In an accumulator of wgmma, viewed as an operand (`views.as_operand_a`), a thread has four registers of 16-bit P
for each k-step, in rows 8 apart and at keys 8 apart. Their masks are 16 bytes: one load. Warps 2 g and 2 g + 1
of a warpgroup hold the halves of a rectangle of 32 rows (`spec.dropout`), so one Philox call of a lane makes
the masks of the same lane in both warps.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_flash.device.philox import Dropout
from cute_flash.device.pipeline import WARPGROUP_THREADS, Pipeline
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.spec.dropout import CALL_STRIDE, RECT_KEYS, RECT_ROWS, ROW_16_FACTOR

WARPS = WARPGROUP_THREADS // 32
REGISTERS = 4  # of P in a k-step
RECTANGLES = WARPGROUP_ROWS // RECT_ROWS  # over the rows of a warpgroup
CALLS_AT_ONCE = 2  # of Philox, as many as registers allow
WARPS_PER_RECTANGLE = WARPS // RECTANGLES  # each takes every WARPS_PER_RECTANGLE-th k-step


@dataclass(frozen=True)
class DropoutMaskPipeline:
    """The masks of some blocks for every consumer warpgroup. Iterations are those of K and V."""

    words: cute.Tensor  # (register, thread, k-step, stage, warpgroup)
    barriers: Pipeline  # a part for each warpgroup
    stages: cutlass.Constexpr

    @staticmethod
    def allocate(smem, num_warpgroups: int, steps: int, stages: int) -> "DropoutMaskPipeline":
        layout = cute.make_layout((REGISTERS, WARPGROUP_THREADS, steps, stages, num_warpgroups))
        words = smem.allocate_tensor(Int32, layout, 16)
        return DropoutMaskPipeline(words, Pipeline.allocate(smem, num_warpgroups * stages), stages)

    def init_barriers(self):
        """One thread calls it, before a fence and a barrier of all threads."""
        self.barriers.init(WARPS, WARPS)

    def pipeline(self, warpgroup: Int32) -> Pipeline:
        return self.barriers.part(warpgroup, self.stages)

    def stage(self, iteration: Int32):
        return iteration & (self.stages - 1) if self.stages > 1 else 0

    # ---- producer

    @cute.jit
    def produce(self, dropout: Dropout, batch_head: Int32, rectangle: Int32, first_key: Int32, where: tuple):
        """Write a warp's share of the masks of one consumer warpgroup.

        The block's rows begin with a rectangle, its keys at a multiple of 16. `where`: stage, consumer warpgroup, warp
        of the producer, and lane.
        """
        stage, warpgroup, warp, lane = where
        part, share = warp // WARPS_PER_RECTANGLE, warp % WARPS_PER_RECTANGLE
        query = Uint32((rectangle + part) * CALL_STRIDE + lane // 4)
        key = Uint32((first_key // RECT_KEYS + share) * 4 + lane % 4)
        calls = cute.size(self.words, mode=[2]) // WARPS_PER_RECTANGLE
        at_once = CALLS_AT_ONCE if calls % CALLS_AT_ONCE == 0 else 1
        for i in cutlass.range(0, calls, at_once, unroll=1):
            for j in cutlass.range_constexpr(at_once):
                step = WARPS_PER_RECTANGLE * (i + j)
                words = dropout.words(batch_head, query, key + Uint32(4 * step))
                for half in cutlass.range_constexpr(2):
                    masks = dropout.masks(words, Uint32(ROW_16_FACTOR) if half else None)
                    thread = (2 * part + half) * 32 + lane
                    self._store(masks, (None, thread, step + share, stage, warpgroup))

    def _store(self, masks: list, coord: tuple):
        quad = cute.make_rmem_tensor(REGISTERS, Int32)
        for i in range(REGISTERS):
            # Philox words are in the order of keys, and then of rows.
            quad[i] = masks[2 * (i % 2) + i // 2]
        cute.autovec_copy(quad, self.words[coord])

    @cute.jit
    def publish(self, warpgroup: Int32, iteration: Int32):
        """A producer warp calls it after its share is written."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.pipeline(warpgroup).full_barrier(iteration))

    # ---- consumers

    @cute.jit
    def wait(self, warpgroup: Int32, iteration: Int32):
        self.pipeline(warpgroup).wait_full(iteration)

    @cute.jit
    def apply(self, packed: cute.Tensor, steps: cutlass.Constexpr, warpgroup: Int32, thread: Int32, iteration: Int32):
        """Set dropped elements of P to 0 in the registers of some k-steps."""
        quad = cute.make_rmem_tensor(REGISTERS, Int32)
        words = self.words[None, thread, None, self.stage(iteration), warpgroup]
        for k in cutlass.range_constexpr(steps.start, steps.stop):
            cute.autovec_copy(words[None, k], quad)
            for i in cutlass.range_constexpr(REGISTERS):
                packed[REGISTERS * k + i] = packed[REGISTERS * k + i] & quad[i]

    @cute.jit
    def release(self, warpgroup: Int32, iteration: Int32):
        """A consumer warp calls it when its masks are in registers, or used."""
        cute.arch.sync_warp()
        self.pipeline(warpgroup).release(iteration)


class NoDropoutMasks:
    """The consumer side of a kernel without dropout."""

    def wait(self, warpgroup: Int32, iteration: Int32): ...

    def apply(self, packed: cute.Tensor, steps: range, warpgroup: Int32, thread: Int32, iteration: Int32): ...

    def release(self, warpgroup: Int32, iteration: Int32): ...
