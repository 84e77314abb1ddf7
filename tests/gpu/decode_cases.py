"""The calls of `test_decode.py` and `test_split_keys.py`, and the kernels that they need."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cute_flash.decode import bind
from cute_flash.planning.plan import CompileKey
from cute_flash.runtime import decode
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from cute_flash.spec.dtypes import ROW_ALIGN_BYTES
from cute_flash.spec.family import FAMILIES, use_kernels
from tests.decode.cases import WIDE_DIMS, DecodeCase, random_cases, wide_case
from tests.fakes.recording import RecordingGpu, backward_keys, forward_keys

DTYPES = (torch.bfloat16, torch.float16)
# 240 random calls of each family. Those of a group share a kernel or two, which one core compiles in 2.6 s.
GROUPS, CASES_OF_A_GROUP = 16, 15
# Compile keys do not depend on lengths, so the K/V caches of a dry run may be short.
DRY_LENGTH = 30

Case = tuple[DecodeCase, torch.dtype]


def random_group(family: str, group: int) -> list[Case]:
    """Random calls of one kind, different for each family. FP8 caches have head dims that the GPU supports."""
    seed = 1000 * list(FAMILIES).index(family) + group
    cases = []
    for case in random_cases(seed, CASES_OF_A_GROUP, kind=seed):
        if case.fp8 and (case.head_dim % ROW_ALIGN_BYTES or case.head_dim_v % ROW_ALIGN_BYTES):
            case = replace(case, head_dim=64, head_dim_v=64)
        cases.append((case, DTYPES[group % 2]))
    return cases


WIDE_GROUPS, WIDE_CASES = 2 * len(WIDE_DIMS), 8


def wide_group(family: str, group: int) -> list[Case]:
    """Random calls of one kind with head dims above 256, different for each family."""
    seed = 1000 * list(FAMILIES).index(family) + 300 + group
    drawn = random_cases(seed, WIDE_CASES, kind=seed)
    return [(wide_case(case, *WIDE_DIMS[group % len(WIDE_DIMS)]), DTYPES[group % 2]) for case in drawn]


# ---- latent caches

# Widths of rows and values, query heads, and tokens. Each pair of them has kernels of its own.
LATENT_WIDTHS = ((576, 512), (576, 512), (512, 512), (320, 256), (192, 128), (48, 32))
LATENT_HEADS, LATENT_TOKENS = (1, 8, 16, 20, 64, 128), (1, 1, 2, 3, 8)
LATENT_GROUPS, LATENT_CASES, DS_MLA_GROUPS = 20, 10, 8
# Query heads and tokens that make an even number of head groups by wgmma, and sizes of pages that TMA or cp.async load.
CLUSTER_ROWS, CLUSTER_PAGES = ((128, 1), (128, 2), (64, 2), (32, 4), (64, 8)), (None, None, 16, 32, 48, 64, 160)
CLUSTER_GROUPS = 10
MLA = DecodeCase(
    seed=5, seqlens=(1000, 77, 0), tokens=(1, 1, 1), new=(0, 0, 0), heads_kv=1, group=16, head_dim=576, head_dim_v=512,
    page_size=64, is_latent=True, scale=192**-0.5,
)  # fmt: skip


def latent_group(family: str, group: int) -> list[Case]:
    """Random calls with latent caches, of one kind, different for each family."""
    return _latent(1000 * list(FAMILIES).index(family) + 500 + group, group)


def ds_mla_group(family: str, group: int) -> list[Case]:
    """The same with rows of `fp8_ds_mla`."""
    cases = _latent(1000 * list(FAMILIES).index(family) + 800 + group, group)
    return [(replace(case, head_dim=576, head_dim_v=512, fp8="ds_mla"), dtype) for case, dtype in cases]


def _latent(seed: int, group: int) -> list[Case]:
    cases = []
    for i, case in enumerate(random_cases(seed, LATENT_CASES, kind=seed)):
        rng = random.Random(seed * 1000 + i)
        head_dim, head_dim_v = LATENT_WIDTHS[group % len(LATENT_WIDTHS)]
        heads_kv = rng.choice((1, 1, 1, 2))
        changes: dict[str, Any] = {"heads_kv": heads_kv, "group": rng.choice(LATENT_HEADS) // heads_kv or 1}
        if not case.is_ragged:
            tokens = (rng.choice(LATENT_TOKENS),) * case.batch
            changes |= {"tokens": tokens, "new": tokens if any(case.new) else case.new}
        latent = replace(case, is_latent=True, head_dim=head_dim, head_dim_v=head_dim_v, rotary_dim=0)
        cases.append((replace(latent, **changes), DTYPES[group % 2]))
    return cases


def cluster_group(group: int) -> list[Case]:
    """Random calls with latent caches, for which two CTAs form a cluster."""
    cases = []
    for i, (case, dtype) in enumerate(_latent(5000 + group, group)):
        rng = random.Random(5000 * (group + 1) + i)
        heads, tokens = rng.choice(CLUSTER_ROWS)
        ragged = tuple(rng.randint(0, tokens) for _ in range(case.batch))
        changes = {
            "heads_kv": rng.choice((1, 1, 2)),
            "group": heads,
            "tokens": (*ragged[1:], tokens) if case.is_ragged else (tokens,) * case.batch,
            "new": (0,) * case.batch,
            "seqlens": tuple(rng.choice((rng.randint(0, 300), rng.randint(0, 5000))) for _ in range(case.batch)),
            "page_size": CLUSTER_PAGES[group % len(CLUSTER_PAGES)],
            "fp8": "",
        }
        cases.append((replace(case, **changes), dtype))
    return cases


def long_latent_case(page_size: int | None, heads: int) -> Case:
    case = replace(MLA, seqlens=(100_003, 1), tokens=(2,) * 2, new=(2,) * 2, page_size=page_size, group=heads)
    return case, torch.bfloat16


def latent_cases() -> Iterator[Case]:
    """The cases of latent caches that are not random."""
    yield from (long_latent_case(page_size, heads) for page_size in (None, 1, 64) for heads in (16, 128))
    for heads in LATENT_HEADS:
        yield replace(MLA, group=heads), torch.bfloat16
        yield replace(MLA, group=heads, fp8="scalar"), torch.bfloat16
        yield replace(MLA, group=heads, fp8="ds_mla"), torch.bfloat16


BASE = DecodeCase(
    seed=3, seqlens=(1000, 77, 0), tokens=(1, 1, 1), new=(0, 0, 0), heads_kv=2, head_dim=128, head_dim_v=128,
    page_size=16,
)  # fmt: skip
APPENDING = replace(BASE, seqlens=(1000, 77, 5), new=(1, 1, 1), rotary_dim=128)
# Rotary tables in fp32, whose products with q and k are not exact in fp32, and caches of every dtype.
ROTARY = tuple(
    (replace(BASE, seqlens=(200, 21, 4), tokens=(4,) * 3, new=(4,) * 3, rotary_fp32=True, **fields), dtype)
    for dtype in DTYPES
    for fields in (
        {"head_dim": 160, "head_dim_v": 160, "rotary_dim": 112, "rotary_interleaved": True, "fp8": "heads"},
        {"rotary_dim": 64},
    )
)
PAGE_SIZES = (None, 1, 16, 64, 528)
CHUNKS = (17, 64, 300)
CHUNK_PAGES = (None, 24, 64)
HEAD_DIMS = (8, 16, 24, 40, 72, 80, 112, 160, 192, 224, 256, 264, 320, 384, 400, 512)
WIDE = replace(BASE, head_dim=512, head_dim_v=512)


def long_case(page_size: int | None, tokens: int) -> Case:
    case = replace(BASE, seqlens=(100_003, 1), tokens=(tokens,) * 2, new=(tokens,) * 2, page_size=page_size)
    return case, torch.bfloat16


def long_wide_case(fp8: str) -> Case:
    case = replace(WIDE, seqlens=(50_003, 1), tokens=(2,) * 2, new=(2,) * 2, group=8, rotary_dim=512, fp8=fp8)
    return case, torch.bfloat16


SPLIT = (
    (BASE, torch.bfloat16),
    (replace(BASE, tokens=(5,) * 3, new=(5,) * 3, fp8="heads"), torch.float16),
    (replace(WIDE, tokens=(5,) * 3), torch.bfloat16),
)


def chunk_cases(tokens: int, page_size: int | None) -> list[Case]:
    case = replace(BASE, seqlens=(500, 0, 33), tokens=(tokens,) * 3, new=(tokens,) * 3, page_size=page_size)
    ragged = replace(case, window=(100, 0), is_ragged=True, tokens=(tokens, 1, 0), new=(tokens, 1, 0))
    return [(replace(case, rotary_dim=64), torch.bfloat16), (ragged, torch.bfloat16)]


def head_dim_cases(head_dim: int) -> list[Case]:
    """Head dims with FP8 are multiples of 16, because rows are copied 16 bytes at a time."""
    case = replace(BASE, head_dim=head_dim, head_dim_v=head_dim, tokens=(3,) * 3, new=(3,) * 3)
    fp8 = [] if head_dim % ROW_ALIGN_BYTES else [(replace(case, fp8="scalar"), torch.bfloat16)]
    return [(case, torch.bfloat16), *fp8]


# Many query tiles: no split of the keys, or few splits.
LARGE_BATCH = replace(
    BASE, seqlens=tuple((37 * b * b) % 900 for b in range(200)), tokens=(1,) * 200, new=(0,) * 200
)  # fmt: skip
LARGE_BATCHES = (
    LARGE_BATCH,
    replace(LARGE_BATCH, page_size=None),
    replace(LARGE_BATCH, page_size=1, window=(100, 0), softcap=5.0),
    replace(LARGE_BATCH, new=(1,) * 200, rotary_dim=128),
    replace(LARGE_BATCH, new=(1,) * 200, page_size=None, alibi="heads", has_sinks=True),
    replace(LARGE_BATCH, tokens=tuple(b % 4 for b in range(200)), is_ragged=True, page_size=24),
    replace(LARGE_BATCH, tokens=(4,) * 200, group=4, head_dim_v=96, kv_layout="hnd"),
    replace(LARGE_BATCH, new=(1,) * 200, head_dim=512, head_dim_v=512, rotary_dim=512),
    replace(LARGE_BATCH, tokens=(4,) * 200, page_size=None, fp8="heads", head_dim=384, head_dim_v=384),
)


def fixed_cases() -> Iterator[Case]:
    """The cases that are not random."""
    yield from ((case, torch.bfloat16) for case in (BASE, APPENDING, replace(APPENDING, page_size=None)))
    yield from (long_case(page_size, tokens) for page_size in PAGE_SIZES for tokens in (1, 8))
    yield from (long_wide_case(fp8) for fp8 in ("", "heads"))
    yield from (*SPLIT, *ROTARY)
    for tokens in CHUNKS:
        for page_size in CHUNK_PAGES:
            yield from chunk_cases(tokens, page_size)
    for head_dim in HEAD_DIMS:
        yield from head_dim_cases(head_dim)
    yield from ((case, torch.bfloat16) for case in LARGE_BATCHES)


def decode_keys(case: DecodeCase, dtype: torch.dtype, family: str, arch: ArchSpec) -> list[CompileKey]:
    """The kernel of a call; none if it has no queries."""
    short = replace(case, seqlens=tuple(min(length, DRY_LENGTH) for length in case.seqlens))
    call = short.build("cpu", dtype)
    gpu = RecordingGpu(arch)
    with use_gpu(gpu), use_kernels(family):
        decode._bind(*bind(*call.tensors, **call.options))
    return gpu.keys


# ---- attn with few queries


@dataclass(frozen=True)
class SplitCase:
    """A call of `attn` with few queries over many keys."""

    tokens: int = 1
    heads: int = 8
    heads_kv: int = 2
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    layout: str = "bhsd"
    keys: int = 4000
    batch: int = 2
    options: dict[str, Any] = field(default_factory=dict)  # keywords; "alibi" and "sinks" are True

    @property
    def id(self) -> str:
        options = "-".join(self.options) or "plain"
        return f"t{self.tokens}-{self.heads}/{self.heads_kv}-d{self.head_dim}-{self.layout}-{options}"

    def inputs(self, device: str) -> dict[str, Tensor]:
        """q, k, v in the order of `layout`, and the tensors of features."""
        generator = torch.Generator().manual_seed(self.tokens)
        tensors = {}
        for name, heads, rows in (("q", self.heads, self.tokens), *((n, self.heads_kv, self.keys) for n in "kv")):
            size = (heads, rows) if self.layout == "bhsd" else (rows, heads)
            made = torch.randn(self.batch, *size, self.head_dim, generator=generator)
            tensors[name] = made.to(device, self.dtype)
        for name in ("alibi", "sinks"):
            if self.options.get(name):
                tensors[name] = (torch.rand(self.heads, generator=generator) * 0.1).to(device)
        return tensors

    @property
    def numbers(self) -> dict[str, Any]:
        """The keywords that are not tensors."""
        return {name: x for name, x in self.options.items() if name not in ("alibi", "sinks")}


FEATURES: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"window": (700, 0)},
    {"window": (700, 3)},
    {"softcap": 5.0},
    {"alibi": True, "causal": True},
    {"sinks": True},
    {"softcap": 5.0, "alibi": True, "sinks": True, "causal": True},
)
SPLIT_CASES = (
    *(SplitCase(tokens, layout=layout) for tokens in range(1, 9) for layout in ("bhsd", "bshd")),
    *(SplitCase(tokens, options=options, layout="bshd") for tokens in (1, 5) for options in FEATURES),
    *(SplitCase(3, heads=8, heads_kv=heads_kv, options={"causal": True}) for heads_kv in (1, 4, 8)),
    *(SplitCase(2, head_dim=head_dim, dtype=torch.float16) for head_dim in (40, 64, 96)),
)


# Head dims above 256: only the forward splits keys.
WIDE_SPLIT_CASES = (
    *(SplitCase(tokens, head_dim=head_dim, layout="bshd") for tokens in (1, 8) for head_dim in (320, 384, 512)),
    SplitCase(3, head_dim=264, dtype=torch.float16),
    *(SplitCase(4, head_dim=512, options=options) for options in FEATURES[2:4]),
)


def split_keys(arch: ArchSpec) -> Iterator[CompileKey]:
    """The kernels of `SPLIT_CASES` and of their gradients, and those of `WIDE_SPLIT_CASES`."""
    for case in (*SPLIT_CASES, *WIDE_SPLIT_CASES):
        tensors = case.inputs("cpu")
        q, k, v = (tensors[name] if case.layout == "bhsd" else tensors[name].transpose(1, 2) for name in "qkv")
        band = Band.of(case.options.get("causal", False), case.options.get("window", (None, None)))
        args = AttentionArgs(
            scale=case.head_dim**-0.5,
            window_left=band.left,
            window_right=band.right,
            softcap=case.options.get("softcap", 0.0),
            alibi=tensors.get("alibi"),
            sinks=tensors.get("sinks"),
        )
        yield from forward_keys(q, k, v, args, arch)
        if case in SPLIT_CASES:
            yield from backward_keys(q, k, v, args, arch)


def keys(arch: ArchSpec, runnable: list[str]) -> Iterator[CompileKey]:
    for family in runnable:
        drawn = [case for group in range(GROUPS) for case in random_group(family, group)]
        wide = [case for group in range(WIDE_GROUPS) for case in wide_group(family, group)]
        latent = [case for group in range(LATENT_GROUPS) for case in latent_group(family, group)]
        ds_mla = [case for group in range(DS_MLA_GROUPS) for case in ds_mla_group(family, group)]
        clusters = [case for group in range(CLUSTER_GROUPS) for case in cluster_group(group)]
        for case, dtype in (*fixed_cases(), *drawn, *wide, *latent_cases(), *latent, *ds_mla, *clusters):
            yield from decode_keys(case, dtype, family, arch)
    yield from split_keys(arch)
