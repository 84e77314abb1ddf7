"""Thins lists of cases that multiply many properties."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")


def covering(items: Sequence[T], properties: Callable[[T], tuple[Hashable, ...]]) -> list[T]:
    """Some of the items. Any two values of two properties that one of all items has, one of these has too."""
    pairs = [set(itertools.combinations(enumerate(properties(item)), 2)) for item in items]
    missing, kept = set().union(*pairs), []
    while missing:
        best = max(range(len(items)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        kept.append(best)
    return [items[i] for i in sorted(kept)]
