"""The host path of `attn_decode` on a fake GPU: one kernel, its arguments by name, signatures, errors, workspaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_flash
from cute_flash import UnsupportedError
from cute_flash.decode import bind
from cute_flash.planning.decode import MAX_SPLITS, DecodeStatic, SplitSizes, plan_splits
from cute_flash.runtime import decode
from cute_flash.runtime.gpu import bound, use_gpu
from cute_flash.runtime.operands import MAX_WINDOW
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.family import use_kernels
from tests.decode.cases import DecodeCall, DecodeCase, latent_cases, random_cases, small_case, table_call, wide_cases
from tests.fakes.cuda import claiming_cuda
from tests.fakes.gpu import FakeGpu
from tests.fakes.recording import RecordingGpu
from tests.gpu import decode_cases


def run(call: DecodeCall, **options: Any) -> tuple[Tensor, Tensor]:
    return decode.run(*bind(*call.tensors, **call.options | options))


def build(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> DecodeCall:
    return small_case(**changes).build("cpu", dtype)


# ---- arguments


def supported(case: DecodeCase) -> DecodeCase:
    is_aligned = case.head_dim % 16 == case.head_dim_v % 16 == 0
    return case if is_aligned or not case.fp8 else replace(case, head_dim=64, head_dim_v=64)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_gets_the_arguments_that_it_is_compiled_for(gpu: FakeGpu, seed: int) -> None:
    for i, drawn in enumerate((*random_cases(seed, 40), *latent_cases(seed, 20), *wide_cases(seed, 8))):
        case = supported(drawn)
        call = case.build("cpu", (torch.bfloat16, torch.float16)[i % 2])
        before = len(gpu.launches)
        out, lse = run(call)
        tokens = call.q.shape[0] if case.is_ragged else call.q.shape[1]
        assert out.shape == (*call.q.shape[:-1], case.head_dim_v) and out.dtype == call.q.dtype
        heads = call.q.shape[-2]
        assert lse.shape == ((heads, tokens) if case.is_ragged else (case.batch, heads, tokens))
        if call.q.numel() == 0 or call.k_cache.numel() == 0 or call.options.get("page_table", call.q).numel() == 0:
            assert len(gpu.launches) == before
            continue
        launched, key = gpu.launches[-1], gpu.keys[-1]
        assert (
            len(gpu.launches) == before + 1
            and key.kernel.removesuffix("_sm90") == "decode" + "_latent" * case.is_latent
        )
        # Caches are never copied.
        assert launched["k_cache"].data_ptr() == call.k_cache.data_ptr()
        assert case.is_latent or launched["v_cache"].data_ptr() == call.v_cache.data_ptr()
        assert "out" not in call.options or out is call.options["out"]
        assert launched["num_splits"] == (case.num_splits or 0)
        assert launched["arrivals"].numel() >= 1 and not launched["arrivals"].any()
        assert launched["scale"] > 0


@pytest.mark.parametrize(
    ("heads", "tokens", "tile_m", "head_groups"),
    [
        (1, 1, 16, 1),
        (16, 1, 16, 1),
        (16, 2, 32, 1),
        (20, 1, 32, 1),
        (64, 1, 32, 2),
        (128, 1, 32, 4),
        (127, 1, 32, 1),
        (128, 2, 32, 8),
        (16, 8, 32, 4),
    ],
)
def test_query_heads_of_a_latent_cache_are_divided_into_groups(
    heads: int, tokens: int, tile_m: int, head_groups: int
) -> None:
    """A group has as many heads as fit a tile with their tokens, and counts as a K/V head."""
    call = build(is_latent=True, heads_kv=1, group=heads, tokens=(tokens,) * 2, head_dim=576, head_dim_v=512)
    with use_gpu(FakeGpu("sm_80")) as ampere:
        run(call)
        launched, key = ampere.launches[-1], ampere.keys[-1]  # type: ignore[attr-defined]
    assert (key.tile.tile_m, launched["head_groups"]) == (tile_m, head_groups)
    assert launched["num_ctas"] % launched["heads_at_once"] == 0
    assert launched["heads_at_once"] in (1, head_groups)


@pytest.mark.parametrize(
    ("heads", "tokens", "head_groups"),
    [(17, 1, 1), (20, 1, 1), (64, 1, 1), (128, 1, 2), (127, 1, 1), (128, 2, 4), (64, 8, 8), (20, 4, 2)],
)
def test_many_rows_of_a_latent_cache_are_computed_by_wgmma(
    sm_90: FakeGpu, heads: int, tokens: int, head_groups: int
) -> None:
    call = build(is_latent=True, heads_kv=1, group=heads, tokens=(tokens,) * 2, head_dim=576, head_dim_v=512)
    run(call)
    launched, key = sm_90.launches[-1], sm_90.keys[-1]
    assert (key.kernel, key.target) == ("decode_latent_sm90", "sm_90a")
    assert (key.tile.tile_m, launched["head_groups"]) == (64, head_groups)
    assert key.tile.ctas_per_sm(ARCHS["sm_90"]) == 1
    with use_kernels("sm80"):
        run(call)
    assert sm_90.keys[-1].kernel == "decode_latent"


@pytest.mark.parametrize(("head_dim", "head_dim_v", "width"), [(512, 512, 512), (320, 264, 384), (64, 512, 512)])
@pytest.mark.parametrize("fp8", ["", "plain"])
def test_wide_heads_are_divided_among_warps(
    sm_90: FakeGpu, head_dim: int, head_dim_v: int, width: int, fp8: str
) -> None:
    head_dim_v = 272 if fp8 and head_dim_v == 264 else head_dim_v
    out, _ = run(build(head_dim=head_dim, head_dim_v=head_dim_v, fp8=fp8, new=(1, 1)))
    assert out.shape[-1] == head_dim_v and sm_90.launches[-1]["partial_out"].shape[-1] == width
    tile = sm_90.keys[-1].tile
    assert (tile.head_dim, tile.column_warps) == (width, width // 128)


def test_few_queries_of_wide_heads_split_keys(sm_90: FakeGpu) -> None:
    q, k, v = (torch.randn(1, heads, rows, 512).bfloat16() for heads, rows in ((8, 4), (2, 1024), (2, 1024)))
    with claiming_cuda():
        cute_flash.attn(q, k, v, causal=True)
    assert [key.kernel for key in sm_90.keys] == ["fwd_split_kv"]


def test_few_rows_of_a_latent_cache_are_computed_by_mma_sync(sm_90: FakeGpu) -> None:
    run(build(is_latent=True, heads_kv=1, group=16, tokens=(1, 1), head_dim=576, head_dim_v=512))
    assert sm_90.keys[-1].kernel == "decode_latent"


def test_tables_of_queries_are_sequences(sm_90: FakeGpu) -> None:
    call = table_call(0, torch.bfloat16)
    run(call)
    launched, options = sm_90.launches[-1], call.options
    assert torch.equal(launched["page_table"], options["page_table"].flatten(0, 1))
    assert torch.equal(launched["cache_seqlens"], options["cache_seqlens"].flatten())
    assert launched["q"].data_ptr() == call.q.data_ptr()
    assert sm_90.keys[-1].static.has_query_tables and not sm_90.keys[-1].static.has_right


def test_the_number_of_ctas(sm_90: FakeGpu) -> None:
    run(build())
    assert sm_90.launches[-1]["num_ctas"] % ARCHS["sm_90"].num_sms == 0
    # 2 sequences, 2 K/V heads, 7 parts.
    run(build(num_splits=7))
    assert sm_90.launches[-1]["num_ctas"] == 2 * 2 * 7


def test_values_of_scalars(sm_90: FakeGpu) -> None:
    call = build(window=(5, 3), causal=False, softcap=2.5, scale=0.25)
    run(call)
    launched = sm_90.launches[-1]
    assert (launched["window_left"], launched["window_right"]) == (5, 3)
    assert (launched["softcap"], launched["scale"]) == (2.5, 0.25)
    run(call, window=(1 << 40, 0))
    assert sm_90.launches[-1]["window_left"] == MAX_WINDOW
    # A kernel with a chunk reads both bounds.
    run(call, attention_chunk=16, window=(None, 3))
    launched = sm_90.launches[-1]
    assert (launched["window_left"], launched["window_right"], launched["attention_chunk"]) == (MAX_WINDOW, 3, 16)
    # A negative scale is passed as a positive scale of -q.
    run(call, scale=-0.5)
    assert sm_90.launches[-1]["scale"] == 0.5
    assert torch.equal(sm_90.launches[-1]["q"], -call.q)


def test_scales_and_slopes_are_of_every_head(sm_90: FakeGpu) -> None:
    run(build(fp8="number", alibi="heads"))
    launched = sm_90.launches[-1]
    assert launched["k_scale"].tolist() == pytest.approx([0.02, 0.02])
    assert launched["v_scale"].shape == (2,) and launched["alibi_slopes"].shape == (2, 4)
    run(build(fp8="plain"))
    assert sm_90.launches[-1]["k_scale"].tolist() == [1.0, 1.0]


def test_rows_of_the_page_table(sm_90: FakeGpu) -> None:
    """The host selects the rows of `cache_batch_idx`, with invalid indices clamped, as the kernel does for caches."""
    call = build(page_size=8, has_batch_idx=True)
    table, rows = call.options["page_table"], call.options["cache_batch_idx"]
    for indices, expected in ((rows, table[rows]), (torch.tensor([-1, 99]).int(), table[[0, -1]])):
        run(call, cache_batch_idx=indices)
        assert torch.equal(sm_90.launches[-1]["page_table"], expected)
        assert sm_90.launches[-1]["cache_batch_idx"] is None


def test_rotary_tables_of_16_bits_stay(sm_90: FakeGpu) -> None:
    for rotary_fp32, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        run(build(new=(1, 1), rotary_dim=16, rotary_fp32=rotary_fp32))
        assert sm_90.launches[-1]["rotary_cos"].dtype == dtype
        assert sm_90.keys[-1].static.rotary_dtype == str(dtype).removeprefix("torch.")


def test_unaligned_queries_are_copied_and_outputs_copied_back(sm_90: FakeGpu) -> None:
    call = build()
    wide = torch.zeros(*call.q.shape[:-1], 17, dtype=call.q.dtype)
    q, out = wide[..., 1:], torch.zeros_like(wide)[..., 1:]
    q.copy_(call.q)
    found, _ = run(replace_q(call, q), out=out)
    launched = sm_90.launches[-1]
    assert found is out and launched["out"].data_ptr() != out.data_ptr()
    assert torch.equal(launched["q"], call.q)


def replace_q(call: DecodeCall, q: Tensor) -> DecodeCall:
    return DecodeCall(q, call.k_cache, call.v_cache, call.options)


# ---- signatures


def test_a_signature_is_bound_once(sm_90: FakeGpu) -> None:
    call = build(page_size=8)
    for length in (3, 7, 0):
        call.options["cache_seqlens"].fill_(length)
        run(call)
    assert len(sm_90.keys) == 1 and len(sm_90.launches) == 3
    for changes in ({"softcap": 3.0}, {"num_splits": 2}, {"window": (3, 0)}):
        run(call, **changes)
    assert len(sm_90.keys) == 4 and len(bound) == 4
    with use_kernels("sm80"):
        run(call)
    assert len(sm_90.keys) == 5
    # Another cache size is another signature, but has the same kernel.
    run(build(page_size=8, seqlens=(40, 5)))
    assert len(sm_90.keys) == 6 and sm_90.keys[-1] == sm_90.keys[0]


def test_the_family_sm80_leaves_out_what_ampere_does_not_have() -> None:
    call = build(fp8="plain")
    found = {}
    families = {"sm_90": ("", "sm90", "sm80"), "sm_89": ("",), "sm_80": ("",), "sm_120": ("",)}
    for arch, family in [(arch, family) for arch, names in families.items() for family in names]:
        with use_gpu(FakeGpu(arch)) as gpu, use_kernels(family):
            run(call)
        static = gpu.keys[0].static  # type: ignore[attr-defined]
        found[arch, family] = (static.overlaps_previous, static.has_fp8_cvt)
    assert found == {
        ("sm_90", ""): (True, True),
        ("sm_90", "sm90"): (True, True),
        ("sm_90", "sm80"): (False, False),
        ("sm_89", ""): (False, True),
        ("sm_80", ""): (False, False),
        ("sm_120", ""): (True, True),
    }
    with use_gpu(FakeGpu("sm_90")) as gpu:
        run(build())
    assert not gpu.keys[0].static.has_fp8_cvt, "a 16-bit cache is the same kernel on all"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("batch", "overlaps"), [(1, True), (6, True), (7, False), (64, False)])
def test_calls_with_many_query_tiles_do_not_start_early(batch: int, overlaps: bool) -> None:
    """Eight query tiles per sequence on 132 SMs."""
    static = DecodeStatic("bfloat16", 128, overlaps_previous=True)
    plan = plan_splits("decode", static, SplitSizes(batch, 1, 32, 8, 4096), ARCHS["sm_90"])
    assert plan.num_query_tiles == 8 * batch
    assert plan.key.static == replace(static, overlaps_previous=overlaps)


def test_calls_bypass_the_dispatcher(sm_90: FakeGpu) -> None:
    call = build()
    with claiming_cuda():
        cute_flash.attn_decode(*call.tensors, **call.options)
    assert len(sm_90.launches) == 1


def test_keys_of_a_dry_run_are_those_of_the_calls() -> None:
    """The kernels that are compiled before the GPU tests do not depend on lengths."""
    arch = ARCHS["sm_90"]
    cases = [*decode_cases.random_group("sm90", 0), *decode_cases.chunk_cases(17, 24), *decode_cases.SPLIT]
    for case, dtype in cases:
        with use_gpu(FakeGpu("sm_90")) as gpu:
            run(case.build("cpu", dtype))
        assert gpu.keys == decode_cases.decode_keys(case, dtype, "", arch)  # type: ignore[attr-defined]


# ---- attn with few queries


def test_attn_with_few_queries_splits_the_keys(gpu: FakeGpu) -> None:
    q, k, v = (torch.randn(2, heads, rows, 64).bfloat16() for heads, rows in ((8, 3), (2, 2000), (2, 2000)))
    for layout, tensors in (("bhsd", (q, k, v)), ("bshd", [x.transpose(1, 2).contiguous() for x in (q, k, v)])):
        with claiming_cuda():
            out = cute_flash.attn(*tensors, layout=layout, causal=True, softcap=3.0)
        launched = gpu.launches[-1]
        assert out.shape == tensors[0].shape
        assert launched["q"].shape == (2, 8, 3, 64) and launched["k"].shape == (2, 2, 2000, 64)
        assert launched["k"].data_ptr() == tensors[1].data_ptr()
        assert launched["window_right"] == 0 and launched["softcap"] == 3.0
    assert {key.kernel for key in gpu.keys} == {"fwd_split_kv"}


def test_batch_invariant_and_chosen_families_do_not_split() -> None:
    q, k, v = (torch.randn(1, 4, rows, 64).bfloat16() for rows in (1, 2000, 2000))
    calls: dict[str, dict[str, Any]] = {"batch_invariant": {"batch_invariant": True}, "out_dtype": {}, "family": {}}
    calls["out_dtype"] = {"out_dtype": torch.float32}
    for name, options in calls.items():
        gpu = RecordingGpu(ARCHS["sm_90"])
        with use_gpu(gpu), claiming_cuda(), use_kernels("sm90" if name == "family" else ""):
            cute_flash.attn(q, k, v, **options)
        assert [key.kernel for key in gpu.keys] == ["fwd_sm90"], name


# ---- errors


def test_caches_that_the_kernel_cannot_address(sm_90: FakeGpu) -> None:
    call = build()
    for name in ("k_cache", "v_cache"):
        cache = getattr(call, name)
        wide = torch.zeros(*cache.shape[:-1], cache.shape[-1] + 4, dtype=cache.dtype)
        for wrong in (wide[..., :-4], torch.zeros(cache.numel() + 1, dtype=cache.dtype)[1:].view(cache.shape)):
            tensors = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache, name: wrong}
            with pytest.raises(UnsupportedError, match=rf"{name} with strides .* multiples of 16 bytes"):
                run(DecodeCall(**tensors, options=call.options))
    assert not sm_90.launches


def test_addresses_are_checked_by_every_call(sm_90: FakeGpu) -> None:
    """Later calls of a signature may have tensors at other addresses."""
    call = build(new=(1, 1))
    run(call)
    moved = {name: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
             for name, x in (("k_cache", call.k_cache), ("k_new", call.options["k_new"]))}  # fmt: skip
    assert all(x.data_ptr() % ROW_ALIGN_BYTES for x in moved.values())
    run(DecodeCall(call.q, call.k_cache, call.v_cache, call.options | {"k_new": moved["k_new"]}))
    assert len(bound) == 1 and sm_90.launches[-1]["k_new"].data_ptr() % ROW_ALIGN_BYTES == 0
    with pytest.raises(UnsupportedError, match=r"k_cache with strides .* multiples of 16 bytes"):
        run(DecodeCall(call.q, moved["k_cache"], call.v_cache, call.options))
    assert len(bound) == 1 and len(sm_90.launches) == 2


def test_overlapping_caches(sm_90: FakeGpu) -> None:
    """Strides are checked when a signature is bound, and addresses by every call."""
    call = build(new=(1, 1))
    twice = DecodeCall(call.q, call.k_cache, call.k_cache, call.options)
    expanded = DecodeCall(call.q, call.k_cache[:1].expand_as(call.k_cache), call.v_cache, call.options)
    for wrong, message in ((twice, "a k_cache and a v_cache that overlap"), (expanded, "whose rows overlap")):
        with pytest.raises(ValueError, match=message):
            run(wrong)
    run(call)
    with pytest.raises(ValueError, match="a k_cache and a v_cache that overlap"):
        run(twice)
    assert len(bound) == len(sm_90.launches) == 1
    run(DecodeCall(call.q, call.k_cache, call.k_cache, build().options))


def test_fp8_needs_head_dims_of_16_bytes(sm_90: FakeGpu) -> None:
    for widths, name in (((24, 16), "k_cache"), ((16, 40), "v_cache")):
        with pytest.raises(UnsupportedError, match=f"{name} in FP8 with head dim .* use a multiple of 16"):
            run(build(fp8="plain", head_dim=widths[0], head_dim_v=widths[1]))


def test_num_splits_is_a_hint(sm_90: FakeGpu) -> None:
    """A number that is too large is reduced; 0 or less lets the kernel choose."""
    for num_splits, expected in ((3, 3), (MAX_SPLITS + 1, MAX_SPLITS), (1 << 40, MAX_SPLITS), (0, 0), (-1, 0)):
        run(build(), num_splits=num_splits)
        assert sm_90.launches[-1]["num_splits"] == expected
    # 400,000 query tiles of 16 x 64 elements: 2 parts are fewer than 2^30 elements.
    sizes = SplitSizes(50_000, 1, 32, 8, 4096)
    assert plan_splits("decode", DecodeStatic("bfloat16", 64), sizes, ARCHS["sm_90"], 100).num_splits == 2


def test_supports_answers_as_the_call_does(sm_90: FakeGpu) -> None:
    call = build()
    unaligned = torch.zeros(call.k_cache.numel() + 1, dtype=call.k_cache.dtype)[1:].view(call.k_cache.shape)
    fp8 = build(fp8="plain", head_dim=24, head_dim_v=16)
    calls = [
        ((call.q, call.k_cache, call.v_cache), call.options),
        ((call.q, call.k_cache, call.v_cache), call.options | {"softcap": 2e4}),
        ((call.q, unaligned, call.v_cache), call.options),
        ((fp8.q, fp8.k_cache, fp8.v_cache), fp8.options),
    ]
    with claiming_cuda():
        answers = [cute_flash.decode_supports(*tensors, **options) for tensors, options in calls]
    assert [bool(answer) for answer in answers] == [True, False, False, False]
    for answer, message in zip(answers[1:], ("softcap", "multiples of 16 bytes", "in FP8 with head dim"), strict=True):
        assert message in answer.reason
    assert not sm_90.launches and not sm_90.keys


def test_a_call_without_keys_or_queries_launches_nothing(sm_90: FakeGpu) -> None:
    call = build(has_sinks=True)
    empty = DecodeCall(call.q, call.k_cache[:, :0], call.v_cache[:, :0], call.options | {"cache_seqlens": 0})
    out, lse = run(empty)
    assert not out.any() and torch.equal(lse, call.options["sinks"][:, None].expand_as(lse).contiguous())
    no_tokens = DecodeCall(call.q[:, :0], call.k_cache, call.v_cache, call.options)
    assert run(no_tokens)[0].shape == (2, 0, 4, 16)
    assert not sm_90.launches


def test_an_append_without_queries(sm_90: FakeGpu) -> None:
    """The kernel appends while it computes query tiles, so it gets queries of zeros, which see only their own row."""
    call = build(new=(3, 3), page_size=8, softcap=2.0, has_sinks=True, alibi="heads", leftpad=(1, 2), rotary_dim=16)
    out, lse = run(DecodeCall(call.q[:, :0], call.k_cache, call.v_cache, call.options))
    assert out.shape == (2, 0, 4, 16) and lse.shape == (2, 4, 0)
    (launched,) = sm_90.launches
    assert launched["q"].shape == (2, 3, 2, 16) and not launched["q"].any()
    assert launched["k_new"] is call.options["k_new"] and launched["rotary_cos"] is call.options["rotary_cos"]
    assert (launched["window_left"], launched["window_right"]) == (0, 0)
    assert launched["softcap"] is launched["sinks"] is launched["leftpad"] is None
    # Nothing to append, and no room.
    for options in ({"k_new": call.options["k_new"][:, :0], "v_new": call.options["v_new"][:, :0]},
                    {"page_table": call.options["page_table"][:, :0]}):  # fmt: skip
        run(DecodeCall(call.q[:, :0], call.k_cache, call.v_cache, call.options | options))
    assert len(sm_90.launches) == 1


# ---- workspaces


def test_a_workspace_is_of_the_plan(sm_90: FakeGpu) -> None:
    run(build())
    run(build(seqlens=(30, 9), tokens=(2, 2)))
    workspaces = sm_90.workspaces
    assert len(workspaces) == 2 and workspaces[0] == workspaces[1], "lengths share a workspace"
    run(build(tokens=(16, 16)))
    assert workspaces[-1][0][1] == 2 * workspaces[0][0][1], "another tile"
    run(build(num_splits=3))
    assert len(workspaces) == 3, "with a fixed number of splits, a call has its own"
    assert sm_90.launches[-1]["partial_out"].shape[0] == 2 * 2 * 3, "a slot for each part"
