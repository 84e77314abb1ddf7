"""Random combinations of what a call may ask for: shapes, masks, dtypes and features that belong together.

A `Combination` is a call of `attn`, a `PackedCombination` one of `attn_varlen`; tests treat them alike.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import cute_flash
from cute_flash.reference import tiled as reference
from cute_flash.reference.dropout import Dropout
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Features, Problem
from tests.packed_model import Lengths

# Every draw of dropout in tests: (seed, offset).
RNG = (0x1234_5678_9ABC_DEF0, 77)

Outputs = tuple[Tensor, Tensor]  # out, lse


class KnownDropout(Dropout):
    """That of `RNG`, of which each mask is drawn once: the oracle and the yardsticks share it."""

    def kept(self, batch: range, heads: range, rows: range, keys: range) -> Tensor:
        return _kept(self.p, self.heads, self.first, self.rng.device, batch, heads, rows, keys)


@functools.lru_cache(maxsize=16)
def _kept(p: float, heads: int, first: int, device: torch.device, *where: range) -> Tensor:
    return Dropout(p, torch.tensor(RNG, device=device), heads, first).kept(*where)


@dataclass(frozen=True)
class Combination:
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
    features: dict[str, Any] = field(default_factory=dict)  # softcap, dropout; alibi: 1 or 2-D; sinks: True

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    @property
    def band(self) -> Band:
        return Band(self.left, self.right)

    @staticmethod
    def drawn(seed: int) -> Combination:
        """One of all that belong together; the same for the same seed."""
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
        )

    @property
    def problem(self) -> Problem:
        sizes = self.batch, self.heads, self.heads_kv, self.seqlen_q, self.seqlen_k, self.head_dim
        width_v = None if self.head_dim_v == self.head_dim else self.head_dim_v
        dtype, asked = str(self.dtype).removeprefix("torch."), dict.fromkeys(self.features, True)
        return Problem(*sizes, dtype, self.band, width_v, Features(**asked))

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v, and the slopes and sinks if asked for."""
        normal = drawing(self, self.dtype)
        keys = (self.batch, self.heads_kv, self.seqlen_k)
        made = {
            "q": normal(self.batch, self.heads, self.seqlen_q, self.head_dim),
            "k": normal(*keys, self.head_dim),
            "v": normal(*keys, self.head_dim_v),
        }
        return made | self.per_head(normal, self.batch)

    def per_head(self, normal: Any, batch: int) -> dict[str, Tensor]:
        """Slopes and sinks, as parameters are: in fp32, but where all is in fp64."""
        dtype, made = torch.float64 if self.dtype == torch.float64 else torch.float32, {}
        if "alibi" in self.features:
            shape = (self.heads,) if self.features["alibi"] == 1 else (batch, self.heads)
            made["alibi"] = normal(*shape, dtype=dtype).mul_(0.2)
        if "sinks" in self.features:
            made["sinks"] = normal(self.heads, dtype=dtype)
        return made

    def score(self, tensors: dict[str, Tensor], first: int = 0) -> reference.Score:
        """What the oracle is to do, with tensors that may want gradients."""
        alibi, p = tensors.get("alibi"), self.features.get("dropout")
        if alibi is not None:
            alibi = alibi.expand(self.batch, self.heads)
        rng = torch.tensor(RNG, device=next(iter(tensors.values())).device)
        dropout = None if p is None else KnownDropout(p, rng, self.heads, first)
        return reference.Score(self.features.get("softcap"), alibi, tensors.get("sinks"), dropout)

    def attend(self, x: dict[str, Tensor], **more: Any) -> Any:
        return cute_flash.attn(x["q"], x["k"], x["v"], **self.options(x), return_lse=True, **more)

    def dense(self, by: Any, x: dict[str, Tensor], scale: float | None) -> Outputs:
        """By `reference.dense`, or a function like it; differentiable."""
        return by(x["q"], x["k"], x["v"], self.band, scale, self.score(x))

    def fused(
        self, x: dict[str, Tensor], outs: Outputs, douts: Outputs, scale: float | None
    ) -> tuple[Tensor, ...]:
        """dq, dk, dv, dalibi (B, H) and dsinks of the CPU path, from these (out, lse), where they are."""
        given = (x["q"], x["k"], x["v"], *outs)
        return reference.backward_with(self.score(x), douts, *given, self.band, scale)

    def weights(self, generator: torch.Generator) -> Outputs:
        """The gradients of out, which its dtype holds exactly, and of the LSE."""
        shape = self.batch, self.heads, self.seqlen_q
        dout = torch.randn(*shape, self.head_dim_v, generator=generator).to(self.dtype)
        return dout, torch.randn(*shape, generator=generator)

    def options(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The keywords of `attn`."""
        named = {name: self.features[name] for name in ("softcap", "dropout") if name in self.features}
        per_head = {name: tensors[name] for name in ("alibi", "sinks") if name in tensors}
        return {"window": (self.left, self.right), **named, **per_head}


@dataclass(frozen=True)
class PackedCombination:
    """Of a packed batch, all tokens of nobody being no numbers, and so what flows into them."""

    one: Combination  # what is asked for; its batch and lengths do not count
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
        """As kernels are planned for: all tokens together."""
        seqlen_q, seqlen_k = self.lengths.totals
        problem = self.one.problem
        features = replace(problem.features, varlen=True, seqused_k=self.lengths.used is not None)
        return replace(problem, batch=self.batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, features=features)

    def tensors(self) -> dict[str, Tensor]:
        one, normal = self.one, drawing(self, self.one.dtype)
        queries, keys = self.lengths.totals
        made = {
            "q": normal(queries, one.heads, one.head_dim),
            "k": normal(keys, one.heads_kv, one.head_dim),
            "v": normal(keys, one.heads_kv, one.head_dim_v),
        }
        made["q"][sum(self.lengths.queries) :] = torch.nan
        unused = torch.ones(keys, dtype=torch.bool)
        for _, span in self.spans():
            unused[span] = False
        made["k"][unused], made["v"][unused] = torch.nan, torch.nan
        return made | one.per_head(normal, self.batch)

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the used keys of each sequence."""
        lengths = self.lengths
        begins = zip(lengths.cu_q.tolist(), lengths.cu_k.tolist(), strict=True)
        counts = zip(lengths.queries, lengths.used or lengths.keys, strict=True)
        for (q0, k0), (sq, sk) in zip(begins, counts, strict=False):
            yield slice(q0, q0 + sq), slice(k0, k0 + sk)

    def attend(self, x: dict[str, Tensor], **more: Any) -> Any:
        where, lengths = x["q"].device, self.lengths
        offsets, used = (lengths.cu_q.to(where), lengths.cu_k.to(where)), lengths.used_k
        options = {**self.one.options(x), **more, "seqused_k": None if used is None else used.to(where)}
        return cute_flash.attn_varlen(x["q"], x["k"], x["v"], *offsets, return_lse=True, **options)

    def sequences(self, x: dict[str, Tensor]) -> Iterator[tuple[Any, ...]]:
        """Of each: its queries and keys, q, k, v (1, H, S, D), and its score."""
        alone = replace(self.one, batch=1)
        for b, (queries, keys) in enumerate(self.spans()):
            spans = zip("qkv", (queries, keys, keys), strict=True)
            inputs = [x[name][span].transpose(0, 1)[None] for name, span in spans]
            given = dict(x)
            if "alibi" in x and x["alibi"].dim() == 2:
                given["alibi"] = x["alibi"][b : b + 1]
            yield queries, keys, inputs, alone.score(given, first=b)

    def dense(self, by: Any, x: dict[str, Tensor], scale: float | None) -> Outputs:
        """One sequence after the other; tokens after the last give 0 and -inf."""
        outs, lses = [], []
        for _, _, inputs, score in self.sequences(x):
            out, lse = by(*inputs, self.one.band, scale, score)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        rest, heads = self.lengths.padding[0], self.one.heads
        outs.append(outs[0].new_zeros(rest, heads, self.one.head_dim_v))
        lses.append(lses[0].new_full((heads, rest), -torch.inf))
        return torch.cat(outs), torch.cat(lses, dim=1)

    def fused(
        self, x: dict[str, Tensor], outs: Outputs, douts: Outputs, scale: float | None
    ) -> tuple[Tensor, ...]:
        dq, dk, dv = (torch.zeros_like(x[name]) for name in "qkv")
        slopes, sinks = [], []
        for queries, keys, inputs, score in self.sequences(x):
            (out, lse), (dout, dlse) = (
                (a[queries].transpose(0, 1)[None], b[None, :, queries]) for a, b in (outs, douts)
            )
            found = reference.backward_with(score, (dout, dlse), *inputs, out, lse, self.one.band, scale)
            for target, span, grad in zip((dq, dk, dv), (queries, keys, keys), found, strict=False):
                target[span] = grad[0].transpose(0, 1)
            slopes.append(found[3])
            sinks.append(found[4])
        return dq, dk, dv, torch.cat(slopes), torch.stack(sinks).sum(dim=0)

    def weights(self, generator: torch.Generator) -> Outputs:
        total, rest, one = self.lengths.totals[0], sum(self.lengths.queries), self.one
        dout = torch.randn(total, one.heads, one.head_dim_v, generator=generator).to(one.dtype)
        dlse = torch.randn(one.heads, total, generator=generator)
        dout[rest:], dlse[:, rest:] = torch.nan, torch.nan
        return dout, dlse


def drawing(case: Any, standard: torch.dtype) -> Any:
    """Standard normal values, the same for the same case."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

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
    """(out, lse), and the gradients of all tensors."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out, lse = function(leaves)
    loss = (out * weights[0].to(out.dtype)).sum()
    loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * weights[1].to(lse.dtype)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()))
    return (out.detach(), lse.detach()), dict(zip(leaves, found, strict=True))
