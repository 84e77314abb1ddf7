"""Decode with a latent cache (MLA) by wgmma, for Hopper and more than 16 query rows.

The rows of a query tile and the division of the keys are those of `kernel.py`. A cache row is the key, and its first
columns are the value. Four warpgroups have three roles:

| warpgroup | role                                                                       | file                    |
|-----------|----------------------------------------------------------------------------|-------------------------|
| 0         | producer: find and publish splits, append new keys, load Q and K           | latent_sm90_producer.py |
| 1         | scores: S = Q K^T, features, mask, softmax; P to shared memory             | latent_sm90_scores.py   |
| 2, 3      | output: O = O alpha + P V, half of the columns each; write, merge splits   | latent_sm90_output.py   |

| shared memory | elements             | lifetime                                                            |
|---------------|----------------------|---------------------------------------------------------------------|
| sQ            | 64 x tile_d          | one split, until the scores warpgroup has read it for the last time |
| sK            | stages x 64 x tile_d | one block: S of the block, then P V; its halves are released apart  |
| sP            | 64 x 64              | one block, handed over in halves                                    |

The roles are ordered only by the pipelines of `latent_sm90_storage.py`. The scores warpgroup computes S of the next
block while the output warpgroups compute P V of the current one, and the producer loads further halves of blocks, by
TMA or by cp.async. The output warpgroups finish a split while the others begin the next.

The CTAs of two head groups may form a cluster, in which each key is loaded once (`latent_sm90_storage.py`).
"""

from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync

from cute_flash.device.memory.multicast import MulticastTiles
from cute_flash.device.memory.tma import TmaTiles
from cute_flash.device.mma.wgmma import make_mma
from cute_flash.kernels.decode.kernel import Decode
from cute_flash.kernels.decode.latent_sm90_output import compute_output
from cute_flash.kernels.decode.latent_sm90_producer import produce
from cute_flash.kernels.decode.latent_sm90_scores import compute_scores
from cute_flash.kernels.decode.latent_sm90_storage import Mmas, SharedStorage
from cute_flash.kernels.decode.storage import Params, Team
from cute_flash.planning.latent_sm90 import COLUMNS_PV, TMA_BOX, WARPGROUP_THREADS, loads_by_tma

# Named barrier 0 is the CTA barrier.
OUTPUT_BARRIER = 1


class DecodeLatentSm90(Decode):
    """The decode kernel with a latent cache and wgmma."""

    name = "decode_latent_sm90"
    launch_options: ClassVar[dict[str, Any]] = {"min_blocks_per_mp": 1}

    def make_mma(self) -> Mmas:
        tile, K = self.tile, OperandMajorMode.K
        return Mmas(
            qk=make_mma(self.dtype, tile.tile_n, False, K, K),
            qk_first=make_mma(self.dtype, tile.tile_n, True, K, K),
            pv=make_mma(self.dtype, min(tile.columns, COLUMNS_PV), False, K, OperandMajorMode.MN),
        )

    @cute.jit
    def make_tma(self, k_cache: cute.Tensor) -> TmaTiles | None:
        if cutlass.const_expr(not loads_by_tma(self.static)):
            return None
        heads_first = cute.make_tensor(k_cache.iterator, cute.select(k_cache.layout, mode=[0, 2, 1, 3]))
        if cutlass.const_expr(self.static.multicasts):
            return MulticastTiles.of(cpasync.CopyBulkTensorTileG2SMulticastOp(), heads_first, TMA_BOX)
        return TmaTiles.of(cpasync.CopyBulkTensorTileG2SOp(), heads_first, TMA_BOX)

    @property
    def size_name(self) -> str:
        tile = self.tile
        return f"{tile.tile_m}x{tile.tile_n}s{tile.stages}"

    @cute.kernel
    def kernel(self, p: Params):
        cta = self.cta_index(p)
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        storage = SharedStorage.allocate(p.config)
        if warp_index == 0:
            with cute.arch.elect_one():
                storage.init_barriers()
        cute.arch.mbarrier_init_fence()
        self.sync()
        if cutlass.const_expr(self.static.overlaps_previous):
            # The kernel starts before the previous one ends (programmatic dependent launch).
            self.read_params(p, storage)
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if warp_index < 4:
            # The division needs more registers than the loads.
            division = p.splits.divide(cta)
            cute.arch.setmaxregister_decrease(self.tile.registers[0])
            produce(p, storage, division, thread)
        elif warp_index < 8:
            cute.arch.setmaxregister_increase(self.tile.registers[1])
            compute_scores(p, storage, thread % WARPGROUP_THREADS)
        else:
            cute.arch.setmaxregister_increase(self.tile.registers[2])
            team = Team(self.tile.merging_threads, OUTPUT_BARRIER)
            thread = thread % self.tile.merging_threads
            compute_output(p, storage, team, thread, cta)
            if cutlass.const_expr(self.static.ragged):
                self.zero_padding(p, team, thread, cta)
        if cutlass.const_expr(self.static.multicasts):
            # The other CTA may still arrive at the barriers of this one.
            self.sync()

    def cta_index(self, p: Params) -> Int32:
        """The index of this CTA. Those of a cluster have the same interval of keys, and neighbouring head groups."""
        interval, head, _ = cute.arch.block_idx()
        return interval + head * p.splits.num_intervals.divisor if self.static.multicasts else interval

    def sync(self):
        """The barrier of the CTA, or of the cluster."""
        if self.static.multicasts:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
