"""Measures the memory that operations of torch allocate."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
