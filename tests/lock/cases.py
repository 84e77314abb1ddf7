"""The kernels that the cubin lock covers, each described as a problem, and their compilation.

A case names sizes, dtype, mask, features, kernel family and architecture, and the role of the kernel in the
plan of that problem. Names of cases do not depend on classes, modules or tiles of the project. Code
that depends on them is in the last section, the adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.jit import resources as reading
from cute_flash.jit import toolchain as versions
from cute_flash.jit.resources import Resources
from cute_flash.planning.merge import merge_key
from cute_flash.planning.plan import CompileKey, Plan, plan_backward, plan_forward
from cute_flash.planning.registry import KERNELS
from cute_flash.score_mod.block_mask import BlockMask
from cute_flash.score_mod.bound import BoundMods
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from cute_flash.spec.describe import describe
from tests import mod_cases
from tests.arguments import call_args
from tests.jit.gates import without_locations
from tests.lock.decode_cases import DecodeCase, decode_cases, decode_key
from tests.mod_cases import Sizes

MASKS: dict[str, tuple[int | None, int | None]] = {
    "full": (None, None),
    "causal": (None, 0),
    "left": (128, None),
    "window": (3000, 64),  # wide, because plans treat narrow windows as short sequences
}
# A kernel with a chunk has both window bounds, so masks with a chunk differ in run-time numbers only.
BANDS = {**{name: Band(*bounds) for name, bounds in MASKS.items()}, "chunk": Band(None, 0, 3000)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BATCH, HEADS, HEADS_KV = 2, 4, 2
SEQLEN_Q, SEQLEN_K = 512, 4096
SHORT, FEW_ROWS = 512, 4
# (kernel family, architecture)
AMPERE, AMPERE_86, AMPERE_ON_90 = ("sm80", "sm_80"), ("sm80", "sm_86"), ("sm80", "sm_90")
HOPPER = ("sm90", "sm_90")
PLACES = (HOPPER, AMPERE, AMPERE_86, AMPERE_ON_90)


@dataclass(frozen=True, kw_only=True)
class Bias:
    dtype: str = "bf16"
    dims: str = "bhqk"  # dimensions of full size; it broadcasts along the others
    layout: str = "pairs"  # alignment of rows: 16 bytes ("aligned"), two elements ("pairs"), one element ("single")
    has_gradient: bool = True

    @property
    def name(self) -> str:
        return f"bias-{self.dtype}-{self.dims}-{self.layout}" + "-constant" * (not self.has_gradient)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel of the plan of one problem.

    `features` are keywords of `attn` or facts about the call, by name: see `FEATURES`. `score_mod` and
    `mask_mod` name methods of `tests.mod_cases.Make`.
    """

    direction: str  # "fwd" or "bwd"
    family: str
    arch: str
    head_dim: int
    head_dim_v: int | None = None
    dtype: str = "bf16"
    mask: str = "causal"
    features: tuple[str, ...] = ()
    score_mod: str = ""
    mask_mod: str = ""
    bias: Bias | None = None
    block_map: bool = False  # the call has a `BlockMask`
    has_table_gradients: bool = False  # gradients of floating-point tensors that score_mod captures
    has_own_gradient: bool = False  # score_mod_bwd is given
    deterministic: bool = False
    has_dlse: bool = False
    seqlen_q: int = SEQLEN_Q
    seqlen_k: int = SEQLEN_K
    # "main", "scheduler", "split" (fp32), "preprocess", "postprocess" or "sum_dbias" (the last three: backward)
    role: str = "main"

    @property
    def name(self) -> str:
        widths = f"d{self.head_dim}" + ("" if self.head_dim_v is None else f"v{self.head_dim_v}")
        parts = [
            *self.features,
            f"score_mod-{self.score_mod}" if self.score_mod else "",
            "table_gradients" if self.has_table_gradients else "",
            "score_mod_bwd" if self.has_own_gradient else "",
            f"mask_mod-{self.mask_mod}" if self.mask_mod else "",
            "" if self.bias is None else self.bias.name,
            "block_map" if self.block_map else "",
            "deterministic" if self.deterministic else "",
            "dlse" if self.has_dlse else "",
            "" if self.seqlen_q == SEQLEN_Q else f"q{self.seqlen_q}",
            "" if self.seqlen_k == SEQLEN_K else f"k{self.seqlen_k}",
        ]
        what = "+".join(filter(None, parts)) or "plain"
        return "/".join((self.direction, self.family, self.arch, widths, self.dtype, self.mask, what, self.role))

    @property
    def has_mods(self) -> bool:
        return bool(self.score_mod or self.mask_mod or self.bias or self.block_map)


@dataclass(frozen=True, kw_only=True)
class MergeCase:
    """The kernel that merges partial outputs."""

    arch: str
    head_dim: int
    num_partials: int
    dtype: str = "bf16"
    direction: str = "merge"

    @property
    def name(self) -> str:
        return f"merge/{self.arch}/d{self.head_dim}/{self.dtype}/{self.num_partials}"


AnyCase = Case | DecodeCase | MergeCase
# Names in `Case.features`. "pack_gqa": the strides of q allow the heads of a group to be rows of one tile.
FEATURES = (
    "varlen", "seqused_k", "softcap", "alibi", "sinks", "dropout", "max_logit", "out_dtype",
    "batch_invariant", "pack_gqa", "dropout_origin",
)  # fmt: skip


# ---- plain attention: every row of the tile tables that a call can reach, with every set of mask bounds


def fwd(place: tuple[str, str], head_dim: int, *features: str, **fields: Any) -> Case:
    return Case(direction="fwd", family=place[0], arch=place[1], head_dim=head_dim, features=features, **fields)


def bwd(place: tuple[str, str], head_dim: int, *features: str, **fields: Any) -> Case:
    return replace(fwd(place, head_dim, *features, **fields), direction="bwd")


def pre_and_postprocess(case: Case) -> Iterator[Case]:
    """The kernels before and after the main kernel of a backward pass."""
    for has_dlse in (False, True):
        yield replace(case, role="preprocess", has_dlse=has_dlse)
    yield replace(case, role="postprocess")


HEAD_DIMS = (64, 96, 128, 192, 256)
# Above 256, warps of the mma.sync forward share rows, with a speculative or an exact row max.
WIDE_HEAD_DIMS = (320, 384, 448, 512)
# Widths of Q and K, and of V, of the rows of the Hopper forward above head dim 256.
HOPPER_WIDE_DIMS = (
    (288, None), (320, None), (320, 256), (256, 320), (320, 384), (384, None), (320, 512), (448, None), (512, 256),
    (512, None), (576, 512),
)  # fmt: skip
# Head dims of the Hopper backward's rows.
HOPPER_BWD_DIMS = (64, 128, 256, 512)
HOPPER_CLUSTER_BWD_DIMS = (320, 384, 512)
# Head dims above 256 of the rows of the mma.sync backward, in which warps split S and dP.
WIDE_BWD_DIMS = (320, 384, 512)


def plain() -> Iterator[Case]:
    """Every row of the tile tables with every mask, in bf16."""
    for place, head_dim, mask in product(PLACES, HEAD_DIMS, MASKS):
        yield fwd(place, head_dim, mask=mask)
    for (head_dim, head_dim_v), mask in product(HOPPER_WIDE_DIMS, MASKS):
        yield fwd(HOPPER, head_dim, head_dim_v=head_dim_v, mask=mask)
    for place, head_dim, mask in product((AMPERE, AMPERE_86, AMPERE_ON_90), WIDE_HEAD_DIMS, MASKS):
        yield fwd(place, head_dim, mask=mask)
    for (head_dim, head_dim_v), mask in product(((64, 128), (128, 64), (192, 128), (256, 128)), MASKS):
        yield fwd(HOPPER, head_dim, head_dim_v=head_dim_v, mask=mask)
    # Rows for short sequences.
    yield from (fwd(HOPPER, 64, mask=mask, seqlen_k=SHORT) for mask in ("full", "causal", "left", "window"))
    yield fwd(HOPPER, 128, mask="causal", seqlen_k=SHORT)
    yield from (fwd(HOPPER, 256, mask=mask, seqlen_k=SHORT) for mask in ("full", "causal"))
    yield from (fwd(HOPPER, 96, mask=mask, seqlen_k=SHORT) for mask in MASKS)
    yield fwd(AMPERE_ON_90, 64, mask="full", seqlen_k=SHORT)
    yield from (bwd(AMPERE_ON_90, 128, mask=mask, seqlen_k=SHORT) for mask in MASKS)
    for place in PLACES:
        for head_dim, mask in product(HOPPER_BWD_DIMS if place == HOPPER else (*HEAD_DIMS, *WIDE_BWD_DIMS), MASKS):
            yield bwd(place, head_dim, mask=mask)


def deterministic() -> Iterator[Case]:
    """Every row of the backward tile tables once, with alternating masks."""
    masks = ("causal", "window", "full", "left")
    for place in PLACES:
        for i, head_dim in enumerate(HOPPER_BWD_DIMS if place == HOPPER else (*HEAD_DIMS, *WIDE_BWD_DIMS)):
            yield bwd(place, head_dim, mask=masks[i % 4], deterministic=True)


def plain_pre_and_postprocess() -> Iterator[Case]:
    for place in PLACES:
        for head_dim in HOPPER_BWD_DIMS if place == HOPPER else (*HEAD_DIMS, *WIDE_BWD_DIMS):
            yield from pre_and_postprocess(bwd(place, head_dim, mask="full"))
    for place in (HOPPER, AMPERE):
        yield from list(pre_and_postprocess(bwd(place, 128, mask="full", deterministic=True)))[:2]
        yield from pre_and_postprocess(bwd(place, 64, mask="full", dtype="fp16"))
        yield from list(pre_and_postprocess(bwd(place, 128, "out_dtype", mask="full")))[:2]
    yield bwd(HOPPER, 128, "out_dtype", mask="full", deterministic=True, role="preprocess")
    yield from list(pre_and_postprocess(bwd(HOPPER, 128, head_dim_v=64, mask="full")))[:2]
    yield from pre_and_postprocess(bwd(AMPERE, 72, mask="full"))


def samples() -> Iterator[Case]:
    """fp16, head dims that are padded to a wider tile, and backward passes with Dv ≠ D."""
    for place in (HOPPER, AMPERE):
        yield fwd(place, 128, dtype="fp16")
        yield fwd(place, 64, dtype="fp16", mask="full")
        yield fwd(place, 256, dtype="fp16", mask="window")
        yield fwd(place, 72, mask="left")
        yield fwd(place, 40)
        yield bwd(place, 128, dtype="fp16")
        yield bwd(place, 64, dtype="fp16", mask="window")
        yield bwd(place, 40, mask="window")
        yield bwd(place, 192, head_dim_v=128)
        yield bwd(place, 128, head_dim_v=64, mask="window")
    yield fwd(HOPPER, 136, mask="full")
    yield fwd(HOPPER, 72, head_dim_v=248)
    yield fwd(AMPERE, 192, head_dim_v=128)
    yield bwd(AMPERE, 192, dtype="fp16")
    yield fwd(AMPERE_86, 128, head_dim_v=64, mask="window")
    yield bwd(HOPPER, 136, dtype="fp16", mask="window")
    yield bwd(HOPPER, 128, head_dim_v=64, deterministic=True)
    yield bwd(AMPERE_86, 72, head_dim_v=256, mask="window")


# ---- features

ALL_SCORE = ("softcap", "alibi", "sinks", "dropout", "max_logit")


def fwd_features() -> Iterator[Case]:
    for place in (HOPPER, AMPERE):
        for name in (*ALL_SCORE, "out_dtype", "batch_invariant", "varlen"):
            yield fwd(place, 128, name)
        yield fwd(place, 128, "softcap", "alibi")
        yield fwd(place, 64, "softcap", mask="full")
        yield fwd(place, 64, "dropout", mask="full")
        yield fwd(place, 64, *ALL_SCORE, mask="window")
        yield fwd(place, 256, *ALL_SCORE, mask="full")
        yield fwd(place, 96, "dropout", mask="left")
        yield fwd(place, 192, "softcap", "dropout", mask="window")
        yield fwd(place, 128, "softcap", head_dim_v=64, mask="full")
        yield fwd(place, 128, "softcap", "out_dtype")
        # Variable lengths.
        yield fwd(place, 128, "varlen", role="scheduler")
        yield fwd(place, 128, "varlen", "seqused_k", role="scheduler")
        yield fwd(place, 64, "varlen", mask="full")
        yield fwd(place, 256, "varlen", mask="window")
        yield fwd(place, 128, "varlen", *ALL_SCORE, mask="window")
        yield fwd(place, 64, "varlen", "batch_invariant", "out_dtype")
        yield fwd(place, 192, "varlen", head_dim_v=128)
    # ALiBi by tensor cores.
    yield fwd(HOPPER, 64, "alibi", mask="full")
    yield fwd(HOPPER, 192, "alibi", head_dim_v=128)
    yield fwd(HOPPER, 96, "varlen", "alibi", mask="window")
    # pack_gqa; softcap is the only score feature that it supports.
    yield fwd(HOPPER, 128, "pack_gqa", seqlen_q=FEW_ROWS)
    yield fwd(HOPPER, 64, "pack_gqa", seqlen_q=FEW_ROWS, seqlen_k=SHORT)
    yield fwd(HOPPER, 256, "pack_gqa", seqlen_q=FEW_ROWS, mask="window")
    yield fwd(HOPPER, 128, "pack_gqa", "softcap", "out_dtype", seqlen_q=FEW_ROWS, mask="left")
    # Rows of the tile table with a dropout producer that the cases above do not reach.
    yield fwd(HOPPER, 64, "dropout", head_dim_v=128)
    yield fwd(HOPPER, 128, "dropout", head_dim_v=64)
    yield fwd(HOPPER, 192, *ALL_SCORE, head_dim_v=128, mask="full")
    yield fwd(HOPPER, 256, "dropout", head_dim_v=128, mask="window")
    yield fwd(HOPPER, 128, "dropout", mask="full")
    # Rows of the tile tables for one feature.
    yield fwd(HOPPER, 96, "softcap")
    yield fwd(HOPPER, 96, "softcap", mask="full")
    yield fwd(HOPPER, 192, "softcap", mask="window")
    yield fwd(HOPPER, 256, "softcap")
    yield fwd(HOPPER, 96, "softcap", mask="full", seqlen_k=SHORT)
    yield fwd(HOPPER, 192, "softcap", seqlen_k=SHORT)
    yield fwd(HOPPER, 256, "softcap", seqlen_k=SHORT)
    yield fwd(HOPPER, 192, "alibi")
    yield fwd(HOPPER, 192, "dropout")
    yield fwd(HOPPER, 192, "dropout", head_dim_v=128)
    yield fwd(HOPPER, 256, "dropout", mask="full")
    yield fwd(AMPERE_86, 128, *ALL_SCORE, mask="window")
    yield fwd(AMPERE_ON_90, 128, "softcap", "alibi", mask="full")
    # Pairs of warps that share rows, and the rows for calls that need the exact row max.
    for place in (AMPERE, AMPERE_ON_90):
        yield fwd(place, 256, "alibi")
        yield fwd(place, 256, "varlen", "sinks", mask="window")
        yield fwd(place, 256, "out_dtype", mask="full")
        yield fwd(place, 256, "max_logit")
    yield fwd(AMPERE_ON_90, 192, mask="full", dtype="fp16")
    yield fwd(AMPERE_86, 64, "varlen")


def fwd_wide_sm90() -> Iterator[Case]:
    """Features of the Hopper forward above head dim 256."""
    for name in (*ALL_SCORE, "out_dtype", "batch_invariant", "varlen"):
        yield fwd(HOPPER, 512, name)
    yield fwd(HOPPER, 512, "varlen", *ALL_SCORE, mask="window")
    yield fwd(HOPPER, 576, *ALL_SCORE, head_dim_v=512, mask="window")
    yield fwd(HOPPER, 512, mask="chunk", dtype="fp16")
    yield fwd(HOPPER, 264, "varlen", mask="full")
    yield fwd(HOPPER, 384, "dropout", "dropout_origin", mask="full")
    yield fwd(HOPPER, 512, mask="window", score_mod="alibi", mask_mod="window", bias=Bias())
    yield fwd(HOPPER, 512, mask="full", bias=Bias(dims="bk"))
    # Up to 320 a single CTA holds the output. Dropout and several mods would spill there.
    formulas = tuple(name for name in ALL_SCORE if name != "dropout")
    for name in (*ALL_SCORE, "out_dtype", "batch_invariant", "varlen"):
        yield fwd(HOPPER, 320, name)
    for d, dv in ((288, None), (320, None), (320, 256), (256, 320)):
        yield fwd(HOPPER, d, "varlen", *formulas, head_dim_v=dv, mask="window")
    yield fwd(HOPPER, 320, "varlen", *ALL_SCORE, mask="window")
    yield fwd(HOPPER, 320, mask="chunk", dtype="fp16")
    yield fwd(HOPPER, 320, "pack_gqa", seqlen_q=FEW_ROWS, mask="window")
    yield fwd(HOPPER, 320, "max_logit", score_mod="relative")
    yield fwd(HOPPER, 320, "softcap", mask="window", bias=Bias())
    yield fwd(HOPPER, 320, "varlen", "alibi", mask="window", mask_mod="hashed")
    yield fwd(HOPPER, 320, mask="window", score_mod="alibi", mask_mod="window", bias=Bias())
    yield fwd(HOPPER, 288, mask="full", bias=Bias())
    yield fwd(HOPPER, 288, mask="window", mask_mod="window")


def fwd_wide() -> Iterator[Case]:
    """Features of the mma.sync forward above head dim 256. `plain` has every row with a speculative row max."""
    for place in (AMPERE, AMPERE_86, AMPERE_ON_90):
        for head_dim in WIDE_HEAD_DIMS:
            yield fwd(place, head_dim, *ALL_SCORE, mask="window")
            yield fwd(place, head_dim, "varlen", "alibi", mask="window")
        yield fwd(place, 512, "batch_invariant")
        yield fwd(place, 512, "varlen", *ALL_SCORE, mask="window")
        yield fwd(place, 512, mask="chunk", dtype="fp16")
        yield fwd(place, 512, "out_dtype", head_dim_v=256)
        yield fwd(place, 264, mask="full")
        yield fwd(place, 512, mask="window", score_mod="alibi", mask_mod="window", bias=Bias())
        yield fwd(place, 512, mask="full", bias=Bias(dims="bk"))
        yield fwd(place, 512, mask="full", mask_mod="document_causal", block_map=True)
    yield fwd(AMPERE, 512, "softcap")
    yield fwd(AMPERE, 384, "dropout", "dropout_origin", mask="full")
    yield fwd(AMPERE, 320, "max_logit", score_mod="relative")


def bwd_features() -> Iterator[Case]:
    score = ("softcap", "alibi", "dropout")
    for place in (HOPPER, AMPERE):
        for name in score:
            yield bwd(place, 128, name)
            yield bwd(place, 64, name, mask="full")
        yield bwd(place, 128, "softcap", "alibi", mask="window")
        yield bwd(place, 128, *score, mask="window")
        yield bwd(place, 64, *score, mask="window")
        yield bwd(place, 128, *score, deterministic=True)
        yield bwd(place, 64, "alibi", "dropout", mask="full", deterministic=True)
        yield bwd(place, 128, "softcap", head_dim_v=72, mask="left")
        # Variable lengths.
        yield bwd(place, 128, "varlen")
        yield bwd(place, 64, "varlen", mask="window")
        yield from pre_and_postprocess(bwd(place, 128, "varlen"))
        yield bwd(place, 128, "varlen", role="scheduler")
        yield bwd(place, 128, "varlen", "seqused_k", role="scheduler")
        yield bwd(place, 128, "varlen", "softcap", "alibi")
        yield bwd(place, 64, "varlen", *score, mask="window")
        yield bwd(place, 128, "varlen", mask="window", deterministic=True)
        yield bwd(place, 128, "varlen", "out_dtype", deterministic=True, role="preprocess", has_dlse=True)
        yield bwd(place, 64, "varlen", "softcap", deterministic=True)
    # Wide heads.
    for name in (*score, "varlen"):
        yield bwd(HOPPER, 256, name)
        yield bwd(HOPPER, 192, name, head_dim_v=128, mask="full", dtype="fp16")
    yield bwd(HOPPER, 256, *score, mask="window")
    yield bwd(HOPPER, 256, "alibi", "dropout", mask="window")
    yield bwd(HOPPER, 256, "varlen", *score, mask="window")
    yield bwd(HOPPER, 256, "varlen", *score, deterministic=True)
    yield bwd(HOPPER, 192, "varlen", mask="window", deterministic=True)
    yield bwd(AMPERE, 256, "softcap", "alibi", "dropout", mask="window")
    yield bwd(AMPERE_86, 192, "softcap")
    yield bwd(AMPERE_ON_90, 256, "softcap", "alibi", "dropout", mask="window")
    yield bwd(AMPERE_ON_90, 256, "varlen")


def bwd_cluster() -> Iterator[Case]:
    """Features of the Hopper backward above head dim 256. `plain` and `deterministic` have its row of 512 columns."""
    for head_dim in HOPPER_CLUSTER_BWD_DIMS:
        for name in ("softcap", "alibi", "dropout", "varlen"):
            yield bwd(HOPPER, head_dim, name)
        yield bwd(HOPPER, head_dim, "softcap", "alibi", mask="window")
        yield bwd(HOPPER, head_dim, "alibi", "dropout", mask="full")
        yield bwd(HOPPER, head_dim, "alibi", mask="full", deterministic=True)
        yield bwd(HOPPER, head_dim, "varlen", mask="window", deterministic=True)
    for head_dim in HOPPER_CLUSTER_BWD_DIMS[:-1]:
        for mask in ("full", "causal"):
            yield bwd(HOPPER, head_dim, mask=mask)
        yield replace(bwd(HOPPER, head_dim, mask="full"), role="postprocess")
    yield bwd(HOPPER, 512, mask="chunk", dtype="fp16")
    yield bwd(HOPPER, 512, head_dim_v=256, mask="window")
    yield bwd(HOPPER, 384, head_dim_v=128, mask="full")
    yield bwd(HOPPER, 264, "varlen")
    yield bwd(HOPPER, 512, mask_mod="document", block_map=True)
    yield bwd(HOPPER, 512, mask_mod="document", block_map=True, deterministic=True)
    yield bwd(HOPPER, 512, score_mod="capped")


def bwd_wide() -> Iterator[Case]:
    """Features of the mma.sync backward above head dim 256. `plain` and `deterministic` have every row."""
    score = ("softcap", "alibi", "dropout")
    for place in (AMPERE, AMPERE_86, AMPERE_ON_90):
        for head_dim in WIDE_BWD_DIMS:
            yield bwd(place, head_dim, *score, mask="window")
            yield bwd(place, head_dim, "varlen", mask="window", deterministic=True)
        yield bwd(place, 512, "varlen", *score, mask="window", deterministic=True)
        yield bwd(place, 512, mask="chunk", deterministic=True)
        yield bwd(place, 512, mask="window", dtype="fp16")
        yield bwd(place, 512, head_dim_v=256, mask="window")
        yield bwd(place, 264, head_dim_v=128)
        yield bwd(place, 512, *score, mask="window", score_mod="alibi", mask_mod="window", bias=Bias())
        yield bwd(place, 512, "dropout", bias=Bias(dims="hqk"), deterministic=True)
        yield bwd(place, 512, score_mod="relative", has_table_gradients=True)
        yield bwd(place, 512, score_mod="relative", has_table_gradients=True, deterministic=True)
        yield bwd(place, 512, mask="full", mask_mod="document", block_map=True)
        yield bwd(place, 512, mask_mod="document", block_map=True, deterministic=True)
    yield bwd(AMPERE, 320, mask="chunk", dtype="fp16")
    yield bwd(AMPERE, 384, "varlen", mask="chunk")
    yield bwd(AMPERE_ON_90, 384, head_dim_v=320, mask="chunk")
    yield from pre_and_postprocess(bwd(AMPERE, 512, "varlen", head_dim_v=264, mask="full"))


def shards() -> Iterator[Case]:
    """Dropout on a shard of a sequence."""
    shard = ("dropout", "dropout_origin")
    for place in (HOPPER, AMPERE):
        yield fwd(place, 128, *shard, "out_dtype")
        yield fwd(place, 64, *shard, "out_dtype", mask="full")
        yield fwd(place, 128, *ALL_SCORE, "dropout_origin", mask="window")
        yield fwd(place, 256, *ALL_SCORE, "dropout_origin", mask="full")
        yield bwd(place, 128, *shard)
        yield bwd(place, 64, *shard, mask="full")
        yield bwd(place, 128, "softcap", "alibi", *shard, mask="window")
        yield bwd(place, 64, "softcap", "alibi", *shard, deterministic=True)
    yield bwd(AMPERE, 256, "softcap", "alibi", *shard, mask="window")
    yield fwd(AMPERE, 128, *shard, dtype="fp32")
    yield bwd(AMPERE, 128, *shard, dtype="fp32")


def chunks() -> Iterator[Case]:
    """Masks with `attention_chunk`."""
    for place in (HOPPER, AMPERE):
        yield fwd(place, 128, mask="chunk")
        yield bwd(place, 128, mask="chunk")
    yield fwd(HOPPER, 64, *ALL_SCORE, mask="chunk")
    yield fwd(HOPPER, 128, "varlen", mask="chunk")
    yield fwd(HOPPER, 128, "varlen", mask="chunk", role="scheduler")
    yield fwd(AMPERE, 128, mask="chunk", dtype="fp32")
    yield bwd(HOPPER, 128, "varlen", mask="chunk", deterministic=True)
    yield bwd(HOPPER, 128, "varlen", mask="chunk", role="scheduler")
    yield bwd(HOPPER, 64, mask="chunk", bias=Bias(dims="hqk", layout="aligned"), role="sum_dbias")
    yield bwd(HOPPER, 256, mask="chunk")
    yield bwd(HOPPER, 256, mask="chunk", deterministic=True)
    yield bwd(AMPERE, 96, mask="chunk")
    yield bwd(AMPERE, 128, mask="chunk", dtype="fp32")


# ---- fp32 inputs, which kernels split into fp16 pieces

FP32_DIMS = (64, 128)


def fp32() -> Iterator[Case]:
    """Every row of the tile tables, the kernels that split inputs into pieces, and features that take registers."""
    score, dtype = ("softcap", "alibi", "dropout"), "fp32"
    for place, head_dim in product((AMPERE, AMPERE_86, AMPERE_ON_90), FP32_DIMS):
        for mask in ("full", "causal"):
            yield fwd(place, head_dim, mask=mask, dtype=dtype)
            yield bwd(place, head_dim, mask=mask, dtype=dtype)
        yield fwd(place, head_dim, mask="full", role="split", dtype=dtype)
        yield bwd(place, head_dim, mask="full", role="split", dtype=dtype)
        yield from pre_and_postprocess(bwd(place, head_dim, mask="full", dtype=dtype))
        yield fwd(place, head_dim, *ALL_SCORE, mask="window", dtype=dtype)
        yield bwd(place, head_dim, *score, mask="window", dtype=dtype)
    for head_dim in FP32_DIMS:
        yield fwd(AMPERE, head_dim, mask="window", dtype=dtype)
        yield bwd(AMPERE, head_dim, mask="window", dtype=dtype)
        yield fwd(AMPERE, head_dim, "varlen", dtype=dtype)
        yield bwd(AMPERE, head_dim, "varlen", dtype=dtype)
        yield bwd(AMPERE, head_dim, "varlen", mask="window", deterministic=True, dtype=dtype)
    yield fwd(AMPERE, 128, "varlen", mask="full", role="split", dtype=dtype)
    yield bwd(AMPERE, 128, "varlen", mask="full", role="split", dtype=dtype)
    yield from pre_and_postprocess(bwd(AMPERE, 128, "varlen", mask="full", dtype=dtype))
    yield bwd(AMPERE, 128, deterministic=True, dtype=dtype)
    yield bwd(AMPERE, 64, mask="full", bias=Bias(dtype="fp32"), dtype=dtype)
    yield bwd(AMPERE, 64, mask="full", mask_mod="document", block_map=True, dtype=dtype)
    yield fwd(AMPERE, 128, score_mod="relative", dtype=dtype)
    yield fwd(AMPERE, 40, head_dim_v=128, dtype=dtype)
    yield bwd(AMPERE, 40, head_dim_v=128, dtype=dtype)


# ---- bias, user mods and block masks

ALIGNED = Bias(layout="aligned")


def fwd_mods() -> Iterator[Case]:
    for place in (HOPPER, AMPERE):
        yield fwd(place, 64, mask="full", score_mod="alibi")
        yield fwd(place, 128, score_mod="relative")
        yield fwd(place, 64, mask="full", score_mod="gated", mask_mod="by_head")
        yield fwd(place, 128, mask="full", mask_mod="document_causal", block_map=True)
        yield fwd(place, 128, mask="full", mask_mod="prefix")
        yield fwd(place, 128, block_map=True)
        yield fwd(place, 64, mask="full", bias=Bias())
        yield fwd(place, 128, bias=Bias(dims="hqk"))
        yield fwd(place, 128, mask="full", bias=Bias(dtype="fp32"))
        yield fwd(place, 128, mask="full", bias=Bias(dims="bk"))
        yield fwd(place, 64, mask="full", bias=Bias(dtype="fp32", layout="single"))
        yield fwd(place, 128, bias=ALIGNED)
        yield fwd(place, 128, mask="window", score_mod="alibi", mask_mod="window", bias=Bias())
        yield fwd(place, 128, "varlen", score_mod="alibi")
        yield fwd(place, 128, "softcap", "sinks", "max_logit", mask="full", mask_mod="prefix")
        yield fwd(place, 128, "dropout", score_mod="alibi")
    yield fwd(HOPPER, 128, mask="full", score_mod="capped")
    yield fwd(HOPPER, 128, score_mod="hiding", dtype="fp16")
    yield fwd(HOPPER, 256, mask="full", score_mod="relative")
    yield fwd(HOPPER, 64, mask="full", mask_mod="document", block_map=True)
    yield fwd(HOPPER, 96, mask="full", mask_mod="window", block_map=True, dtype="fp16")
    yield fwd(HOPPER, 256, mask="full", mask_mod="by_head", block_map=True)
    yield fwd(HOPPER, 128, mask="window", mask_mod="padding", block_map=True)
    yield fwd(HOPPER, 128, mask="full", bias=Bias(dtype="fp16", layout="single"), dtype="fp16")
    yield fwd(HOPPER, 256, mask="full", bias=Bias())
    yield fwd(HOPPER, 64, mask="full", bias=ALIGNED)
    yield fwd(HOPPER, 96, mask="full", bias=ALIGNED)
    yield fwd(HOPPER, 192, bias=ALIGNED)
    yield fwd(HOPPER, 192, mask="full", bias=ALIGNED, head_dim_v=128)
    yield fwd(HOPPER, 256, mask="window", bias=ALIGNED)
    yield fwd(HOPPER, 64, mask="window", score_mod="alibi", bias=replace(ALIGNED, dtype="fp16"))
    yield fwd(HOPPER, 128, mask="full", mask_mod="document", bias=ALIGNED, block_map=True)
    yield fwd(HOPPER, 128, "batch_invariant", bias=ALIGNED)
    yield fwd(HOPPER, 128, "dropout", bias=ALIGNED)
    yield fwd(HOPPER, 128, "out_dtype", mask_mod="document", mask="full", head_dim_v=64)
    yield fwd(HOPPER, 64, "varlen", mask="full", mask_mod="prefix")
    yield fwd(AMPERE_86, 192, mask="full", score_mod="capped", mask_mod="prefix", bias=Bias(dtype="fp16"))
    yield fwd(AMPERE_ON_90, 256, mask="full", mask_mod="by_head", block_map=True)


def bwd_mods() -> Iterator[Case]:
    for place in (HOPPER, AMPERE):
        yield bwd(place, 64, mask="full", score_mod="alibi")
        yield bwd(place, 64, mask="full", score_mod="alibi", has_table_gradients=True)
        yield bwd(place, 128, score_mod="relative", has_table_gradients=True)
        yield bwd(place, 128, mask="full", score_mod="capped")
        yield bwd(place, 128, mask="full", score_mod="capped", has_own_gradient=True)
        yield bwd(place, 64, mask="full", mask_mod="document", block_map=True)
        yield bwd(place, 128, mask="full", mask_mod="document_causal", block_map=True)
        yield bwd(place, 64, mask="full", mask_mod="document")
        yield bwd(place, 128, block_map=True)
        yield bwd(place, 64, mask="full", bias=Bias())
        yield bwd(place, 128, bias=Bias(dims="hqk"))
        yield bwd(place, 128, bias=Bias(dims="bk"))
        yield bwd(place, 128, mask="full", bias=Bias(dtype="fp32"))
        yield bwd(place, 64, mask="full", bias=Bias(dtype="fp32", layout="single"))
        yield bwd(place, 128, bias=replace(ALIGNED, has_gradient=False))
        yield bwd(place, 128, bias=Bias(dims="hqk"), deterministic=True)
        yield bwd(place, 64, mask="full", mask_mod="window", deterministic=True)
        yield bwd(place, 64, "softcap", "dropout", score_mod="alibi", mask="full")
        yield bwd(place, 128, "varlen", score_mod="relative", has_table_gradients=True)
        yield bwd(place, 64, "varlen", mask="window", score_mod="alibi", mask_mod="window")
        yield bwd(place, 128, mask_mod="document", block_map=True, deterministic=True)
    gated = {"score_mod": "gated", "mask_mod": "by_head", "mask": "full", "has_table_gradients": True}
    yield bwd(AMPERE, 64, **gated)
    yield bwd(AMPERE, 128, score_mod="relative", has_table_gradients=True, deterministic=True)
    yield bwd(AMPERE_ON_90, 256, mask="full", score_mod="relative", has_table_gradients=True)
    yield bwd(AMPERE, 128, mask="window", score_mod="alibi", mask_mod="window", bias=Bias())
    yield bwd(AMPERE, 128, dtype="fp16", score_mod="hiding")
    yield bwd(HOPPER, 128, mask_mod="prefix", mask="full", bias=Bias(dtype="fp16"))
    yield bwd(AMPERE_86, 128, mask_mod="prefix", mask="full", head_dim_v=64)
    # TMA moves the bias and its gradient.
    yield bwd(HOPPER, 64, mask="full", bias=ALIGNED)
    yield bwd(HOPPER, 64, bias=Bias(layout="aligned", has_gradient=False))
    yield bwd(HOPPER, 128, mask="full", bias=Bias(dtype="fp16", layout="aligned"), dtype="fp16")
    yield bwd(HOPPER, 128, bias=Bias(dims="hqk", layout="aligned"))
    yield bwd(HOPPER, 64, "softcap", score_mod="alibi", bias=ALIGNED)
    yield bwd(HOPPER, 64, mask="full", bias=ALIGNED, block_map=True)
    yield bwd(HOPPER, 64, bias=ALIGNED, deterministic=True)
    yield bwd(HOPPER, 128, "dropout", bias=ALIGNED)
    yield bwd(HOPPER, 128, mask="left", bias=Bias(dtype="fp16", layout="aligned"))
    # The sum of the terms of a gradient.
    for mask in ("full", "causal", "window"):
        yield bwd(HOPPER, 64, mask=mask, bias=Bias(dims="hqk", layout="aligned"), role="sum_dbias")
    yield bwd(HOPPER, 64, bias=Bias(dims="hqk", layout="aligned"))
    yield bwd(HOPPER, 64, "dropout", mask="full", score_mod="alibi", bias=ALIGNED)
    fp16 = Bias(dtype="fp16", dims="hqk", layout="aligned")
    yield bwd(HOPPER, 128, bias=fp16, dtype="fp16", role="sum_dbias")
    # Wide heads.
    yield bwd(HOPPER, 256, bias=Bias(dims="hqk", layout="aligned"), role="sum_dbias")
    yield bwd(HOPPER, 256, bias=Bias(dims="hqk", layout="aligned"))
    yield bwd(HOPPER, 256, score_mod="relative", has_table_gradients=True)
    yield bwd(HOPPER, 256, mask="full", mask_mod="document_causal", block_map=True)
    yield bwd(HOPPER, 256, mask="full", mask_mod="document_causal", block_map=True, deterministic=True)
    yield bwd(HOPPER, 192, mask="full", score_mod="capped", head_dim_v=128)
    yield bwd(HOPPER, 256, bias=Bias())
    yield bwd(HOPPER, 256, bias=ALIGNED)
    yield bwd(HOPPER, 256, bias=replace(ALIGNED, has_gradient=False))
    yield bwd(HOPPER, 192, mask="full", bias=Bias(dims="hqk", layout="aligned"), head_dim_v=128)
    yield bwd(HOPPER, 256, mask="full", score_mod="capped", bias=ALIGNED, block_map=True)
    yield bwd(HOPPER, 192, "softcap", "dropout", mask="window", score_mod="alibi", bias=ALIGNED)
    yield bwd(HOPPER, 256, "dropout", bias=ALIGNED, deterministic=True)
    yield bwd(HOPPER, 256, "softcap", "dropout", mask="window", score_mod="alibi", bias=Bias(dims="hqk"))
    yield bwd(HOPPER, 256, "varlen", score_mod="alibi", mask_mod="window")


def merges() -> Iterator[MergeCase]:
    for arch in ("sm_90", "sm_80"):
        yield from (MergeCase(arch=arch, head_dim=128, num_partials=num) for num in (2, 3, 4))
        yield MergeCase(arch=arch, head_dim=96, num_partials=3, dtype="fp16")
        yield MergeCase(arch=arch, head_dim=256, num_partials=4, dtype="fp32")


def cases() -> list[AnyCase]:
    """All cases. One plain kernel of each direction and family and those with features come first."""
    everything = list(plain())
    first = {(one.direction, one.family): one for one in reversed(everything)}
    found: list[AnyCase] = [
        *first.values(),
        *fwd_features(),
        *bwd_features(),
        *fwd_wide_sm90(),
        *fwd_wide(),
        *bwd_cluster(),
        *bwd_wide(),
        *shards(),
        *chunks(),
        *fwd_mods(),
        *bwd_mods(),
        *plain_pre_and_postprocess(),
    ]
    found += [*samples(), *fp32(), *deterministic(), *everything, *decode_cases(), *merges()]
    return list(dict.fromkeys(found))


# ---- adapter: the only part that knows how the project describes, plans and compiles a kernel


def call_of(case: Case, sizes: Sizes | None = None) -> tuple[Tensor, Tensor, Tensor, AttentionArgs]:
    """q, k, v and the arguments of the call of a case, on the CPU; q, k, v and a bias are uninitialized."""
    sizes = sizes or Sizes(BATCH, HEADS, HEADS_KV, case.seqlen_q, case.seqlen_k)
    batch, heads, names, varlen = sizes.batch, sizes.heads, case.features, "varlen" in case.features

    def rows(heads: int, seqlen: int, width: int) -> Tensor:
        shape = (seqlen, heads, width) if varlen else (batch, heads, seqlen, width)
        return torch.empty(shape, dtype=DTYPES[case.dtype])

    def offsets(total: int) -> Tensor:
        """Offsets: sequences of one token, and a last sequence with all other tokens."""
        return torch.tensor([*range(batch), total], dtype=torch.int32)

    width_v = case.head_dim_v or case.head_dim
    q, k = rows(heads, sizes.seqlen_q, case.head_dim), rows(sizes.heads_kv, sizes.seqlen_k, case.head_dim)
    args = call_args(
        q,
        BANDS[case.mask],
        scale=0.1,
        **(_mods_of(case, sizes) if case.has_mods else {}),
        softcap=3.0 if "softcap" in names else 0.0,
        # Not the dtype that kernels read; a launch converts it.
        alibi=torch.zeros(batch, heads, dtype=torch.bfloat16) if "alibi" in names else None,
        sinks=torch.zeros(heads) if "sinks" in names else None,
        dropout=0.75 if "dropout" in names else 0.0,
        rng=torch.zeros(2, dtype=torch.int64) if "dropout" in names else None,
        dropout_origin=(64, 32, 0, heads) if "dropout_origin" in names else (),
        return_max_logit="max_logit" in names,
        cu_seqlens_q=offsets(sizes.seqlen_q) if varlen else None,
        cu_seqlens_k=offsets(sizes.seqlen_k) if varlen else None,
        seqused_k=torch.ones(batch, dtype=torch.int32) if "seqused_k" in names else None,
        out_fp32="out_dtype" in names,
        batch_invariant="batch_invariant" in names,
        deterministic=case.deterministic,
        kernel_family=case.family,
    )
    bias = None if args.bias is None else args.bias.detach()
    args = args._replace(bias=bias, captures=tuple(x.detach() for x in args.captures))
    return q, k, rows(sizes.heads_kv, sizes.seqlen_k, width_v), args


def _mods_of(case: Case, sizes: Sizes) -> dict[str, Any]:
    """Bias, mods and block mask, as keywords of `attn`."""
    make, block_mask = mod_cases.Make(sizes, 0, "cpu"), None
    score_mod = getattr(make, case.score_mod)() if case.score_mod else None
    mask_mod = getattr(make, case.mask_mod)() if case.mask_mod else None
    for capture in BoundMods.of(score_mod, mask_mod, None).captures:
        capture.requires_grad_(case.has_table_gradients and capture.is_floating_point())
    if case.block_map:
        shape = sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k
        block_mask = BlockMask.of(mask_mod, shape, tile=mod_cases.BLOCK, causal=case.mask == "causal")
    return {
        "bias": None if case.bias is None else _bias(case.bias, sizes),
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "score_mod_bwd": _straight_through if case.has_own_gradient else None,
        "block_mask": block_mask,
    }


def _straight_through(grad, score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return grad


def _bias(bias: Bias, sizes: Sizes) -> Tensor:
    whole = dict(zip("bhqk", (sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k), strict=True))
    shape = [size if name in bias.dims else 1 for name, size in whole.items()]
    # "single": the keys of a row are not contiguous. Otherwise the row stride is a multiple of 8 ("aligned"), or even
    # and not a multiple of 8 ("pairs").
    if bias.layout == "single":
        memory = torch.empty(*shape[:2], shape[3], shape[2], dtype=DTYPES[bias.dtype]).mT
    else:
        padding = 0 if bias.layout == "aligned" else 2
        memory = torch.empty(*shape[:3], shape[3] + padding, dtype=DTYPES[bias.dtype])[..., : shape[3]]
    return memory.requires_grad_(bias.has_gradient)


def plan_of(case: Case, sizes: Sizes | None = None) -> Plan:
    """The plan of a case's call, as a launch makes it; raises `UnsupportedError` if the family has none."""
    q, k, v, args = call_of(case, sizes)
    problem, arch = describe(q, k, v, args, "cuda"), ARCHS[case.arch]
    if case.direction == "fwd":
        return plan_forward(problem, arch, case.family, can_pack_gqa="pack_gqa" in case.features)
    return plan_backward(problem, arch, case.deterministic, case.has_dlse, case.family)


@cache
def compile_key(case: AnyCase) -> CompileKey:
    """The `CompileKey` of the kernel of a case; raises `UnsupportedError` if the family has none."""
    if isinstance(case, DecodeCase):
        return decode_key(case)
    if isinstance(case, MergeCase):
        dtype = str(DTYPES[case.dtype]).removeprefix("torch.")
        return merge_key(dtype, case.head_dim, case.num_partials, ARCHS[case.arch])
    names = {
        "scheduler": "varlen_scheduler",
        "split": "split_fp32",
        "preprocess": "bwd_preprocess",
        "postprocess": "bwd_postprocess",
        "sum_dbias": "bwd_sum_dbias",
    }
    plan = plan_of(case)
    return plan.main if case.role == "main" else plan.launch(names[case.role])


def resources_of(key: CompileKey) -> Resources:
    """Compile a kernel without caches; its machine code and the remarks of ptxas."""
    with without_locations(), mock.patch.object(reading, "disassemble", lambda cubin: ""):
        return reading.kernel_resources(key)


def toolchain() -> str:
    """DSL version and CUDA flavour. Only machine code of the same toolchain is compared."""
    found = versions.toolchain()
    return f"{found['dsl']}-{found['flavour']}"


def source_digest() -> str:
    """sha256 of all files that may change a kernel or the meaning of a case."""
    root = Path(__file__).parents[2]
    names = [f"tests/lock/{name}.py" for name in ("cases", "cubin", "decode_cases")]
    files = [root / name for name in ("tests/jit/gates.py", *names, "tests/mod_cases.py")]
    for folder in ("cute_flash", "layouts"):
        files += (root / folder).rglob("*.py")
    whole = hashlib.sha256()
    for path in sorted(files):
        whole.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()


def row_and_bounds(case: Case) -> Hashable:
    """The row of the tile table that a case takes, and the sides on which its mask is bounded."""
    key = compile_key(case)
    sides = key.static.has_left, key.static.has_right
    return case.direction, case.family, case.arch, case.deterministic, key.tile, sides


def reachable() -> Iterator[Case]:
    """Plain calls that have a kernel: every width and mask, short and long keys, every architecture."""
    steps = range(8, 257, 8)
    widths: list[tuple[int, int | None]] = [(head_dim, None) for head_dim in steps]
    widths += [(d, dv) for d, dv in product(steps[3::4], steps[3::4]) if d != dv]
    for place, head_dim, mask in product(PLACES[1:], range(264, 513, 8), MASKS):
        yield fwd(place, head_dim, mask=mask)
        yield fwd(place, 128, head_dim_v=head_dim, mask=mask)
        yield fwd(HOPPER, head_dim, mask=mask)
        one = bwd(place, head_dim, mask=mask)
        yield from (one, replace(one, deterministic=True), replace(one, head_dim=64, head_dim_v=head_dim))
    for place, (head_dim, head_dim_v), mask in product(PLACES, widths, MASKS):
        for keys in (SHORT, 1536, SEQLEN_K):
            yield fwd(place, head_dim, head_dim_v=head_dim_v, mask=mask, seqlen_k=keys)
        one = bwd(place, head_dim, head_dim_v=head_dim_v, mask=mask)
        for wanted in (one, replace(one, deterministic=True)):
            try:
                compile_key(wanted)
            except UnsupportedError:
                continue
            yield wanted


def kernel_names() -> set[str]:
    """Every kernel that the project can compile."""
    return set(KERNELS)


def kernel_name(case: AnyCase) -> str:
    return compile_key(case).kernel
