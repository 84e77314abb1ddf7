"""`flash_attn_with_kvcache` on the CPU, against plain torch: caches, pages, rotary embedding and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError
from cute_flash.integrations.flash_attn import flash_attn_with_kvcache
from tests.covering import covering
from tests.integrations.plain import plain, rotary

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: {"rtol": 2e-4, "atol": 2e-5}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}
LENGTHS = torch.tensor([9, 0, 21], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.02])


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def caches(head_dim: int = 24, dtype: torch.dtype = torch.float32, batch: int = 3) -> tuple[Tensor, Tensor]:
    return normal(batch, 31, 2, head_dim, seed=1, dtype=dtype), normal(batch, 31, 2, head_dim, seed=2, dtype=dtype)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), **TOLERANCE[found.dtype])


# ---- without an append


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [24, 20])
def test_lengths(head_dim: int, dtype: torch.dtype) -> None:
    q, (k, v) = normal(3, 5, 4, head_dim, seed=0, dtype=dtype), caches(head_dim, dtype)
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=LENGTHS, causal=True, alibi_slopes=SLOPES, softcap=4.0, return_softmax_lse=True
    )
    assert out.shape == q.shape and lse.shape == (3, 4, 5)
    for b, length in enumerate(LENGTHS):
        expected, expected_lse = plain(
            q[b], k[b, :length], v[b, :length], causal=True, slopes=SLOPES, softcap=4.0
        )  # fmt: skip
        close(out[b], expected)
        close(lse[b], expected_lse)


@pytest.mark.parametrize("length", [None, 31])
def test_the_full_cache_is_the_default(length: int | None) -> None:
    q, (k, v) = normal(3, 2, 4, 24, seed=0), caches()
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=length, window_size=(7, 3), num_splits=2)
    for b in range(3):
        close(out[b], plain(q[b], k[b], v[b], window=(7, 3))[0])


def test_batch_index_leftpad_and_sinks() -> None:
    q, (k, v) = normal(2, 3, 4, 24, seed=0), caches()
    rows, leftpad = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([4, 1], dtype=torch.int32)
    lengths = torch.tensor([20, 8], dtype=torch.int32)
    out = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, cache_batch_idx=rows, cache_leftpad=leftpad, s_aux=SLOPES
    )
    for b, (row, length, start) in enumerate(zip(rows, lengths, leftpad.tolist())):
        close(out[b], plain(q[b], k[row, :length], v[row, :length], leftpad=start, sinks=SLOPES)[0])


@pytest.mark.parametrize("name", ["block_table", "page_table"])
def test_pages(name: str) -> None:
    q, (k, v) = normal(3, 2, 4, 24, seed=0), caches()
    table = torch.randperm(15).view(3, 5).int()
    pages = torch.zeros(2, 15, 7, 2, 24)
    for cache, x in zip(pages, (k, v)):
        cache[table] = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 4)).unflatten(1, (5, 7))
    out = flash_attn_with_kvcache(q, *pages, cache_seqlens=LENGTHS, causal=True, **{name: table})
    for b, length in enumerate(LENGTHS):
        close(out[b], plain(q[b], k[b, :length], v[b, :length], causal=True)[0])
    out = flash_attn_with_kvcache(q, *pages, **{name: table})  # 35 rows
    close(out[0, :, :, 0], plain(q[0], *(x[table[0]].flatten(0, 1) for x in pages))[0][..., 0])


def test_ragged_queries() -> None:
    q, (k, v) = normal(9, 4, 24, seed=0), caches()
    offsets = torch.tensor([0, 2, 3, 9], dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=LENGTHS, cu_seqlens_q=offsets, max_seqlen_q=6, causal=True, return_softmax_lse=True
    )
    assert lse.shape == (4, 9)
    for b, length in enumerate(LENGTHS):
        tokens = slice(offsets[b], offsets[b + 1])
        expected, expected_lse = plain(q[tokens], k[b, :length], v[b, :length], causal=True)
        close(out[tokens], expected)
        close(lse[:, tokens], expected_lse)


@pytest.mark.parametrize("expanded", [False, True])
def test_fp8_caches(expanded: bool) -> None:
    q = normal(3, 2, 4, 32, seed=0)
    k, v = (x.to(FP8) for x in caches(32))
    k_scale, v_scale = torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])
    scales = (x.expand(3, 2) if expanded else x for x in (k_scale, v_scale))
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=LENGTHS, **dict(zip(("k_descale", "v_descale"), scales)))
    keys, values = k.float() * k_scale[:, None], v.float() * v_scale[:, None]
    for b, length in enumerate(LENGTHS):
        close(out[b], plain(q[b], keys[b, :length], values[b, :length])[0])


# ---- append


WINDOWS = [(-1, -1), (-1, 0), (4, 2)]
# Any two properties meet; the numbers are the queries and the appended rows.
APPENDS = covering(
    list(itertools.product(TOLERANCE, [24, 20], [(3, 3), (1, 4), (5, 2)], [True, False, None], WINDOWS)), tuple
)


@pytest.mark.parametrize(("dtype", "head_dim", "counts", "interleaved", "window"), APPENDS, ids=str)
def test_append(
    dtype: torch.dtype, head_dim: int, counts: tuple[int, int], interleaved: bool | None, window: tuple[int, int]
) -> None:
    """interleaved=None: no rotary embedding. Queries rotate from cache_seqlens on, also if T differs from Tn."""
    tokens, new = counts
    q, (k_cache, v_cache) = normal(3, tokens, 4, head_dim, seed=0, dtype=dtype), caches(head_dim, dtype)
    k, v = normal(3, new, 2, head_dim, seed=3, dtype=dtype), normal(3, new, 2, head_dim, seed=4, dtype=dtype)
    angles = normal(40, 8, seed=5)
    cos, sin = (None, None) if interleaved is None else (angles.cos(), angles.sin())
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    causal = window == (-1, 0)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, LENGTHS, causal=causal, window_size=(-1, -1) if causal else window,
        **({} if interleaved is None else {"rotary_interleaved": interleaved}),
    )  # fmt: skip
    for b, length in enumerate(LENGTHS.tolist()):
        queries, keys = q[b], k[b]
        if interleaved is not None:
            is_banded = window != (-1, -1)
            queries = rotary(q[b], cos, sin, length, interleaved, moves=is_banded).to(dtype)
            keys = rotary(k[b], cos, sin, length, interleaved).to(dtype)
        expected_k[b, length : length + new], expected_v[b, length : length + new] = keys, v[b]
        rows = slice(length + new)
        close(out[b], plain(queries, expected_k[b, rows], expected_v[b, rows], window=window)[0])
    close(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


OFFSETS = {True: torch.tensor([0, 2, 3, 9], dtype=torch.int32), False: torch.tensor([0, 0, 4, 5], dtype=torch.int32)}
# (queries are ragged, k is ragged); None: the offsets of k are those of q, in another tensor.
RAGGED = [(True, True), (True, False), (False, True), (True, None)]
APART = covering(
    list(itertools.product(TOLERANCE, [24, 20], RAGGED, [True, False, None], WINDOWS, [False, True], [None, 7])), tuple
)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "ragged", "interleaved", "window", "has_seqlens", "page"), APART, ids=str
)
def test_append_with_offsets_of_its_own(
    dtype: torch.dtype,
    head_dim: int,
    ragged: tuple[bool, bool | None],
    interleaved: bool | None,
    window: tuple[int, int],
    has_seqlens: bool,
    page: int | None,
) -> None:
    """q and k have different lengths, and rotary_seqlens. Without offsets, they have 3 queries and 4 new rows."""
    own = {True: OFFSETS[False], None: OFFSETS[True].clone(), False: None}
    cu_q, cu_k = OFFSETS[True] if ragged[0] else None, own[ragged[1]]
    # Padding after the last sequence, which is longer than the rotary tables.
    q = normal(*((54,) if ragged[0] else (3, 3)), 4, head_dim, seed=0, dtype=dtype)
    new = (3, 4) if cu_k is None else (11 if ragged[1] is None else 6,)
    k, v = normal(*new, 2, head_dim, seed=3, dtype=dtype), normal(*new, 2, head_dim, seed=4, dtype=dtype)
    k_cache, v_cache = caches(head_dim, dtype)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    options: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k_new": cu_k}
    if page is not None:
        # The rows of the page table are those of five sequences.
        rows = torch.tensor([4, 0, 2], dtype=torch.int32)
        table = torch.full((5, 5), -1).int()
        table[rows] = torch.randperm(15, generator=torch.Generator().manual_seed(6)).view(3, 5).int()
        pages = torch.zeros(2, 15, page, 2, head_dim, dtype=dtype)
        for cache, x in zip(pages, (k_cache, v_cache)):
            cache[table[rows]] = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 4)).unflatten(1, (5, page))
        k_cache, v_cache = pages
        options |= {"page_table": table, "cache_batch_idx": rows}
    starts = LENGTHS
    if interleaved is not None:
        angles = normal(40, 8, seed=5)
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}
        if has_seqlens:
            options["rotary_seqlens"] = starts = torch.tensor([2, 30, 0], dtype=torch.int32)
    causal = window == (-1, 0)
    found = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=LENGTHS, causal=causal, window_size=(-1, -1) if causal else window,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    for b, length in enumerate(LENGTHS.tolist()):
        tokens_q, tokens_k = (b if offsets is None else slice(offsets[b], offsets[b + 1]) for offsets in (cu_q, cu_k))
        queries, keys, values = q[tokens_q], k[tokens_k], v[tokens_k]
        if interleaved is not None:
            turn = options["rotary_cos"], options["rotary_sin"], int(starts[b]), interleaved
            queries, keys = rotary(queries, *turn, moves=window != (-1, -1)).to(dtype), rotary(keys, *turn).to(dtype)
        rows_new = slice(length, length + len(keys))
        expected_k[b, rows_new], expected_v[b, rows_new] = keys, values
        visible = slice(length + len(keys))
        out, lse = plain(queries, expected_k[b, visible], expected_v[b, visible], window=window)
        close(found[0][tokens_q], out)
        close(found[1][b] if cu_q is None else found[1][:, tokens_q], lse)
    if page is not None:
        k_cache, v_cache = (x[table[rows]].flatten(1, 2)[:, :31] for x in (k_cache, v_cache))
    close(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_nothing_is_appended_by_a_wrong_call() -> None:
    k_cache, v_cache = caches()
    before, new = k_cache.clone(), normal(2, 5, 2, 24, seed=3)
    with pytest.raises(ValueError, match="alibi has shape"):
        flash_attn_with_kvcache(
            normal(3, 1, 4, 24, seed=0), k_cache, v_cache, *new, cache_seqlens=LENGTHS,
            cu_seqlens_k_new=OFFSETS[False], alibi_slopes=torch.ones(3),
        )  # fmt: skip
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize("interleaved", [False, True])
def test_new_rows_are_rounded_once(interleaved: bool) -> None:
    """Rotated rows are not rounded to bf16 before they are stored as FP8."""
    k, v = (x.to(FP8) for x in caches(32))
    new, angles = normal(2, 3, 60, 2, 32, seed=3, dtype=torch.bfloat16)[:, :, :8], normal(40, 16, seed=5)
    turn = angles.cos(), angles.sin()
    flash_attn_with_kvcache(
        normal(3, 2, 4, 32, seed=0, dtype=torch.bfloat16), k, v, *new, *turn, LENGTHS, causal=True,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    for b, length in enumerate(LENGTHS.tolist()):
        expected = rotary(new[0][b], *turn, length, interleaved).to(FP8)
        assert torch.equal(k[b, length : length + 8].view(torch.uint8), expected.view(torch.uint8))


def test_one_length_for_all_sequences() -> None:
    arguments = [normal(2, 3, 4, 24, seed=0), *(x[:2] for x in caches()), *normal(2, 2, 2, 2, 24, seed=3)]
    cos, sin = normal(2, 40, 8, seed=5)
    found, expected = (
        flash_attn_with_kvcache(*(x.clone() for x in arguments), cos, sin, cache_seqlens=n, causal=True)
        for n in (6, torch.tensor([6, 6], dtype=torch.int32))
    )
    assert torch.equal(found, expected)


# ---- refusals


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"k": torch.ones(3, 1, 2, 24)}, "k alone: give both"),
        ({"v": torch.ones(3, 1, 2, 24)}, "v alone: give both"),
        (
            {"k": torch.ones(3, 1, 2, 24), "v": torch.ones(3, 1, 2, 24), "cache_seqlens": None},
            "k without cache_seqlens",
        ),
        (
            {"k": torch.ones(3, 1, 2, 22), "v": torch.ones(3, 1, 2, 24)},
            "k has shape .*: expected 4 dimensions and head dim 24",
        ),
        ({"cu_seqlens_k_new": LENGTHS}, "cu_seqlens_k_new without k"),
        (
            {"cu_seqlens_k_new": LENGTHS, "k": torch.ones(3, 1, 2, 24), "v": torch.ones(3, 1, 2, 24)},
            "k has shape .*: expected 3 dimensions and head dim 24",
        ),
        ({"k_descale": torch.ones(2)}, "k_descale with a cache of torch.float32"),
        ({"qv": torch.ones(1)}, "^qv=a tensor in flash_attn_with_kvcache"),
        (
            {"k": torch.ones(3, 1, 2, 24), "v": torch.ones(3, 1, 2, 24), "rotary_cos": torch.ones(40, 8)}
            | {"rotary_sin": torch.ones(40, 8), "rotary_seqlens": LENGTHS[:2]},
            "rotary_seqlens has 2 lengths: expected 3",
        ),
        (
            {"k": torch.ones(3, 1, 2, 24), "v": torch.ones(3, 1, 2, 24), "rotary_cos": torch.ones(20, 8)}
            | {"rotary_sin": torch.ones(20, 8), "rotary_seqlens": LENGTHS.clone()},
            "position 21: rotary_cos has 20 rows",
        ),
        ({"rotary_seqlens": LENGTHS.clone()}, "^rotary_seqlens without k or without rotary_cos"),
        ({"k": torch.ones(3, 1, 2, 24), "v": torch.ones(3, 1, 2, 24), "rotary_cos": torch.ones(40, 8)}, "_cos alone"),
        ({"attention_chunk": -16}, "^attention_chunk=-16"),
        ({"sm_margin": 4}, "^sm_margin=4"),
        ({"pack_gqa": "yes"}, "^pack_gqa='yes'"),
        ({"q_descale": torch.ones(1)}, "^q_descale="),
        ({"block_table": torch.zeros(3, 1).int(), "page_table": torch.zeros(3, 1).int()}, "block_table and page_table"),
        ({"rotary_cos": torch.ones(40, 8), "rotary_sin": torch.ones(40, 8)}, "rotary_cos"),
        (
            {"k": torch.ones(3, 2, 2, 24), "v": torch.ones(3, 2, 2, 24), "rotary_cos": torch.ones(40, 13)}
            | {"rotary_sin": torch.ones(40, 13), "causal": True},
            "rotary_cos has shape .* rotary_dim at most 24",
        ),
        ({"num_splits": 2.5}, r"num_splits=2\.5"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals(keywords: dict[str, Any], message: str) -> None:
    arguments = {"cache_seqlens": LENGTHS, **keywords}
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(normal(3, 1, 4, 24, seed=0), *caches(), **arguments)


def test_rotary_seqlens_may_be_cache_seqlens() -> None:
    q = normal(3, 1, 4, 24, seed=0)
    expected = flash_attn_with_kvcache(q, *caches(), cache_seqlens=LENGTHS)
    assert torch.equal(flash_attn_with_kvcache(q, *caches(), cache_seqlens=LENGTHS, rotary_seqlens=LENGTHS), expected)


def test_a_scale_for_each_sequence_is_refused() -> None:
    k, v = (x.to(FP8) for x in caches(32))
    with pytest.raises(UnsupportedError, match=r"v_descale has a scale for each sequence, \(3, 2\)"):
        flash_attn_with_kvcache(normal(3, 1, 4, 32, seed=0), k, v, v_descale=torch.ones(3, 2))


def test_head_dims_must_agree() -> None:
    with pytest.raises(ValueError, match="q has head dim 20 and k_cache has 24"):
        flash_attn_with_kvcache(normal(3, 1, 4, 20, seed=0), *caches())


@pytest.mark.parametrize("head_dim", [24, 20])
def test_no_gradients(head_dim: int) -> None:
    q, k, v = (normal(3, 1, h, head_dim, seed=i).requires_grad_() for i, h in enumerate((4, 2, 2)))
    with torch.no_grad():
        expected = flash_attn_with_kvcache(q, *caches(head_dim), k, v, cache_seqlens=LENGTHS)
    assert not expected.requires_grad
    out, lse = flash_attn_with_kvcache(q, *caches(head_dim), k, v, cache_seqlens=LENGTHS, return_softmax_lse=True)
    assert torch.equal(out, expected)
    with pytest.raises(UnsupportedError, match="no gradients with a K/V cache or block_table"):
        (out.sum() + lse.sum()).backward()
