"""`attn_decode` with a latent cache (MLA) on a GPU, by every family, against the reference in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cute_flash
from cute_flash.reference import ds_mla
from tests.decode.cases import DecodeCall, DecodeCase, table_call
from tests.gpu import decode_cases
from tests.gpu.captured import Captured
from tests.gpu.decode_cases import MLA
from tests.gpu.test_decode import DEVICE, assert_decoded, check, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]

BF16 = torch.bfloat16


@pytest.mark.parametrize("group", range(decode_cases.LATENT_GROUPS))
def test_random_calls(group: int, family: str) -> None:
    for case, dtype in decode_cases.latent_group(family, group):
        try:
            check(case, dtype)
        except Exception as error:
            raise AssertionError(f"{case.id}: {error}") from error


@pytest.mark.parametrize("group", range(decode_cases.CLUSTER_GROUPS))
def test_random_calls_of_clusters(group: int) -> None:
    for case, dtype in decode_cases.cluster_group(group):
        try:
            check(case, dtype)
        except Exception as error:
            raise AssertionError(f"{case.id}: {error}") from error


@pytest.mark.parametrize("group", range(decode_cases.DS_MLA_GROUPS))
def test_random_calls_with_rows_of_ds_mla(group: int, family: str) -> None:
    for case, dtype in decode_cases.ds_mla_group(family, group):
        try:
            check(case, dtype)
        except Exception as error:
            raise AssertionError(f"{case.id}: {error}") from error


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_scales_of_all_sizes(dtype: torch.dtype) -> None:
    """The scales of a key and of neighbouring keys differ by up to 2^60; keys with small values have large weights."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = torch.randn(600, 1, 576, generator=generator, device=DEVICE)
    exponents = torch.randint(-60, 1, (600, 1, 5), generator=generator, device=DEVICE).float()
    rows *= (2.0**exponents).repeat_interleave(128, dim=-1)[..., :576]
    rows[::7] = 0
    q = torch.randn(2, 3, 16, 576, generator=generator, device=DEVICE).to(dtype)
    cache = torch.full((4, 300, 1, 656), 0xFF, dtype=torch.uint8, device=DEVICE)
    cache[2:] = ds_mla.stored(rows).view(2, 300, 1, 656)
    lengths, places = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((300, 77), (2, 3)))
    options = {"value_dim": 512, "scale": 0.2, "cache_seqlens": lengths, "cache_batch_idx": places}
    call = DecodeCall(q, cache, None, options)
    assert_decoded(*run(call), call, call)


@pytest.mark.parametrize("page_size", (None, 1, 64), ids=str)
@pytest.mark.parametrize("heads", (16, 128))
def test_long_sequences(page_size: int | None, heads: int) -> None:
    check(*decode_cases.long_latent_case(page_size, heads))


@pytest.mark.parametrize("heads", decode_cases.LATENT_HEADS)
@pytest.mark.parametrize("num_splits", (1, 2, 7, 32, 5000))
@pytest.mark.parametrize("fp8", ("", "scalar", "ds_mla"))
def test_forced_splits(heads: int, num_splits: int, fp8: str) -> None:
    check(replace(MLA, group=heads, fp8=fp8), BF16, num_splits=num_splits)


@pytest.mark.parametrize("fp8", ("", "heads", "ds_mla"))
def test_an_append_without_queries(fp8: str) -> None:
    check(replace(MLA, tokens=(0,) * 3, new=(5,) * 3, fp8=fp8), BF16)


@pytest.mark.parametrize("heads", (16, 64, 128))
def test_same_input_same_bits(heads: int) -> None:
    call = replace(MLA, seqlens=(5000, 300, 20_000), group=heads).build(DEVICE, BF16)
    first = run(call)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(call), first, strict=True))


@pytest.mark.parametrize("heads", (16, 64))
def test_a_sequence_does_not_depend_on_the_batch_with_forced_splits(heads: int) -> None:
    """The division of a query tile's keys into `num_splits` parts depends on its own length only."""
    case = replace(MLA, seqlens=(1000, 77, 3001, 1), tokens=(1,) * 4, new=(0,) * 4, group=heads, num_splits=4)
    call = case.build(DEVICE, BF16)
    all_rows = run(call)
    for b in range(case.batch):
        own = {name: call.options[name][b : b + 1] for name in ("cache_seqlens", "page_table")}
        one = DecodeCall(call.q[b : b + 1], call.k_cache, None, call.options | own)
        assert all(torch.equal(x[0], y[b]) for x, y in zip(run(one), all_rows, strict=True))


# ---- a table for each query


def on_gpu(call: DecodeCall) -> DecodeCall:
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in call.options.items()}
    return DecodeCall(call.q.to(DEVICE), call.k_cache.to(DEVICE), None, options)


@pytest.mark.parametrize("page_size", (1, 4, 16))
@pytest.mark.parametrize("heads_kv", (1, 2))
def test_tables(page_size: int, heads_kv: int) -> None:
    for seed in range(8):
        options = {"softcap": 20.0} if seed % 2 else {}
        for fp8 in ("ds_mla", seed % 4 > 1):
            call = on_gpu(table_call(seed, BF16, page_size=page_size, heads_kv=heads_kv, fp8=fp8, **options))
            assert_decoded(*run(call), call, call)


@pytest.mark.parametrize("heads", (1, 16, 64, 128))
@pytest.mark.parametrize("has_bytes", (False, True))
def test_lists_of_rows_equal_the_gathered_rows(heads: int, has_bytes: bool) -> None:
    """Lists of 2048 of 65,536 rows, with -1 at every place of a block, and NaN in all other rows."""
    generator = torch.Generator(DEVICE).manual_seed(heads)
    batch, tokens, entries, rows = 2, 2, 2048, 65_536
    q = torch.randn(batch, tokens, heads, 576, generator=generator, device=DEVICE).to(BF16)
    cache = torch.full((rows, 1, 1, 576), torch.nan, device=DEVICE, dtype=BF16)
    table = torch.randint(rows, (batch, tokens, entries), generator=generator, device=DEVICE, dtype=torch.int32)
    cache[table.flatten().long()] = torch.randn(table.numel(), 1, 1, 576, generator=generator, device=DEVICE).to(BF16)
    table[torch.rand(table.shape, generator=generator, device=DEVICE) < 0.3] = -1
    table[0, 0, :130], table[1, 1] = -1, -1
    lengths = torch.tensor([[entries, 1000], [65, 2048]], dtype=torch.int32, device=DEVICE)
    cache = ds_mla.stored(cache) if has_bytes else cache
    call = DecodeCall(q, cache, None, {"value_dim": 512, "scale": 0.05, "page_table": table, "cache_seqlens": lengths})
    assert_decoded(*run(call), call, call)


# ---- graphs


@pytest.mark.parametrize(("heads", "new"), [(16, 1), (64, 1), (128, 0)])
@pytest.mark.parametrize("page_size", (None, 64), ids=str)
def test_a_graph_with_lengths_written_in_place(heads: int, new: int, page_size: int | None) -> None:
    """Lengths, page tables, queries and new rows change between replays; the cache carries over."""
    largest = replace(MLA, seqlens=(2000,) * 3, new=(new,) * 3, page_size=page_size, group=heads)
    call = largest.build(DEVICE, BF16)
    captured = Captured.of(lambda: run(call))
    for seed, lengths in enumerate(((2000, 2000, 2000), (0, 1, 1999), (17, 0, 0), (1024, 1023, 1025))):
        other = replace(largest, seed=seed).build(DEVICE, BF16)
        call.q.copy_(other.q)
        for name in (*(["k_new"] if new else []), *(["page_table"] if page_size else [])):
            call.options[name].copy_(other.options[name])
        call.k_cache.copy_(other.k_cache)
        for x in (call, other):
            x.options["cache_seqlens"].copy_(torch.tensor(lengths))
        assert_decoded(*captured.replay(), call, other)


def test_compiled_equals_eager() -> None:
    case: DecodeCase = replace(MLA, new=(1,) * 3)
    eager, compiled = (case.build(DEVICE, BF16) for _ in range(2))
    expected = run(eager)
    function = torch.compile(cute_flash.attn_decode, fullgraph=True)
    found = function(*compiled.tensors, return_lse=True, **compiled.options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(compiled.k_cache.view(torch.int16), eager.k_cache.view(torch.int16))


def test_what_has_no_kernel() -> None:
    for widths, match in (({"head_dim": 584}, "head_dim=584"), ({"head_dim_v": 516}, "value_dim=516")):
        call = replace(MLA, **widths).build(DEVICE, BF16)
        with pytest.raises(cute_flash.UnsupportedError, match=match):
            run(call)
