"""Sums of accumulators of two CTAs of a cluster, through distributed shared memory.

Both CTAs compute a product over different columns, for example half of the head dim of Q Kᵀ. Thread t of a warpgroup in
one CTA has the same elements as thread t of that warpgroup in the other CTA. Each writes its elements to a slot in the
shared memory of the other, and adds those in its own slot. Both compute a + b, so both have the same bits.

    send      wait until the other CTA has read the previous message in the slot, and write the next to it
    add       wait for the message of the other CTA, add it, and release the slot

With one slot, a message must be added before the next is sent: `send` waits for the other CTA. With two slots, a second
message can be sent before the first is added. Each warp has its own barriers, because it exchanges messages with one
warp only. A slot is (group of four elements, thread, element of the four), so a warp accesses contiguous memory.

Barriers have cluster scope. `full` orders the stores of a message, which are asynchronous, before its loads; `empty`
orders the loads before the next stores.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cute_flash.device.ptx import instruction, rederived
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, Pipeline

VECTOR = 4  # fp32 elements that a thread writes at once
WARPS = WARPGROUP_THREADS // 32
# Of the arrival that releases a slot. It publishes no stores. It must only come after the loads of the slot, and its
# address depends on them. A release would wait for the stores of the thread's own message: twice a block.
ORDER = "relaxed"


@dataclass(frozen=True)
class ClusterSum:
    """The slots of this CTA, with barriers. All methods are called by all threads of the warpgroups.

    `number`: of messages before this one, or its lowest bits, one more than numbers the slots.
    """

    sSlots: cute.Tensor  # (VECTOR, thread, group, warpgroup, slot) fp32
    barriers: Pipeline  # `slots` stages for each warp. full: the message has arrived; empty: the other CTA has read it
    slots: cutlass.Constexpr

    @staticmethod
    def allocate(smem: SmemAllocator, elements: int, num_warpgroups: int, slots: int) -> "ClusterSum":
        """`elements`: of a thread; `slots`: 1 or 2."""
        layout = cute.make_layout((VECTOR, WARPGROUP_THREADS, elements // VECTOR, num_warpgroups, slots))
        sSlots = smem.allocate_tensor(Float32, layout, 128)
        return ClusterSum(sSlots, Pipeline.allocate(smem, WARPS * num_warpgroups * slots), slots)

    @cute.jit
    def init_barriers(self):
        """Called by one thread, before a fence and a cluster barrier."""
        self.barriers.init(1, 1)

    def warp(self, wg: Int32, thread: Int32) -> Pipeline:
        """The barriers of a warp."""
        return self.barriers.part(wg * WARPS + (thread >> 5), self.slots)

    @cute.jit
    def send(self, acc: cute.Tensor, wg: Int32, thread: Int32, number: Int32 | int):
        """Send the accumulators to the other CTA."""
        thread = rederived(thread)
        warp = self.warp(wg, thread)
        slot = self.sSlots[None, thread, None, wg, warp.stage(number)]
        warp.wait_empty(number, in_cluster=True)
        warp.expect_bytes(number, 4 * 32 * cute.size(acc))
        other = cute.arch.block_idx_in_cluster() ^ 1
        barrier = peer_address(warp.full_barrier(number), other)
        first = peer_address(slot.iterator, other)
        for i in cutlass.range_constexpr(cute.size(acc) // VECTOR):
            values = [acc[VECTOR * i + j] for j in range(VECTOR)]
            store_to_peer(first + 4 * cute.crd2idx((0, i), slot.layout), values, barrier)

    @cute.jit
    def add(self, acc: cute.Tensor, wg: Int32, thread: Int32, number: Int32 | int):
        """Add the message of the other CTA to the accumulators, and release the slot."""
        thread = rederived(thread)
        warp = self.warp(wg, thread)
        slot = self.sSlots[None, thread, None, wg, warp.stage(number)]
        warp.wait_full(number, in_cluster=True)
        loaded = Int32(0)
        for i in cutlass.range_constexpr(cute.size(acc) // VECTOR):
            four = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(slot[None, i], four)
            loaded = loaded | cute.recast_tensor(four, Int32)[0]
            for j in cutlass.range_constexpr(VECTOR):
                acc[VECTOR * i + j] = acc[VECTOR * i + j] + four[j]
        cute.arch.sync_warp()
        other = cute.arch.block_idx_in_cluster() ^ 1
        with cute.arch.elect_one():
            warp.release_to_peer(number, loaded, other, ORDER)


def peer_address(pointer: cute.Pointer, rank: Int32) -> Int32:
    """The address of `pointer` in the shared memory of the CTA with this rank in the cluster."""
    return instruction("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", Int32, Int32(pointer.toint()), rank)


def store_to_peer(address: Int32, values: list[Float32], barrier: Int32) -> None:
    """Start to store four values in the shared memory of another CTA. An mbarrier there counts the bytes."""
    cute.arch.inline_ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        " [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} }, [{$r5}];",
        read_only_args=[address, *values, barrier],
    )
