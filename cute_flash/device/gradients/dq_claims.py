"""Claims of dQ in global memory: the first CTA stores a part of an m_block, the others add to it.

The sums of dQ then need no zeros, which would be written to HBM and read again: 5 to 10 % of the time at S = 512. For
every m_block an int32 has two bits for each of its parts: *claimed* and *stored*. A CTA claims a part before it has
computed its values, so the latency of the claim is hidden. The first CTA stores its values, then sets the second bit.
The others wait for that bit, and add.

Nothing deadlocks, because only a CTA that runs can hold a claim, and because its values never depend on a later claim.
With one adder warp per CTA (`BwdSm90`) a CTA that holds a claim waits for no other CTA. With two (`BwdSm90Wide`) one of
them may wait, and stop the MMA warps, while the other holds a claim. It then waits for an earlier m_block. This is safe
if a CTA has one K/V tile, and all K/V tiles visit the m_blocks of their head in the same order.

In a cluster (`BwdSm90Cluster`), the CTAs also wait for partial sums of each other. They have the same K/V tile, run at
the same time and visit the m_blocks in the same order, and each claims parts of its own columns. What a CTA sends for
an m_block, and its dQ of that m_block, need additions to dQ of earlier m_blocks only. So a CTA that waits for the other
one waits, in the end, for an earlier m_block too.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_flash.device.ptx import instruction

MAX_PARTS = 16  # bits 0 to 15: claimed; bits 16 to 31: stored


@dataclass(frozen=True)
class DQClaim:
    """The claims of an m_block."""

    address: Int64  # of the int32, which is 0 before the first claim

    @cute.jit
    def claim_or_wait(self, part: Int32 | int):
        """Claim a part. Return 1 if this CTA is the first, and must store it; else wait until it is stored; return 0.

        Called by a warp. Its lane 0 then stores or adds.
        """
        claimed, stored = Int32(1) << part, Int32(1 << MAX_PARTS) << part
        is_first = Int32(0)
        if cute.arch.lane_idx() == 0:
            bits = instruction("atom.acquire.gpu.global.or.b32 {$w0}, [{$r0}], {$r1};", Int32, self.address, claimed)
            if bits & claimed == 0:
                is_first = Int32(1)
            else:
                while bits & stored == 0:
                    bits = instruction("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", Int32, self.address)
                cute.arch.inline_ptx("fence.proxy.async.global;")
        return cute.arch.shuffle_sync(is_first, 0)

    def set_stored(self, part: Int32 | int) -> None:
        """Let others add to a part. Called by the thread whose bulk stores of the part are complete."""
        cute.arch.inline_ptx("fence.proxy.async.global;")
        cute.arch.inline_ptx(
            "red.release.gpu.global.or.b32 [{$r0}], {$r1};",
            read_only_args=[self.address, Int32(1 << MAX_PARTS) << part],
        )
