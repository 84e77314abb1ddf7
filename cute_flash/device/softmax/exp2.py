"""The exponentials of a block: P = exp2(scale S - m), a few k-steps at a time, from S to separate registers of P.

A *pass* computes them. `PlainExp2` is for scores that are in registers; a `FusedExp2` also transforms them
(`device/softmax/fused_exp2.py`). S stays unchanged, because P may have to be computed again with another m.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_flash.device.memory.views import as_mn, as_operand_a
from cute_flash.device.softmax.softmax import RowValues, Softmax


@dataclass(frozen=True)
class ProbBlock:
    """S and P of a block in the accumulators of a thread, which has two rows, and statistics of the block's rows."""

    acc_S: cute.Tensor
    acc_P: cute.Tensor
    block_max: cute.Tensor  # the largest score of each row, over this thread's columns
    block_sum: cute.Tensor  # the sum of P of each row, over this thread's columns

    @staticmethod
    def of(acc_S: cute.Tensor, softmax: Softmax) -> "ProbBlock":
        block_max, block_sum = (cute.make_fragment_like(softmax.row_max) for _ in range(2))
        block_sum.fill(0.0)
        return ProbBlock(acc_S, cute.make_fragment_like(acc_S), block_max, block_sum)

    @property
    def steps(self) -> int:
        """The number of k-steps."""
        return cute.size(self.S_steps, mode=[2])

    @property
    def S_steps(self) -> cute.Tensor:
        """S as ((2, 2, 2), 1, k-step)."""
        return as_operand_a(self.acc_S)

    @property
    def P_steps(self) -> cute.Tensor:
        """P as ((2, 2, 2), 1, k-step)."""
        return as_operand_a(self.acc_P)


@dataclass(frozen=True)
class PlainExp2:
    """The pass over scores that are transformed and masked."""

    reference: RowValues | None = None  # S is scaled, and relative to these row maxima; None: S is not scaled
    applies_mask = False

    @property
    def is_relative(self) -> bool:
        return self.reference is not None

    @cute.jit
    def exponentiate(self, softmax: Softmax, block: ProbBlock, steps: range, maybe_empty: bool):
        """P = exp(scale (S - m)) and block_sum += rowsum P for some k-steps.

        `maybe_empty`: rows may have no keys so far, which have m = -inf.
        """
        acc_S, acc_P, block_sum = block.S_steps, block.P_steps, block.block_sum
        row_max = [softmax.row_max[r] for r in range(2)]
        if cutlass.const_expr(maybe_empty and not self.is_relative):
            for r in cutlass.range_constexpr(2):
                row_max[r] = Float32(0.0) if row_max[r] == -Float32.inf else row_max[r]
        for k in cutlass.range_constexpr(steps.start, steps.stop):
            for pair in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    scores = acc_S[(None, r, pair), 0, k].load()
                    if cutlass.const_expr(not self.is_relative):
                        scores = scores * softmax.scale_log2 - row_max[r]
                    probs = cute.math.exp2(scores, fastmath=True)
                    block_sum[r] = block_sum[r] + (probs[0] + probs[1])
                    acc_P[(None, r, pair), 0, k].store(probs)

    def find_max(self, softmax: Softmax, block: ProbBlock) -> None:
        """Write `block_max`."""
        softmax.block_max(as_mn(block.acc_S), block.block_max, self.reference)

    @cute.jit
    def rebase(self, softmax: Softmax, block: ProbBlock):
        """Make relative scores relative to m, which may have been raised since."""
        if cutlass.const_expr(self.reference is not None):
            acc_S_mn = as_mn(block.acc_S)
            for r in cutlass.range_constexpr(cute.size(softmax.row_max)):
                grown = Float32(0.0) if softmax.row_max[r] == -Float32.inf else softmax.row_max[r] - self.reference[r]
                acc_S_mn[r, None].store(acc_S_mn[r, None].load() - grown)

    def release(self) -> None:
        """Nothing: the pass reads registers only."""
