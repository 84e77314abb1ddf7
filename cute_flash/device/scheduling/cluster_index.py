"""The tile index that the CTAs of a cluster share: rank 0 gets it from the scheduler and sends it to the other CTA."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.scheduling.pipeline import Pipeline
from cute_flash.device.scheduling.tile_scheduler import PersistentTileScheduler

INDEX_BYTES = 4


@dataclass(frozen=True)
class ClusterIndex:
    """The index in shared memory, and its barriers. One warp of each CTA calls the methods."""

    slot: cute.Tensor
    pipeline: Pipeline  # full: in the receiving CTA; empty: in the sending CTA

    @staticmethod
    def allocate(smem: SmemAllocator) -> "ClusterIndex":
        return ClusterIndex(smem.allocate_tensor(Int32, cute.make_layout(1), 16), Pipeline.allocate(smem, 1))

    @cute.jit
    def next_tile(self, scheduler: PersistentTileScheduler, index: Int32, count: Int32, rank: Int32) -> Int32:
        """The tile after `index`, the same in both CTAs. `count`: the number of earlier calls."""
        following = Int32(0)
        if rank == 0:
            following = scheduler.next_tile(index)
            self.pipeline.wait_empty(count, in_cluster=True)
            with cute.arch.elect_one():
                cute.arch.store_async_dsmem(self.slot.iterator, following, self.pipeline.full, 1)
        else:
            self.pipeline.expect_bytes(count, INDEX_BYTES)
            self.pipeline.wait_full(count, in_cluster=True)
            following = self.slot[0]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                self.pipeline.release_to_peer(count, following, 0)
        return cute.arch.make_warp_uniform(following)
