"""A block of a bias on its way to scores: read by every thread at its places, or by the copy engine.

Both ways a thread has what an accumulator has: of a k-step of 16 keys, pairs of neighbours, in two rows 8
apart and then in keys 8 apart. Of 64 rows in shared memory that is one ldmatrix.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_flash.device.barriers import WARPGROUP_THREADS, Ring
from cute_flash.device.ldmatrix import STEP, swizzled
from cute_flash.device.tma import TmaTiles
from cute_flash.tiles import WARP_ROWS
from layouts.smem import SmemTile, byte_swizzle, to_cute

SMEM_ALIGN = 1024
VALUES = 8  # of a k-step in a thread


def values_of(step: cute.Tensor) -> list:
    """[row][column] of a k-step, as floats."""
    return [[Float32(step[i % 2 + 2 * (r + 2 * (i // 2))]) for i in range(4)] for r in range(2)]


@dataclass(frozen=True)
class LoadedBias:
    """In registers."""

    found: cute.Tensor  # (2, pairs, rows), or one row for all

    def wait(self): ...

    def release(self): ...

    def loaded(self) -> cute.Tensor:
        return self.found

    def step(self, k: int) -> list:
        rows = cute.size(self.found, mode=[2])
        return [[Float32(self.found[i % 2, 2 * k + i // 2, r % rows]) for i in range(4)] for r in range(2)]


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
        affine = to_cute(tile.staged(num_warpgroups * stages).layout)
        sB = smem.allocate_tensor(dtype, affine, SMEM_ALIGN, swizzle=byte_swizzle(tile))
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
        """What a thread of a warpgroup reads of a fill."""
        row, chunk = thread // 32 * WARP_ROWS + thread % WARP_ROWS, thread % 32 // WARP_ROWS
        place = (row * self.tile.row_stride + chunk * self.tile.chunk_cols) * self.tile.element_bytes
        first = Int32(self.sB.iterator.toint())
        ring = self.ring(warpgroup)
        part = (ring.stage(fill) * self.num_warpgroups + warpgroup) * self.tile.bytes
        return FetchedBias(self, ring, swizzled(first + place, self.tile) + part, fill)


@dataclass(frozen=True)
class FetchedBias:
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

    def loaded(self) -> cute.Tensor:
        """(2, pairs, rows) of all k-steps, in registers."""
        steps = self.blocks.tile.cols // STEP
        found = cute.make_rmem_tensor(VALUES * steps, self.blocks.sB.element_type)
        for k in range(steps):
            self._load(k, cute.make_tensor(found.iterator + VALUES * k, cute.make_layout(VALUES)))
        return cute.make_tensor(found.iterator, cute.make_layout((2, 2 * steps, 2), stride=(1, 4, 2)))

    def step(self, k: int) -> list:
        found = cute.make_rmem_tensor(VALUES, self.blocks.sB.element_type)
        self._load(k, found)
        return values_of(found)

    def _load(self, k: int, into: cute.Tensor) -> None:
        tile, dtype = self.blocks.tile, self.blocks.sB.element_type
        flipped, added = tile.column(STEP * k)
        address = self.address ^ (flipped * tile.element_bytes)
        source = cute.make_ptr(dtype, address, cutlass.AddressSpace.smem, assumed_align=16) + added
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
        one = cute.make_layout(((VALUES, 1),), stride=((1, 0),))
        cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(into.iterator, one))
