"""A model in Python of the tile list that `kernels/common/varlen_scheduler.py` writes.

Only the order of sequences within a length class may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cute_flash.planning.varlen import (
    BY_LENGTH,
    DESCENDING,
    TILE_LIST_HEADER,
    TILE_LIST_WIDTH,
    descends_by_length,
    length_class,
    longest_tile,
    num_blocks,
)
from cute_flash.spec.band import Band, ceil_div


class SeqlenInfo(NamedTuple):
    """A sequence, or rows that belong to no sequence."""

    sequence: int
    q_begin: int
    q_len: int
    k_begin: int
    k_len: int


class VarlenTile(NamedTuple):
    """One row of a tile list."""

    block: int
    sequence: int
    q_begin: int
    q_len: int
    k_begin: int
    k_len: int


def sequences(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    totals: tuple[int, int],
    of_keys: bool,
    numbers_rest: bool = False,
) -> list[SeqlenInfo]:
    """The sequences whose tiles are listed, then the rows that belong to no sequence.

    If offsets decrease, all rows belong to no sequence.

    `of_keys`: tiles are of keys, and unused keys of each sequence are listed too. `numbers_rest`: the rows after the
    last sequence get the next sequence number.
    """
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if any(end < begin for offsets in (queries, keys) for begin, end in pairwise(offsets)):
        queries, keys = ([0] * len(queries) for _ in range(2))
        seqused_k = None if seqused_k is None else torch.zeros_like(seqused_k)
    used, unused = [], []
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(queries), pairwise(keys), strict=True)):
        k_len = k1 - k0 if seqused_k is None else int(seqused_k[b])
        used.append(SeqlenInfo(b, q0, q1 - q0, k0, k_len))
        unused.append(SeqlenInfo(b, q0, 0, k0 + k_len, k1 - k0 - k_len))
    last = len(used) - 1
    if of_keys:
        rest = SeqlenInfo(last, queries[last], 0, keys[-1], totals[1] - keys[-1])
        return [*used, *(unused if seqused_k is not None else []), rest]
    number = len(used) if numbers_rest else last
    return [*used, SeqlenInfo(number, queries[-1], totals[0] - queries[-1], keys[last], 0)]


def tiles(
    infos: list[SeqlenInfo], band: Band, tile_shape: tuple[int, int], of_keys: bool, tile_order: int
) -> Iterator[VarlenTile]:
    """The tiles in the order of the list. `band`: of rows over columns. `tile_shape`: (rows, columns)."""

    def classed(info: SeqlenInfo) -> Iterator[tuple[int, VarlenTile]]:
        rows, columns = (info.k_len, info.q_len) if of_keys else (info.q_len, info.k_len)
        num, sizes = ceil_div(rows, tile_shape[0]), (rows, columns, *tile_shape)
        longest = longest_tile(band, *sizes)
        order = descends_by_length(band, num, *sizes) if tile_order == BY_LENGTH and num else tile_order
        for i in range(num):
            block = num - 1 - i if order == DESCENDING else i
            own = num_blocks(band, block, *sizes)
            is_apart = tile_order == BY_LENGTH and 2 * own < longest
            yield length_class(own if is_apart else longest), VarlenTile(block, *info)

    classes = [one for info in infos for one in classed(info)]
    for _, tile in sorted(classes, key=lambda one: one[0], reverse=True):
        yield tile


def write(tile_list: Tensor, listed: list[VarlenTile]) -> None:
    """Write the list into an int32 tensor (TILE_LIST_HEADER + most tiles, TILE_LIST_WIDTH)."""
    assert len(listed) <= len(tile_list) - TILE_LIST_HEADER, "more tiles than there is room for"
    assert tile_list.shape[1] == TILE_LIST_WIDTH
    tile_list[0, 0] = len(listed)
    if listed:
        rows = slice(TILE_LIST_HEADER, TILE_LIST_HEADER + len(listed))
        tile_list[rows, : len(VarlenTile._fields)] = torch.tensor(listed, dtype=torch.int32)


def read(tile_list: Tensor) -> list[VarlenTile]:
    rows = slice(TILE_LIST_HEADER, TILE_LIST_HEADER + int(tile_list[0, 0]))
    return [VarlenTile(*row[: len(VarlenTile._fields)]) for row in tile_list[rows].tolist()]
