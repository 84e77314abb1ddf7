"""Shared memory and barriers of decode with a latent cache by wgmma.

Every pipeline counts its iterations from the start of the kernel:

| pipeline | iteration            | full: arrivals        | empty: arrivals          | data                          |
|----------|----------------------|-----------------------|--------------------------|-------------------------------|
| splits   | split, and the end   | producer: 1           | scores, output: 384      | fields of the split           |
| q        | split                | producer: 128 copies  | scores: 128              | Q                             |
| kv       | half of a block      | producer: 128         | output: 8 or 16 warps    | K, which contains V           |
| p        | half of a block, end | scores: 128           | output: 256              | P and factors of O; then m, l |

The copies of a thread count as one arrival. If TMA loads a half, each thread of the producer arrives by itself, and
the barrier also waits for the bytes. With tables of queries, each thread arrives twice.
Thus a split with n blocks takes 2 n iterations of `kv` and 2 n + 2 of `p`. The factors come with the first half of P.
The scores warpgroup hands over P of a block after its reads of K, so only the output warpgroups release K.

In a cluster, two CTAs have the same splits of two head groups. TMA of the CTA of rank r loads half r of a block to
both, and `kv.empty` counts the output warps of both. Halves that TMA may not load are copied by each CTA for itself.
So both must have the same splits and decide alike about TMA: they compute both from the lengths of the sequence only.
"""

from dataclasses import dataclass, replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.memory.multicast import CTAS
from cute_flash.device.memory.smem import allocate_stages
from cute_flash.device.scheduling.kv_splits import Split, TileCtas
from cute_flash.device.scheduling.pipeline import Pipeline
from cute_flash.device.scheduling.published_tiles import MIN_SLOTS, NO_TILE, PublishedTiles
from cute_flash.kernels.decode.storage import Config
from cute_flash.planning.latent_sm90 import LOAD_KEYS, WARPGROUP_THREADS
from cute_flash.smem.tile import SmemTile

# The published fields of a split. `batch` is NO_TILE after the last split.
SPLIT_FIELDS = ("batch", "head_kv", "row_tile", "query_tile", "begin", "end", "is_first")
TILE_CTAS_FIELDS = ("first", "last", "num_final")
SCORES_WARPS, OUTPUT_WARPS = 4, 8


@dataclass(frozen=True)
class Mmas:
    """The products of one warpgroup."""

    qk: cute.TiledMma
    qk_first: cute.TiledMma  # the k-steps of Q that stay in registers
    pv: cute.TiledMma


@dataclass(frozen=True)
class SharedStorage:
    sQ: cute.Tensor  # (64, tile_d, 1)
    sK: cute.Tensor  # (tile_n, tile_d, stage)
    sV: cute.Tensor  # (width_v, tile_n, stage): the first columns of sK, transposed
    sP: cute.Tensor  # (64, tile_n, 1)
    factors: cute.Tensor  # (64) fp32: factors of the rows of O; after the last block of a split m
    sums: cute.Tensor  # (64) fp32: after the last block of a split l
    rescales: cute.Tensor  # (4): whether a warp's rows of O are rescaled
    config: cutlass.Constexpr  # Config
    sExists: cute.Tensor | None  # (half of a stage, key): whether a key has a page, if a page can be -1
    merge_share: cute.Tensor  # (1): as in `storage.SharedStorage`
    splits: Pipeline
    q: Pipeline
    kv: Pipeline
    p: Pipeline
    fields: PublishedTiles
    rank: Int32 | None  # of this CTA in a cluster; None: no cluster

    @staticmethod
    def allocate(config: Config) -> "SharedStorage":
        smem, tile = SmemAllocator(), config.tile
        allocate = partial(allocate_stages, smem, config.dtype)
        sQ, sK, sP = allocate(tile.q_smem, 1), allocate(tile.kv_smem, tile.stages), allocate(tile.p_smem, 1)
        (rows, columns), strides = SmemTile(tile.tile_n, tile.width_v).affine
        layout = cute.make_layout((columns, rows, tile.stages), stride=(*reversed(strides), tile.kv_smem.cosize))
        sV = cute.make_tensor(sK.iterator, layout)
        row_values = cute.make_layout(tile.tile_m)
        factors, sums = (smem.allocate_tensor(Float32, row_values, 16) for _ in range(2))
        rescales = smem.allocate_tensor(Int32, cute.make_layout(SCORES_WARPS), 16)
        exists = None
        if config.static.has_query_tables:
            layout = cute.make_layout((tile.loads * tile.stages, LOAD_KEYS), stride=(LOAD_KEYS, 1))
            exists = smem.allocate_tensor(Int32, layout, 16)
        merge_share = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        pipelines = [Pipeline.allocate(smem, stages) for stages in (MIN_SLOTS, 1, tile.loads * tile.stages, tile.loads)]
        fields = PublishedTiles.allocate(smem, len(SPLIT_FIELDS) + len(TILE_CTAS_FIELDS))
        rank = cute.arch.block_idx_in_cluster() if config.static.multicasts else None
        return SharedStorage(
            sQ, sK, sV, sP, factors, sums, rescales, config, exists, merge_share, *pipelines, fields, rank
        )

    @cute.jit
    def init_barriers(self):
        """Called by one thread, before a fence and a barrier of the CTA or the cluster."""
        scores, output = WARPGROUP_THREADS, self.config.tile.merging_threads
        self.splits.init(1, scores + output)
        self.q.init(WARPGROUP_THREADS, scores)
        arrivals = WARPGROUP_THREADS if self.sExists is None else 2 * WARPGROUP_THREADS
        self.kv.init(arrivals, OUTPUT_WARPS if self.rank is None else CTAS * OUTPUT_WARPS)
        self.p.init(scores, output)

    # ---- Q and K

    @cute.jit
    def wait_loaded(self, pipeline: Pipeline, iteration: Int32):
        """Wait until wgmma may read a stage."""
        pipeline.wait_full(iteration)
        # Copies arrive when they have landed, without a fence between them and wgmma.
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def wait_block(self, block: Int32):
        """Wait until wgmma may read all keys of a block."""
        loads = self.config.tile.loads
        for half in cutlass.range_constexpr(loads - 1):
            self.kv.wait_full(loads * block + half)
        self.wait_loaded(self.kv, loads * block + loads - 1)

    @cute.jit
    def release_half(self, load: Int32):
        """Release a half of a block, also for the other CTA of the cluster. Called by every output warp."""
        if cutlass.const_expr(self.rank is None):
            self.kv.release(load)
        else:
            lane = cute.arch.lane_idx()
            if lane < CTAS:
                cute.arch.mbarrier_arrive(self.kv.empty_barrier(load, None), peer_cta_rank_in_cluster=lane)

    def stage_of_block(self, block: Int32) -> Int32:
        """The index of a block in sK and sV."""
        loads = self.config.tile.loads
        return self.kv.stage(loads * block) // loads

    # ---- published splits. `count` is the number of splits that the CTA has computed before.

    @cute.jit
    def publish(self, count: Int32, split: Split, ctas: TileCtas):
        """Publish a split. Called by one warp of the producer."""
        self.splits.wait_empty(count)
        values = [getattr(split, name) for name in SPLIT_FIELDS] + [getattr(ctas, name) for name in TILE_CTAS_FIELDS]
        self.fields.write(count, [Int32(value) for value in values])
        self._published(count)

    @cute.jit
    def publish_end(self, count: Int32):
        self.splits.wait_empty(count)
        self.fields.write_end(count)
        self._published(count)

    def _published(self, count: Int32):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.splits.full_barrier(count))

    @cute.jit
    def wait_split(self, count: Int32) -> cutlass.Boolean:
        """Wait for a split, and return whether there is one."""
        self.splits.wait_full(count)
        return self.fields.read(0, count) != NO_TILE

    def split(self, count: Int32) -> Split:
        """The split, with only its SPLIT_FIELDS set. Called after `wait_split`."""
        fields = {name: self.fields.read(i, count) for i, name in enumerate(SPLIT_FIELDS)}
        return replace(Split.none(), **(fields | {"is_first": fields["is_first"] == 1}))

    def ctas(self, count: Int32) -> TileCtas:
        """The CTAs of the split's query tile. Called after `wait_split`."""
        first = len(SPLIT_FIELDS)
        return TileCtas(*(self.fields.read(first + i, count) for i in range(len(TILE_CTAS_FIELDS))))

    @cute.jit
    def release_split(self, count: Int32):
        """Release the fields of a split. Called by every thread that reads them, when it is done with the split."""
        self.splits.release_per_thread(count)
