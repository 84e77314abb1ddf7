"""Measures the memory that operations of torch allocate."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cute_flash import reference
from cute_flash.spec.args import AttentionArgs


class Memory(TorchDispatchMode):
    """Tracks every tensor that operations make: the largest one, and the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            # A view or the target of an in-place operation has its storage from an argument: no new memory.
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.track(x)
        return result

    def track(self, x: Tensor) -> None:
        size, key = x.untyped_storage().nbytes(), id(x)
        self.alive[key] = size
        weakref.finalize(x, self.alive.pop, key, None)
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, sum(self.alive.values()))


def largest_within_budget(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, budget: int) -> int:
    """Check the temporaries of forward and backward; the bytes of the largest tensor of either."""
    with torch.no_grad(), Memory() as forward:
        out, lse, _ = reference.forward(q, k, v, args)
    assert forward.peak <= out.nbytes + lse.nbytes + budget
    with torch.no_grad(), Memory() as backward:
        *gradients, others = reference.backward(out, lse, q, k, v, out, lse, args)
    # The gradients, and dk and dv once more to accumulate them.
    sums = sum(x.nbytes for x in (*gradients, *others) if x is not None)
    assert backward.peak <= sums + k.nbytes + v.nbytes + budget
    return max(forward.largest, backward.largest)
