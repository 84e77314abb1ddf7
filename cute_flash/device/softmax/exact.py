"""The exact row max of a block in a kernel that overlaps the softmax with products."""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_flash.device.softmax.exp2 import PlainExp2, ProbBlock
from cute_flash.device.softmax.softmax import Softmax


@dataclass(frozen=True)
class ExactMax:
    """Raises m before the exponentials of a block, if a score exceeds it by more than `Softmax.threshold`.

    Has the methods of `SpeculativeMax`.
    """

    softmax: Softmax
    keys_seen: Int32  # number of keys in the blocks before this one
    maybe_empty = True  # rows may have no keys after `raise_before_exp2`, and then have m = -inf

    @cute.jit
    def raise_before_exp2(self, block: ProbBlock, exp2: PlainExp2):
        """m' = max(m, rowmax S). Return whether it grew: the caller then scales O, when P V of the last block is done.

        l is scaled here.
        """
        softmax = self.softmax
        threshold = softmax.threshold(self.keys_seen)
        exp2.find_max(softmax, block)
        grew = softmax.is_outgrown(block.block_max, threshold)
        if grew:
            self._raise_max(block, exp2)
        return grew

    def _raise_max(self, block: ProbBlock, exp2: PlainExp2) -> None:
        self.softmax.raise_max(block.block_max)
        exp2.rebase(self.softmax, block)

    def correct_after_exp2(
        self, block: ProbBlock, exp2: PlainExp2, acc_O_mn: cute.Tensor, finish_probs: Callable[[], None]
    ) -> None:
        """Nothing: m was raised before."""
