"""A cache of values that were computed from tensors, keyed by the identity of the tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

_dispatch_modes = torch._C._len_torch_dispatch_stack
Value = TypeVar("Value")


class TensorCache(Generic[Value]):
    """Caches at most `max_size` values. A value is dropped when one of its tensors is freed.

    A value must not be a view that autograd tracks, because such a view would keep its tensor alive.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._known: dict[tuple, tuple[tuple[weakref.ref, ...], Value]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, tensors: Sequence[Tensor], key: Hashable) -> Value | None:
        """The value for these tensors and other inputs (`key`); None if it is not cached."""
        refs, value = self._known.get((*map(id, tensors), key), ((), None))
        for ref, x in zip(refs, tensors):
            if ref() is not x:  # a new tensor that reuses the id of a freed one
                return None
        return value

    def put(self, tensors: Sequence[Tensor], key: Hashable, value: Value) -> Value:
        """Cache a value, dropping the oldest values beyond `max_size`.

        Values that are computed in a dispatch mode, which may have replaced tensors by fake ones, are not cached.
        """
        if _dispatch_modes():
            return value
        full_key = (*map(id, tensors), key)
        # A copy, because freeing a tensor during the iteration drops entries.
        for oldest in list(self._known)[: max(0, len(self._known) + 1 - self._max_size)]:
            self._known.pop(oldest, None)
        refs = tuple(weakref.ref(x, lambda _: self._known.pop(full_key, None)) for x in tensors)
        self._known[full_key] = refs, value
        return value

    def of_contents(self, tensors: Sequence[Tensor], key: Hashable, compute: Callable[[], Value]) -> Value:
        """The value for the present contents of the tensors, computed if it is not cached.

        Values of inference tensors are not cached, because these tensors have no version counter.
        """
        if any(x.is_inference() for x in tensors):
            return compute()
        key = key, *(x._version for x in tensors)
        value = self.get(tensors, key)
        return self.put(tensors, key, compute()) if value is None else value

    def clear(self) -> None:
        self._known.clear()
