"""The list of a packed batch's tiles, in plain Python: what `kernels/prepare.py` writes, but for the order of
sequences of one class.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cute_flash.planning.varlen import (
    BY_LENGTH,
    DESCENDS,
    HEADER,
    ITEM,
    bucket,
    descends_by_length,
    most_blocks,
    num_blocks,
)
from cute_flash.spec.band import Band, ceil_div


class Run(NamedTuple):
    """A sequence, or rows of nobody."""

    sequence: int
    q_begin: int
    q_len: int
    k_begin: int
    k_len: int


class Item(NamedTuple):
    block: int
    sequence: int
    q_begin: int
    q_len: int
    k_begin: int
    k_len: int


def runs(
    cu_q: Tensor, cu_k: Tensor, used: Tensor | None, totals: tuple[int, int], of_keys: bool
) -> list[Run]:
    queries, keys = cu_q.tolist(), cu_k.tolist()
    found, unused = [], []
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(queries), pairwise(keys), strict=True)):
        k_len = k1 - k0 if used is None else int(used[b])
        found.append(Run(b, q0, q1 - q0, k0, k_len))
        unused.append(Run(b, q0, 0, k0 + k_len, k1 - k0 - k_len))
    last = len(found) - 1
    if of_keys:
        rest = Run(last, queries[last], 0, keys[-1], totals[1] - keys[-1])
        return [*found, *(unused if used is not None else []), rest]
    return [*found, Run(last, queries[-1], totals[0] - queries[-1], keys[last], 0)]


def items(
    all_runs: list[Run], band: Band, tiles: tuple[int, int], of_keys: bool, order: int
) -> Iterator[Item]:
    """`band` of rows over columns, `tiles` of rows and of columns."""

    def classed(run: Run) -> Iterator[tuple[int, Item]]:
        rows, columns = (run.k_len, run.q_len) if of_keys else (run.q_len, run.k_len)
        num, sizes = ceil_div(rows, tiles[0]), (rows, columns, *tiles)
        longest = most_blocks(band, *sizes)
        descends = descends_by_length(band, num, *sizes) if order == BY_LENGTH and num else order
        for i in range(num):
            block = num - 1 - i if descends == DESCENDS else i
            own = num_blocks(band, block, *sizes)
            is_apart = order == BY_LENGTH and 2 * own < longest
            yield bucket(own if is_apart else longest), Item(block, *run)

    found = [one for run in all_runs for one in classed(run)]
    for _, item in sorted(found, key=lambda one: one[0], reverse=True):
        yield item


def write(target: Tensor, found: list[Item]) -> None:
    """Into an int32 tensor (HEADER + items at most, ITEM)."""
    assert len(found) <= len(target) - HEADER, "more tiles than there is room for"
    target[0, 0] = len(found)
    if found:
        target[HEADER : HEADER + len(found), : len(Item._fields)] = torch.tensor(found)
    assert target.shape[1] == ITEM


def read(items: Tensor) -> list[Item]:
    return [Item(*row[: len(Item._fields)]) for row in items[HEADER : HEADER + int(items[0, 0])].tolist()]
