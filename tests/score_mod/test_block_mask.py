"""Masks, block masks and their pictures, against definitions for each (query, key) pair."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from cute_flash import BlockMask, attn, masks
from cute_flash.score_mod import trace
from cute_flash.score_mod.block_mask import EMPTY, FULL, PARTIAL, _cache, visible_pairs
from cute_flash.score_mod.trace import bind
from cute_flash.spec.band import Band, ceil_div

IDS = torch.tensor([0, 0, 0, 5, 5, 1, 1, 1, 1, 2, 2, 2])
PARENTS = [-1, 0, 0, 1, 1, 2, -1]
MASKS: dict[str, tuple[Any, Any]] = {
    "causal": (masks.causal(), lambda b, i, j: j <= i),
    "causal, shifted": (masks.causal(3), lambda b, i, j: j <= i + 3),
    "prefix": (masks.prefix_lm(4), lambda b, i, j: j <= i or j < 4),
    "prefixes": (masks.prefix_lm(torch.tensor([2, 7])), lambda b, i, j: j <= i or j < (2, 7)[b]),
    "ids": (masks.document(IDS), lambda b, i, j: IDS[i] == IDS[j]),
    "ids of each": (masks.document(torch.stack([IDS, IDS.flip(0)])),
                    lambda b, i, j: IDS[i] == IDS[j] if b == 0 else IDS[11 - i] == IDS[11 - j]),
    "offsets": (masks.document(offsets=torch.tensor([0, 3, 3, 8])),
                lambda b, i, j: (i >= 3) + (i >= 8) == (j >= 3) + (j >= 8)),
    "dilated": (masks.dilated(3, 2), lambda b, i, j: i - j in (0, 2, 4)),
    "block causal": (masks.block_causal(5), lambda b, i, j: j // 5 <= i // 5),
    "window": (masks.sliding_window(3), lambda b, i, j: 0 <= i - j < 3),
    "window and global": (masks.sliding_window(3, 2), lambda b, i, j: 0 <= i - j and (i - j < 3 or j < 2)),
    "and": (masks.and_(masks.causal(), masks.document(IDS), masks.dilated(4, 2)),
            lambda b, i, j: IDS[i] == IDS[j] and i - j in (0, 2, 4, 6)),
    "or": (masks.or_(masks.sliding_window(2), masks.block_causal(6)),
           lambda b, i, j: 0 <= i - j < 2 or j // 6 <= i // 6),
    "not": (masks.not_(masks.causal()), lambda b, i, j: j > i),
}  # fmt: skip


def seen(mask: Any, sq: int, sk: int, place: tuple[int, int] = (0, 0), bounds: Any = (None, None)) -> Any:
    rows, keys = torch.arange(sq), torch.arange(sk)
    found = None if mask is None else bind(mask, "mask_mod")
    return visible_pairs(found, bounds, rows, keys, (sq, sk), place)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask, meaning = MASKS[name]
    for b in range(2):
        expected = [[bool(meaning(b, i, j)) for j in range(12)] for i in range(12)]
        assert seen(mask, 12, 12, (b, 0)).tolist() == expected


def ancestors(node: int) -> set[int]:
    return {node} | (ancestors(PARENTS[node]) if PARENTS[node] >= 0 else set())


def test_tree() -> None:
    found = seen(masks.tree(torch.tensor(PARENTS), prefix=5), 7, 12).tolist()
    for i, j in product(range(7), range(12)):
        assert found[i][j] == (j < 5 or j - 5 in ancestors(i))


def test_other_values_are_the_same_trace() -> None:
    bind(masks.and_(masks.sliding_window(3, 2), masks.document(IDS)), "mask_mod")
    before = trace.num_traces
    bind(masks.and_(masks.sliding_window(9, 1), masks.document(IDS.flip(0))), "mask_mod")
    assert trace.num_traces == before


def test_masks_that_contradict_themselves() -> None:
    bad: list[Any] = [
        (lambda: masks.document(), "give either ids or offsets"),
        (lambda: masks.document(IDS, offsets=IDS), "give either ids or offsets"),
        (lambda: masks.document(torch.zeros(1, 1, 1, dtype=torch.int32)), "ids have shape"),
        (lambda: masks.document(offsets=torch.tensor([0])), "offsets have shape"),
        (lambda: masks.tree(torch.tensor([0])), r"parents\[0\]=0"),
        (lambda: masks.tree(torch.zeros(1, 1)), "parents have shape"),
        (lambda: masks.dilated(0, 1), "must be positive"),
        (lambda: masks.block_causal(0), "must be positive"),
        (lambda: masks.sliding_window(0), "at least 1"),
        (lambda: masks.and_(), "at least one"),
        (lambda: masks.or_(), "at least one"),
    ]
    for make, message in bad:
        with pytest.raises(ValueError, match=message):
            make()


# Block masks

SHAPES = [(12, 12, (4, 4)), (12, 11, (5, 4)), (7, 12, (8, 8)), (12, 5, (3, 2))]


@pytest.mark.parametrize("name", ["none", "prefixes", "window and global", "and", "not"])
@pytest.mark.parametrize(("sq", "sk", "tile"), SHAPES)
@pytest.mark.parametrize("window", [(None, None), (4, 1)])
def test_block_masks(name: str, sq: int, sk: int, tile: tuple[int, int], window: Any) -> None:
    mask = None if name == "none" else MASKS[name][0]
    block_mask = BlockMask.of(mask, (2, 3, sq, sk), tile=tile, window=window)
    status = block_mask.status
    assert tuple(status.shape) == (1 + (name == "prefixes"), 1, ceil_div(sq, tile[0]), ceil_div(sk, tile[1]))
    for b in range(len(status)):
        pairs = seen(mask, sq, sk, (b, 0), window)
        for m, n in product(range(status.shape[2]), range(status.shape[3])):
            block = pairs[m * tile[0] : (m + 1) * tile[0], n * tile[1] : (n + 1) * tile[1]]
            expected = EMPTY if not block.any() else PARTIAL
            if block.all() and block.shape[1] == tile[1]:
                expected = FULL
            assert status[b, 0, m, n] == expected
    for lists, value in ((block_mask.partial_kv, PARTIAL), (block_mask.full_kv, FULL)):
        assert lists.num_blocks.dtype == lists.indices.dtype == torch.int32 and lists.indices.is_contiguous()
        for place in product(*map(range, status.shape[:3])):
            expected = (status[place] == value).nonzero().flatten().tolist()
            assert lists.indices[place][: lists.num_blocks[place]].tolist() == expected
    visited = int((status != EMPTY).sum())
    assert block_mask.density == pytest.approx(visited / status.numel())


def test_a_band_alone_is_what_kernels_visit() -> None:
    for sq, sk, tile in SHAPES:
        band = Band(3, 1)
        status = BlockMask.of(None, (1, 1, sq, sk), tile=tile, window=(3, 1)).status[0, 0]
        for m in range(len(status)):
            blocks = band.blocks(m, *tile, sq, sk)
            for n, found in enumerate(status[m].tolist()):
                if not blocks.begin <= n < blocks.end:
                    assert found == EMPTY
                assert (found == FULL) == (blocks.full_begin <= n < blocks.full_end)


def test_block_masks_without_captured_tensors_are_cached() -> None:
    shape, first = (1, 1, 12, 12), BlockMask.of(masks.causal(), (1, 1, 12, 12), tile=(4, 4))
    assert BlockMask.of(masks.causal(), shape, tile=(4, 4)) is first
    assert BlockMask.of(masks.causal(), shape, tile=(2, 4)) is not first
    window = BlockMask.of(masks.sliding_window(2), shape, tile=(4, 4))
    assert BlockMask.of(masks.sliding_window(9), shape, tile=(4, 4)) is not window
    for i in range(100):
        BlockMask.of(masks.causal(i), shape, tile=(4, 4))
    assert len(_cache) <= 64


def test_many_queries_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BlockMask.of(masks.dilated(5, 3), (1, 1, 50, 40), tile=(8, 8)).status
    monkeypatch.setattr("cute_flash.score_mod.block_mask.MAX_PAIRS", 1)
    _cache.clear()
    assert torch.equal(BlockMask.of(masks.dilated(5, 3), (1, 1, 50, 40), tile=(8, 8)).status, whole)


def test_a_status_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="status has shape"):
        BlockMask.of_status(torch.zeros(1, 1, 2, 2), 4, 4, 12, 12)
    with pytest.raises(ValueError, match="status is FULL for the last K/V block, which has"):
        BlockMask.of_status(torch.full((1, 1, 3, 3), 2), 4, 4, 12, 11)
    block_mask = BlockMask.of_status(torch.full((1, 1, 3, 3), 2), 4, 4, 11, 12)
    again = BlockMask.of_tensors(list(block_mask.tensors), list(block_mask.sizes))
    assert torch.equal(again.status, block_mask.status) and again.sizes == block_mask.sizes


# Pictures


def test_text() -> None:
    assert masks.draw(masks.causal(), 6, tile=(3, 2)) == (
        "causal: 6 queries x 6 keys, blocks of 3 x 2: 2 full, 3 partial, 1 empty; 58% visible\n"
        "   0 +...\n     ++..\n     +++.\n   3 ####..\n     ####+.\n     ####++\n"
    )
    coloured = masks.draw(masks.causal(), 6, tile=(3, 2), has_colour=True)
    assert coloured.count("\x1b[0m") == 18


def test_svg() -> None:
    from xml.etree import ElementTree

    mask = masks.prefix_lm(torch.tensor([2, 5]))
    drawn = masks.draw(mask, 9, 12, place=(1, 0), as_svg=True, title="a < b")
    root = ElementTree.fromstring(drawn)
    boxes = [x.attrib for x in root.iter("{http://www.w3.org/2000/svg}rect")]
    sizes = (int(x["width"]) * int(x["height"]) for x in boxes if x["fill"] in ("#5faf5f", "#d7af5f"))
    assert sum(sizes) == 12 * 12 * int(seen(mask, 9, 12, (1, 0)).sum())
    assert "a &lt; b" in drawn


# ---- the mask that a block mask carries


ONE = torch.ones(1)


def _qkv(seqlen: int = 256) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, seqlen, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))


def test_attn_applies_the_mask_of_a_block_mask() -> None:
    q, k, v = _qkv()
    for mask, keywords in ((masks.causal(), {}), (None, {"causal": True})):
        block_mask = BlockMask.of(mask, (1, 2, 256, 256), **keywords)
        torch.testing.assert_close(attn(q, k, v, block_mask=block_mask), attn(q, k, v, causal=True))


def test_windows_of_the_call_and_of_the_block_mask_both_hold() -> None:
    q, k, v = _qkv()
    block_mask = BlockMask.of(None, (1, 2, 256, 256), window=(40, None))
    out = attn(q, k, v, block_mask=block_mask, causal=True, window=(100, None))
    torch.testing.assert_close(out, attn(q, k, v, window=(40, 0)))


def test_the_same_mask_beside_a_block_mask() -> None:
    q, k, v = _qkv()
    ids = torch.arange(256) // 100
    for mask, same in ((masks.causal(), masks.causal()), (masks.document(ids), masks.document(ids[:]))):
        out = attn(q, k, v, mask_mod=same, block_mask=BlockMask.of(mask, (1, 2, 256, 256)))
        torch.testing.assert_close(out, attn(q, k, v, mask_mod=mask))


@pytest.mark.parametrize("other", [masks.causal(1), masks.document(torch.arange(256) // 100), masks.prefix_lm(3)])
def test_another_mask_beside_a_block_mask_is_refused(other) -> None:
    documents = masks.document(torch.arange(256) // 100)
    for block_mask in (
        BlockMask.of(masks.causal(), (1, 2, 256, 256)),
        BlockMask.of(documents, (1, 2, 256, 256)),
        BlockMask.of(None, (1, 2, 256, 256), causal=True),
    ):
        with pytest.raises(ValueError, match=r"differs from the mask_mod of block_mask.*masks\.and_"):
            attn(*_qkv(), mask_mod=other, block_mask=block_mask)


@pytest.mark.parametrize("write", [lambda x: x.fill_(0), lambda x: x.data.fill_(0)], ids=["in place", "data"])
def test_writing_to_a_captured_tensor(write) -> None:
    """The old block mask is refused, and a new one has the new contents."""
    q, k, v = _qkv()
    ids = torch.arange(256) // 100
    mask = masks.document(ids)
    block_mask = BlockMask.of(mask, (1, 2, 256, 256))
    write(ids)
    with pytest.raises(ValueError, match="was written to after the block mask was built: build a new one"):
        attn(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(attn(q, k, v, block_mask=BlockMask.of(mask, (1, 2, 256, 256))), attn(q, k, v))


def _saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": _saved,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "computed"])
def test_a_copy_is_a_block_mask_of_the_copied_tensors(copied: Callable, is_leaf: bool) -> None:
    q, k, v = _qkv()
    ids = torch.arange(256.0).div_(100, rounding_mode="floor")  # written to once
    ids = ids if is_leaf else ids * torch.ones(256, requires_grad=True)
    block_mask = BlockMask.of(lambda b, h, i, j: ids[i] == ids[j], (1, 2, 256, 256))
    expected = attn(q, k, v, block_mask=block_mask)
    own = copied(copied(block_mask))
    torch.testing.assert_close(attn(q, k, v, block_mask=own), expected)
    with torch.no_grad():
        own.captured[0].fill_(0)
    with pytest.raises(ValueError, match="was written to after the block mask was built"):
        attn(q, k, v, block_mask=own)
    if copied is not copy.copy:  # which shares the tensors
        torch.testing.assert_close(attn(q, k, v, block_mask=block_mask), expected)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_notices_writes_by_the_version_of_the_copied_tensor(copied: Callable) -> None:
    """These writes change no element, so a comparison of elements does not notice them."""
    q, k, v = _qkv()
    ids = (torch.arange(256) // 100).add_(0)
    block_mask = BlockMask.of(masks.document(ids), (1, 2, 256, 256))
    # A module that holds both has one copy of the tensor.
    own = copied({"ids": ids, "block_mask": block_mask})
    attn(q, k, v, block_mask=own["block_mask"])
    own["ids"].add_(0)
    with pytest.raises(ValueError, match="was written to"):
        attn(q, k, v, block_mask=own["block_mask"])
    ids.add_(0)
    with pytest.raises(ValueError, match="was written to"):
        attn(q, k, v, block_mask=copied(block_mask))


def test_numbers_are_those_of_the_time_it_was_made() -> None:
    q, k, v = _qkv()
    width = 3
    block_mask = BlockMask.of(lambda b, h, i, j: (i - j < width) & (i >= j), (1, 2, 256, 256))
    width = 100
    torch.testing.assert_close(attn(q, k, v, block_mask=block_mask), attn(q, k, v, window=(2, 0)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(tile=(0, 0)), r"tile=\(0, 0\)"),
        (dict(tile=(-128, 128)), "tile="),
        (dict(tile=(1.5, 2)), "tile="),
        (dict(shape=(1, 2, -1, 256)), r"shape=\(1, 2, -1, 256\)"),
        (dict(shape=(256, 256)), "shape="),
        (dict(window=(-1, None)), "window="),
        (dict(window=("a", None)), "window="),
        (dict(window=(2**63, None)), r"window=\(9223372036854775808, None\): give whole numbers from 0 to 2\^63 - 1"),
    ],
)
def test_wrong_sizes(arguments: dict, message: str) -> None:
    shape = arguments.pop("shape", (1, 2, 256, 256))
    with pytest.raises(ValueError, match=message):
        BlockMask.of(masks.causal(), shape, **arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.document(torch.ones(4)),
        lambda: masks.document([0, 1]),
        lambda: masks.document(offsets=torch.tensor([0, 5, 3])),
        lambda: masks.document(offsets=torch.tensor([-1, 5])),
        lambda: masks.document(offsets=torch.tensor([2, 5])),
        lambda: masks.document(offsets=torch.tensor([0.0, 5.0])),
        lambda: attn(*_qkv(), mask_mod=masks.document(torch.zeros(100, dtype=torch.int32))),
        lambda: attn(*_qkv(), mask_mod=masks.tree(torch.full((100,), -1))),
        lambda: attn(*_qkv(), score_mod=lambda s, b, h, i, j: s + ONE[h]),
    ],
)
def test_wrong_tables(make) -> None:
    with pytest.raises(ValueError, match=r"ints|offsets|needs at least"):
        make()


def test_a_captured_table_with_nan_is_not_taken_for_changed() -> None:
    q, k, v = _qkv()
    table = torch.zeros(256)
    table[3] = torch.nan
    mask = BlockMask.of(lambda b, h, i, j: table[j] == 0, (1, 2, 256, 256))
    torch.testing.assert_close(attn(q, k, v, block_mask=mask), attn(q, k, v, mask_mod=lambda b, h, i, j: table[j] == 0))
    table[3] = 0.0
    with pytest.raises(ValueError, match="was written to"):
        attn(q, k, v, block_mask=mask)
