"""Dropout masks in shared memory: a producer warpgroup computes them for the consumer warpgroups.

In a wgmma accumulator viewed as operand A (`views.as_operand_a`), a thread has four registers of 16-bit P per k-step:
two rows 8 apart times two pairs of keys 8 apart. Their masks are 16 bytes, so a thread reads them with one load. Warps
2 g and 2 g + 1 of a warpgroup hold the two halves of a Philox rectangle of 32 rows (`spec.dropout`). One Philox call of
a producer lane therefore gives the masks of the same lane in both warps.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.memory import SmemAllocator

from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, Pipeline
from cute_flash.device.scores.philox import Dropout, FourWords
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.spec.dropout import CALL_STRIDE, RECT_KEYS, RECT_ROWS, ROW_16_FACTOR

WARPS = WARPGROUP_THREADS // 32
REGISTERS = 4  # registers of P of a thread in a k-step
RECTANGLES = WARPGROUP_ROWS // RECT_ROWS  # Philox rectangles in the rows of a warpgroup
CALLS_AT_ONCE = 2  # Philox calls in flight, limited by registers
WARPS_PER_RECTANGLE = WARPS // RECTANGLES  # producer warps; each takes every WARPS_PER_RECTANGLE-th k-step


@dataclass(frozen=True)
class DropoutMaskPipeline:
    """The masks of the next K/V blocks for every consumer warpgroup. Iterations count K/V blocks."""

    words: cute.Tensor  # (register, thread, k-step, stage, warpgroup)
    barriers: Pipeline  # of all warpgroups; `pipeline` selects those of one
    stages: cutlass.Constexpr

    @staticmethod
    def allocate(smem: SmemAllocator, num_warpgroups: int, steps: int, stages: int) -> "DropoutMaskPipeline":
        layout = cute.make_layout((REGISTERS, WARPGROUP_THREADS, steps, stages, num_warpgroups))
        words = smem.allocate_tensor(Int32, layout, 16)
        return DropoutMaskPipeline(words, Pipeline.allocate(smem, num_warpgroups * stages), stages)

    def init_barriers(self):
        """Called by one thread, before a fence and a CTA barrier."""
        self.barriers.init(WARPGROUP_THREADS, WARPGROUP_THREADS)

    def pipeline(self, warpgroup: Int32) -> Pipeline:
        return self.barriers.part(warpgroup, self.stages)

    def stage(self, iteration: Int32):
        return iteration & (self.stages - 1) if self.stages > 1 else 0

    # ---- producer

    @cute.jit
    def produce(
        self,
        dropout: Dropout,
        batch_head: Int32,
        rectangle: Int32,
        first_key: Int32,
        stage: Int32,
        warpgroup: cutlass.Constexpr,
        warp: Int32,
        lane: Int32,
    ):
        """Write the share of a producer warp and lane of a block's masks for one consumer warpgroup.

        `rectangle`: index of the first Philox rectangle of rows; `first_key`: a multiple of 16.
        """
        part, share = warp // WARPS_PER_RECTANGLE, warp % WARPS_PER_RECTANGLE
        query = dropout.first_query(Uint32((rectangle + part) * CALL_STRIDE + lane // 4))
        key = dropout.first_key(Uint32((first_key // RECT_KEYS + share) * 4 + lane % 4))
        calls = cute.size(self.words, mode=[2]) // WARPS_PER_RECTANGLE
        at_once = CALLS_AT_ONCE if calls % CALLS_AT_ONCE == 0 else 1
        for i in cutlass.range(0, calls, at_once, unroll=1):
            for j in cutlass.range_constexpr(at_once):
                step = WARPS_PER_RECTANGLE * (i + j)
                words = dropout.words(batch_head, query, key + Uint32(4 * step))
                for half in cutlass.range_constexpr(2):
                    masks = dropout.masks(words, Uint32(ROW_16_FACTOR) if half else None)
                    thread = (2 * part + half) * 32 + lane
                    self._store(masks, thread, step + share, stage, warpgroup)

    def _store(self, masks: FourWords, thread: Int32, step: Int32, stage: Int32, warpgroup: int) -> None:
        quad = cute.make_rmem_tensor(REGISTERS, Int32)
        for i in range(REGISTERS):
            # Among Philox words the pair of keys changes fastest, among registers the row.
            quad[i] = masks[2 * (i % 2) + i // 2]
        cute.autovec_copy(quad, self.words[None, thread, step, stage, warpgroup])

    @cute.jit
    def publish(self, warpgroup: Int32, iteration: Int32):
        """Called by every producer thread after it has written its share.

        Every thread arrives, because racecheck does not recognise one arrival per warp after a warp barrier.
        """
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
    def release(self, packed: cute.Tensor, warpgroup: Int32, iteration: Int32):
        """Called by every consumer thread after it has applied the masks to `packed`, the registers of all k-steps."""
        loaded = packed[0]
        for k in cutlass.range_constexpr(1, cute.size(packed) // REGISTERS):
            loaded = loaded | packed[REGISTERS * k]
        self.pipeline(warpgroup).release_per_thread(iteration, loaded)


class NoDropoutMasks:
    """The consumer side without dropout: does nothing."""

    def wait(self, warpgroup: Int32, iteration: Int32): ...

    def apply(self, packed: cute.Tensor, steps: range, warpgroup: Int32, thread: Int32, iteration: Int32): ...

    def release(self, packed: cute.Tensor, warpgroup: Int32, iteration: Int32): ...
