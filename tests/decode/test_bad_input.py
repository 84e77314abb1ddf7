"""Wrong arguments of `attn_decode`: the error names the argument, its value and a remedy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from cute_flash import UnsupportedError, attn_decode, decode_supports
from cute_flash.decode import bind
from cute_flash.spec.decode import describe_decode

B, T, H, HKV, D, S = 2, 1, 4, 2, 32, 24


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(**changes: Any) -> dict[str, Any]:
    """A contiguous call; `changes` replace or add arguments."""
    q, cache = torch.zeros(B, T, H, D), torch.zeros(B, S, HKV, D)
    return {"q": q, "k_cache": cache, "v_cache": cache.clone(), "cache_seqlens": ints(5, 9), **changes}


def paged(**changes: Any) -> dict[str, Any]:
    pages = torch.zeros(6, 8, HKV, D)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    return call(k_cache=pages, v_cache=pages.clone(), page_table=table) | changes


def rotary(width: int = 8, **changes: Any) -> dict[str, Any]:
    table = torch.zeros(S, width)
    return call(k_new=NEW, v_new=NEW, rotary_cos=table, rotary_sin=table) | changes


def appending(**changes: Any) -> dict[str, Any]:
    return call(k_new=NEW, v_new=NEW) | changes


def latent(**changes: Any) -> dict[str, Any]:
    """The values are the first half of the keys."""
    return call(v_cache=None, value_dim=16, scale=0.1) | changes


def with_tables(**changes: Any) -> dict[str, Any]:
    """A page table for each query."""
    return latent(page_table=TABLES, cache_seqlens=SEQLENS) | changes


def ds_mla(**changes: Any) -> dict[str, Any]:
    """A cache with rows of `fp8_ds_mla`."""
    return latent(q=torch.zeros(B, T, H, 576), k_cache=BYTES, value_dim=512) | changes


BYTES = torch.zeros(B, S, HKV, 656, dtype=torch.uint8)
TABLES, SEQLENS = torch.zeros(B, T, 3, dtype=torch.int32), torch.full((B, T), 5, dtype=torch.int32)
NEW, NEW3 = torch.zeros(B, T, HKV, D), torch.zeros(B, 3, HKV, D)
CACHE = torch.zeros(B, S, HKV, D)
WIDE = torch.zeros(B, S, HKV, 2 * D)
PAGES = torch.zeros(7, 8, HKV, D)
FP8 = torch.zeros(B, S, HKV, D).to(torch.float8_e4m3fn)
CU = ints(0, 1, 2)
Q3 = torch.zeros(2, H, D)

# Errors that do not depend on tensor elements; `decode_supports` returns them too.
WRONG = [
    (call(q=np.zeros(3)), "q is a numpy.ndarray: give a torch.Tensor"),
    (call(k_cache=None), "k_cache is a builtins.NoneType: give a torch.Tensor"),
    (call(v_cache=3), "v_cache=3 is a number: give a torch.Tensor, or write value_dim=3"),
    (call(v_cache="x"), "v_cache is a builtins.str: give a torch.Tensor"),
    (call(sinks=[1.0]), "sinks is a builtins.list: give a torch.Tensor"),
    (call(q=torch.zeros(())), "q has shape (): expected (B, T, H, D)"),
    (call(q=Q3), "q has shape (2, 4, 32): expected (B, T, H, D); for one token per sequence use q[:, None]"),
    (call(cu_seqlens_q=CU), "q has shape (2, 1, 4, 32): expected (T, H, D), because cu_seqlens_q is set"),
    (call(k_cache=torch.zeros(B, S, D)), "k_cache has shape (2, 24, 32): expected (B, S, Hkv, D)"),
    (paged(v_cache=Q3), "v_cache has shape (2, 4, 32): expected (num_pages, page_size, Hkv, D)"),
    (call(v_cache=torch.zeros(B, S, 1, D)), "all dimensions but the last must agree"),
    (call(q=torch.zeros(B, T, H, 16)), "the head dims must agree"),
    (call(q=torch.zeros(B, T, 3, D)), "q has 3 heads and k, v have 2: the first must be a multiple of the second"),
    (call(k_cache=torch.zeros(B, S, D, HKV).mT), "k_cache has stride 2 in the last dimension"),
    (call(q=torch.zeros(B, T, H, D, dtype=torch.int32)), "q is torch.int32 on cpu: use one of float16"),
    (call(q=torch.zeros(B, T, H, D).half()), "k_cache is torch.float32 and q is torch.float16: use torch.float16 or"),
    (call(v_cache=FP8), "k_cache is torch.float32 and v_cache is torch.float8_e4m3fn: they must agree"),
    (call(k_cache=FP8.to(torch.float8_e5m2)), "k_cache is torch.float8_e5m2 and q is torch.float32: use torch.float32"),
    (call(k_cache=torch.zeros(1, S, HKV, D), v_cache=torch.zeros(1, S, HKV, D)),
     "k_cache has batch size 1 and there are 2 sequences: give a larger cache, cache_batch_idx or page_table"),
    (call(cache_seqlens=2.5), "cache_seqlens=2.5 is a float: give a whole number, or an int32 tensor of shape (B)"),
    (call(cache_seqlens=torch.tensor([1, 2])), "cache_seqlens is torch.int64: use torch.int32"),
    (call(cache_seqlens=ints(1)), "cache_seqlens has 1 elements: expected 2, one for each sequence"),
    (call(cache_seqlens=ints(1, 2)[None]), "cache_seqlens has shape (1, 2): expected (B)"),
    (call(cache_batch_idx=ints(0)), "cache_batch_idx has 1 elements: expected 2"),
    (call(leftpad=torch.zeros(2)), "leftpad is torch.float32: use torch.int32"),
    (paged(page_table=ints(0, 1)), "page_table has shape (2,): expected (2, max_pages), a row for each sequence"),
    (paged(page_table=torch.zeros(2, 3, dtype=torch.int64)), "page_table is torch.int64: use torch.int32"),
    (paged(cache_batch_idx=ints(0, 1), page_table=torch.zeros(0, 3, dtype=torch.int32)),
     "page_table has shape (0, 3): expected (1 or more, max_pages), rows for cache_batch_idx"),
    (paged(k_cache=torch.zeros(6, 0, HKV, D), v_cache=torch.zeros(6, 0, HKV, D)), "a page needs at least one row"),
    (call(k_new=NEW), "k_new alone: give both k_new and v_new"),
    (call(v_new=NEW), "v_new alone: give both k_new and v_new"),
    (call(k_new=NEW[:1], v_new=NEW), "k_new has shape (1, 1, 2, 32): expected (2, 1, 2, 32)"),
    (call(k_new=NEW[0], v_new=NEW), "k_new has shape (1, 2, 32): expected (2, Tn, 2, 32)"),
    (call(k_new=NEW, v_new=NEW[..., :8]), "v_new has shape (2, 1, 2, 8): expected (2, 1, 2, 32)"),
    (call(q=Q3, cu_seqlens_q=CU, k_new=NEW[0], v_new=NEW[0]), "expected (2, 2, 32), the tokens of q"),
    (call(k_new=NEW.half(), v_new=NEW), "k_new is torch.float16 and q is torch.float32: they must agree"),
    (appending(k_cache=CACHE, v_cache=CACHE), "k_new with a k_cache and a v_cache that overlap in memory: give each"),
    # One sequence later or earlier; the next row of the same page; half a row; other strides, but the same first row.
    (appending(k_cache=PAGES[:-1], v_cache=PAGES[1:]), "a k_cache and a v_cache that overlap"),
    (appending(k_cache=PAGES[1:], v_cache=PAGES[:-1]), "a k_cache and a v_cache that overlap"),
    (appending(k_cache=WIDE[..., :D], v_cache=WIDE[..., D // 2 : -D // 2]), "a k_cache and a v_cache that overlap"),
    (paged(k_new=NEW, v_new=NEW, k_cache=PAGES[:6, :-1], v_cache=PAGES[:6, 1:]), "a k_cache and a v_cache that"),
    (appending(k_cache=PAGES[:2], v_cache=PAGES.flatten(0, 1)[:32].unflatten(0, (2, 16))[:, :8]),
     "a k_cache and a v_cache that overlap"),
    (appending(k_cache=CACHE[:1].expand(B, -1, -1, -1)),
     "k_new with a k_cache of shape (2, 24, 2, 32) and strides (0, 64, 32, 1), whose rows overlap in memory: give "
     "every row its own memory, such as k_cache.contiguous()"),
    (paged(k_new=NEW, v_new=NEW, k_cache=PAGES[:1].expand(6, -1, -1, -1)), "and strides (0, 64, 32, 1), whose rows"),
    (appending(v_cache=CACHE[:, :1].expand(-1, S, -1, -1)), "and strides (1536, 0, 32, 1), whose rows overlap"),
    (appending(v_cache=CACHE.flatten().unfold(0, S * HKV * D, 64)[:B].view(B, S, HKV, D)), "(64, 64, 32, 1), whose"),
    (appending(k_cache=CACHE, k_new=CACHE[:, 2:3]), "k_new overlaps k_cache in memory: pass k_new.clone()"),
    (appending(v_cache=CACHE, k_new=CACHE[:, 2:4], v_new=NEW3[:, :2]), "k_new overlaps v_cache in memory"),
    (appending(k_cache=CACHE, v_new=CACHE[:, -1:]), "v_new overlaps k_cache in memory: pass v_new.clone()"),
    (call(q=torch.zeros(B, T, HKV, D), v_cache=CACHE, out=CACHE[:, 3:4]), "out overlaps v_cache in memory: give out"),
    (rotary(rotary_sin=None), "rotary_cos alone: give both rotary_cos and rotary_sin"),
    (rotary(k_new=None, v_new=None), "rotary_cos without k_new: rotate q before the call, or append"),
    (rotary(rotary_sin=torch.zeros(S, 4)), "rotary_sin has shape (24, 4): expected (positions, rotary_dim / 2)"),
    (rotary(rotary_sin=torch.zeros(S, 8).double()), "rotary_cos is torch.float32 and rotary_sin is torch.float64"),
    (rotary(17), "rotary_cos has 17 columns, so rotary_dim=34: at most the head dim, 32"),
    (rotary(rotary_interleaved="yes"), "rotary_interleaved='yes': give True or False"),
    (call(alibi=torch.zeros(3)), "alibi has shape (3,): expected (4,) or (2, 4), a value for each query head"),
    (call(sinks=torch.zeros(4, dtype=torch.int64)), "sinks is torch.int64: use one of"),
    (call(k_scale=0.5), "k_scale with a cache of torch.float32: leave it out, or store the cache in"),
    (call(k_cache=FP8, v_cache=FP8, k_scale=torch.ones(3)), "k_scale has shape (3,): expected () or (2,), one"),
    (call(k_cache=FP8, v_cache=FP8, v_scale=torch.ones(2).double()), "v_scale is torch.float64: use torch.float32"),
    (call(k_cache=FP8, v_cache=FP8, v_scale="x"), "v_scale='x' is a str: give a number"),
    (call(scale=float("inf")), "scale=inf is not finite"),
    (call(softcap=1e39), "softcap=1e+39 exceeds 3.4e+38, the largest float32, the dtype of the scores"),
    (call(softcap=-1.0), "softcap=-1.0: use a positive number, or None for no cap"),
    (call(window=(2**63, 0)), "window left=9223372036854775808 exceeds 64 bits"),
    (call(window=(-1, -1)), "window left=-1 is negative: use None for an unbounded side"),
    (call(attention_chunk=-1), "attention_chunk=-1: use a positive number of keys, or None or 0 for no chunks"),
    (call(attention_chunk="8"), "attention_chunk='8' is a str: use a whole number of keys"),
    (call(causal=None), "causal=None: give True or False"),
    (call(kv_layout="NHD"), "kv_layout='NHD': use one of nhd, hnd"),
    (call(num_splits=1.5), "num_splits=1.5 is a float"),
    (call(return_lse="x"), "return_lse='x': give True or False"),
    (call(out=torch.zeros(B, T, H, 8)), "out has shape (2, 1, 4, 8): expected (2, 1, 4, 32)"),
    (call(out=torch.zeros(B, T, H, D).half()), "out is torch.float16 and q is torch.float32: they must agree"),
    (call(out=torch.zeros(B, T, D, H).mT), "out has stride 4 in the last dimension"),
    (call(cu_seqlens_q=ints(), q=Q3), "cu_seqlens_q has shape (0,): expected (B + 1)"),
    (call(q=torch.zeros(B, T, H, D, requires_grad=True)),
     "q requires grad, but attn_decode computes no gradients: use attn, or call attn_decode under torch.no_grad()"),
    (call(sinks=torch.zeros(H, requires_grad=True)), "sinks requires grad, but attn_decode computes no gradients"),
    (call(v_cache=None), "no v_cache: give v_cache, or value_dim if the values are the first columns of k_cache"),
    (latent(v_cache=CACHE), "v_cache with value_dim=16: leave out v_cache, or value_dim if V is not in K"),
    (latent(scale=None), "value_dim=16 without scale: give that of the head dim before absorption, such as 192**-0.5"),
    (latent(value_dim=0), "value_dim=0: give a number of columns from 1 to 32, the head dim"),
    (latent(value_dim=33), "value_dim=33: give a number of columns from 1 to 32, the head dim"),
    (latent(value_dim=1.5), "value_dim=1.5 is a float"),
    (latent(k_cache=torch.zeros(D)), "k_cache has shape (32,): expected (B, S, Hkv, D)"),
    (latent(k_new=NEW, v_new=NEW), "v_new with value_dim=16: leave it out, because the rows of k_new hold the values"),
    (latent(k_cache=FP8, v_scale=0.5), "v_scale with value_dim=16: leave it out, because k_scale is the scale of the"),
    (latent(k_new=NEW, rotary_cos=torch.zeros(S, 8), rotary_sin=torch.zeros(S, 8)),
     "rotary_cos with value_dim=16: rotate the last columns of q and k_new before the call"),
    (latent(k_new=NEW[..., :16]), "k_new has shape (2, 1, 2, 16): expected (2, 1, 2, 32)"),
    (latent(k_cache=CACHE[:1].expand(B, -1, -1, -1), k_new=NEW), "whose rows overlap in memory: give every row"),
    (latent(out=torch.zeros(B, T, H, D)), "out has shape (2, 1, 4, 32): expected (2, 1, 4, 16)"),
    (latent(k_cache=CACHE, q=torch.zeros(B, T, HKV, D), out=CACHE[:, 3:4, :, :16]), "out overlaps k_cache in memory"),
    (ds_mla(k_cache=BYTES[..., :576]),
     "k_cache is torch.uint8, with bytes in a row of k_cache: 576 instead of 656. Rows of fp8_ds_mla have 512 "
     "float8_e4m3fn, which are the value, 4 float32 scales and 64 bfloat16; q has 576 columns, and value_dim is 512"),
    (ds_mla(q=torch.zeros(B, T, H, 656)), "k_cache is torch.uint8, with columns of q: 656 instead of 576. Rows of"),
    (ds_mla(value_dim=576), "k_cache is torch.uint8, with value_dim: 576 instead of 512. Rows of fp8_ds_mla have 512"),
    (ds_mla(value_dim=None), "k_cache is torch.uint8, with value_dim: None instead of 512"),
    (ds_mla(k_cache=BYTES[:, :, 0]), "k_cache has shape (2, 24, 656): expected (B, S, Hkv, D)"),
    (ds_mla(v_cache=BYTES), "v_cache is torch.uint8: leave it out, because rows of fp8_ds_mla hold keys and values"),
    (ds_mla(v_cache=CACHE), "v_cache with a k_cache of torch.uint8: leave it out, and give value_dim=512"),
    (ds_mla(k_scale=0.5), "k_scale with a k_cache of torch.uint8: leave it out, because the rows have their own"),
    (ds_mla(v_scale=0.5), "v_scale with value_dim=512: leave it out"),
    (ds_mla(k_new=NEW), "k_new has shape (2, 1, 2, 32): expected (2, 1, 2, 576)"),
    (ds_mla(k_new=torch.zeros(B, T, HKV, 576).half()), "k_new is torch.float16 and q is torch.float32: they must"),
    (ds_mla(k_cache=BYTES[:1].expand(B, -1, -1, -1), k_new=torch.zeros(B, T, HKV, 576)), "whose rows overlap in"),
    (call(page_table=TABLES), "page_table has shape (2, 1, 3): a table for each query needs value_dim"),
    (with_tables(page_table=TABLES[:, :0]),
     "page_table has shape (2, 0, 3): expected (2, 1, max_pages), a table for each query"),
    (with_tables(page_table=TABLES[None]), "page_table has shape (1, 2, 1, 3): expected (B, max_pages) or (B, T, max"),
    (with_tables(page_table=TABLES.long()), "page_table is torch.int64: use torch.int32"),
    (latent(page_table=TABLES), "cache_seqlens has shape (2,): expected (2, 1), the rows in the table of each query"),
    (with_tables(cache_seqlens=SEQLENS.long()), "cache_seqlens is torch.int64: use torch.int32"),
    (with_tables(k_new=NEW), "k_new with a page table for each query: append in a call before"),
    (with_tables(window=(3, 0)), "window with a page table for each query: leave it out, because the rows of such a"),
    (with_tables(window=(None, 3), causal=False), "window with a page table for each query: leave it out"),
    (with_tables(attention_chunk=3), "attention_chunk with a page table for each query: leave it out"),
    (with_tables(alibi=torch.zeros(H)), "alibi with a page table for each query: leave it out"),
    (with_tables(leftpad=ints(0, 0)), "leftpad with a page table for each query: leave it out, and set the entries of"),
    (with_tables(cache_batch_idx=ints(0, 1)), "cache_batch_idx with a page table for each query: leave it out"),
    (with_tables(q=Q3, cu_seqlens_q=CU), "cu_seqlens_q with a page table for each query: give q as (B, T, H, D)"),
]  # fmt: skip

# Wrong values of lengths and indices, which the CPU path reads.
WRONG_VALUES = [
    (call(cache_seqlens=ints(5, -1)), "cache_seqlens[1]=-1 is negative"),
    (call(cache_seqlens=ints(25, 1)), "cache_seqlens[0]=25: the cache holds 24 rows per sequence"),
    (call(cache_seqlens=24, k_new=NEW, v_new=NEW), "cache_seqlens[0]=24 and 1 new rows: the cache holds 24 rows"),
    (paged(cache_seqlens=ints(0, 25)), "cache_seqlens[1]=25: the cache holds 24 rows per sequence"),
    (paged(page_table=torch.full((2, 3), 6, dtype=torch.int32)), "page_table[0, 0]=6: there are 6 pages"),
    (paged(page_table=torch.tensor([[0, 1, 2], [3, -1, 5]]).int()), "page_table[1, 1]=-1: there are 6 pages"),
    # Of the rows 7, 8 and 9, which are appended, the query sees row 9 alone.
    (paged(page_table=torch.tensor([[0, 1, 2], [-1, 4, 5]]).int(), cache_seqlens=ints(5, 7), k_new=NEW3, v_new=NEW3,
           window=(0, 0)), "page_table[1, 0]=-1: there are 6 pages"),
    (call(cache_batch_idx=ints(0, 2)), "cache_batch_idx[1]=2: the cache has 2 sequences, numbered from 0"),
    (paged(cache_batch_idx=ints(-1, 0)), "cache_batch_idx[0]=-1: page_table has 2 sequences, numbered from 0"),
    (appending(cache_batch_idx=ints(1, 1)), "sequences 0 and 1 both append to batch index 1: cache_batch_idx must"),
    (paged(k_new=NEW, v_new=NEW, page_table=torch.tensor([[0, 1, 2], [3, 0, 5]]).int(), cache_seqlens=ints(4, 12)),
     "sequences 0 and 1 both append to page 0: give each its own pages for new rows"),
    (call(leftpad=ints(0, -3)), "leftpad[1]=-3 is negative"),
    (call(q=Q3, cu_seqlens_q=ints(0, 1, 3)), "cu_seqlens_q ends with 3: there are 2 tokens in q"),
    (call(q=Q3, cu_seqlens_q=ints(0, 2, 1)), "offsets may not decrease"),
    (rotary(cache_seqlens=ints(5, 9), rotary_cos=torch.zeros(9, 8), rotary_sin=torch.zeros(9, 8)),
     "position 9 of sequence 1: rotary_cos has 9 rows, one for each position from 0"),
    (rotary(q=torch.zeros(B, 8, H, D)), "position -2 of sequence 0: rotary_cos has 24 rows"),
]  # fmt: skip
# The same of page tables of queries.
WRONG_TABLES = [
    (with_tables(cache_seqlens=ints(0, 73).view(2, 1)), "cache_seqlens[1, 0]=73: the page table of a query has 72"),
    (with_tables(cache_seqlens=-1), "cache_seqlens[0, 0]=-1: the page table of a query has 72 rows"),
    (with_tables(page_table=TABLES + 2), "page_table[0, 0, 0]=2: there are 2 pages; -1 is no page"),
    (with_tables(page_table=TABLES - 2), "page_table[0, 0, 0]=-2: there are 2 pages; -1 is no page"),
]  # fmt: skip


def run(arguments: dict[str, Any]) -> Any:
    return attn_decode(**arguments)


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[text[:50] for _, text in WRONG])
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        run(arguments)
    support = decode_supports(**arguments)
    assert not support and support.reason == str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG_VALUES + WRONG_TABLES, ids=[text[:50] for _, text in WRONG_VALUES + WRONG_TABLES]
)
def test_wrong_values_on_the_cpu(arguments: dict[str, Any], message: str) -> None:
    before = arguments["k_cache"].clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        run(arguments)
    assert torch.equal(arguments["k_cache"], before), "nothing is appended"
    assert decode_supports(**arguments), "no tensor is read"


def test_pages_that_no_query_sees_may_have_any_index() -> None:
    """This holds for the CPU path only: kernels may read the page indices of a full K/V block."""
    table = torch.tensor([[-1, 1, 99], [99, 4, -7]], dtype=torch.int32)
    run(paged(page_table=table, cache_seqlens=ints(12, 16), window=(3, 0)))
    run(paged(page_table=table, cache_seqlens=ints(12, 16), leftpad=ints(8, 9)))


def test_caches_that_share_memory_but_no_row() -> None:
    """Appends to views of one tensor, and to pages with a common prefix; and calls that do not append."""
    pool = torch.zeros(9, 16, 2 * HKV, D)
    table = {
        "page_table": torch.tensor([[0, 1], [0, 2]]).int(),
        "cache_seqlens": ints(8, 9),
        "k_new": NEW,
        "v_new": NEW,
    }
    halves = {"rows": (pool[:, :8], pool[:, 8:]), "heads": (pool[:, :8, :HKV], pool[:, :8, HKV:])}
    halves |= {
        "pages": (pool[:4, :8, :HKV], pool[4:8, :8, :HKV]),
        "in turns": (pool[:8:2, :8, ::2], pool[1::2, :8, ::2]),
    }
    halves |= {"columns": tuple(torch.zeros(9, 8, HKV, 2 * D).split(D, -1))}
    # The ranges of pages intersect, but the caches have different heads of a page.
    halves |= {"crossed": (pool[:5, :8, :HKV], pool[2:7, :8, HKV:])}
    for name, (k_cache, v_cache) in halves.items():
        caches = {"k_cache": k_cache[..., :HKV, :], "v_cache": v_cache[..., :HKV, :]}
        assert decode_supports(**call(**caches, **table)) and decode_supports(**appending(**caches)), name
    run(paged(**table))
    # V is one page after K, and the table has every other page.
    even = torch.tensor([[0, 2], [4, 0]]).int()
    run(paged(**table | {"page_table": even, "cache_seqlens": ints(9, 3)}, k_cache=PAGES[:-1], v_cache=PAGES[1:]))
    # New rows and the output beside the rows of the caches, and new rows that are expanded.
    beside = {"k_new": pool[:B, 8:9, :HKV, :D], "v_new": NEW[:, :, :1].expand(-1, -1, HKV, -1)}
    out = pool[:B, 9:10, :HKV]
    halves_of_heads = {"k_cache": pool[:B, :8, :HKV], "v_cache": pool[:B, :8, HKV:], "cache_seqlens": 5}
    run(call(q=torch.zeros(B, T, HKV, D), out=out, **halves_of_heads, **beside))
    # An index chooses the rows that the call writes to.
    run(appending(k_cache=CACHE, k_new=CACHE[:, 2:3], cache_batch_idx=ints(1, 0)))
    run(call(k_cache=CACHE, v_cache=CACHE, cache_batch_idx=ints(1, 1)))
    run(call(k_cache=CACHE[:1].expand(B, -1, -1, -1)))


def test_grad_mode_decides() -> None:
    arguments = call(q=torch.zeros(B, T, H, D, requires_grad=True))
    with torch.no_grad():
        assert not run(arguments).requires_grad
    with pytest.raises(UnsupportedError, match="q requires grad"):
        torch.ops.cute_flash.decode(
            arguments["q"], arguments["k_cache"], arguments["v_cache"], arguments["cache_seqlens"], 0.1
        )


def test_tangents() -> None:
    """Forward-mode differentiation would silently give tangents of 0."""

    def jvp(name: str) -> None:
        arguments = call()
        torch.func.jvp(lambda x: run(arguments | {name: x}), (arguments[name],), (arguments[name],))

    for name in ("q", "v_cache"):
        with pytest.raises(UnsupportedError, match="forward-mode differentiation of attn_decode"):
            jvp(name)


def test_vmap_and_sparse_tensors() -> None:
    for name in ("q", "k_cache", "sinks"):
        arguments = call(sinks=torch.zeros(H))
        with pytest.raises(UnsupportedError, match=f"vmap over {name} of attn_decode, .*: call it in a loop"):
            torch.func.vmap(lambda x: run(arguments | {name: x}))(arguments[name][None])  # noqa: B023
    for name in ("q", "k_cache"):
        arguments = call()
        with pytest.raises(UnsupportedError, match=r"a tensor of the call is sparse: call to_dense\(\)"):
            run(arguments | {name: arguments[name].to_sparse()})


def test_cuda_has_fewer_kernels() -> None:
    def on_cuda(**changes: Any) -> None:
        describe_decode(*bind(**changes), device="cuda")

    def of(dtype: torch.dtype, head_dim: int = D, **changes: Any) -> dict[str, Any]:
        cache = torch.zeros(B, S, HKV, head_dim, dtype=dtype)
        return call(q=torch.zeros(B, T, H, head_dim, dtype=dtype), k_cache=cache, v_cache=cache, **changes)

    on_cuda(**of(torch.bfloat16))
    on_cuda(**of(torch.float16) | {"k_cache": FP8, "v_cache": FP8})
    on_cuda(**of(torch.float16, 512))
    with pytest.raises(UnsupportedError, match=r"q is torch\.float32 on cuda: use one of float16, bfloat16"):
        on_cuda(**of(torch.float32))
    with pytest.raises(UnsupportedError, match="head_dim=36: kernels take multiples of 8"):
        on_cuda(**of(torch.float16, 36))
    with pytest.raises(UnsupportedError, match="head_dim=520"):
        on_cuda(**of(torch.float16, 520))
    with pytest.raises(UnsupportedError, match=r"softcap=20000\.0 on cuda"):
        on_cuda(**of(torch.float16, softcap=20000.0))
    new, table = torch.zeros(B, T, HKV, D).half(), torch.zeros(S, 4)
    with pytest.raises(UnsupportedError, match="rotary_dim=8 on cuda: use a multiple of 16"):
        on_cuda(**of(torch.float16, k_new=new, v_new=new, rotary_cos=table, rotary_sin=table))


def test_the_description() -> None:
    table = torch.zeros(S, 8)
    arguments = paged(k_new=NEW, v_new=NEW, rotary_cos=table, rotary_sin=table, window=(7, 3))
    problem = describe_decode(*bind(**arguments))
    assert (problem.batch, problem.tokens, problem.total_tokens) == (2, 1, 2)
    assert (problem.heads, problem.heads_kv, problem.group) == (4, 2, 2)
    assert (problem.head_dim, problem.head_dim_v) == (32, 32)
    assert (problem.dtype, problem.cache_dtype, problem.is_fp8) == ("float32", "float32", False)
    assert (problem.page_size, problem.capacity) == (8, 24)
    assert (problem.has_new, problem.new_tokens, problem.rotary_dim) == (True, 1, 16)
    assert problem.band.bounds == (7, 0) and not problem.is_ragged
    ragged = describe_decode(*bind(**call(q=Q3, cu_seqlens_q=CU, k_cache=FP8, v_cache=FP8, causal=False)))
    assert (ragged.batch, ragged.tokens, ragged.total_tokens, ragged.new_tokens) == (2, None, 2, 0)
    assert ragged.is_ragged and ragged.is_fp8 and ragged.page_size is None and ragged.capacity == S
    assert ragged.band.bounds == (None, None) and not ragged.has_new and ragged.rotary_dim == 0


@pytest.mark.parametrize(
    "changes",
    [{}, {"k_new": NEW.half()}, {"page_table": TABLES, "cache_seqlens": SEQLENS}],
    ids=["plain", "append", "tables"],
)
def test_kernels_take_one_cache(changes: dict[str, Any]) -> None:
    arguments = latent(q=torch.zeros(B, T, H, D).half(), k_cache=CACHE.half(), **changes)
    assert decode_supports(**arguments)
    assert decode_supports(**arguments, gpu="H100") and decode_supports(**arguments, gpu="A100")


@pytest.mark.parametrize(
    ("width", "value_dim", "reason"),
    [
        (
            584,
            512,
            "head_dim=584 with one cache on cuda: kernels take multiples of 8 up to 576; pad the columns of q and ",
        ),
        (36, 32, "head_dim=36 with one cache on cuda"),
        (576, 520, "value_dim=520 with one cache on cuda: kernels take multiples of 8 up to 512"),
    ],
)
def test_widths_of_one_cache_on_cuda(width: int, value_dim: int, reason: str) -> None:
    arguments = latent(q=torch.zeros(B, T, H, width).half(), k_cache=torch.zeros(B, S, 2, width).half())
    arguments["value_dim"] = value_dim
    assert decode_supports(**arguments)
    assert (decode_supports(**arguments, gpu="H100").reason or "").startswith(reason)


def test_rows_of_bytes_on_cuda() -> None:
    arguments = ds_mla(q=torch.zeros(B, T, H, 576).half())
    assert decode_supports(**arguments)
    assert decode_supports(**arguments, gpu="H100") and decode_supports(**arguments, gpu="A100")
    problem = describe_decode(*bind(**arguments))
    assert (problem.head_dim, problem.head_dim_v, problem.cache_dtype) == (576, 512, "fp8_ds_mla") and problem.is_fp8
