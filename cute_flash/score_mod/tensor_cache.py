"""A cache of values that were computed from tensors, with the tensors' identities as keys."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class TensorCache(Generic[Value]):
    """At most `max_size` values; a value is dropped with any of its tensors, as it may hold device memory.

    A value must not be a view that autograd tracks: such a view would keep its tensor alive.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._known: dict[tuple, tuple[tuple[weakref.ref, ...], Value]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, tensors: Sequence[Tensor], key: Hashable) -> Value | None:
        """The value of these tensors and a key that names all else that it was computed from."""
        found = self._known.get((*map(id, tensors), key))
        if found is None:
            return None
        refs, value = found
        for ref, x in zip(refs, tensors):
            if ref() is not x:  # a new tensor with the id of one that was freed
                return None
        return value

    def put(self, tensors: Sequence[Tensor], key: Hashable, value: Value) -> Value:
        whole = (*map(id, tensors), key)
        # A list: entries may be dropped during the iteration, when their tensors are freed.
        for oldest in list(self._known)[: max(0, len(self._known) + 1 - self._max_size)]:
            self._known.pop(oldest, None)
        refs = tuple(weakref.ref(x, lambda _: self._known.pop(whole, None)) for x in tensors)
        self._known[whole] = refs, value
        return value

    def clear(self) -> None:
        self._known.clear()


def versions(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """How often each tensor was written to, as part of a key; None: inference tensors do not count it."""
    return None if any(x.is_inference() for x in tensors) else tuple(x._version for x in tensors)
