"""What dropout keeps of a block of P, drawn by other warps than those that multiply: masks in shared memory.

In an accumulator of wgmma, seen as an operand (`views.as_operand_a`), a thread has four registers of P in 16
bits for each k-step, which lie in rows 8 apart and then in keys 8 apart. Their masks are 16 bytes, one load.
Warps 2 g and 2 g + 1 of a warpgroup have the halves of a rectangle of 32 rows (`spec.dropout`): a lane
that draws for it makes the masks of the same lane in both of them by one call.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_flash.device.barriers import WARPGROUP_THREADS, Ring
from cute_flash.device.philox import Dropout
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.spec.dropout import APART, KEYS, ROWS, SECOND

WARPS = WARPGROUP_THREADS // 32
REGISTERS = 4  # of P in a k-step
RECTANGLES = WARPGROUP_ROWS // ROWS  # over the rows of a warpgroup
AT_ONCE = 2  # calls
SHARES = WARPS // RECTANGLES  # warps that draw for one of them: every SHARES-th k-step each


@dataclass(frozen=True)
class Drawn:
    """Of every warpgroup that multiplies, the masks of some blocks. Fills are those of K and V."""

    words: cute.Tensor  # (register, thread, k-step, stage, warpgroup)
    full: cute.Pointer  # one mbarrier a stage and warpgroup
    empty: cute.Pointer
    num_warpgroups: cutlass.Constexpr
    stages: cutlass.Constexpr

    @staticmethod
    def allocate(smem, num_warpgroups: int, steps: int, stages: int) -> "Drawn":
        layout = cute.make_layout((REGISTERS, WARPGROUP_THREADS, steps, stages, num_warpgroups))
        words, num = smem.allocate_tensor(Int32, layout, 16), num_warpgroups * stages
        barriers = smem.allocate_array(cutlass.Int64, 2 * num, byte_alignment=8)
        return Drawn(words, barriers, barriers + num, num_warpgroups, stages)

    @cute.jit
    def init_barriers(self):
        """By one thread, before a fence and a barrier of all."""
        for warpgroup in cutlass.range_constexpr(self.num_warpgroups):
            self.ring(warpgroup).init(WARPS, WARPS)

    def ring(self, warpgroup: Int32) -> Ring:
        first = warpgroup * self.stages
        return Ring(self.full + first, self.empty + first, self.stages)

    def stage(self, fill: Int32):
        return fill & (self.stages - 1) if self.stages > 1 else 0

    @cute.jit
    def draw(self, dropout: Dropout, sequence: Int32, rectangle: Int32, first_key: Int32, where: tuple):
        """A warp's share of a warpgroup's block, whose rows begin with a rectangle, and keys at a multiple of
        16. `where`: the stage, the warpgroup, the warp of those that draw, and the lane.
        """
        stage, warpgroup, warp, lane = where
        part, share = warp // SHARES, warp % SHARES
        query = Uint32((rectangle + part) * APART + lane // 4)
        key = Uint32((first_key // KEYS + share) * 4 + lane % 4)
        calls = cute.size(self.words, mode=[2]) // SHARES
        # As many as there are registers for.
        at_once = AT_ONCE if calls % AT_ONCE == 0 else 1
        for i in cutlass.range(0, calls, at_once, unroll=1):
            for j in cutlass.range_constexpr(at_once):
                step = SHARES * (i + j)
                words = dropout.words(sequence, query, key + Uint32(4 * step))
                for half in cutlass.range_constexpr(2):
                    masks = dropout.masks(words, Uint32(SECOND) if half else None)
                    thread = (2 * part + half) * 32 + lane
                    self._store(masks, (None, thread, step + share, stage, warpgroup))

    def _store(self, masks: list, where: tuple):
        quad = cute.make_rmem_tensor(REGISTERS, Int32)
        for i in range(REGISTERS):
            # Words are in the order of keys, and then of rows.
            quad[i] = masks[2 * (i % 2) + i // 2]
        cute.autovec_copy(quad, self.words[where])

    @cute.jit
    def tell(self, warpgroup: Int32, fill: Int32):
        """By a warp that has drawn its share."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.ring(warpgroup).full_of(fill))

    @cute.jit
    def wait(self, warpgroup: Int32, fill: Int32):
        self.ring(warpgroup).wait_full(fill)

    @cute.jit
    def apply(self, packed: cute.Tensor, steps: cutlass.Constexpr, warpgroup: Int32, thread: Int32, fill: Int32):
        """0 in the registers of P, of some k-steps, where it is dropped."""
        quad = cute.make_rmem_tensor(REGISTERS, Int32)
        words = self.words[None, thread, None, self.stage(fill), warpgroup]
        for k in cutlass.range_constexpr(steps.start, steps.stop):
            cute.autovec_copy(words[None, k], quad)
            for i in cutlass.range_constexpr(REGISTERS):
                packed[REGISTERS * k + i] = packed[REGISTERS * k + i] & quad[i]

    @cute.jit
    def release(self, warpgroup: Int32, fill: Int32):
        """By a warp that has its masks in registers, or has used them."""
        cute.arch.sync_warp()
        self.ring(warpgroup).release(fill)


class NotDrawn:
    """Where nothing is dropped."""

    def wait(self, warpgroup: Int32, fill: Int32): ...

    def apply(self, packed: cute.Tensor, steps: range, warpgroup: Int32, thread: Int32, fill: Int32): ...

    def release(self, warpgroup: Int32, fill: Int32): ...
