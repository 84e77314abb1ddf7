"""Values that were made of tensors, found again by those very tensors."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """So many values at most, each no longer than all of its tensors live: they may be memory on a device.

    A value must not be a view that torch tracks: that would keep its tensor alive.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[tuple, tuple[tuple[weakref.ref, ...], Value]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, tensors: Sequence[Tensor], more: Hashable) -> Value | None:
        """`more`: what else it was made of."""
        found = self._known.get((*map(id, tensors), more))
        if found is None:
            return None
        refs, value = found
        for ref, x in zip(refs, tensors):
            if ref() is not x:  # which has the id of one that is gone
                return None
        return value

    def keep(self, tensors: Sequence[Tensor], more: Hashable, value: Value) -> Value:
        key = (*map(id, tensors), more)
        # A list: tensors may go, and their values with them, while one looks.
        for oldest in list(self._known)[: max(0, len(self._known) + 1 - self._most)]:
            self._known.pop(oldest, None)
        refs = tuple(weakref.ref(x, lambda _: self._known.pop(key, None)) for x in tensors)
        self._known[key] = refs, value
        return value

    def clear(self) -> None:
        self._known.clear()


def versions(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """How often each was written, part of what a copy was made of; None: inference tensors do not count."""
    return None if any(x.is_inference() for x in tensors) else tuple(x._version for x in tensors)
