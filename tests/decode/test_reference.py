"""`attn_decode` on the CPU against the row-by-row oracle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_flash
from cute_flash import reference
from cute_flash.decode import bind
from tests.decode.cases import LATENT_DIMS, DecodeCase, latent_cases, random_cases, small_case, table_call, wide_cases
from tests.decode.oracle import oracle

CASES = list(random_cases(7, 110, longest=40))
LATENT = list(latent_cases(8, 40, longest=40))
WIDE = list(wide_cases(9, 8, longest=40))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor, so that NaN equals itself."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(sizes[x.element_size()])


def check(case: DecodeCase, dtype: torch.dtype) -> None:
    call = case.build(dtype=dtype, poison_skipped=True)
    expected, expected_lse, keys, values = oracle(*call.tensors, **call.options)
    out, lse = cute_flash.attn_decode(*call.tensors, return_lse=True, **call.options)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)
    assert (out.double()[expected == 0] == 0).all()
    if "out" in call.options:
        assert out is call.options["out"]
    if dtype == torch.float64:
        # Only the appended rows change, and everything else keeps its bits.
        if case.rotary_dim and not case.fp8:
            torch.testing.assert_close(call.k_cache, keys, rtol=1e-13, atol=1e-13, equal_nan=True)
        else:
            assert torch.equal(bits(call.k_cache), bits(keys))
        if not case.is_latent:
            assert torch.equal(bits(call.v_cache), bits(values))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + LATENT + WIDE, ids=lambda case: case.id)
def test_against_the_oracle(case: DecodeCase) -> None:
    check(case, torch.float64)


OTHERS = list(zip(CASES[:18] + LATENT[:6], itertools.cycle([torch.float32, torch.bfloat16, torch.float16])))


@pytest.mark.parametrize(("case", "dtype"), OTHERS, ids=lambda x: getattr(x, "id", str(x)))
def test_other_dtypes(case: DecodeCase, dtype: torch.dtype) -> None:
    check(case, dtype)


def test_the_cases_cover_everything() -> None:
    assert {case.page_size for case in CASES} == {None, 1, 8, 16, 24, 32, 64, 128, 256, 528}
    assert {case.group for case in CASES} == {1, 2, 3, 4, 5, 7, 8, 16}
    assert {max(case.tokens) for case in CASES} >= set(range(1, 17))
    assert {0, 1} <= {length for case in CASES for length in case.seqlens}
    assert {(case.storage, case.kv_layout, bool(case.page_size)) for case in CASES} == {
        (storage, layout, paged)
        for storage in ("apart", "joined", "stacked", "padded")
        for layout in ("nhd", "hnd")
        for paged in (True, False)
    }
    assert {(bool(case.rotary_dim), case.rotary_interleaved) for case in CASES if any(case.new)} == {
        (rotary, interleaved) for rotary in (True, False) for interleaved in (True, False)
    }
    assert any(0 < case.rotary_dim < case.head_dim // 16 * 16 for case in CASES)
    assert {case.fp8 for case in CASES} == {"", "plain", "number", "scalar", "heads"}
    assert {case.alibi for case in CASES} == {"", "heads", "batch"}
    for name in ("is_ragged", "padding", "leftpad", "softcap", "has_sinks", "scale", "has_batch_idx", "has_out"):
        assert {bool(getattr(case, name)) for case in CASES} == {True, False}, name
    assert any(case.window[0] is not None and not case.causal for case in CASES)
    assert any(case.new != case.tokens and any(case.new) for case in CASES)
    chunked = [case for case in CASES if case.chunk is not None]
    assert any(case.leftpad for case in chunked) and any(case.page_size for case in chunked)
    assert any(1 < case.chunk < max(case.tokens) for case in chunked if case.chunk)
    assert any(case.window[0] is not None for case in chunked) and any(case.rotary_dim for case in chunked)


def test_latent_cases_cover_everything() -> None:
    assert {(case.head_dim, case.head_dim_v) for case in LATENT} == set(LATENT_DIMS)
    both = "is_ragged", "page_size", "fp8", "leftpad", "softcap", "has_sinks", "has_batch_idx", "has_out", "chunk"
    for name in both:
        assert {bool(getattr(case, name)) for case in LATENT} == {True, False}, name
    ds_mla = [case for case in LATENT if case.fp8 == "ds_mla"]
    assert {any(case.new) for case in ds_mla} == {True, False} and {case.kv_layout for case in ds_mla} == {"nhd", "hnd"}
    assert {bool(case.page_size) for case in ds_mla} == {True, False}
    assert {any(case.new) for case in LATENT} == {True, False} and {case.heads_kv for case in LATENT} >= {1, 2}


# ---- parts of the definition


def test_it_is_attn_over_the_rows() -> None:
    case = small_case(seqlens=(21, 21), tokens=(3, 3), leftpad=(4, 4), group=3)
    call = case.build(dtype=torch.float64)
    found = cute_flash.attn_decode(*call.tensors, return_lse=True, **call.options)
    k, v = call.k_cache[:2, 4:21], call.v_cache[:2, 4:21]
    expected = cute_flash.attn(call.q, k, v, causal=True, layout="bshd", return_lse=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_of_chunks_is_rotary_of_the_sequence(interleaved: bool) -> None:
    """Scores depend on distances only: appending in parts gives the results of appending at once."""
    case = small_case(seqlens=(0, 0), tokens=(12, 12), new=(12, 12), rotary_dim=16, rotary_interleaved=interleaved)
    call = case.build(dtype=torch.float64)
    whole = cute_flash.attn_decode(*call.tensors, **call.options)
    parts = []
    again = case.build(dtype=torch.float64)
    k_new, v_new = again.options.pop("k_new"), again.options.pop("v_new")
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        chunk = slice(begin, end)
        again.options |= {"cache_seqlens": begin, "k_new": k_new[:, chunk], "v_new": v_new[:, chunk]}
        parts.append(cute_flash.attn_decode(again.q[:, chunk], again.k_cache, again.v_cache, **again.options))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(again.k_cache, call.k_cache, equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "fp8"), [(torch.bfloat16, ""), (torch.float16, ""), (torch.bfloat16, "scalar")])
def test_rotated_rows_are_rounded_once(dtype: torch.dtype, fp8: str, interleaved: bool) -> None:
    """Against exact rotation. u is 2^-8 for bf16, 2^-11 for fp16, and with FP8 caches 2^-11, because kernels then
    multiply in fp16. Elements of q and k are normal, so a score changes by about u · scale · sqrt(D).
    """
    widths = {"head_dim": 160, "head_dim_v": 160, "rotary_dim": 112, "rotary_interleaved": interleaved}
    lengths = {"seqlens": (21, 0), "tokens": (4, 4), "new": (4, 4)}
    case = small_case(**widths, **lengths, fp8=fp8, group=4, rotary_fp32=True)
    call, exact = case.build(dtype=dtype), case.build(dtype=dtype)
    _, lse = cute_flash.attn_decode(*call.tensors, return_lse=True, **call.options)
    exact.options |= {name: exact.options[name].double() for name in ("k_new", "v_new")}
    caches = [x if fp8 else x.double() for x in (call.k_cache, call.v_cache)]
    _, _, keys, _ = oracle(exact.q, *caches, **exact.options)
    assert torch.equal(bits(keys.to(call.k_cache.dtype)), bits(call.k_cache)), "new keys are correctly rounded"
    # Attention over the rows that the call wrote.
    exact.options |= {"k_new": exact.options["k_new"][:, :0], "v_new": exact.options["v_new"][:, :0]}
    exact.options["cache_seqlens"] = exact.options["cache_seqlens"] + 4
    _, expected, *_ = oracle(exact.q.double(), *caches, **exact.options)
    unit = 2.0**-8 if (dtype, fp8) == (torch.bfloat16, "") else 2.0**-11
    assert (lse.double() - expected).abs().max() <= 1.5 * unit


@pytest.mark.parametrize("left", [2, 5, 9])
def test_a_window_inside_chunks(left: int) -> None:
    """The first row that a query sees is not the first of its chunk."""
    tokens = {"tokens": (7, 7), "window": (left, None), "chunk": 8, "leftpad": (3, 0)}
    for rows in range(14, 22):
        check(small_case(seqlens=(rows, rows + 1), seed=rows, **tokens), torch.float64)


def test_queries_without_a_mask_are_rotated_by_the_old_length() -> None:
    case = small_case(tokens=(2, 2), new=(2, 2), rotary_dim=16, causal=False)
    call = case.build(dtype=torch.float64)
    call.q[:, 1] = call.q[:, 0]
    out = cute_flash.attn_decode(*call.tensors, **call.options)
    torch.testing.assert_close(out[:, 0], out[:, 1])


def test_rows_without_keys() -> None:
    call = small_case(seqlens=(0, 2), tokens=(4, 4)).build()
    out, lse = cute_flash.attn_decode(*call.tensors, return_lse=True, **call.options)
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert (out[1, :2] == 0).all() and (lse[1, :, :2] == -torch.inf).all()
    assert lse[1, :, 2:].isfinite().all()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse = cute_flash.attn_decode(*call.tensors, sinks=sinks, return_lse=True, **call.options)
    assert (out[0] == 0).all() and torch.equal(lse[0], sinks[:, None].expand(4, 4))


def test_fp8_saturates_and_keeps_nan() -> None:
    call = small_case(new=(1, 1), fp8="scalar").build()
    call.options["k_new"][0, 0, 0, :4] = torch.tensor([1e6, -1e6, torch.nan, torch.inf])
    cute_flash.attn_decode(*call.tensors, **call.options)
    stored = call.k_cache[0, 21, 0].float()
    assert stored[:2].tolist() == [448, -448] and stored[2].isnan() and stored[3] == 448


def test_attention_reads_what_is_stored() -> None:
    """A key that FP8 rounds counts with its rounded value."""
    call = small_case(seqlens=(0, 0), new=(1, 1), fp8="number").build(dtype=torch.float64)
    out = cute_flash.attn_decode(*call.tensors, **call.options)
    expected = call.v_cache[:2, :1].double() * call.options["v_scale"]
    torch.testing.assert_close(out, expected.repeat_interleave(2, dim=2), rtol=1e-6, atol=0)
    assert not torch.equal(expected, call.options["v_new"])


# ---- one cache for keys and values


def test_values_are_columns_of_the_keys() -> None:
    call = small_case(is_latent=True, head_dim=24, page_size=8).build(dtype=torch.float64)
    del call.options["value_dim"]
    expected = cute_flash.attn_decode(call.q, call.k_cache, call.k_cache[..., :16].clone(), **call.options)
    assert torch.equal(cute_flash.attn_decode(call.q, call.k_cache, value_dim=16, **call.options), expected)


def test_a_head_dim_before_absorption() -> None:
    """A layer with keys (compressed rows times W_k, rotated part) equals one that multiplies queries with W_k."""
    heads, nope, turned, width, dim_v = 3, 16, 8, 24, 12
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q_nope, q_turned, rows = normal(2, 1, heads, nope), normal(2, 1, heads, turned), normal(2, 9, width + turned)
    w_k, w_v, scale = normal(heads, width, nope), normal(heads, width, dim_v), (nope + turned) ** -0.5
    latent, k_turned = rows.split((width, turned), dim=-1)
    k = torch.cat((torch.einsum("bsw,hwd->bhsd", latent, w_k), k_turned[:, None].expand(-1, heads, -1, -1)), dim=-1)
    v = torch.einsum("bsw,hwd->bhsd", latent, w_v)
    q = torch.cat((q_nope, q_turned), dim=-1).transpose(1, 2)
    expected = cute_flash.attn(q, k, v, causal=True).transpose(1, 2)
    absorbed = torch.cat((torch.einsum("bthd,hwd->bthw", q_nope, w_k), q_turned), dim=-1)
    out = cute_flash.attn_decode(absorbed, rows[:, :, None], value_dim=width, cache_seqlens=9, scale=scale)
    torch.testing.assert_close(torch.einsum("bthw,hwd->bthd", out, w_v), expected)


TABLES = {
    "plain": {},
    "pages": {"page_size": 3},
    "heads": {"heads_kv": 2, "softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 4), "causal": False},
    "fp8": {"fp8": True, "k_scale": torch.tensor(0.5)},
    "fp8 heads": {"fp8": True, "heads_kv": 2, "k_scale": torch.tensor([0.5, 2.0])},
    "splits": {"num_splits": 3},
    "ds_mla": {"fp8": "ds_mla", "page_size": 3},
}


@pytest.mark.parametrize("options", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_page_table_for_each_query(seed: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    call = table_call(seed, dtype, **options)
    expected, expected_lse, *_ = oracle(*call.tensors, **call.options)
    out, lse = cute_flash.attn_decode(*call.tensors, return_lse=True, **call.options)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), expected_lse, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if "sinks" not in options:
        assert (lse[0, :, 0] == -torch.inf).all() and (lse[1, :, 0] == -torch.inf).all()
    assert (out[0, 0] == 0).all() and (out[1, 0] == 0).all()


def test_ways_to_store_a_call_with_tables() -> None:
    call = table_call(0, torch.float64, page_size=3, heads_kv=2)
    expected = cute_flash.attn_decode(*call.tensors, **call.options)
    wide = torch.full((*expected.shape[:-1], 40), torch.nan, dtype=torch.float64)
    heads_first = call.k_cache.transpose(1, 2).contiguous()
    out = cute_flash.attn_decode(call.q, heads_first, kv_layout="hnd", out=wide[..., :32], **call.options)
    assert torch.equal(out, expected) and wide[..., 32:].isnan().all()
    table = call.options["page_table"]
    call.options["page_table"] = table.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(cute_flash.attn_decode(*call.tensors, **call.options), expected)
    call.options["page_table"] = table[:, :, :0]
    call.options["cache_seqlens"] = 0
    assert not cute_flash.attn_decode(*call.tensors, **call.options).any()


def test_a_table_of_all_rows_is_the_cache() -> None:
    call = small_case(is_latent=True, seqlens=(21, 21), tokens=(2, 2), causal=False).build(dtype=torch.float64)
    expected = cute_flash.attn_decode(*call.tensors, **call.options)
    rows = call.k_cache.flatten(0, 1)[:, None]  # pages of one row
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0))
    table = order + torch.arange(2)[:, None, None] * call.k_cache.shape[1]
    options = call.options | {"page_table": table.expand(2, 2, 21).int(), "cache_seqlens": 21}
    torch.testing.assert_close(cute_flash.attn_decode(call.q, rows, None, **options), expected)


def test_num_splits_does_not_matter() -> None:
    call = small_case().build()
    outs = [cute_flash.attn_decode(*call.tensors, **call.options, num_splits=n) for n in (None, 1, 5)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_one_length_for_all_sequences() -> None:
    call = small_case(seqlens=(9, 9)).build()
    expected = cute_flash.attn_decode(*call.tensors, **call.options)
    call.options["cache_seqlens"] = 9
    assert torch.equal(cute_flash.attn_decode(*call.tensors, **call.options), expected)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)
    ragged = cute_flash.attn_decode(call.q[:, 0], *call.tensors[1:], **call.options, cu_seqlens_q=cu)
    assert torch.equal(ragged, expected[:, 0])


def test_queries_with_strided_elements() -> None:
    call = small_case(new=(1, 1)).build()
    expected = cute_flash.attn_decode(*call.tensors, **call.options)
    again = small_case(new=(1, 1)).build()
    for name in ("k_new", "v_new"):
        again.options[name] = again.options[name].mT.contiguous().mT
    found = cute_flash.attn_decode(again.q.mT.contiguous().mT, *again.tensors[1:], **again.options)
    assert torch.equal(found, expected)


def test_an_append_without_queries() -> None:
    """The rows are those of a call with queries."""
    case = small_case(tokens=(3, 3), new=(3, 3), rotary_dim=16, page_size=8, has_batch_idx=True)
    call, expected = case.build(), case.build()
    cute_flash.attn_decode(*expected.tensors, **expected.options)
    out, lse = cute_flash.attn_decode(call.q[:, :0], *call.tensors[1:], return_lse=True, **call.options)
    assert out.shape == (2, 0, 4, 16) and lse.shape == (2, 4, 0)
    assert torch.equal(bits(call.k_cache), bits(expected.k_cache))
    assert torch.equal(bits(call.v_cache), bits(expected.v_cache))


@pytest.mark.parametrize("shape", [(0, 1, 4), (2, 0, 4)], ids=str)
def test_empty_calls(shape: tuple[int, int, int]) -> None:
    batch, tokens, heads = shape
    q, cache = torch.randn(batch, tokens, heads, 16), torch.randn(2, 8, 2, 16)
    lengths = torch.full((batch,), 3, dtype=torch.int32)
    out, lse = cute_flash.attn_decode(q, cache, cache, cache_seqlens=lengths, return_lse=True)
    assert out.shape == (*shape, 16) and lse.shape == (batch, heads, tokens)


@pytest.mark.slow
def test_the_reference_in_fp64_is_an_oracle() -> None:
    """`forward(dtype=torch.float64)` computes 16-bit inputs exactly: the oracle of the GPU tests."""
    for case in CASES[:20]:
        call = case.build(dtype=torch.bfloat16)
        expected, expected_lse, *_ = oracle(*call.tensors, **call.options)
        out, lse = reference.decode.forward(*bind(*call.tensors, **call.options), dtype=torch.float64)
        assert out.dtype == lse.dtype == torch.float64
        # An element of a rotated query or key may be rounded up instead of down.
        tolerance = 2e-2 if case.rotary_dim else 1e-6
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)
