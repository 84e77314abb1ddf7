"""Warp-specialised backward attention by clusters of two CTAs, for Hopper and head dims above 256.

The roles of the warps, the formulas and the shared memory are those of `bwd_wide`. The CTAs of a cluster compute the
same K/V tile and visit the same m_blocks. Each has half of the columns of Q, K, V, dO, dQ, dK and dV, so its tiles are
those of a narrower head. Only S and dP need all columns: each CTA computes a partial sum, and both add the partial sum
of the other (`device/mma/cluster_sum.py`). Then both have the same S and dP, and compute P and dS twice.

For a block, a warpgroup issues the following products. 0 and 1 are halves; ' marks the next block:

    S' dQ0 dK0 dK1 dQ1 dP' dV0' dV1'

S' is sent while dQ0 and dK0 run, and the partial sum of the other CTA arrives until dQ1 ends. While dP' runs, the
warpgroup computes P' and stages dQ1. dP' is exchanged while dV0' and dV1' run. Then nothing runs until dS' is stored.

Clocks of a block of 64 queries and 64 keys, for one CTA:

| what                    | clocks | why                                                                               |
|-------------------------|--------|-----------------------------------------------------------------------------------|
| products, tensor cores  | 2560   | 5 x 64 x 64 x 256 / 2048                                                          |
| products, shared memory | 3072   | S and dP read 3 KB for 16 clocks of products (24 clocks); the others 4 KB for 32  |
| dQ, staged and added    | 1024   | 64 KB written and read, 128 bytes a clock                                         |
| loads of Q and dO       | 512    | 64 KB                                                                             |
| P, dS, partial sums     | 640    | 80 KB                                                                             |
| partial sums, SM to SM  | 2300   | 32 KB in each direction, about 14 bytes a clock (estimate)                        |

Shared memory is the bound: 5250 clocks. Latencies that no product hides add to it: about 1000 clocks for a send, 400
for dS (estimates).

Claims of dQ are free of deadlocks, as in `bwd_wide`: the CTAs of a cluster run at the same time, and dQ of a block
depends on additions to earlier blocks only. A warpgroup sends S' before it stages dQ of the block, and stages dQ1
before it waits for dP' of the other CTA.
"""

from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cute_flash.device.gradients.mods_bwd import AnyScores
from cute_flash.kernels.sm90.bwd_storage import BlockVisit, KVTile
from cute_flash.kernels.sm90.bwd_wide import BwdSm90Wide, MmaState, WideVisit
from cute_flash.kernels.sm90.bwd_wide_storage import HALVES, Params, SharedStorage

# Numbers of the messages of a block (`ClusterSum`).
SCORES, GRADIENTS = 0, 1


class BwdSm90Cluster(BwdSm90Wide):
    """The backward kernel for the widest heads. A cluster of two CTAs computes one K/V tile."""

    name = "bwd_sm90_cluster"
    launch_options: ClassVar[dict[str, Any]] = {**BwdSm90Wide.launch_options, "cluster": (2, 1, 1)}

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

    @cute.jit
    def first_scores(self, p: Params, state: MmaState, tile: KVTile):
        """Compute P and dS of the first block, and its dV."""
        visit, storage = p.first_visit(tile, self.needs_head), state.storage
        scores = self.block_scores(p, state, tile, Int32(0), visit)
        self.start_s(p, state, Int32(0))
        self.start_dp(p, state, Int32(0))
        warpgroup.wait_group(1)
        storage.cluster_sum.send(state.acc_S, state.wg, state.thread, SCORES)
        rLSE = self.load_row_statistic(state, storage.sLSE[None, 0])
        storage.cluster_sum.add(state.acc_S, state.wg, state.thread, SCORES)
        probs = self.make_p(p, state, tile, scores, rLSE, visit)
        self.stage_transposed(state, probs, storage.sP)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.wait_group(0)
        storage.cluster_sum.send(state.acc_dP, state.wg, state.thread, GRADIENTS)
        self.start_early_dv(p, state, Int32(0))
        self.finish_ds(p, state, tile, scores, Int32(0), visit)

    @cute.jit
    def process_block(self, p: Params, state: MmaState, tile: KVTile, iteration: Int32, wide: WideVisit):
        """Compute the gradients of a block from its dS, P and dS of the next block, and dV of the next block.

        No product is in flight when it begins or returns. Both warpgroups arrive at DS_STAGED after dV, so sP is free
        after that barrier. Both arrive at `read_by_other` after dK1 and dQ1, so sdS is free after a wait for it.

        Returns the next visit.
        """
        storage = state.storage
        # S = Q K^T of the next block; dQ = dS K and dK += dS^T Q of the block
        self.start_s(p, state, iteration + 1)
        self.start_dq(p, state, 0)
        self.start_dk(p, state, iteration, 0)
        following = self.next_visit(p, tile, wide)
        scores = self.block_scores(p, state, tile, iteration + 1, following.visit)
        # wait for S
        warpgroup.wait_group(2)
        storage.cluster_sum.send(state.acc_S, state.wg, state.thread, SCORES)
        # wait for dQ0, and move it to shared memory while dK0 runs
        warpgroup.wait_group(1)
        self.stage_dq(state, iteration, 0)
        self.start_dk(p, state, iteration, 1)
        self.start_dq(p, state, 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.publish_dq(state, iteration, 0)
        # P = exp(scale S - LSE) of the next block; dP = dO V^T
        rLSE = self.load_row_statistic(state, storage.sLSE[None, storage.q.stage(iteration + 1)])
        storage.cluster_sum.add(state.acc_S, state.wg, state.thread, SCORES)
        self.start_dp(p, state, iteration + 1)
        probs = self.make_p(p, state, tile, scores, rLSE, following.visit)
        self.stage_transposed(state, probs, storage.sP)
        cute.arch.fence_proxy("async.shared", space="cta")
        # dV += P^T dO of the next block
        self.start_early_dv(p, state, iteration + 1)
        # wait for dK1 and dQ1, and move dQ1 to shared memory while dP runs
        warpgroup.wait_group(HALVES + 1)
        state.read_by_other.arrive()
        storage.q.release(iteration)
        self.stage_dq(state, iteration, 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.publish_dq(state, iteration, 1)
        # wait for dP
        warpgroup.wait_group(HALVES)
        storage.cluster_sum.send(state.acc_dP, state.wg, state.thread, GRADIENTS)
        state.read_by_other.wait()
        self.finish_ds(p, state, tile, scores, iteration + 1, following.visit)
        return following

    @cute.jit
    def finish_ds(
        self, p: Params, state: MmaState, tile: KVTile, scores: AnyScores, iteration: Int32, visit: BlockVisit
    ):
        """Compute dS = P (dP - Δ), after the partial sum of dP has been sent. Release dO."""
        storage = state.storage
        rDelta = self.load_row_statistic(state, storage.sDelta[None, storage.do.stage(iteration)])
        # wait for dV
        warpgroup.wait_group(0)
        words = cute.recast_tensor(rDelta, Int32)
        storage.do.release_per_thread(iteration, words[0] | words[1])
        storage.cluster_sum.add(state.acc_dP, state.wg, state.thread, GRADIENTS)
        self.make_ds(p, state, tile, scores, rDelta, iteration, visit)
