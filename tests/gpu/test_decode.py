"""`attn_decode` on a GPU, by every family, against the reference in fp64.

The reference does the roundings of the kernel: both append the same bits, and rotate queries to the same numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_flash
from cute_flash import reference
from cute_flash.decode import bind
from cute_flash.jit.kernels import cache_info
from cute_flash.reference import ds_mla
from tests.decode.cases import DecodeCall, DecodeCase
from tests.gpu import decode_cases
from tests.gpu.captured import Captured
from tests.gpu.decode_cases import APPENDING, BASE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]

DEVICE = "cuda"
# The unit in the last place of each dtype, relative to the value.
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def run(call: DecodeCall) -> tuple[Tensor, Tensor]:
    return cute_flash.attn_decode(*call.tensors, return_lse=True, **call.options)


def check(case: DecodeCase, dtype: torch.dtype, **options: Any) -> None:
    before, call = case.build(DEVICE, dtype), case.build(DEVICE, dtype)
    call.options |= options
    out, lse = run(call)
    assert "out" not in call.options or out is call.options["out"]
    assert_decoded(out, lse, call, before)


def assert_decoded(out: Tensor, lse: Tensor, call: DecodeCall, before: DecodeCall) -> None:
    """Compare results, and caches after a call, with the reference. `before` has the caches before the call."""
    q, keys, values, args = bind(*call.tensors, **call.options)
    _, expected_keys, expected_values, _ = bind(*before.tensors, **before.options)
    sequences = reference.decode.read_sequences(q, keys, args)
    reference.decode.append(expected_keys, expected_values, args, sequences)
    assert_appended("k_cache", keys, expected_keys)
    if values is not None:
        assert_appended("v_cache", values, expected_values)

    exact, exact_lse = reference.decode.attend(q, keys, values, args, sequences, torch.float64)
    # Σ p |v|, which bounds the error of rounded weights.
    latent = {} if args.value_dim is None else {"v_scale": args.k_scale}
    is_ds_mla = keys.dtype == torch.uint8
    numbers = ds_mla.loaded(keys, torch.float64) if is_ds_mla else keys
    magnitudes = (numbers[..., : args.value_dim] if values is None else values).to(torch.float64).abs()
    sizes, _ = reference.decode.attend(q, keys, magnitudes, args._replace(**latent), sequences, torch.float64)
    assert out.shape == exact.shape and out.dtype == q.dtype
    assert lse.shape == exact_lse.shape and lse.dtype == torch.float32
    empty = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), "lse: must be -inf exactly where a row sees no key"
    lse_error = (lse.double() - exact_lse).masked_fill(empty, 0.0).abs()
    allowed = 5e-5 + 1e-5 * exact_lse.masked_fill(empty, 0.0).abs()
    assert (lse_error <= allowed).all(), f"lse: error {lse_error.max():.2e}"
    assert (out[sizes == 0] == 0).all(), "rows that see no key must be exactly 0"
    # Kernels round the weights of `fp8_ds_mla` to bf16.
    error, ulp = (out.double() - exact).abs(), ULP[torch.bfloat16 if is_ds_mla else q.dtype]
    assert error.isfinite().all(), "out: not finite"
    assert (error <= ulp * sizes + 1e-5).all(), f"out: {(error / (sizes + 1e-30)).max():.2e} of Σ p |v|"
    assert not error.numel() or error.mean() <= ulp / 2 * sizes.mean() + 1e-6, "out: the mean error is too large"


def assert_appended(name: str, cache: Tensor, expected: Tensor) -> None:
    """Both caches have the same bits: NaN in unused rows, and the appended rows."""
    bits = {1: torch.uint8, 2: torch.int16}[cache.element_size()]
    differs = cache.contiguous().view(bits) != expected.contiguous().view(bits)
    found, wanted = (x.float()[differs].tolist()[:4] for x in (cache, expected))
    assert not differs.any(), f"{name}: {differs.sum()} wrong elements, such as {found} instead of {wanted}"


@pytest.mark.parametrize("group", range(decode_cases.GROUPS))
def test_random_calls(group: int, family: str) -> None:
    for case, dtype in decode_cases.random_group(family, group):
        try:
            check(case, dtype)
        except Exception as error:
            raise AssertionError(f"{case.id}: {error}") from error


@pytest.mark.parametrize("group", range(decode_cases.WIDE_GROUPS))
def test_random_calls_with_wide_heads(group: int, family: str) -> None:
    for case, dtype in decode_cases.wide_group(family, group):
        try:
            check(case, dtype)
        except Exception as error:
            raise AssertionError(f"{case.id}: {error}") from error


@pytest.mark.parametrize("fp8", ("", "heads"))
def test_long_sequences_with_wide_heads(fp8: str) -> None:
    check(*decode_cases.long_wide_case(fp8))


@pytest.mark.parametrize("page_size", decode_cases.PAGE_SIZES, ids=str)
@pytest.mark.parametrize("tokens", (1, 8))
def test_long_sequences(page_size: int | None, tokens: int) -> None:
    check(*decode_cases.long_case(page_size, tokens))


@pytest.mark.parametrize(("case", "dtype"), decode_cases.ROTARY, ids=lambda x: getattr(x, "id", str(x)))
def test_rotary(case: DecodeCase, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.parametrize("fp8", ("", "heads"))
def test_an_append_without_queries(fp8: str) -> None:
    check(replace(APPENDING, tokens=(0,) * 3, new=(5,) * 3, seqlens=(1000, 77, 0), fp8=fp8), torch.bfloat16)


@pytest.mark.parametrize("num_splits", (1, 2, 3, 5, 8, 16, 31, 32, 5000))
def test_forced_splits(num_splits: int) -> None:
    for case, dtype in decode_cases.SPLIT:
        check(case, dtype, num_splits=num_splits)


@pytest.mark.parametrize("tokens", decode_cases.CHUNKS)
@pytest.mark.parametrize("page_size", decode_cases.CHUNK_PAGES, ids=str)
def test_chunks_of_a_prefill(tokens: int, page_size: int | None) -> None:
    for case, dtype in decode_cases.chunk_cases(tokens, page_size):
        check(case, dtype)


@pytest.mark.parametrize("head_dim", decode_cases.HEAD_DIMS)
def test_head_dims(head_dim: int) -> None:
    for case, dtype in decode_cases.head_dim_cases(head_dim):
        check(case, dtype)


@pytest.mark.parametrize("case", decode_cases.LARGE_BATCHES, ids=lambda case: case.id)
def test_large_batches(case: DecodeCase) -> None:
    check(case, torch.bfloat16)


def test_pages_beyond_two_gigabytes() -> None:
    """The element offset of a page exceeds 31 bits."""
    num_pages, page_size, heads_kv, head_dim = 140_000, 16, 8, 128
    q = torch.randn(1, 1, 32, head_dim, device=DEVICE).bfloat16()
    shape = num_pages, page_size, heads_kv, head_dim
    caches = [torch.empty(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    pages = torch.tensor([num_pages - 1, 3, num_pages - 2, 131_072], device=DEVICE)
    for cache in caches:
        cache[pages] = torch.randn(4, page_size, heads_kv, head_dim, device=DEVICE).bfloat16()
    found = cute_flash.attn_decode(q, *caches, cache_seqlens=61, page_table=pages[None].int())
    rows = [cache[pages].flatten(0, 1)[None, :61] for cache in caches]
    expected = cute_flash.attn(q, *rows, layout="bshd")
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_same_input_same_bits() -> None:
    call = replace(BASE, seqlens=(5000, 300, 20_000)).build(DEVICE, torch.bfloat16)
    first = run(call)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(call), first, strict=True))


@pytest.mark.parametrize("tokens", (1, 4))
def test_every_division_of_the_keys_can_be_repeated(tokens: int) -> None:
    """A query tile is shared by one, two or more CTAs, with several rows to merge. Each call resets the counters."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    sizes = (2, tokens, 8, 128), (2, 2000, 1, 128), (2, 2000, 1, 128)
    q, k, v = (torch.randn(size, generator=generator, device=DEVICE).bfloat16() for size in sizes)
    lengths = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for length in (*range(8, 700, 24), *range(700, 2000, 200)):
        lengths.copy_(torch.tensor([length, 2000 - length]))
        first, second, third = (cute_flash.attn_decode(q, k, v, cache_seqlens=lengths) for _ in range(3))
        assert torch.equal(first, second) and torch.equal(first, third), f"length {length}"
        for b, num in enumerate((length, 2000 - length)):
            rows = [
                x.double().transpose(0, 1) for x in (q[b], k[b, :num].expand(-1, 8, -1), v[b, :num].expand(-1, 8, -1))
            ]
            scores = rows[0] @ rows[1].mT * 128**-0.5
            scores += torch.full_like(scores, -torch.inf).triu(num - tokens + 1)
            exact = (scores.softmax(-1) @ rows[2]).transpose(0, 1)
            error = (first[b].double() - exact).norm() / exact.norm()
            assert error < 5e-3, f"length {num}: relative error {error:.1e}"


def test_new_lengths_neither_wait_nor_compile() -> None:
    """100 lengths without a host sync; nothing is compiled after the first calls."""
    calls = [
        replace(APPENDING, seed=i, seqlens=(i * 31 % 997, i, 5 * i)).build(DEVICE, torch.bfloat16) for i in range(103)
    ]
    for call in calls[:3]:
        run(call)
    compiles = cache_info().compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls[3:]:
            run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache_info().compiles == compiles


@pytest.mark.parametrize("page_size", (None, 16), ids=str)
def test_a_graph_with_lengths_written_in_place(page_size: int | None) -> None:
    """Lengths, page tables, queries and new rows change between replays; the caches carry over."""
    largest = replace(APPENDING, seqlens=(2000, 2000, 2000), page_size=page_size)
    call = largest.build(DEVICE, torch.bfloat16)
    captured = Captured.of(lambda: run(call))
    for seed, lengths in enumerate(((2000, 2000, 2000), (0, 1, 1999), (17, 0, 0), (1024, 1023, 1025))):
        other = replace(largest, seed=seed).build(DEVICE, torch.bfloat16)
        call.q.copy_(other.q)
        for name in ("k_new", "v_new", *(["page_table"] if page_size else [])):
            call.options[name].copy_(other.options[name])
        call.k_cache.copy_(other.k_cache)
        call.v_cache.copy_(other.v_cache)
        call.options["cache_seqlens"].copy_(torch.tensor(lengths))
        other.options["cache_seqlens"].copy_(torch.tensor(lengths))
        assert_decoded(*captured.replay(), call, other)


def test_a_graph_of_a_generation() -> None:
    """One graph of a step, replayed: it appends, and advances the lengths itself."""
    case = replace(APPENDING, seqlens=(120, 35, 20))
    call, eager = (case.build(DEVICE, torch.bfloat16) for _ in range(2))

    def step() -> Tensor:
        out = run(call)[0]
        call.options["cache_seqlens"].add_(1)
        return out

    # Shorter than the caches that were built; the calls before the capture append, too.
    call.options["cache_seqlens"].copy_(torch.tensor([100, 15, 0]))
    captured = Captured.of(step)
    for x in (call, eager):
        x.options["cache_seqlens"].copy_(torch.tensor([100, 15, 0]))
    call.k_cache.copy_(eager.k_cache)
    call.v_cache.copy_(eager.v_cache)
    for _ in range(20):
        expected = run(eager)[0]
        eager.options["cache_seqlens"].add_(1)
        assert torch.equal(captured.replay(), expected)
    assert torch.equal(call.k_cache.view(torch.int16), eager.k_cache.view(torch.int16))


def test_checks_read_lengths_and_pages_before_the_launch() -> None:
    case = replace(APPENDING, page_size=16)
    expected, call = run(case.build(DEVICE, torch.bfloat16)), case.build(DEVICE, torch.bfloat16)
    with cute_flash.use_checks():
        assert all(map(torch.equal, run(call), expected))
        Captured.of(lambda: run(call))  # a captured call is not checked, because the host cannot wait
        before = call.k_cache.clone()
        lengths, table = call.options["cache_seqlens"], call.options["page_table"]
        lengths[1] = capacity = table.shape[1] * 16
        with pytest.raises(
            ValueError, match=rf"cache_seqlens\[1\]={capacity} and . new rows: the cache holds {capacity}"
        ):
            run(call)
        lengths[1], table[2, 0] = case.seqlens[1], len(call.k_cache)
        with pytest.raises(ValueError, match=rf"page_table\[2, 0\]={len(call.k_cache)}: there are {len(call.k_cache)}"):
            run(call)
    assert torch.equal(call.k_cache.view(torch.int16), before.view(torch.int16))


def test_compiled_equals_eager() -> None:
    eager, compiled = (APPENDING.build(DEVICE, torch.bfloat16) for _ in range(2))
    expected = run(eager)
    function = torch.compile(cute_flash.attn_decode, fullgraph=True)
    found = function(*compiled.tensors, return_lse=True, **compiled.options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(compiled.k_cache.view(torch.int16), eager.k_cache.view(torch.int16))


def test_what_has_no_kernel() -> None:
    call = BASE.build(DEVICE, torch.float32)
    with pytest.raises(cute_flash.UnsupportedError, match=r"q is torch\.float32 on cuda"):
        run(call)
    call = replace(BASE, head_dim=36, head_dim_v=36).build(DEVICE, torch.bfloat16)
    with pytest.raises(cute_flash.UnsupportedError, match="head_dim=36"):
        run(call)
    call = replace(BASE, new=(1, 1, 1)).build(DEVICE, torch.bfloat16)
    run(call)
    with pytest.raises(ValueError, match="a k_cache and a v_cache that overlap"):
        run(replace(call, v_cache=call.k_cache))
    for head_dims in ((40, 40), (64, 72)):
        widths = {"head_dim": head_dims[0], "head_dim_v": head_dims[1]}
        call = replace(BASE, fp8="scalar", **widths).build(DEVICE, torch.bfloat16)
        with pytest.raises(
            cute_flash.UnsupportedError, match=r"in FP8 with head dim \d+ on cuda: use a multiple of 16"
        ):
            run(call)
