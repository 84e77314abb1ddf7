"""Tile schedulers: which tiles a CTA computes, and in which order.

The GPU starts CTAs in the order of their indices, so the order of tiles decides when each one runs. Heads form L2
groups, and the tiles of all heads of a group run at the same time. The data that they share fits in L2: K and V in the
forward; Q, dO and dQ in the backward. With a right bound (causal) the long tiles (late rows, which see more keys) come
first, so that short ones fill the last wave.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_flash.device.scheduling.seqlen import NUM_VALUES, SeqlenValues
from cute_flash.planning.varlen import TILE_LIST_HEADER, TILE_LIST_WIDTH


class TileCoord(NamedTuple):
    """The coordinate of a tile."""

    block: Int32  # its m_block, in the backward its n_block
    head: Int32
    seqlen_values: SeqlenValues


@dataclass(frozen=True)
class StaticTileScheduler:
    """Maps the linear index of a tile to its coordinates."""

    num_blocks: Int32  # tiles of a head: m_blocks in the forward, n_blocks in the backward
    heads: Int32
    batch: Int32
    heads_per_l2_group: Int32
    longest_first: cutlass.Constexpr
    # Whether the tiles of one head in all batch entries are neighbours, so that they read a shared bias at the same
    # time. None: they are not, and the kernel has no code for it.
    batch_is_inner: cutlass.Boolean | None = None

    @cute.jit
    def tile_coord(self, index: Int32) -> TileCoord:
        """The coordinate of a tile of a dense batch."""
        group_tiles = self.heads_per_l2_group * self.num_blocks
        group = index // group_tiles
        rest = index - group * group_tiles
        first_head = group * self.heads_per_l2_group
        width = cutlass.min(self.heads_per_l2_group, self.heads * self.batch - first_head)
        block = rest // width
        head = first_head + rest - block * width
        if cutlass.const_expr(self.longest_first):
            block = self.num_blocks - 1 - block
        batch = head // self.heads
        head = head - batch * self.heads
        if cutlass.const_expr(self.batch_is_inner is not None):
            if self.batch_is_inner:
                flat = batch * self.heads + head
                head = flat // self.batch
                batch = flat - head * self.batch
        # The compiler does not see that the quotients are the same in all threads; `make_warp_uniform` allows uniform
        # registers for them.
        uniform = cute.arch.make_warp_uniform
        return TileCoord(uniform(block), uniform(head), (uniform(batch),))


@dataclass(frozen=True)
class PersistentTileScheduler:
    """The indices of the tiles of a persistent CTA.

    The first index is the index of the CTA. A static schedule then adds the number of CTAs for each tile. A dynamic
    schedule, for tiles that differ in length, fetches the next index from a counter when the CTA is free.

    `tile_counter` is the address of an int32 in global memory that is 0 between launches, and that no concurrent
    launch uses. A launch fetches one index per tile, so the largest index is known; the CTA that fetches it resets the
    counter.
    """

    num_tiles: Int32
    tile_counter: Int64
    is_dynamic: cutlass.Constexpr
    # CTAs of a cluster, which compute a tile together. One CTA of a cluster calls `next_tile` and `finish`.
    ctas_per_tile: cutlass.Constexpr = 1

    def _pointer(self) -> cute.Pointer:
        return cute.make_ptr(Int32, self.tile_counter, cutlass.AddressSpace.gmem, assumed_align=4)

    def first_tile(self) -> Int32:
        return self._per_cluster(cute.arch.block_idx()[0])

    def _first_tiles(self) -> Int32:
        """The number of tiles that are first tiles."""
        return self._per_cluster(cute.arch.grid_dim()[0])

    def _per_cluster(self, ctas: Int32) -> Int32:
        return ctas if self.ctas_per_tile == 1 else ctas // self.ctas_per_tile

    @cute.jit
    def next_tile(self, index: Int32) -> Int32:
        """The tile after `index`. Called by one warp."""
        following = index + self._first_tiles()
        if cutlass.const_expr(self.is_dynamic):
            fetched = Int32(0)
            if cute.arch.lane_idx() == 0:
                fetched = cute.arch.atomic_add(self._pointer(), Int32(1), sem="relaxed", scope="gpu")
            following = self._first_tiles() + cute.arch.shuffle_sync(fetched, 0)
        return following

    @cute.jit
    def finish(self, index: Int32):
        """Reset the counter if this CTA fetched the last index. `index`: the CTA's first index that is not a tile."""
        if cutlass.const_expr(self.is_dynamic):
            if cute.arch.lane_idx() == 0 and index == self._first_tiles() + self.num_tiles - 1:
                cute.make_tensor(self._pointer(), cute.make_layout(1))[0] = Int32(0)


@dataclass(frozen=True)
class VarlenTileList:
    """The tile list of a varlen batch, which the scheduler kernel has written (`planning.varlen`)."""

    mTiles: cute.Tensor  # (TILE_LIST_HEADER + tiles, TILE_LIST_WIDTH)
    heads: Int32
    heads_per_l2_group: Int32

    @cute.jit
    def num_tiles(self) -> Int32:
        """The number of tiles of all heads."""
        return self.mTiles[0, 0] * self.heads

    @cute.jit
    def tile_coord(self, index: Int32) -> TileCoord:
        scheduler = StaticTileScheduler(self.mTiles[0, 0], self.heads, Int32(1), self.heads_per_l2_group, False)
        row, head, _ = scheduler.tile_coord(index)
        block, seqlen_values = read_tile(self.mTiles, row)
        return TileCoord(block, head, seqlen_values)

    def scheduler(self, tile_counter: Int64, is_dynamic: bool, ctas_per_tile: int = 1) -> PersistentTileScheduler:
        """A scheduler of the listed tiles for persistent CTAs."""
        return PersistentTileScheduler(self.num_tiles(), tile_counter, is_dynamic, ctas_per_tile)


@cute.jit
def read_tile(mTiles: cute.Tensor, index: Int32):
    """(block, `SeqlenInfo.values`) of an entry of the tile list."""
    row = cute.make_rmem_tensor(TILE_LIST_WIDTH, Int32)
    source = (mTiles.iterator + (index + TILE_LIST_HEADER) * TILE_LIST_WIDTH).align(16)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(TILE_LIST_WIDTH)), row)
    uniform = cute.arch.make_warp_uniform
    block, *seqlen_values = (uniform(row[i]) for i in range(1 + NUM_VALUES))
    return block, tuple(seqlen_values)
