"""Calls with a score_mod, a mask_mod, a bias or a block mask, in many sizes.

All calls of a `Kind` use the same kernel of a family, which keeps the number of kernels to compile small. GPU tests run
the calls; other tests only plan or compile them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cute_flash import BlockMask, attn, attn_varlen, masks
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from tests.arguments import call_args
from tests.lengths import Lengths

BLOCK = (128, 128)
NUM_DISTANCES = 32  # the size of a table of relative positions


@dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int


class Make:
    """Builds mods, with random captured tensors for some sizes."""

    def __init__(self, sizes: Sizes, seed: int, device: str) -> None:
        self.sizes, self.device = sizes, device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def alibi(self) -> Callable:
        slopes = self.normal(self.sizes.heads).abs() * 0.1
        return lambda score, b, h, q, kv: score - slopes[h] * (q - kv).abs()

    def relative(self) -> Callable:
        """A learned value for each distance and head, transposed in memory."""
        table, near = self.normal(self.sizes.heads, NUM_DISTANCES).T, NUM_DISTANCES // 2
        return lambda score, b, h, q, kv: score + table[(q - kv + near).clamp(0, NUM_DISTANCES - 1), h]

    def capped(self) -> Callable:
        cap = 4.5
        return lambda score, b, h, q, kv: cap * torch.tanh(score / cap)

    def gated(self) -> Callable:
        """Captures tensors of several dtypes: by batch and head, by query, by key, and a single number."""
        sizes = self.sizes
        gate, rows = self.normal(sizes.batch, sizes.heads), self.normal(sizes.seqlen_q).bfloat16()
        keys, one = self.normal(sizes.seqlen_k).half(), self.normal(1)[0]

        def mod(score, b, h, q, kv):
            x = score * torch.sigmoid(gate[b, h]) + rows[q] * keys[kv] * one
            return torch.where(q >= kv, x, torch.maximum(x, -score)) + torch.exp(-score.abs())

        return mod

    def hiding(self) -> Callable:
        """A score_mod that masks scores by returning -inf."""
        step = 3
        return lambda score, b, h, q, kv: torch.where((q + kv) % step == 0, -float("inf"), score)

    def stepped(self) -> Callable:
        """Divides negative and positive ints by powers of two."""
        return lambda score, b, h, q, kv: score + (q - kv) // 16 - (q - kv) % 4

    def document(self) -> Callable:
        longest = max(self.sizes.seqlen_q, self.sizes.seqlen_k)
        ids = self.ints(2, self.sizes.batch, longest).cumsum(1) // max(1, longest // 8)
        return masks.document(ids.to(torch.int32))

    def hashes(self) -> Tensor:
        """int64 ids of documents that differ only above bit 32; (S)."""
        longest = max(self.sizes.seqlen_q, self.sizes.seqlen_k)
        return ((self.ints(2, longest).cumsum(0) // max(1, longest // 8)) << 33) + 12345

    def hashed(self) -> Callable:
        ids = self.hashes()
        return lambda b, h, q, kv: ids[q] == ids[kv]

    def hashed_causal(self) -> Callable:
        return masks.and_(self.hashed(), masks.causal(self.sizes.seqlen_k - self.sizes.seqlen_q))

    def hashed_near(self) -> Callable:
        """Differences and products of int64, and captured and literal ints beyond 32 bits."""
        ids, end = self.hashes(), 12345 + (5 << 33)

        def mod(b, h, q, kv):
            is_near = ((ids[q] - ids[kv]).abs() <= 1 << 33) & (ids[kv] < end)
            return is_near | ((q.long() - kv) * (1 << 31) == (ids[q] - ids[kv]) // 4)

        return mod

    def same_document(self) -> Callable:
        """A learned value for each head and document, which a part of an int64 indexes."""
        ids, bonus = self.hashes(), self.normal(self.sizes.heads, 8)
        return lambda score, b, h, q, kv: score + torch.where(ids[q] == ids[kv], bonus[h, (ids[kv] >> 33) & 7], -0.5)

    def document_causal(self) -> Callable:
        return masks.and_(self.document(), masks.causal(self.sizes.seqlen_k - self.sizes.seqlen_q))

    def prefix(self) -> Callable:
        return masks.prefix_lm(self.ints(max(1, self.sizes.seqlen_k), self.sizes.batch))

    def window(self) -> Callable:
        return masks.sliding_window(max(2, self.sizes.seqlen_k // 5), num_global=3)

    def by_head(self) -> Callable:
        flags, width = self.ints(2, self.sizes.heads, 7) == 1, 40
        return lambda b, h, q, kv: (q - kv < width + h) & flags[h, (kv + b) % 7]

    def padding(self) -> Callable:
        lengths = self.ints(self.sizes.seqlen_k + 1, self.sizes.batch)
        return lambda b, h, q, kv: kv < lengths[b]


@dataclass(frozen=True)
class Kind:
    """The properties of a call that decide its kernel."""

    head_dim: int
    score: str = ""
    mask: str = ""
    bias: torch.dtype | None = None
    bounds: tuple[bool, bool] = (False, False)
    has_block_mask: bool = False
    has_pairs: bool = True  # the strides of the bias allow loads of two keys
    is_aligned: bool = False  # TMA can load the bias
    dtype: torch.dtype = torch.bfloat16
    head_dim_v: int | None = None  # of the values; None: head_dim
    more: dict[str, Any] = field(
        default_factory=dict, hash=False
    )  # other keywords: softcap, return_max_logit, and sinks=True

    @property
    def id(self) -> str:
        memory = "-aligned" if self.is_aligned else "" if self.has_pairs else "-single"
        bias = "" if self.bias is None else f"bias-{str(self.bias)[6:]}{memory}"
        band = "l" * self.bounds[0] + "r" * self.bounds[1]
        parts = self.score, self.mask, bias, "block_mask" * self.has_block_mask, band, *self.more
        widths = f"d{self.head_dim}" + ("" if self.head_dim_v is None else f"v{self.head_dim_v}")
        return "-".join((widths, *filter(None, parts)))


@dataclass(frozen=True)
class Case:
    kind: Kind
    sizes: Sizes
    seed: int = 0
    device: str = "cuda"

    @property
    def id(self) -> str:
        s = self.sizes
        return f"{self.kind.id}-b{s.batch}h{s.heads}kv{s.heads_kv}-{s.seqlen_q}x{s.seqlen_k}-{self.seed}"

    @cached_property
    def make(self) -> Make:
        return Make(self.sizes, self.seed, self.device)

    @cached_property
    def band(self) -> Band:
        left, right = self.kind.bounds
        drawn = random.Random(self.seed)
        bound = max(1, self.sizes.seqlen_k // 2)
        return Band(
            drawn.randrange(bound) if left else None, drawn.choice((0, drawn.randrange(bound))) if right else None
        )

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of the LSE."""
        return self.sizes.batch, self.sizes.heads, self.sizes.seqlen_q

    @property
    def out_shape(self) -> tuple[int, ...]:
        return *self.row_shape, self.kind.head_dim_v or self.kind.head_dim

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        """Call `attn` and return out and LSE."""
        out, lse, *_ = attn(q, k, v, **self.options, **more, return_lse=True)
        return out, lse

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.make.normal(*shape).to(self.kind.dtype) for shape in self._shapes())
        return q, k, v

    def uninitialized_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors like `inputs`, for calls that are only planned."""
        q, k, v = (torch.empty(shape, dtype=self.kind.dtype, device=self.device) for shape in self._shapes())
        return q, k, v

    def _shapes(self) -> list[tuple[int, ...]]:
        s, d = self.sizes, self.kind.head_dim
        keys = s.batch, s.heads_kv, s.seqlen_k
        return [(s.batch, s.heads, s.seqlen_q, d), (*keys, d), (*keys, self.kind.head_dim_v or d)]

    @cached_property
    def options(self) -> dict[str, Any]:
        """The keywords of the call of `attn`."""
        make, kind = self.make, self.kind
        found: dict[str, Any] = {"window": (self.band.left, self.band.right), **kind.more}
        if found.pop("sinks", False):
            found["sinks"] = make.normal(self.sizes.heads)
        for name, value in (("score_mod", kind.score), ("mask_mod", kind.mask)):
            if value:
                found[name] = getattr(make, value)()
        if kind.bias is not None:
            found["bias"] = self._bias()
        if kind.has_block_mask:
            shape = self.sizes.batch, self.sizes.heads, self.sizes.seqlen_q, self.sizes.seqlen_k
            causal = self.band == Band(None, 0) and self.seed % 2 == 0
            found["block_mask"] = BlockMask.of(
                found.get("mask_mod"), shape, tile=BLOCK, causal=causal, device=self.device
            )
        return found

    def _bias(self) -> Tensor:
        """A bias of a random shape that broadcasts, with the strides of the kind."""
        s, drawn = self.sizes, random.Random(self.seed + 1)
        shape = [size if drawn.random() < 0.7 else 1 for size in (s.batch, s.heads, s.seqlen_q)]
        if self.kind.is_aligned:
            shape[2] = s.seqlen_q
            return self.make.normal(*shape, -(-s.seqlen_k // 8) * 8 + 8).to(self.kind.bias)[..., : s.seqlen_k]
        if self.kind.has_pairs:
            # The number of keys is even, and so are the strides.
            return self.make.normal(*shape, s.seqlen_k + 2).to(self.kind.bias)[..., :-2]
        if drawn.random() < 0.3:
            return self.make.normal(*shape, 1).to(self.kind.bias)
        return self.make.normal(*shape[:2], s.seqlen_k, shape[2]).to(self.kind.bias).mT

    def args(self, **fields: Any) -> AttentionArgs:
        """The `AttentionArgs` of the call; `needs_grad` is set for tensors that require grad."""
        options = self.options
        return call_args(
            torch.empty(self.kind.head_dim), self.band,
            softcap=options.get("softcap", 0.0), sinks=options.get("sinks"),
            return_max_logit=options.get("return_max_logit", False), bias=options.get("bias"),
            score_mod=options.get("score_mod"), mask_mod=options.get("mask_mod"),
            block_mask=options.get("block_mask"), **fields,
        )  # fmt: skip


@dataclass(frozen=True)
class VarlenCase(Case):
    """A call of `attn_varlen`. `sizes` has the largest lengths."""

    lengths: Lengths = field(default_factory=lambda: Lengths([1], [1]))

    @staticmethod
    def of(kind: Kind, lengths: Lengths, heads: int, heads_kv: int, seed: int, device: str) -> VarlenCase:
        longest = max(1, *lengths.queries), max(1, *lengths.keys)
        return VarlenCase(kind, Sizes(len(lengths.keys), heads, heads_kv, *longest), seed, device, lengths)

    @property
    def id(self) -> str:
        return f"{super().id}-{'-'.join(map(str, self.lengths.queries[:5]))}" + "-used" * bool(self.lengths.used)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.sizes.heads, self.lengths.totals[0]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.lengths.totals[0], self.sizes.heads, self.kind.head_dim

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        options = {**self.options, **self.lengths.args(q.device), **more}
        out, lse, *_ = attn_varlen(q, k, v, **options, return_lse=True)
        return out, lse

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v, with NaN in tokens that belong to no sequence or are not used."""
        q, k, v = (self.make.normal(*shape) for shape in self._shapes())
        q[sum(self.lengths.queries) :] = torch.nan
        for x in (k, v):
            x[self.lengths.unused_keys().to(x.device)] = torch.nan
        return q.to(self.kind.dtype), k.to(self.kind.dtype), v.to(self.kind.dtype)

    def _shapes(self) -> list[tuple[int, ...]]:
        (sq, sk), s, d = self.lengths.totals, self.sizes, self.kind.head_dim
        return [(sq, s.heads, d), (sk, s.heads_kv, d), (sk, s.heads_kv, d)]

    def args(self, **fields: Any) -> AttentionArgs:
        return super().args(**self.lengths.args(self.device), **fields)


bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
KINDS = [
    Kind(64, score="alibi"),
    Kind(128, score="relative", bounds=(False, True)),
    Kind(128, score="capped"),
    Kind(64, score="gated", mask="by_head"),
    Kind(128, score="hiding", bounds=(False, True), dtype=fp16),
    Kind(256, score="relative"),
    Kind(64, mask="document"),
    Kind(128, mask="document_causal", has_block_mask=True),
    Kind(64, mask="document", has_block_mask=True),
    Kind(128, mask="prefix"),
    Kind(96, mask="window", has_block_mask=True, dtype=fp16),
    Kind(256, mask="by_head", has_block_mask=True),
    Kind(128, mask="padding", bounds=(True, True), has_block_mask=True),
    Kind(128, bounds=(False, True), has_block_mask=True),
    Kind(64, bias=bf16),
    Kind(128, bias=bf16, bounds=(False, True)),
    Kind(128, bias=fp32),
    Kind(128, bias=fp16, has_pairs=False, dtype=fp16),
    Kind(256, bias=bf16),
    Kind(64, bias=fp32, has_pairs=False),
    Kind(64, bias=bf16, is_aligned=True),
    Kind(128, bias=bf16, is_aligned=True, bounds=(False, True)),
    Kind(128, mask="document", bias=fp16, is_aligned=True, has_block_mask=True, dtype=fp16),
    Kind(64, score="alibi", bias=fp16, is_aligned=True, bounds=(True, True)),
    Kind(96, bias=bf16, is_aligned=True),
    Kind(256, bias=bf16, is_aligned=True, bounds=(False, True)),
    Kind(192, bias=fp16, is_aligned=True, dtype=fp16),
    Kind(64, mask="window"),
    Kind(128, score="alibi", mask="window", bias=bf16),
    Kind(64, score="gated", mask="document", bias=bf16, has_block_mask=True, bounds=(False, True)),
    Kind(192, score="capped", mask="prefix", bias=fp16, dtype=fp16),
    Kind(128, mask="prefix", more={"softcap": 4.0, "sinks": True, "return_max_logit": True}),
]
CASES_OF_KIND = 9


def _sizes(drawn: random.Random, kind: Kind) -> Sizes:
    heads_kv = drawn.choice((1, 2, 3))
    batch, group = drawn.choice((1, 2, 3)), drawn.choice((1, 2, 4))
    lengths = [drawn.choice((1, 17, 64, 129, 200, 256, 333, 511, 640)) for _ in range(2)]
    lengths[1] += lengths[1] % 2 if kind.bias is not None and kind.has_pairs else 0
    return Sizes(batch, heads_kv * group, heads_kv, *lengths)


def cases(device: str = "cuda", kinds: list[Kind] = KINDS) -> list[Case]:
    found = []
    for i, kind in enumerate(kinds):
        drawn = random.Random(i)
        for seed in range(CASES_OF_KIND):
            found.append(Case(kind, _sizes(drawn, kind), seed, device))
        # Many more tiles than SMs.
        found.append(Case(kind, Sizes(4, 40, 8, 300, 150), CASES_OF_KIND, device))
    return found


VARLEN_KINDS = [
    Kind(64, score="alibi"),
    Kind(128, score="relative", bounds=(False, True)),
    Kind(128, score="capped"),
    Kind(64, score="gated", mask="by_head"),
    Kind(128, score="hiding", bounds=(False, True), dtype=fp16),
    Kind(256, score="relative", bounds=(True, True)),
    Kind(64, mask="document"),
    Kind(128, score="relative", mask="window", bounds=(True, True)),
    Kind(96, mask="prefix", bounds=(True, False), dtype=fp16),
    Kind(64, score="alibi", mask="by_head", more={"softcap": 4.0, "sinks": True}),
]
VARLEN_LENGTHS = (
    Lengths([257, 1, 0, 130, 64, 500], [391, 3, 77, 0, 64, 129], None, (70, 33)),
    Lengths([200, 50, 0, 129, 40], [300, 64, 50, 129, 40], [250, 0, 20, 128, 40], (3, 200)),
    # More tiles than SMs.
    Lengths([300, 40, 999, 128] * 4, [300, 40, 999, 128] * 4),
)


def varlen_cases(device: str = "cuda", kinds: list[Kind] = VARLEN_KINDS) -> list[VarlenCase]:
    """Every kind with every batch of `VARLEN_LENGTHS`: odd lengths, empty sequences, padding, grouped heads."""
    heads = ((4, 2), (6, 2), (8, 8))
    return [
        VarlenCase.of(kind, lengths, *heads[seed], seed, device)
        for kind in kinds
        for seed, lengths in enumerate(VARLEN_LENGTHS)
    ]
