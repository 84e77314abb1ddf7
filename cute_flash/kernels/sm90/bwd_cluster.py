"""Warp-specialised backward attention by clusters of two CTAs, for Hopper and head dims above 256.

The roles of the warps, the formulas and the shared memory are those of `bwd_wide`. The CTAs of a cluster compute the
same K/V tile and visit the same m_blocks. Each has half of the columns of Q, K, V, dO, dQ, dK and dV, so its tiles are
those of a narrower head. Only S and dP need all columns: each CTA computes a partial sum, and both add the partial sum
of the other (`device/mma/cluster_sum.py`). Then both have the same S and dP, and compute P and dS twice.

A CTA has 160, 192 or 256 columns, and each of its two warpgroups has half of them. dK and dV are not transposed, as
they are in `bwd_wide`: the 64 keys of a tile are the rows of a wgmma, so the columns of a warpgroup are one product of
any width. The columns of a warpgroup are whole atoms of Q, K, V and dO in shared memory. So an atom has 64 columns if a
CTA has 256, 32 at 192, and 16 at 160 (`BwdTileSm90Wide.atom_columns`).

For a block, a warpgroup issues the following products; ' marks the next block. Up to 192 columns there are registers
for a whole dQ; at 256 columns dQ is computed in two halves:

    S' dQ dK dP' dV'    or    S' dQ0 dK dQ1 dP' dV'

S' is sent as soon as it is complete, and so is dP', if there are slots for two messages. At 256 columns there is memory
for one, so dP' is sent after S' of the other CTA has been added. P' is computed when S' of the other CTA has arrived.
While dV' runs, dP' of the other CTA arrives. Then nothing runs until dS' is stored.

Clocks of a block of 64 queries and 64 keys, for one CTA with C columns:

| what                    |  160 |  192 |  256 | why                                                            |
|-------------------------|------|------|------|----------------------------------------------------------------|
| products, tensor cores  | 1600 | 1920 | 2560 | 5 x 64 x 64 x C / 2048                                         |
| S and dP, shared memory |  960 | 1152 | 1536 | 2 x C / 16 steps x 2 warpgroups x 3 KB                         |
| dK and dV, the same     |  576 |  640 |  768 | 2 x 4 steps x 2 warpgroups x (2 KB + C / 2 x 32 B)             |
| dQ, the same            |  288 |  320 |  512 | 4 steps x 2 warpgroups x (2 KB + C / 2 x 32 B); 256: as halves |
| dQ, staged and added    |  640 |  768 | 1024 | 64 x C x 4 B, written and read                                 |
| loads of Q and dO       |  320 |  384 |  512 | 2 x 64 x C x 2 B                                               |
| P, dS, partial sums     |  640 |  640 |  640 | 80 KB                                                          |
| sum of shared memory    | 3424 | 3904 | 4992 | at 128 B a clock                                               |
| partial sums, SM to SM  | 1770 | 1770 | 1770 | 32 KB in each direction, 18.5 bytes a clock                    |
| measured                | 5700 | 6000 | 6900 | S = 16384 without a mask, at an assumed 1.755 GHz              |

The longest chain of dependent steps at 192 columns: S' 500, both messages 2270 (500 of them latency), dS' and its
barrier 500 (estimates): 3300. So shared memory is the bound at all widths. At 256 columns the second message waits for
the first, and the chain has 4700 clocks. Narrow atoms cost time too: with atoms of 16 columns, 192 columns take 6600
clocks, and 256 columns take 8400 (7700 with 32).

Claims of dQ are free of deadlocks, as in `bwd_wide`: the CTAs of a cluster run at the same time, and dQ of a block
depends on additions to earlier blocks only. A warpgroup sends S' before it stages dQ of the block. Before it stages the
second half, it waits only for steps of the other CTA that come before the second half there too.
"""

from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_flash.device.gradients.mods_bwd import AnyScores
from cute_flash.device.memory.stmatrix import store_steps
from cute_flash.device.mma.wgmma import convert, make_mma, start_gemm
from cute_flash.kernels.sm90.bwd_storage import MMA_THREADS, BlockVisit, KVTile
from cute_flash.kernels.sm90.bwd_wide import P_STAGED, BwdSm90Wide, MmaState, Products, WideVisit
from cute_flash.kernels.sm90.bwd_wide_storage import Params, SharedStorage
from cute_flash.planning.tiles.bwd_sm90 import HALVES

# Messages of a block (`ClusterSum`), in the order in which they are sent.
SCORES, GRADIENTS = 0, 1
MESSAGES = 2


class BwdSm90Cluster(BwdSm90Wide):
    """The backward kernel for the widest heads. A cluster of two CTAs computes one K/V tile."""

    name = "bwd_sm90_cluster"
    launch_options: ClassVar[dict[str, Any]] = {**BwdSm90Wide.launch_options, "cluster": (2, 1, 1)}

    @property
    def sends_twice(self) -> bool:
        """Whether dP is sent before S of the other CTA is added: it needs a second slot."""
        return self.tile.sum_slots == MESSAGES

    def k_steps(self) -> tuple[range | None, range | None]:
        """All k-steps: the columns of one CTA of the cluster always exist."""
        return None, None

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        storage = SharedStorage.allocate(self.config)
        if warp_index == 0:
            with cute.arch.elect_one():
                storage.init_barriers()
        cute.arch.mbarrier_init_fence()
        self.sync_cluster()
        # Wait for the end of the preprocess kernel. Allow the postprocess kernel to be launched; it waits for this one.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.static.varlen):
            if p.tile_exists():
                self.run_role(p, storage, warp_index, thread)
        else:
            self.run_role(p, storage, warp_index, thread)
        # The other CTA may still arrive at barriers of this one.
        self.sync_cluster()

    def sync_cluster(self) -> None:
        """The barrier of the cluster."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def make_mma_dkv(self) -> cute.TiledMma:
        """The product of a warpgroup's columns of dK and dV."""
        return make_mma(self.dtype, self.tile.dq_part[1], False, OperandMajorMode.K, OperandMajorMode.MN)

    def _operands_dkv(self, p: Params, storage: SharedStorage, wg: Int32) -> dict[str, Products | cute.Tensor]:
        """The fields of `MmaState` for dK and dV: one product, with a row for each key."""
        dkv, columns = p.mma_dkv.get_slice(0), self.tile.dq_part[1]

        def columns_b(sX: cute.Tensor) -> Products:
            return tuple(dkv.make_fragment_B(dkv.partition_B(sY)) for sY in self.columns(sX, columns, wg, 1))

        def accumulators() -> Products:
            return (cute.make_rmem_tensor(dkv.partition_shape_C((self.tile.tile_n, columns)), Float32),)

        return dict(
            rdOt=columns_b(storage.sdO),
            rQt=columns_b(storage.sQ),
            rP=dkv.make_fragment_A(dkv.partition_A(storage.sP)),
            rdS=dkv.make_fragment_A(dkv.partition_A(storage.sdS)),
            acc_dK=accumulators(),
            acc_dV=accumulators(),
        )

    @cute.jit
    def start_dv(self, p: Params, state: MmaState, iteration: Int32, product: cutlass.Constexpr):
        """Start dV += P^T dO."""
        rdOt = state.rdOt[product][None, None, None, state.storage.do.stage(iteration)]
        start_gemm(p.mma_dkv, state.acc_dV[product], state.rP, rdOt, True)

    @cute.jit
    def start_dk(self, p: Params, state: MmaState, iteration: Int32, product: cutlass.Constexpr):
        """Start dK += dS^T Q."""
        rQt = state.rQt[product][None, None, None, state.storage.q.stage(iteration)]
        start_gemm(p.mma_dkv, state.acc_dK[product], state.rdS, rQt, True)

    @cute.jit
    def first_scores(self, p: Params, state: MmaState, tile: KVTile):
        """Compute P and dS of the first block, and its dV."""
        visit = p.first_visit(tile, self.needs_head)
        scores = self.block_scores(p, state, tile, Int32(0), visit)
        self.start_s(p, state, Int32(0))
        self.start_dp(p, state, Int32(0))
        warpgroup.wait_group(1)
        self.send(state, state.acc_S, Int32(0), SCORES)
        if cutlass.const_expr(not self.sends_twice):
            self.stage_p(p, state, tile, scores, Int32(0), visit)
        warpgroup.wait_group(0)
        self.send(state, state.acc_dP, Int32(0), GRADIENTS)
        if cutlass.const_expr(self.sends_twice):
            self.stage_p(p, state, tile, scores, Int32(0), visit)
        self.finish_block(p, state, tile, scores, Int32(0), visit)

    @cute.jit
    def process_block(self, p: Params, state: MmaState, tile: KVTile, iteration: Int32, wide: WideVisit):
        """Compute dQ and dK of a block from its dS, and P, dS and dV of the next block.

        No product is in flight when it begins or returns. Both warpgroups arrive at DS_STAGED after dV, so sP is free
        after that barrier. Both arrive at P_STAGED after dQ and dK, so sdS is free after that barrier.

        Returns the next visit.
        """
        dq_products = self.tile.dq_products
        # S = Q K^T of the next block; dQ = dS K and dK += dS^T Q of the block; dP = dO V^T of the next block
        self.start_s(p, state, iteration + 1)
        self.start_dq(p, state, 0)
        self.start_dk(p, state, iteration, 0)
        if cutlass.const_expr(dq_products == 1):
            self.start_dp(p, state, iteration + 1)
        following = self.next_visit(p, tile, wide)
        scores = self.block_scores(p, state, tile, iteration + 1, following.visit)
        # wait for S
        warpgroup.wait_group(4 - dq_products)
        self.send(state, state.acc_S, iteration + 1, SCORES)
        # wait for dQ or its first half, and move a half to shared memory
        warpgroup.wait_group(3 - dq_products)
        self.stage_dq(state, iteration, 0)
        if cutlass.const_expr(dq_products == HALVES):
            self.start_dq(p, state, 1)
            self.start_dp(p, state, iteration + 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.publish_dq(state, iteration, 0)
        if cutlass.const_expr(not self.sends_twice):
            self.stage_p(p, state, tile, scores, iteration + 1, following.visit)
        # wait for dK and dP
        warpgroup.wait_group(0)
        state.storage.q.release(iteration)
        self.send(state, state.acc_dP, iteration + 1, GRADIENTS)
        self.stage_dq(state, iteration, 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.publish_dq(state, iteration, 1)
        if cutlass.const_expr(self.sends_twice):
            self.stage_p(p, state, tile, scores, iteration + 1, following.visit)
        self.finish_block(p, state, tile, scores, iteration + 1, following.visit)
        return following

    @cute.jit
    def stage_p(self, p: Params, state: MmaState, tile: KVTile, scores: AnyScores, iteration: Int32, visit: BlockVisit):
        """Add S of the other CTA, and write P = exp(scale S - LSE) to shared memory."""
        storage = state.storage
        rLSE = self.load_row_statistic(state, storage.sLSE[None, storage.q.stage(iteration)])
        self.add(state, state.acc_S, iteration, SCORES)
        probs = self.make_p(p, state, tile, scores, rLSE, visit)
        self.stage_transposed(state, probs, storage.sP)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def finish_block(
        self, p: Params, state: MmaState, tile: KVTile, scores: AnyScores, iteration: Int32, visit: BlockVisit
    ):
        """Compute dV and dS, after P has been staged and the partial sum of dP has been sent. Release dO."""
        storage = state.storage
        # dV += P^T dO
        cute.arch.barrier(barrier_id=P_STAGED, number_of_threads=MMA_THREADS)
        self.start_dv(p, state, iteration, 0)
        rDelta = self.load_row_statistic(state, storage.sDelta[None, storage.do.stage(iteration)])
        # wait for dV
        warpgroup.wait_group(0)
        words = cute.recast_tensor(rDelta, Int32)
        storage.do.release_per_thread(iteration, words[0] | words[1])
        # dS = P (dP - Δ)
        self.add(state, state.acc_dP, iteration, GRADIENTS)
        self.make_ds(p, state, tile, scores, rDelta, iteration, visit)

    @cute.jit
    def last_block(self, p: Params, state: MmaState, iteration: Int32, accum_block: Int32):
        """Compute dQ and dK of the tile's last block."""
        dq_products = self.tile.dq_products
        self.start_dq(p, state, 0)
        self.start_dk(p, state, iteration, 0)
        for half in cutlass.range_constexpr(HALVES):
            if cutlass.const_expr(half < dq_products):
                warpgroup.wait_group(1 - half)
            self.stage_dq(state, iteration, half)
            if cutlass.const_expr(half + 1 < dq_products):
                self.start_dq(p, state, half + 1)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.publish_dq(state, iteration, half)
        warpgroup.wait_group(0)

    def send(self, state: MmaState, acc: cute.Tensor, iteration: Int32, message: int) -> None:
        """Send the partial sum of S or dP of a block to the other CTA."""
        state.storage.cluster_sum.send(acc, state.wg, state.thread, MESSAGES * iteration + message)

    def add(self, state: MmaState, acc: cute.Tensor, iteration: Int32, message: int) -> None:
        """Add the partial sum of the other CTA to S or dP of a block."""
        state.storage.cluster_sum.add(acc, state.wg, state.thread, MESSAGES * iteration + message)

    @cute.jit
    def stage_output(self, state: MmaState, accs: Products, sX: cute.Tensor, factor: Float32):
        """Write a warpgroup's columns of dK or dV, times `factor`, to sX (tile_n, tile_d)."""
        acc, out = accs[0], self.config.out
        acc.store(acc.load() * factor)
        rX = cute.make_fragment_like(acc, self.dtype)
        convert(acc, rX)
        store_steps(rX, Int32(sX.iterator.toint()) + state.wg * out.bytes, out, state.thread)
