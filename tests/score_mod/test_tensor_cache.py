"""Values cached by tensors: found by identity, never stale, and freed with the tensors."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_flash import BlockMask
from cute_flash.runtime import block_masks
from cute_flash.score_mod import block_sparse
from cute_flash.score_mod.tensor_cache import TensorCache
from cute_flash.spec.args import AttentionArgs

PROBLEM: Any = SimpleNamespace(batch=2, heads=4, heads_kv=2)


def test_found_by_tensors_and_key() -> None:
    cache: TensorCache[str] = TensorCache(4)
    x, y = torch.ones(2), torch.ones(2)
    assert cache.get([x, y], "a") is None
    assert cache.put([x, y], "a", "made") == "made"
    assert cache.get((x, y), "a") == "made"
    for tensors, more in (([y, x], "a"), ([x, y], "b"), ([x], "a"), ([x, y.clone()], "a")):
        assert cache.get(tensors, more) is None
    assert TensorCache[int](3).put([], "nothing", 7) == 7


def test_the_oldest_values_are_dropped_first() -> None:
    cache: TensorCache[int] = TensorCache(3)
    x = torch.ones(1)
    for i in range(10):
        cache.put([x], i, i)
        assert len(cache) == min(i + 1, 3)
    assert [cache.get([x], i) for i in range(10)] == [None] * 7 + [7, 8, 9]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_value_is_dropped_with_any_of_its_tensors(gone: int) -> None:
    cache: TensorCache[int] = TensorCache(3)
    tensors = [torch.ones(1), torch.ones(1)]
    cache.put(tensors, None, 1)
    cache.put([tensors[1 - gone]], None, 2)
    del tensors[gone]
    gc.collect()
    assert len(cache) == 1 and cache.get(tensors, None) == 2


def test_a_reused_id_is_detected() -> None:
    cache: TensorCache[int] = TensorCache(3)
    x, other = torch.ones(1), torch.ones(1)
    cache.put([other], None, 1)
    # As if `other` had been freed unnoticed, and x had its id.
    cache._known[(id(x), None)] = cache._known[(id(other), None)]
    assert cache.get([x], None) is None


def test_values_of_contents_are_computed_after_a_write() -> None:
    cache: TensorCache[object] = TensorCache(4)
    x, y = torch.ones(2), torch.ones(2)
    first = cache.of_contents([x, y], "a", object)
    assert cache.of_contents([x, y], "a", object) is first
    assert cache.of_contents([x, y], "b", object) is not first
    y.add_(1)
    assert cache.of_contents([x, y], "a", object) is not first
    with torch.inference_mode():
        tensors = [x, torch.ones(1)]
        assert cache.of_contents(tensors, "a", object) is not cache.of_contents(tensors, "a", object)
    assert cache.of_contents([], "a", object) is cache.of_contents([], "a", object)


def made_mask() -> BlockMask:
    status = torch.randint(0, 3, (1, 4, 3, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    status[..., -1].clamp_(max=1)
    return BlockMask.of_status(status, 128, 128, 300, 400)


def forward_block_indices(made: BlockMask) -> Any:
    args = AttentionArgs(1.0, block_mask=made.tensors, block_mask_sizes=made.sizes)
    return block_masks.forward_block_indices(args, PROBLEM)


def query_block_indices(made: BlockMask) -> Any:
    return block_sparse.query_block_indices(made.tensors, made.sizes, **vars(PROBLEM), tile=(64, 128))


@pytest.mark.parametrize(
    ("make", "known"), [(forward_block_indices, block_masks._forward_lists), (query_block_indices, block_sparse._cache)]
)
def test_indices_live_as_long_as_their_block_mask(make: Any, known: TensorCache) -> None:
    known.clear()
    one, other = made_mask(), made_mask()
    assert make(one) is make(one) and make(other) is not make(one)
    assert len(known) == 2
    del one
    gc.collect()
    assert len(known) == 1


@pytest.mark.parametrize("part", range(4))
def test_query_block_indices_follow_writes_to_a_block_mask(part: int) -> None:
    one = made_mask()
    before = query_block_indices(one)
    other = made_mask()
    numbers = (one.tensors[part], other.tensors[part])
    for x in numbers:
        # Fewer blocks, or others.
        x.zero_() if part % 2 == 0 else x.copy_(x.flip(-1))
    after = query_block_indices(one)
    assert after is not before
    assert all(map(torch.equal, after, query_block_indices(other)))


def test_forward_block_indices_show_writes_to_a_block_mask() -> None:
    one = made_mask()
    lists = forward_block_indices(one)
    one.full_kv.num_blocks.fill_(1)
    assert forward_block_indices(one) is lists and (lists[0] == 1).all()
    # Copies are not cached.
    turned = [x.mT.contiguous().mT if x.dim() == 4 else x for x in one.tensors]
    copied = BlockMask.of_tensors(turned, one.sizes)
    found = forward_block_indices(copied)
    copied.full_kv.indices.fill_(2)
    assert not (found[1] == 2).all() and (forward_block_indices(copied)[1] == 2).all()


def test_inference_block_masks_are_not_cached() -> None:
    """Inference tensors count no writes: query block indices are made at each call, the others are views."""
    with torch.inference_mode():
        made = made_mask()
        first = query_block_indices(made)
        made.partial_kv.num_blocks.zero_()
        assert not torch.equal(query_block_indices(made)[0], first[0])
        assert forward_block_indices(made) is forward_block_indices(made)
