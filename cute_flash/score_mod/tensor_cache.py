"""A cache of values that were computed from tensors, keyed by the identity of the tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class TensorCache(Generic[Value]):
    """At most `max_size` values. A value, which may hold device memory, is dropped when one of its tensors is freed.

    A value must not be a view that autograd tracks: such a view would keep its tensor alive.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._known: dict[tuple, tuple[tuple[weakref.ref, ...], Value]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, tensors: Sequence[Tensor], key: Hashable) -> Value | None:
        """The value of these tensors and a key of its other inputs; None if it is not cached."""
        refs, value = self._known.get((*map(id, tensors), key), ((), None))
        for ref, x in zip(refs, tensors):
            if ref() is not x:  # a new tensor with the id of one that was freed
                return None
        return value

    def put(self, tensors: Sequence[Tensor], key: Hashable, value: Value) -> Value:
        full_key = (*map(id, tensors), key)
        # A copy, because entries are dropped during the iteration if their tensors are freed.
        for oldest in list(self._known)[: max(0, len(self._known) + 1 - self._max_size)]:
            self._known.pop(oldest, None)
        refs = tuple(weakref.ref(x, lambda _: self._known.pop(full_key, None)) for x in tensors)
        self._known[full_key] = refs, value
        return value

    def of_contents(self, tensors: Sequence[Tensor], key: Hashable, compute: Callable[[], Value]) -> Value:
        """The value of the tensors' present contents, computed if it is not cached.

        It is not cached for inference tensors, which do not count the writes to them.
        """
        if any(x.is_inference() for x in tensors):
            return compute()
        key = key, *(x._version for x in tensors)
        value = self.get(tensors, key)
        return self.put(tensors, key, compute()) if value is None else value

    def clear(self) -> None:
        self._known.clear()
