"""What is kept of tensors: found by them alone, never stale, and not for long."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from cute_flash.custom import custom_of

from cute_flash import BlockMask, custom_cuda, masks
from cute_flash.score_mod import block_mask, block_sparse
from cute_flash.score_mod.bound import BoundMods
from cute_flash.score_mod.tensor_cache import TensorCache, versions
from cute_flash.spec.problem import Features, Problem

PROBLEM = Problem(2, 4, 2, 300, 400, 64, features=Features(block_map=True))


def test_found_by_the_very_tensors_and_the_rest() -> None:
    cache: TensorCache[str] = TensorCache(4)
    x, y = torch.ones(2), torch.ones(2)
    assert cache.get([x, y], "a") is None
    assert cache.put([x, y], "a", "made") == "made"
    assert cache.get((x, y), "a") == "made"
    for tensors, more in (([y, x], "a"), ([x, y], "b"), ([x], "a"), ([x, y.clone()], "a")):
        assert cache.get(tensors, more) is None
    assert TensorCache[int](3).put([], "nothing", 7) == 7


def test_the_oldest_go_first() -> None:
    cache: TensorCache[int] = TensorCache(3)
    x = torch.ones(1)
    for i in range(10):
        cache.put([x], i, i)
        assert len(cache) == min(i + 1, 3)
    assert [cache.get([x], i) for i in range(10)] == [None] * 7 + [7, 8, 9]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_value_goes_with_any_of_its_tensors(gone: int) -> None:
    cache: TensorCache[int] = TensorCache(3)
    tensors = [torch.ones(1), torch.ones(1)]
    cache.put(tensors, None, 1)
    cache.put([tensors[1 - gone]], None, 2)
    del tensors[gone]
    gc.collect()
    assert len(cache) == 1 and cache.get(tensors, None) == 2


def test_an_id_of_another_tensor_is_not_believed() -> None:
    cache: TensorCache[int] = TensorCache(3)
    x, other = torch.ones(1), torch.ones(1)
    cache.put([other], None, 1)
    # As if `other` had gone unnoticed, and x had its id.
    cache._known[(id(x), None)] = cache._known[(id(other), None)]
    assert cache.get([x], None) is None


def test_versions() -> None:
    x, y = torch.ones(2), torch.ones(2)
    before = versions([x, y])
    y.add_(1)
    assert before != versions([x, y])
    with torch.inference_mode():
        assert versions([x, torch.ones(1)]) is None
    assert versions([]) == ()


def made_map() -> BlockMask:
    status = torch.randint(0, 3, (1, 4, 3, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    status[..., -1].clamp_(max=1)
    return BlockMask.of_status(status, 128, 128, 300, 400)


def lists_of(made: BlockMask) -> Any:
    asked = custom_of(None, BoundMods.of(None, None, None), made)
    return custom_cuda.given(asked, PROBLEM).lists


def query_block_indices(made: BlockMask) -> Any:
    heads = {"batch": PROBLEM.batch, "heads": PROBLEM.heads, "heads_kv": PROBLEM.heads_kv}
    return block_sparse.query_block_indices(list(made.tensors), list(made.sizes), **heads, tile=(64, 128))


@pytest.mark.parametrize(
    ("make", "known"), [(lists_of, custom_cuda._known), (query_block_indices, block_sparse._cache)]
)
def test_lists_live_as_long_as_their_map(make: Any, known: TensorCache) -> None:
    known.clear()
    one, other = made_map(), made_map()
    assert make(one) is make(one) and make(other) is not make(one)
    assert len(known) == 2
    del one
    gc.collect()
    assert len(known) == 1


@pytest.mark.parametrize("part", range(4))
def test_entries_follow_what_is_written_into_a_map(part: int) -> None:
    one = made_map()
    before = query_block_indices(one)
    other = made_map()
    numbers = (one.tensors[part], other.tensors[part])
    for x in numbers:
        # Fewer blocks, or others.
        x.zero_() if part % 2 == 0 else x.copy_(x.flip(-1))
    after = query_block_indices(one)
    assert after is not before
    assert all(map(torch.equal, after, query_block_indices(other)))


def test_lists_of_the_forward_show_what_is_written_into_a_map() -> None:
    one = made_map()
    lists = lists_of(one)
    one.full_kv.num_blocks.fill_(1)
    assert lists_of(one) is lists and (lists[0] == 1).all()
    # Those that had to be copied are made anew.
    turned = [x.mT.contiguous().mT if x.dim() == 4 else x for x in one.tensors]
    copied = BlockMask.of_tensors(turned, list(one.sizes))
    found = lists_of(copied)
    copied.full_kv.indices.fill_(2)
    assert not (found[1] == 2).all() and (lists_of(copied)[1] == 2).all()


def test_maps_made_for_inference_are_not_taken_for_others() -> None:
    """They do not count what is written into them: entries are made at each call, lists are views anyway."""
    with torch.inference_mode():
        made = made_map()
        first = query_block_indices(made)
        made.partial_kv.num_blocks.zero_()
        assert not torch.equal(query_block_indices(made)[0], first[0])
        assert lists_of(made) is lists_of(made)


def test_a_map_goes_with_what_its_mask_captured() -> None:
    block_mask._cache.clear()
    ids = torch.arange(12) // 5
    made = BlockMask.of(masks.document(ids), (1, 1, 12, 12), tile=(4, 4))
    assert BlockMask.of(masks.document(ids), (1, 1, 12, 12), tile=(4, 4)) is made
    assert len(block_mask._cache) == 1
    del ids
    gc.collect()
    assert len(block_mask._cache) == 0
