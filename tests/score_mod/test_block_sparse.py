"""The index lists of a block mask for the backward."""

import itertools

import pytest
import torch
from torch import Tensor

from cute_flash.score_mod.block_mask import EMPTY, FULL, PARTIAL, BlockMask
from cute_flash.score_mod.block_sparse import HEAD_SHIFT, IS_LAST, IS_PARTIAL, M_BLOCK_SHIFT, query_block_indices

TILE = (64, 128)


def lists_of(status: Tensor, batch: int, heads: int, heads_kv: int, begins_apart: bool) -> list[list[list[list[int]]]]:
    """The entries of each (batch, K/V head, K/V tile)."""
    mask = BlockMask.of_status(status, 128, 128, status.shape[2] * 128, status.shape[3] * 128)
    num, entries = query_block_indices(
        mask.tensors, mask.sizes, batch=batch, heads=heads, heads_kv=heads_kv, tile=TILE, begins_apart=begins_apart
    )
    return [
        [[entries[b, h, n, : num[b, h, n]].tolist() for n in range(num.shape[2])] for h in range(heads_kv)]
        for b in range(batch)
    ]


def m_blocks(entries: list[int]) -> list[int]:
    return [(one & ((1 << HEAD_SHIFT) - 1)) >> M_BLOCK_SHIFT for one in entries]


def documents() -> Tensor:
    """Blocks of 128 x 128: documents of three, one and four blocks."""
    document = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    return torch.where(document[:, None] == document, FULL, EMPTY).to(torch.uint8)[None, None]


def test_lists_ascend() -> None:
    ((lists,),) = lists_of(documents(), 1, 1, 1, begins_apart=False)
    ends = [(0, 6), (6, 8), (8, 16)]
    assert [m_blocks(one) for one in lists] == [list(range(*ends[d])) for d in (0, 0, 0, 1, 2, 2, 2, 2)]


def test_tiles_of_a_document_begin_apart() -> None:
    ((lists,),) = lists_of(documents(), 1, 1, 1, begins_apart=True)
    found = [m_blocks(one) for one in lists]
    assert found[:4] == [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 0, 1], [4, 5, 0, 1, 2, 3], [6, 7]]
    assert [one[0] for one in found[4:]] == [8, 10, 12, 14]
    for step in range(6):
        now = [one[step] for one in found[:3]]
        assert len(set(now)) == len(now), "no two tiles of a document visit a block at the same time"


@pytest.mark.parametrize("seed", range(6))
def test_both_orders_have_the_same_blocks(seed: int) -> None:
    pick = torch.Generator().manual_seed(seed)
    heads_kv, group, batch = 2, 3, 2
    shape = (batch, heads_kv * group if seed % 2 else 1, 5, 1 + 3 * (seed % 3))
    status = torch.randint(0, 3, shape, generator=pick).to(torch.uint8)
    ascending, apart = (lists_of(status, batch, heads_kv * group, heads_kv, order) for order in (False, True))
    for b, h in itertools.product(range(batch), range(heads_kv)):
        for n, (one, other) in enumerate(zip(ascending[b][h], apart[b][h], strict=True)):
            assert sorted(x & ~IS_LAST for x in one) == sorted(x & ~IS_LAST for x in other)
            own_heads = [x >> HEAD_SHIFT for x in other]
            assert own_heads == sorted(own_heads), "head by head"
            ends = [i for i in range(len(other)) if own_heads[i] not in own_heads[i + 1 :]]
            assert [i for i, x in enumerate(other) if x & IS_LAST] == ends
            for x, m in zip(other, m_blocks(other), strict=True):
                row = (h * group + (x >> HEAD_SHIFT)) % shape[1]
                expected = status[b, row, m * TILE[0] // 128, n * TILE[1] // 128]
                assert expected == (PARTIAL if x & IS_PARTIAL else FULL)
