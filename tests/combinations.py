"""Random combinations of shapes, masks, dtypes and score features.

A `Combination` is a call of `attn`, a `VarlenCombination` a call of `attn_varlen`. Both have the same methods.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import cute_flash
from cute_flash import reference
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from cute_flash.spec.features import FEATURES
from cute_flash.spec.problem import Problem
from tests.gradients import loss_of
from tests.lengths import Lengths

# (seed, offset) of dropout in tests.
RNG = (0x1234_5678_9ABC_DEF0, 77)

Outputs = tuple[Tensor, Tensor]  # out, lse


class _Call:
    """The common base of `Combination` and `VarlenCombination`."""

    def args(self, x: dict[str, Tensor], scale: float | None = None) -> AttentionArgs:
        raise NotImplementedError

    def dense(self, by: Any, x: dict[str, Tensor], scale: float | None = None) -> Outputs:
        """(out, lse) of the call, computed by `by`: `reference.dense` or `reference.dense_low_precision`."""
        return by(x["q"], x["k"], x["v"], args=self.args(x, scale))


@dataclass(frozen=True)
class Combination(_Call):
    batch: int
    heads_kv: int
    group: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    left: int | None = None
    right: int | None = None
    features: dict[str, Any] = field(
        default_factory=dict
    )  # softcap and dropout: the value; alibi: 1 or 2, its rank; sinks: True
    chunk: int | None = None

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    @property
    def band(self) -> Band:
        return Band(self.left, self.right, self.chunk)

    @staticmethod
    def drawn(seed: int) -> Combination:
        """A random combination, determined by the seed."""
        pick = random.Random(seed)
        some = {
            "softcap": pick.choice([0.5, 3.0, 50.0]),
            "alibi": pick.choice([1, 2]),
            "sinks": True,
            "dropout": pick.choice([0.1, 0.5, 0.9]),
        }
        bounds = [None, 0, pick.randrange(6), pick.randrange(60)]
        return Combination(
            batch=pick.choice([1, 2, 3]),
            heads_kv=pick.choice([1, 2, 3]),
            group=pick.choice([1, 2, 3]),
            seqlen_q=pick.choice([0, 1, 5, 17, 33, 50]),
            seqlen_k=pick.choice([0, 1, 6, 16, 40, 61]),
            head_dim=pick.choice([1, 3, 8, 24]),
            head_dim_v=pick.choice([2, 8, 16]),
            dtype=pick.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
            left=pick.choice(bounds),
            right=pick.choice(bounds),
            features={name: value for name, value in some.items() if pick.random() < 0.5},
            chunk=pick.choice([None, None, 1, 7, 16, 100]),
        )

    @property
    def problem(self) -> Problem:
        return Problem(
            batch=self.batch,
            heads=self.heads,
            heads_kv=self.heads_kv,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            head_dim=self.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            band=self.band,
            head_dim_v=None if self.head_dim_v == self.head_dim else self.head_dim_v,
            features=tuple(feature.name for feature in FEATURES if feature.name in self.features),
        )

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v, and the slopes and sinks of the features."""
        normal = drawing(self, self.dtype)
        keys = (self.batch, self.heads_kv, self.seqlen_k)
        made = {
            "q": normal(self.batch, self.heads, self.seqlen_q, self.head_dim),
            "k": normal(*keys, self.head_dim),
            "v": normal(*keys, self.head_dim_v),
        }
        return made | self.per_head(normal, self.batch)

    def per_head(self, normal: Any, batch: int) -> dict[str, Tensor]:
        """Slopes and sinks: fp32, as parameters usually are, or fp64 for an fp64 call."""
        dtype, made = torch.float64 if self.dtype == torch.float64 else torch.float32, {}
        if "alibi" in self.features:
            shape = (self.heads,) if self.features["alibi"] == 1 else (batch, self.heads)
            made["alibi"] = normal(*shape, dtype=dtype).mul_(0.2)
        if "sinks" in self.features:
            made["sinks"] = normal(self.heads, dtype=dtype)
        return made

    def args(self, x: dict[str, Tensor], scale: float | None = None) -> AttentionArgs:
        """The `AttentionArgs` of the call, for functions of `cute_flash.reference`; dropout has the seed `RNG`."""
        dropout = self.features.get("dropout", 0.0)
        return reference.plain_args(x["q"], self.band, scale)._replace(
            softcap=self.features.get("softcap", 0.0),
            alibi=x.get("alibi"),
            sinks=x.get("sinks"),
            dropout=dropout,
            rng=torch.tensor(RNG, device=x["q"].device) if dropout else None,
        )

    def attend(self, x: dict[str, Tensor], **more: Any) -> Any:
        return cute_flash.attn(x["q"], x["k"], x["v"], **self.options(x), return_lse=True, **more)

    def weights(self, generator: torch.Generator) -> Outputs:
        """Random gradients of out, exact in the dtype of the call, and of the LSE."""
        shape = self.batch, self.heads, self.seqlen_q
        dout = torch.randn(*shape, self.head_dim_v, generator=generator).to(self.dtype)
        return dout, torch.randn(*shape, generator=generator)

    def options(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The keywords of the call of `attn`."""
        named = {name: self.features[name] for name in ("softcap", "dropout") if name in self.features}
        per_head = {name: tensors[name] for name in ("alibi", "sinks") if name in tensors}
        return {"window": (self.left, self.right), "attention_chunk": self.chunk, **named, **per_head}


@dataclass(frozen=True)
class VarlenCombination(_Call):
    """A varlen batch. Tokens outside of all sequences hold NaN, and so do their gradients."""

    one: Combination  # everything but the batch and the lengths
    lengths: Lengths

    @property
    def features(self) -> dict[str, Any]:
        return self.one.features

    @property
    def head_dim(self) -> int:
        return self.one.head_dim

    @property
    def head_dim_v(self) -> int:
        return self.one.head_dim_v

    @property
    def batch(self) -> int:
        return len(self.lengths.queries)

    @property
    def problem(self) -> Problem:
        """The problem that kernels are planned for; its lengths are total numbers of tokens."""
        seqlen_q, seqlen_k = self.lengths.totals
        return replace(
            self.one.problem,
            batch=self.batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            varlen=True,
            seqused_k=self.lengths.used is not None,
        )

    def tensors(self) -> dict[str, Tensor]:
        one, normal = self.one, drawing(self, self.one.dtype)
        queries, keys = self.lengths.totals
        made = {
            "q": normal(queries, one.heads, one.head_dim),
            "k": normal(keys, one.heads_kv, one.head_dim),
            "v": normal(keys, one.heads_kv, one.head_dim_v),
        }
        made["q"][sum(self.lengths.queries) :] = torch.nan
        unused = self.lengths.unused_keys()
        made["k"][unused], made["v"][unused] = torch.nan, torch.nan
        return made | one.per_head(normal, self.batch)

    def args(self, x: dict[str, Tensor], scale: float | None = None) -> AttentionArgs:
        return self.one.args(x, scale)._replace(**self.lengths.args(x["q"].device))

    def attend(self, x: dict[str, Tensor], **more: Any) -> Any:
        options = {**self.one.options(x), **self.lengths.args(x["q"].device), **more}
        return cute_flash.attn_varlen(x["q"], x["k"], x["v"], return_lse=True, **options)

    def weights(self, generator: torch.Generator) -> Outputs:
        total, rest, one = self.lengths.totals[0], sum(self.lengths.queries), self.one
        dout = torch.randn(total, one.heads, one.head_dim_v, generator=generator).to(one.dtype)
        dlse = torch.randn(one.heads, total, generator=generator)
        dout[rest:], dlse[:, rest:] = torch.nan, torch.nan
        return dout, dlse


def drawing(case: Any, standard: torch.dtype) -> Any:
    """A generator of standard normal tensors, seeded by the case."""
    # Calls without a chunk keep the tensors that they had before there were chunks.
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).replace(", chunk=None", "").encode()))

    def normal(*shape: int, dtype: torch.dtype = standard) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return normal


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(sq: int = 5, sk: int = 6, heads_kv: int = 2, d: int = 3) -> list[Tensor]:
    return [normal(1, h, s, d, seed=i) for i, (h, s) in enumerate(((4, sq), (heads_kv, sk), (heads_kv, sk)))]


def gradients(function: Any, tensors: dict[str, Tensor], weights: Outputs) -> dict[str, Tensor]:
    return results(function, tensors, weights)[1]


def results(function: Any, tensors: dict[str, Tensor], weights: Outputs) -> tuple[Outputs, dict[str, Tensor]]:
    """(out, lse) of `function`, and the gradients of all tensors for the gradients `weights` of (out, lse)."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out, lse = function(leaves)
    found = torch.autograd.grad(loss_of((out, lse), weights), list(leaves.values()))
    return (out.detach(), lse.detach()), dict(zip(leaves, found, strict=True))
