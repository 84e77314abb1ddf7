"""The bias of a K/V block in the forward: its loads, and its addition to the scores.

| class          | load                                                                                   |
|----------------|----------------------------------------------------------------------------------------|
| `RegisterBias` | every thread loads its own elements from global memory                                 |
| `WarpBias`     | a warp loads one row that all queries share; lanes exchange its elements by shuffles   |
| `SmemBias`     | TMA loads tiles to shared memory (`BiasPipeline`); threads read them with ldmatrix     |

A thread needs the elements at the positions of its accumulator. In a k-step (16 keys) it has two rows, 8 apart, and in
each row two pairs of neighbouring keys, 8 apart. One ldmatrix.x4 loads exactly these elements.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.ldmatrix import STEP, swizzled
from cute_flash.device.memory.stmatrix import step_offset
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, Pipeline
from cute_flash.device.scores.bias_stages import BiasStages
from cute_flash.device.softmax.fused_exp2 import StepScores
from cute_flash.smem.tile import SmemTile

STEP_VALUES = 8  # elements of a thread in a k-step
KEYS_PER_WARP_LOAD = 64  # one 32-bit register in each lane, with two keys


def pair_to_floats(pair: cute.Tensor) -> list[Float32]:
    """Convert two neighbouring elements to fp32. For bf16 this takes one integer instruction per element."""
    if pair.element_type is not cutlass.BFloat16:
        return [Float32(pair[i]) for i in range(2)]
    word, halves = cute.recast_tensor(pair, Int32)[0], cute.make_rmem_tensor(2, Int32)
    halves[0], halves[1] = word << 16, word & -(1 << 16)
    floats = cute.recast_tensor(halves, Float32)
    return [floats[0], floats[1]]


class BlockBias:
    """The bias of one K/V block. `wait` and `release` do nothing unless the bias is in a pipeline stage."""

    def wait(self): ...

    def release(self, scores: cute.Tensor | None = None): ...

    def step(self, k: int) -> StepScores:
        """The elements of the k-th k-step as fp32."""
        raise NotImplementedError

    def add_to(self, acc_S_mn: cute.Tensor):
        """Add the bias in place to scores in natural units (not log2)."""
        rows, columns = (cute.size(acc_S_mn, mode=[i]) for i in range(2))
        for k in range(columns // 4):
            values = self.step(k)
            for r in range(rows):
                for i in range(4):
                    acc_S_mn[r, 4 * k + i] = acc_S_mn[r, 4 * k + i] + values[r % 2][i]


@dataclass(frozen=True)
class RegisterBias(BlockBias):
    """Bias elements that a thread has loaded to its own registers."""

    rBias: cute.Tensor  # (2, pairs, rows of this thread); one row if all queries share it

    def add_to(self, acc_S_mn: cute.Tensor):
        """Add the bias in place, to any number of rows.

        `step` supports two rows only, but a thread of an mma.sync kernel may have more.
        """
        rows, columns = (cute.size(acc_S_mn, mode=[i]) for i in range(2))
        for r in range(rows):
            for pair in range(columns // 2):
                values = pair_to_floats(self._pair(pair, r))
                for i in range(2):
                    acc_S_mn[r, 2 * pair + i] = acc_S_mn[r, 2 * pair + i] + values[i]

    def step(self, k: int) -> StepScores:
        pairs = [[pair_to_floats(self._pair(2 * k + i, r)) for i in range(2)] for r in range(2)]
        return [[*first, *second] for first, second in pairs]

    def _pair(self, pair: int, r: int) -> cute.Tensor:
        return self.rBias[None, pair, r % cute.size(self.rBias, mode=[2])]


@dataclass(frozen=True)
class WarpBias(BlockBias):
    """One row that all queries share, distributed over a warp. Each lane holds one pair of every 64 keys."""

    words: cute.Tensor  # this lane's pairs, one per 64 keys
    dtype: cutlass.Constexpr

    @staticmethod
    def load(row: cute.Tensor, first_col: Int32, columns: int, last: Int32 | None) -> "WarpBias":
        """Load the keys of the block that begins at `first_col`.

        Addresses are clamped to `last`, the first key of the row's last pair. None: the loads stay within the row.
        """
        words = cute.make_rmem_tensor(-(-columns // KEYS_PER_WARP_LOAD), Int32)
        for j in range(cute.size(words)):
            key = first_col + 2 * cute.arch.lane_idx() + KEYS_PER_WARP_LOAD * j
            key = key if last is None else cutlass.min(key, last)
            pair = (row.iterator + key).align(4)
            words[j] = cute.make_tensor(cute.recast_ptr(pair, dtype=Int32), cute.make_layout(1))[0]
        return WarpBias(words, row.element_type)

    def step(self, k: int) -> StepScores:
        words = cute.make_rmem_tensor(2, Int32)
        for i in range(2):
            pair = 8 * k + 4 * i
            lane = (cute.arch.lane_idx() & 3) + pair % 32
            words[i] = cute.arch.shuffle_sync(self.words[pair // 32], lane)
        pairs = cute.logical_divide(cute.recast_tensor(words, self.dtype), cute.make_layout(2))
        row = [*pair_to_floats(pairs[None, 0]), *pair_to_floats(pairs[None, 1])]
        return [row, row]


@dataclass(frozen=True)
class BiasPipeline:
    """Bias tiles in shared memory: 64 queries of each consumer warpgroup. Iterations count K/V blocks."""

    stages: BiasStages

    @staticmethod
    def allocate(smem: SmemAllocator, dtype: type, tile: SmemTile, num_warpgroups: int, stages: int) -> "BiasPipeline":
        return BiasPipeline(BiasStages.allocate(smem, dtype, tile, num_warpgroups, stages, splits_rows=True))

    def init_barriers(self):
        """Called by one thread, before a fence and a CTA barrier."""
        self.stages.barriers.init(1, WARPGROUP_THREADS // 32)

    def block(self, warpgroup: Int32, thread: Int32, iteration: Int32) -> "SmemBias":
        """The bias of one iteration for a thread. Its address is recomputed, which saves a register over the loop."""
        tile = self.stages.tile
        offset = step_offset(tile, rederived(thread))
        first = Int32(self.stages.sBias.iterator.toint())
        pipeline, stage = self.stages.pipeline(warpgroup), self.stages.offset(warpgroup, iteration)
        return SmemBias(self.stages, pipeline, swizzled(first + offset, tile) + stage, iteration)


@dataclass(frozen=True)
class SmemBias(BlockBias):
    """Bias in a pipeline stage of shared memory, read by ldmatrix."""

    stages: BiasStages
    pipeline: Pipeline
    address: Int32  # of this thread's 16 bytes of the first k-step
    iteration: Int32

    def wait(self):
        self.pipeline.wait_full(self.iteration)

    @cute.jit
    def release(self, scores: cute.Tensor | None = None):
        """Called by all lanes of a warp after their last read of the bias.

        `scores`: those of `add_to`; the arrival waits until the loads of all k-steps have completed
        (`Pipeline.empty_barrier`). After `step` it is None, and the caller must have branched on a value that depends
        on all of the bias, as the check of row sums does.
        """
        loaded = None
        if cutlass.const_expr(scores is not None):
            bits = cute.recast_tensor(scores, Int32)
            loaded = bits[0, 0]
            for k in cutlass.range_constexpr(1, cute.size(scores, mode=[1]) // 4):
                loaded = loaded | bits[0, 4 * k]
        cute.arch.sync_warp()
        self.pipeline.release(self.iteration, loaded)

    def step(self, k: int) -> StepScores:
        tile, dtype = self.stages.tile, self.stages.sBias.element_type
        values = cute.make_rmem_tensor(STEP_VALUES, dtype)
        flipped, added = tile.column(STEP * k)
        address = self.address ^ (flipped * tile.element_bytes)
        source = cute.make_ptr(dtype, address, cutlass.AddressSpace.smem, assumed_align=16) + added
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
        layout = cute.make_layout(((STEP_VALUES, 1),), stride=((1, 0),))
        cute.copy(atom, cute.make_tensor(source, layout), cute.make_tensor(values.iterator, layout))
        pairs = cute.logical_divide(values, cute.make_layout(2))
        return [pair_to_floats(pairs[None, r]) + pair_to_floats(pairs[None, 2 + r]) for r in range(2)]
