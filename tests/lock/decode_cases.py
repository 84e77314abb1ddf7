"""The decode kernels that the cubin lock covers. Their names begin with "decode/"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cute_flash import reference
from cute_flash.decode import bind
from cute_flash.planning.plan import CompileKey
from cute_flash.runtime import decode
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from cute_flash.spec.family import use_kernels
from tests.fakes.recording import RecordingGpu, forward_keys

BANDS = {"full": Band(), "causal": Band(None, 0), "window": Band(100, 0), "chunk": Band(None, 0, 3000)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEADS, HEADS_KV, LENGTH = 8, 2, 4096
# Sequences of a call, and of one with "many_sequences".
BATCH, MANY = 2, 100
# Names in `DecodeCase.features`. "attn" and "attn_varlen": calls of these functions with few queries, which split keys.
FEATURES = (
    "page16", "page1", "fp8", "append", "rotary_halves", "rotary_pairs", "ragged", "leftpad", "batch_idx", "softcap",
    "alibi", "sinks", "rows32", "many_sequences", "attn", "attn_varlen", "tables", "ds_mla", "group128",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """The kernel of one call of `attn_decode`, or of `attn` or `attn_varlen` with few queries."""

    family: str
    arch: str
    head_dim: int
    head_dim_v: int | None = None
    dtype: str = "bf16"
    mask: str = "causal"
    features: tuple[str, ...] = ()
    direction: str = "decode"
    value_dim: int | None = None  # of a latent cache

    @property
    def name(self) -> str:
        width_v = "" if self.head_dim_v is None else f"v{self.head_dim_v}"
        widths = f"d{self.head_dim}{width_v}" + ("" if self.value_dim is None else f"latent{self.value_dim}")
        what = "+".join(self.features) or "plain"
        return "/".join((self.direction, self.family, self.arch, widths, self.dtype, self.mask, what))


def case(place: tuple[str, str], head_dim: int, *features: str, **fields: Any) -> DecodeCase:
    return DecodeCase(family=place[0], arch=place[1], head_dim=head_dim, features=features, **fields)


def decode_cases() -> Iterator[DecodeCase]:
    """Every feature, and every tile, on Ampere and Hopper."""
    score = ("softcap", "alibi", "sinks")
    for place in (("sm90", "sm_90"), ("sm80", "sm_80")):
        yield from (case(place, head_dim) for head_dim in (64, 128, 256))
        yield case(place, 128, "page16")
        yield case(place, 128, "page1")
        # sm_80 has no instruction that converts FP8 to fp16.
        yield case(place, 128, "page16", "fp8")
        yield case(place, 128, "page16", "append", "rotary_halves")
        yield case(place, 128, "append", "rotary_pairs", "batch_idx", dtype="fp16")
        yield case(place, 128, "ragged", "append", "page16")
        yield case(place, 64, "leftpad", head_dim_v=128, mask="window")
        yield case(place, 128, *score, mask="full")
        yield case(place, 128, "rows32")
        yield case(place, 128, "rows32", "fp8", *score, mask="window")
        yield case(place, 128, "attn")
        yield case(place, 128, "page16", "append", "rotary_halves", mask="chunk")
    yield case(("sm90", "sm_90"), 128, "attn_varlen")
    yield case(("sm90", "sm_90"), 64, "leftpad", mask="chunk")
    yield case(("sm80", "sm_80"), 128, "attn", mask="chunk")
    yield case(("sm90", "sm_90"), 128, "many_sequences")
    yield case(("sm90", "sm_90"), 128, "many_sequences", "page16", "append", "rotary_halves")
    # The sm80 kernels do not use this instruction on sm_90 either.
    yield case(("sm80", "sm_90"), 128, "fp8")
    yield from wide_cases()
    yield from latent_cases()


def wide_cases() -> Iterator[DecodeCase]:
    """Head dims above 256: the tiles of three amounts of shared memory, and the features with the most registers."""
    score = ("softcap", "alibi", "sinks")
    for place in (("sm90", "sm_90"), ("sm80", "sm_80"), ("sm80", "sm_89")):
        yield from (case(place, head_dim) for head_dim in (384, 512))
        yield case(place, 512, "page1", *score, mask="window")
        yield case(place, 512, "page16", "append", "rotary_halves", mask="chunk")
        yield case(place, 512, "fp8", "page1", *score, mask="window")
    yield case(("sm90", "sm_90"), 320, "fp8", "page16", "append", "rotary_pairs", dtype="fp16")
    yield case(("sm90", "sm_90"), 512, "leftpad", head_dim_v=256, mask="window")
    yield case(("sm90", "sm_90"), 512, "ragged", "append", "page16")
    yield case(("sm90", "sm_90"), 512, "attn")
    yield case(("sm80", "sm_80"), 264, "attn_varlen", dtype="fp16")


def latent_cases() -> Iterator[DecodeCase]:
    """Calls with value_dim: the tiles of three amounts of shared memory, and the features."""
    mla, score = {"value_dim": 512}, ("softcap", "alibi", "sinks")
    for place in (("sm90", "sm_90"), ("sm80", "sm_90"), ("sm80", "sm_80"), ("sm80", "sm_89")):
        yield case(place, 576, **mla)
        if place[1] != "sm_89":  # which has tiles of 16 rows only
            yield case(place, 576, "rows32", **mla)
        yield case(place, 576, "page16", *score, mask="window", **mla)
        yield case(place, 576, "page1", "tables", mask="full", **mla)
        yield case(place, 576, "page1", "append", **mla)
        yield case(place, 576, "fp8", **mla)
        yield case(place, 320, value_dim=256)
        yield case(place, 576, "ds_mla", "page16", **mla)
        yield case(place, 576, "ds_mla", "page1", "tables", mask="full", **mla)
        yield case(place, 576, "ds_mla", "page16", "append", *score, mask="window", **mla)
    yield case(("sm90", "sm_90"), 576, "ds_mla", "rows32", "ragged", "append", dtype="fp16", **mla)
    yield case(("sm90", "sm_90"), 576, "rows32", "page1", *score, mask="chunk", **mla)
    yield case(("sm90", "sm_90"), 576, "fp8", "page1", "tables", mask="full", **mla)
    yield case(("sm90", "sm_90"), 576, "fp8", "page16", "append", *score, mask="window", **mla)
    yield case(("sm90", "sm_90"), 576, "rows32", "page1", "append", **mla)
    yield case(("sm90", "sm_90"), 320, "rows32", "page16", dtype="fp16", value_dim=256)
    # Two head groups, whose CTAs form clusters.
    yield case(("sm90", "sm_90"), 576, "group128", **mla)
    yield case(("sm90", "sm_90"), 576, "group128", "page16", *score, mask="window", **mla)
    yield case(("sm90", "sm_90"), 320, "group128", "ragged", dtype="fp16", value_dim=256)
    yield case(("sm90", "sm_90"), 512, "leftpad", "batch_idx", dtype="fp16", **mla)
    yield case(("sm90", "sm_90"), 192, "ragged", "append", "page16", value_dim=128)
    yield case(("sm80", "sm_80"), 576, "rows32", "page16", *score, mask="window", **mla)


def decode_key(case: DecodeCase) -> CompileKey:
    """The `CompileKey` of the kernel of a case."""
    if {"attn", "attn_varlen"} & set(case.features):
        (key,) = _attention_keys(case)
        return key
    names, tokens = set(case.features), 8 if "rows32" in case.features else 1
    heads = HEADS_KV * 128 if "group128" in names else HEADS
    dtype, ragged = DTYPES[case.dtype], "ragged" in case.features
    batch = MANY if "many_sequences" in names else BATCH
    leading = (batch * tokens,) if ragged else (batch, tokens)
    width_v = case.head_dim_v or case.head_dim
    page = 16 if "page16" in names else 1 if "page1" in names else None
    rows = (batch, LENGTH) if page is None else (batch * LENGTH // page, page)
    integers = torch.zeros(batch, dtype=torch.int32)
    band = BANDS[case.mask]
    options: dict[str, Any] = {"window": band.bounds, "attention_chunk": band.chunk, "causal": False}
    options["cache_seqlens"] = integers
    if page is not None:
        options["page_table"] = torch.zeros(batch, LENGTH // page, dtype=torch.int32)
    if "tables" in names:
        options["page_table"] = options["page_table"][:, None].expand(batch, tokens, -1).contiguous()
        options["cache_seqlens"] = torch.zeros(batch, tokens, dtype=torch.int32)
    if ragged:
        options["cu_seqlens_q"] = torch.zeros(batch + 1, dtype=torch.int32)
    if "append" in names:
        options["k_new"] = torch.empty(*leading, HEADS_KV, case.head_dim, dtype=dtype)
        if case.value_dim is None:
            options["v_new"] = torch.empty(*leading, HEADS_KV, width_v, dtype=dtype)
    if names & {"rotary_halves", "rotary_pairs"}:
        options |= {name: torch.empty(LENGTH, case.head_dim // 2) for name in ("rotary_cos", "rotary_sin")}
        options["rotary_interleaved"] = "rotary_pairs" in names
    made = {"leftpad": integers, "batch_idx": integers, "softcap": 3.0}
    made |= {"alibi": torch.zeros(heads), "sinks": torch.zeros(heads)}
    options |= {{"batch_idx": "cache_batch_idx"}.get(name, name): x for name, x in made.items() if name in names}
    stored = torch.float8_e4m3fn if "fp8" in names else torch.uint8 if "ds_mla" in names else dtype
    widths = (656 if "ds_mla" in names else case.head_dim), width_v
    caches = [torch.empty(*rows, HEADS_KV, width, dtype=stored) for width in widths]
    if case.value_dim is not None:
        caches, options = caches[:1], options | {"value_dim": case.value_dim, "scale": 0.1}
    call = bind(torch.empty(*leading, heads, case.head_dim, dtype=dtype), *caches, **options)
    gpu = RecordingGpu(ARCHS[case.arch])
    with use_gpu(gpu), use_kernels(case.family):
        decode._bind(*call)
    (key,) = gpu.keys
    return key


def _attention_keys(case: DecodeCase) -> list[CompileKey]:
    dtype, varlen = DTYPES[case.dtype], "attn_varlen" in case.features
    heads = (HEADS, 1), (HEADS_KV, LENGTH), (HEADS_KV, LENGTH)
    if varlen:
        q, k, v = (torch.empty(BATCH * rows, n, case.head_dim, dtype=dtype) for n, rows in heads)
    else:
        q, k, v = (torch.empty(BATCH, n, rows, case.head_dim, dtype=dtype) for n, rows in heads)
    args = reference.plain_args(q, BANDS[case.mask])
    if varlen:
        offsets = torch.zeros(BATCH + 1, dtype=torch.int32)
        args = args._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    return forward_keys(q, k, v, args, ARCHS[case.arch])
