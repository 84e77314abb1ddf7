"""Parameters and shared memory of the Hopper backward for wide heads."""

from dataclasses import dataclass, replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.gradients.bias_bwd import BwdBiasPipeline
from cute_flash.device.memory.smem import allocate_stages
from cute_flash.device.memory.tma import TmaTiles
from cute_flash.device.mma.cluster_sum import ClusterSum
from cute_flash.device.scheduling.block_iterator import BlockIterator
from cute_flash.device.scheduling.block_sparse import BwdBlockIndex
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, Pipeline
from cute_flash.device.scores.position import ScoreBlock
from cute_flash.kernels.sm90.bwd_storage import MMA_THREADS, NUM_WARPGROUPS, BwdParams, Config, KVTile, allocate_bias

# The number of adder warps with deterministic gradients. They take halves in turn, so that several can wait at a time:
# for a semaphore, or until additions are complete.
DETERMINISTIC_ADDERS = 3
# The number of successive halves that have separate barriers, with deterministic gradients. A wait can only distinguish
# two successive phases of a barrier. An adder warp waits for half j after it has added half j - DETERMINISTIC_ADDERS.
# At that time half j - DETERMINISTIC_HALVES, which has the same barrier, must have been staged. The number is a power
# of two, like all numbers of stages.
DETERMINISTIC_HALVES = 4


@dataclass(frozen=True)
class Params(BwdParams):
    """The argument of the kernel. In `band`, rows are queries and columns are keys."""

    @property
    def loads_bias_with_q(self) -> bool:
        """Whether the warp that loads Q also loads the bias."""
        return self.bias is not None

    def tile_exists(self) -> cutlass.Boolean:
        """Whether a varlen batch has a tile for this CTA. The grid has the size of the longest possible tile list."""
        return self.tile_index < self.tile_list.num_tiles()

    @property
    def tile_index(self) -> Int32:
        """The index of the tile of this CTA, or of its cluster."""
        index, cluster = cute.arch.block_idx()[0], self.config.tile.cluster
        return index // cluster if cluster > 1 else index

    @cute.jit
    def tile(self):
        """The K/V tile of this CTA."""
        tile_n, tile_m = self.config.tile.tile_n, self.config.tile.tile_m
        coord = self.tile_coord(self.tile_index)
        n_block, head_kv, seqlen = coord.block, coord.head, self.seqlen_info(coord)
        blocks = self.band.of_keys.blocks(n_block, tile_n, tile_m, seqlen.k_len, seqlen.q_len)
        block_iter = BlockIterator.of(blocks, ascends=True)
        # Keys past the end must not contribute to dQ, so all blocks of the last tile are masked.
        is_tail = (n_block + 1) * tile_n > seqlen.k_len
        block_iter = replace(block_iter, full_end=Int32(0) if is_tail else block_iter.full_end)
        num_sparse = None
        if cutlass.const_expr(self.block_indices is not None):
            num_sparse = self.block_indices.count(seqlen.batch, head_kv, n_block)
        return KVTile(Int32(0), Int32(0), n_block, head_kv, seqlen, blocks, block_iter, None, num_sparse)

    def sparse_accum_block(self, tile: KVTile, index: BwdBlockIndex) -> Int32:
        """The index of an m_block that a block mask lists, among all blocks of mdQ_accum."""
        _, heads, blocks, _ = self.mdQ_accum.shape
        return (tile.batch * heads + tile.head_kv * self.heads_per_kv + index.head) * blocks + index.m_block

    def first_accum_block(self, tile: KVTile) -> Int32:
        """The index of the first block that a tile adds to, among all blocks of mdQ_accum, without a block mask."""
        _, heads, blocks, _ = self.mdQ_accum.shape
        first_head, first = tile.head_kv * self.heads_per_kv, tile.block_iter.first
        if tile.seqlen.is_varlen:
            return first_head * blocks + tile.seqlen.padded_q_block(first, self.config.tile.tile_m)
        return (tile.batch * heads + first_head) * blocks + first


@dataclass(frozen=True)
class SharedStorage:
    """The shared memory: tiles and barriers."""

    sK: cute.Tensor  # (tile_n, tile_d); dK is stored through it
    sV: cute.Tensor  # (tile_n, tile_d); dV is stored through it
    sQ: cute.Tensor  # (tile_m, tile_d, stage)
    sdO: cute.Tensor
    sP: cute.Tensor  # (tile_n, tile_m)
    sdS: cute.Tensor
    sdQ: cute.Tensor  # (4, thread, piece, warpgroup) fp32, half of each warpgroup's dQ
    sLSE: cute.Tensor  # (tile_m, stage)
    sDelta: cute.Tensor
    k: Pipeline
    v: Pipeline
    q: Pipeline  # with LSE
    do: Pipeline  # with Δ
    dq: Pipeline  # per warpgroup: memory for one half, barriers for one, or for DETERMINISTIC_HALVES
    bias: BwdBiasPipeline | None  # None: TMA loads no bias
    cluster_sum: ClusterSum | None  # of S, then of dP; None: no cluster

    @staticmethod
    def allocate(config: Config) -> "SharedStorage":
        smem, tile = SmemAllocator(), config.tile
        allocate = partial(allocate_stages, smem, config.dtype)

        def allocate_rows(stages: int) -> cute.Tensor:
            return smem.allocate_tensor(Float32, cute.make_layout((tile.tile_m, stages)), 128)

        sK, sV = allocate(config.k, 1)[None, None, 0], allocate(config.k, 1)[None, None, 0]
        sQ, sdO = allocate(config.q, tile.q_stages), allocate(config.q, tile.do_stages)
        sP, sdS = allocate(config.ds, 1)[None, None, 0], allocate(config.ds, 1)[None, None, 0]
        layout = cute.make_layout((4, WARPGROUP_THREADS, tile.dq_pieces, NUM_WARPGROUPS))
        sdQ = smem.allocate_tensor(Float32, layout, 128)
        sLSE, sDelta = allocate_rows(tile.q_stages), allocate_rows(tile.do_stages)
        bias = allocate_bias(smem, config, is_transposed=False)
        dq_stages = NUM_WARPGROUPS * (DETERMINISTIC_HALVES if config.static.deterministic else 1)
        stages = (1, 1, tile.q_stages, tile.do_stages, dq_stages)
        k, v, q, do, dq = [Pipeline.allocate(smem, number) for number in stages]
        cluster_sum = None
        if tile.cluster > 1:
            elements = tile.tile_m * tile.tile_n // MMA_THREADS
            cluster_sum = ClusterSum.allocate(smem, elements, NUM_WARPGROUPS, tile.sum_slots)
        return SharedStorage(sK, sV, sQ, sdO, sP, sdS, sdQ, sLSE, sDelta, k, v, q, do, dq, bias, cluster_sum)

    def store_dbias(self, tma: TmaTiles, iteration: Int32, block: ScoreBlock) -> None:
        """Store the gradient of the bias of a block. Called by one warp."""
        self.bias.store_gradient(tma, iteration, block)

    @cute.jit
    def init_barriers(self):
        """Called by one thread, before a fence and a CTA barrier."""
        for pipeline in (self.k, self.v, self.q):
            pipeline.init(1, 4 * NUM_WARPGROUPS)
        # dO is released per thread, because every thread reads Δ with plain loads.
        self.do.init(1, MMA_THREADS)
        self.dq.init(WARPGROUP_THREADS, 1)
        if cutlass.const_expr(self.bias is not None):
            self.bias.init_barriers()
        if cutlass.const_expr(self.cluster_sum is not None):
            self.cluster_sum.init_barriers()
