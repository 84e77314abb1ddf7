"""A block of a bias in the forward, from global memory to the scores.

Threads load their own elements, a warp loads one row that all queries share, or TMA loads tiles to shared memory. In
the end a thread holds the elements of its accumulator: in every k-step of 16 keys, pairs of neighbouring keys, in two
rows 8 apart and at two keys 8 apart. For 64 rows in shared memory that is one ldmatrix.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_flash.device.ldmatrix import STEP, swizzled
from cute_flash.device.pipeline import WARPGROUP_THREADS, Pipeline
from cute_flash.device.ptx import rederived
from cute_flash.device.smem import allocate_stages
from cute_flash.device.tma import TmaTiles
from cute_flash.planning.tiles.common import WARP_ROWS
from cute_flash.smem.tile import SmemTile

STEP_VALUES = 8  # of a k-step in a thread
KEYS_PER_WARP_LOAD = 64  # one register of every lane, a pair of keys each


def pair_to_floats(pair: cute.Tensor) -> list:
    """Two neighbouring elements as floats; bf16 takes one instruction each."""
    if pair.element_type is not cutlass.BFloat16:
        return [Float32(pair[i]) for i in range(2)]
    word, halves = cute.recast_tensor(pair, Int32)[0], cute.make_rmem_tensor(2, Int32)
    halves[0], halves[1] = word << 16, word & -(1 << 16)
    floats = cute.recast_tensor(halves, Float32)
    return [floats[0], floats[1]]


class BlockBias:
    """The bias of a block. Subclasses say where it is, and whether it must be waited for and released."""

    def wait(self): ...

    def release(self): ...

    def step(self, k: int) -> list:
        """[row][column] of a k-step, as floats."""
        raise NotImplementedError

    def add_to(self, acc_S_mn: cute.Tensor):
        """Add it to natural scores, in place."""
        rows, columns = (cute.size(acc_S_mn, mode=[i]) for i in range(2))
        for k in range(columns // 4):
            values = self.step(k)
            for r in range(rows):
                for i in range(4):
                    acc_S_mn[r, 4 * k + i] = acc_S_mn[r, 4 * k + i] + values[r % 2][i]


@dataclass(frozen=True)
class RegisterBias(BlockBias):
    """In the registers of its thread."""

    rBias: cute.Tensor  # (2, pairs, rows), or one row for all

    def add_to(self, acc_S_mn: cute.Tensor):
        """For as many rows as a thread of an mma.sync kernel has."""
        rows, columns = (cute.size(acc_S_mn, mode=[i]) for i in range(2))
        for r in range(rows):
            for pair in range(columns // 2):
                values = pair_to_floats(self._pair(pair, r))
                for i in range(2):
                    acc_S_mn[r, 2 * pair + i] = acc_S_mn[r, 2 * pair + i] + values[i]

    def step(self, k: int) -> list:
        pairs = [[pair_to_floats(self._pair(2 * k + i, r)) for i in range(2)] for r in range(2)]
        return [[*first, *second] for first, second in pairs]

    def _pair(self, pair: int, r: int) -> cute.Tensor:
        return self.rBias[None, pair, r % cute.size(self.rBias, mode=[2])]


@dataclass(frozen=True)
class WarpBias(BlockBias):
    """One row for all queries, distributed over a warp: each lane holds pairs of keys, and shuffles exchange them."""

    words: cute.Tensor  # this lane's pair of every 64 keys
    dtype: cutlass.Constexpr

    @staticmethod
    def load(row: cute.Tensor, first_col: Int32, columns: int, last: Int32 | None) -> "WarpBias":
        """The keys of a block that begins at `first_col`; `last`: the last pair of the row, if the block may end
        after it.
        """
        words = cute.make_rmem_tensor(-(-columns // KEYS_PER_WARP_LOAD), Int32)
        for j in range(cute.size(words)):
            key = first_col + 2 * cute.arch.lane_idx() + KEYS_PER_WARP_LOAD * j
            key = key if last is None else cutlass.min(key, last)
            pair = (row.iterator + key).align(4)
            words[j] = cute.make_tensor(cute.recast_ptr(pair, dtype=Int32), cute.make_layout(1))[0]
        return WarpBias(words, row.element_type)

    def step(self, k: int) -> list:
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
    """Tiles of the bias in shared memory, loaded by TMA, with a pipeline for each consumer warpgroup.

    Iterations are those of K and V.
    """

    sBias: cute.Tensor  # (64, tile_n, (warpgroup, stage))
    barriers: Pipeline  # a part for each warpgroup: no warpgroup waits for another
    tile: cutlass.Constexpr  # SmemTile of a warpgroup
    num_warpgroups: cutlass.Constexpr
    stages: cutlass.Constexpr

    @staticmethod
    def allocate(smem, dtype, tile: SmemTile, num_warpgroups: int, stages: int) -> "BiasPipeline":
        sBias = allocate_stages(smem, dtype, tile, num_warpgroups * stages)
        sBias = cute.logical_divide(sBias, (None, None, num_warpgroups))
        barriers = Pipeline.allocate(smem, num_warpgroups * stages)
        return BiasPipeline(sBias, barriers, tile, num_warpgroups, stages)

    def init_barriers(self):
        """One thread calls it, before a fence and a barrier of all threads."""
        self.barriers.init(1, WARPGROUP_THREADS // 32)

    def pipeline(self, warpgroup: Int32 | int) -> Pipeline:
        return self.barriers.part(warpgroup, self.stages)

    @cute.jit
    def load(self, tma: TmaTiles, iteration: Int32, block: tuple, head_batch: tuple):
        """One warp loads the block (m_block, n_block) for all warpgroups."""
        m_block, n_block = block
        for w in cutlass.range_constexpr(self.num_warpgroups):
            pipeline = self.pipeline(w)
            pipeline.wait_empty(iteration)
            pipeline.expect_bytes(iteration, self.tile.bytes)
            sX = self.sBias[None, None, (w, pipeline.stage(iteration))]
            tma.load(sX, m_block * self.num_warpgroups + w, *head_batch, pipeline.full_barrier(iteration), n_block)

    def block(self, warpgroup: Int32, thread: Int32, iteration: Int32) -> "SmemBias":
        """The bias of one iteration for a thread; its address is recomputed, not kept in a register."""
        thread = rederived(thread)
        # Bit operations: the compiler generates more for a quotient of signed integers.
        row, chunk = (thread >> 5) * WARP_ROWS + (thread & (WARP_ROWS - 1)), (thread >> 4) & 1
        offset = (row * self.tile.row_stride + chunk * self.tile.chunk_cols) * self.tile.element_bytes
        first = Int32(self.sBias.iterator.toint())
        pipeline = self.pipeline(warpgroup)
        stage = (pipeline.stage(iteration) * self.num_warpgroups + warpgroup) * self.tile.bytes
        return SmemBias(self, pipeline, swizzled(first + offset, self.tile) + stage, iteration)


@dataclass(frozen=True)
class SmemBias(BlockBias):
    """In shared memory, read by ldmatrix."""

    owner: BiasPipeline
    pipeline: Pipeline
    address: Int32  # of this thread's 16 bytes of the first k-step
    iteration: Int32

    def wait(self):
        self.pipeline.wait_full(self.iteration)

    @cute.jit
    def release(self):
        """A warp calls it when the bias is in its registers, or used."""
        cute.arch.sync_warp()
        self.pipeline.release(self.iteration)

    def step(self, k: int) -> list:
        tile, dtype = self.owner.tile, self.owner.sBias.element_type
        values = cute.make_rmem_tensor(STEP_VALUES, dtype)
        flipped, added = tile.column(STEP * k)
        address = self.address ^ (flipped * tile.element_bytes)
        source = cute.make_ptr(dtype, address, cutlass.AddressSpace.smem, assumed_align=16) + added
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
        layout = cute.make_layout(((STEP_VALUES, 1),), stride=((1, 0),))
        cute.copy(atom, cute.make_tensor(source, layout), cute.make_tensor(values.iterator, layout))
        pairs = cute.logical_divide(values, cute.make_layout(2))
        return [pair_to_floats(pairs[None, r]) + pair_to_floats(pairs[None, 2 + r]) for r in range(2)]
