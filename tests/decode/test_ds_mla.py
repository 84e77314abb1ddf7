"""Rows of `fp8_ds_mla` on the CPU: the bytes that an append writes, and the numbers that attention reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cute_flash
from cute_flash.decode import bind
from cute_flash.reference import decode, ds_mla
from tests.decode.cases import small_case
from tests.decode.ds_mla import packed, unpacked
from tests.decode.oracle import oracle

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALLEST = torch.finfo(torch.float32).tiny


def rows(dtype: torch.dtype) -> Tensor:
    """Rows with groups of all sizes that `dtype` has, of zeros and of ties, (200, 1, 576)."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 1, 576, generator=generator, dtype=torch.float64)
    lowest = -24 if dtype == torch.float16 else -140
    exponents = torch.randint(lowest, 15, (200, 1, 5), generator=generator).double()
    x = (x * (2.0**exponents).repeat_interleave(128, dim=-1)[..., :576]).clamp(-60000, 60000)
    x[0] = 0
    x[1, :, 128:256], x[2, :, 512:] = 0, 0
    # Quotients in the middle of two e4m3 numbers, because the scale is 1.
    x[3, :, :128] = torch.cat((torch.arange(-63, 64) * 2.0**-9 + 2.0**-10, torch.tensor([448.0])))
    x[4, :, :128] = torch.cat((torch.arange(17, 32, 2).repeat(16)[:127].double(), torch.tensor([-448.0])))
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_bytes(dtype: torch.dtype) -> None:
    assert torch.equal(ds_mla.stored(rows(dtype)), packed(rows(dtype)))


def test_rows_of_zeros() -> None:
    """The scale of zeros is the smallest normal number, as in vLLM."""
    stored = ds_mla.stored(torch.zeros(1, 1, 576))
    assert (stored[..., 512:528].view(torch.float32) == SMALLEST).all()
    assert not stored[..., :512].any() and not stored[..., 528:].any()
    assert not ds_mla.loaded(stored, torch.float64).any()


def test_nan_and_infinity() -> None:
    """The maximum skips NaN. An infinite scale makes finite columns 0, and infinite ones NaN."""
    x = torch.full((1, 576), 2.0)
    x[0, 5], x[0, 200], x[0, 256:384] = torch.nan, torch.inf, torch.nan
    stored = ds_mla.stored(x)
    scales = stored[0, 512:528].view(torch.float32).tolist()
    last = 2 / torch.tensor(448.0).item()
    assert scales == pytest.approx([last, torch.inf, SMALLEST, last])
    numbers = stored[0, :512].view(torch.float8_e4m3fn).float()
    assert numbers.isnan().nonzero().flatten().tolist() == [5, 200, *range(256, 384)]
    assert (numbers[:128].nan_to_num(448) == 448).all() and (numbers[128:256].nan_to_num(0) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_of_a_column(dtype: torch.dtype) -> None:
    x = rows(dtype)
    loaded = ds_mla.loaded(ds_mla.stored(x), torch.float64)
    assert torch.equal(loaded, unpacked(packed(x)))
    exact = x.double()
    groups, found = (y[..., :512].unflatten(-1, (4, 128)) for y in (exact, loaded))
    scales = (groups.abs().amax(dim=-1, keepdim=True) / 448).clamp(min=SMALLEST)
    # Half of the spacing of e4m3: of normal numbers, and of subnormal ones.
    assert ((found - groups).abs() <= groups.abs() * (2.0**-4 + 1e-6) + scales * (2.0**-10 + 1e-6)).all()
    assert torch.equal(loaded[..., 512:], x[..., 512:].bfloat16().double())


@pytest.mark.parametrize("page_size", [None, 3], ids=str)
def test_an_append_and_attention_over_its_rows(page_size: int | None) -> None:
    widths = {"head_dim": 576, "head_dim_v": 512, "is_latent": True, "fp8": "ds_mla", "page_size": page_size}
    case = small_case(seqlens=(0, 4), tokens=(3, 3), new=(3, 3), **widths)
    call = case.build(dtype=torch.bfloat16)
    out = cute_flash.attn_decode(*call.tensors, **call.options)
    new = packed(call.options["k_new"])
    if page_size is None:
        written = torch.stack((call.k_cache[0, :3], call.k_cache[1, 4:7]))
    else:
        table = call.options["page_table"]
        written = torch.stack((call.k_cache[table[0, 0]], call.k_cache[table[1, 1:3]].flatten(0, 1)[1:4]))
    assert torch.equal(written, new)
    # The first query of the first sequence sees one row.
    expected = unpacked(new[0, 0])[:, :512].bfloat16().repeat_interleave(2, dim=0)
    assert torch.equal(out[0, 0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_queries(dtype: torch.dtype) -> None:
    """fp16 rounds small latent columns of a bf16 query, and bf16 the rotary columns of an fp16 query."""
    case = small_case(head_dim=576, head_dim_v=512, is_latent=True, fp8="ds_mla")
    call = case.build(dtype=dtype)
    if dtype == torch.bfloat16:
        call.q.mul_(2.0**-20)
        call.options["scale"] *= 2.0**20
    expected, expected_lse, *_ = oracle(*call.tensors, **call.options)
    out, lse = decode.forward(*bind(*call.tensors, **call.options), dtype=torch.float64)
    torch.testing.assert_close((out, lse), (expected, expected_lse), rtol=1e-9, atol=1e-9)


def test_a_layer_in_bf16_is_near() -> None:
    """The format changes a result as much as rounding to e4m3 with the largest magnitude of 128 columns."""
    generator = torch.Generator().manual_seed(0)
    q, cache = (torch.randn(2, n, 4 // n or 1, 576, generator=generator).bfloat16() for n in (1, 50))
    cache = cache[:, :, :1]
    options = {"value_dim": 512, "cache_seqlens": 50, "scale": 192**-0.5}
    expected = cute_flash.attn_decode(q, cache, **options)
    out = cute_flash.attn_decode(q, ds_mla.stored(cache), **options)
    error = (out.float() - expected.float()).pow(2).mean().sqrt() / expected.float().pow(2).mean().sqrt()
    assert error < 0.06


def test_a_cache_of_a_wider_tensor() -> None:
    case = small_case(head_dim=576, head_dim_v=512, is_latent=True, fp8="ds_mla", storage="padded", kv_layout="hnd")
    call = case.build(dtype=torch.float64)
    expected = cute_flash.attn_decode(*call.tensors, **call.options)
    found = cute_flash.attn_decode(call.q, call.k_cache.contiguous(), **call.options)
    assert torch.equal(found, expected)
