"""A block of a bias on its way to scores: read by threads at their places, by a warp, or by the copy engine.

In the end a thread has what an accumulator has: of a k-step of 16 keys, pairs of neighbours, in two rows 8
apart and then in keys 8 apart. Of 64 rows in shared memory that is one ldmatrix.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_flash.device.barriers import WARPGROUP_THREADS, Ring
from cute_flash.device.ldmatrix import STEP, swizzled
from cute_flash.device.ptx import rederived
from cute_flash.device.stages import allocate_stages
from cute_flash.device.tma import TmaTiles
from cute_flash.planning.tiles.common import WARP_ROWS
from cute_flash.smem.tile import SmemTile

VALUES = 8  # of a k-step in a thread
KEYS_OF_WARP = 64  # in one register of all lanes


def floats_of(pair: cute.Tensor) -> list:
    """Two neighbours as floats; of bf16, by one instruction each."""
    if pair.element_type is not cutlass.BFloat16:
        return [Float32(pair[i]) for i in range(2)]
    word, halves = cute.recast_tensor(pair, Int32)[0], cute.make_rmem_tensor(2, Int32)
    halves[0], halves[1] = word << 16, word & -(1 << 16)
    floats = cute.recast_tensor(halves, Float32)
    return [floats[0], floats[1]]


class Bias:
    """Of a block; of what must be waited for, and given back, a kind says so."""

    def wait(self): ...

    def release(self): ...

    def step(self, k: int) -> list:
        """[row][column] of a k-step, as floats."""
        raise NotImplementedError

    def add(self, acc_S_mn: cute.Tensor):
        """To natural scores, in place."""
        rows, columns = (cute.size(acc_S_mn, mode=[i]) for i in range(2))
        for k in range(columns // 4):
            values = self.step(k)
            for r in range(rows):
                for i in range(4):
                    acc_S_mn[r, 4 * k + i] = acc_S_mn[r, 4 * k + i] + values[r % 2][i]


@dataclass(frozen=True)
class LoadedBias(Bias):
    """In registers."""

    found: cute.Tensor  # (2, pairs, rows), or one row for all

    def add(self, acc_S_mn: cute.Tensor):
        """Of as many rows as an mma.sync kernel's thread has."""
        rows, columns = (cute.size(acc_S_mn, mode=[i]) for i in range(2))
        for r in range(rows):
            for pair in range(columns // 2):
                values = floats_of(self._pair(pair, r))
                for i in range(2):
                    acc_S_mn[r, 2 * pair + i] = acc_S_mn[r, 2 * pair + i] + values[i]

    def step(self, k: int) -> list:
        pairs = [[floats_of(self._pair(2 * k + i, r)) for i in range(2)] for r in range(2)]
        return [[*first, *second] for first, second in pairs]

    def _pair(self, pair: int, r: int) -> cute.Tensor:
        return self.found[None, pair, r % cute.size(self.found, mode=[2])]


@dataclass(frozen=True)
class SharedBias(Bias):
    """One row for all queries, in registers of a warp: pairs of keys, one a lane, that lanes ask each other
    for.
    """

    words: cute.Tensor  # of every 64 keys, this lane's pair
    dtype: cutlass.Constexpr

    @staticmethod
    def load(row: cute.Tensor, first_col: Int32, columns: int, last: Int32 | None) -> "SharedBias":
        """Keys of a block from a column on, up to the last pair of the row."""
        words = cute.make_rmem_tensor(-(-columns // KEYS_OF_WARP), Int32)
        for j in range(cute.size(words)):
            key = first_col + 2 * cute.arch.lane_idx() + KEYS_OF_WARP * j
            key = key if last is None else cutlass.min(key, last)
            pair = (row.iterator + key).align(4)
            words[j] = cute.make_tensor(cute.recast_ptr(pair, dtype=Int32), cute.make_layout(1))[0]
        return SharedBias(words, row.element_type)

    def step(self, k: int) -> list:
        words = cute.make_rmem_tensor(2, Int32)
        for i in range(2):
            pair = 8 * k + 4 * i
            lane = (cute.arch.lane_idx() & 3) + pair % 32
            words[i] = cute.arch.shuffle_sync(self.words[pair // 32], lane)
        pairs = cute.logical_divide(cute.recast_tensor(words, self.dtype), cute.make_layout(2))
        row = [*floats_of(pairs[None, 0]), *floats_of(pairs[None, 1])]
        return [row, row]


@dataclass(frozen=True)
class BiasBlocks:
    """Of every warpgroup, some blocks that the copy engine fetched. Fills are those of K and V."""

    sB: cute.Tensor  # (64, tile_n, (warpgroup, stage))
    full: cute.Pointer  # one mbarrier a stage and warpgroup: none waits until others are done
    empty: cute.Pointer
    tile: cutlass.Constexpr  # SmemTile of a warpgroup
    num_warpgroups: cutlass.Constexpr
    stages: cutlass.Constexpr

    @staticmethod
    def allocate(smem, dtype, tile: SmemTile, num_warpgroups: int, stages: int) -> "BiasBlocks":
        sB = allocate_stages(smem, dtype, tile, num_warpgroups * stages)
        sB = cute.logical_divide(sB, (None, None, num_warpgroups))
        num = num_warpgroups * stages
        barriers = smem.allocate_array(cutlass.Int64, 2 * num, byte_alignment=8)
        return BiasBlocks(sB, barriers, barriers + num, tile, num_warpgroups, stages)

    @cute.jit
    def init_barriers(self):
        """By one thread, before a fence and a barrier of all."""
        for warpgroup in cutlass.range_constexpr(self.num_warpgroups):
            self.ring(warpgroup).init(1, WARPGROUP_THREADS // 32)

    def ring(self, warpgroup: Int32 | int) -> Ring:
        first = warpgroup * self.stages
        return Ring(self.full + first, self.empty + first, self.stages)

    @cute.jit
    def load(self, tiles: TmaTiles, fill: Int32, place: tuple, coord: tuple):
        """By one warp: the block of all warpgroups. `place`: of rows and of keys; `coord`: head and batch."""
        m_block, n_block = place
        for w in cutlass.range_constexpr(self.num_warpgroups):
            ring = self.ring(w)
            ring.wait_empty(fill)
            ring.expect(fill, self.tile.bytes)
            into = self.sB[None, None, (w, ring.stage(fill))]
            tiles.load(into, m_block * self.num_warpgroups + w, *coord, ring.full_of(fill), n_block)

    def at(self, warpgroup: Int32, thread: Int32, fill: Int32) -> "FetchedBias":
        """What a thread of a warpgroup reads of a fill; its address is found anew, not kept in a register."""
        thread = rederived(thread)
        # By bits: of a quotient of signed numbers the compiler makes more.
        row, chunk = (thread >> 5) * WARP_ROWS + (thread & (WARP_ROWS - 1)), (thread >> 4) & 1
        place = (row * self.tile.row_stride + chunk * self.tile.chunk_cols) * self.tile.element_bytes
        first = Int32(self.sB.iterator.toint())
        ring = self.ring(warpgroup)
        part = (ring.stage(fill) * self.num_warpgroups + warpgroup) * self.tile.bytes
        return FetchedBias(self, ring, swizzled(first + place, self.tile) + part, fill)


@dataclass(frozen=True)
class FetchedBias(Bias):
    """In shared memory."""

    blocks: BiasBlocks
    ring: Ring
    address: Int32  # of this thread's 16 bytes of the first k-step
    fill: Int32

    def wait(self):
        self.ring.wait_full(self.fill)

    @cute.jit
    def release(self):
        """By a warp that has it in registers, or has used it."""
        cute.arch.sync_warp()
        self.ring.release(self.fill)

    def step(self, k: int) -> list:
        tile, dtype = self.blocks.tile, self.blocks.sB.element_type
        found = cute.make_rmem_tensor(VALUES, dtype)
        flipped, added = tile.column(STEP * k)
        address = self.address ^ (flipped * tile.element_bytes)
        source = cute.make_ptr(dtype, address, cutlass.AddressSpace.smem, assumed_align=16) + added
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
        one = cute.make_layout(((VALUES, 1),), stride=((1, 0),))
        cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(found.iterator, one))
        pairs = cute.logical_divide(found, cute.make_layout(2))
        return [floats_of(pairs[None, r]) + floats_of(pairs[None, 2 + r]) for r in range(2)]
