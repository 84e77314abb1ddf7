"""Random combinations of what a call may ask for: shapes, masks, dtypes and features that belong together."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.band import Band
from cute_flash.philox import Dropout
from cute_flash.problem import Features, Problem

# Every draw of dropout in tests: (seed, offset).
RNG = (0x1234_5678_9ABC_DEF0, 77)


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
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        keys = (self.batch, self.heads_kv, self.seqlen_k)
        made = {
            "q": normal(self.batch, self.heads, self.seqlen_q, self.head_dim),
            "k": normal(*keys, self.head_dim),
            "v": normal(*keys, self.head_dim_v),
        }
        # As parameters are: in fp32, but where all is in fp64.
        per_head = torch.float64 if self.dtype == torch.float64 else torch.float32
        if "alibi" in self.features:
            shape = (self.heads,) if self.features["alibi"] == 1 else (self.batch, self.heads)
            made["alibi"] = normal(*shape, dtype=per_head).mul_(0.2)
        if "sinks" in self.features:
            made["sinks"] = normal(self.heads, dtype=per_head)
        return made

    def score(self, tensors: dict[str, Tensor], first: int = 0) -> reference.Score:
        """What the oracle is to do, with tensors that may want gradients."""
        alibi, p = tensors.get("alibi"), self.features.get("dropout")
        if alibi is not None:
            alibi = alibi.expand(self.batch, self.heads)
        rng = torch.tensor(RNG, device=next(iter(tensors.values())).device)
        dropout = None if p is None else Dropout(p, rng, self.heads, first)
        return reference.Score(self.features.get("softcap"), alibi, tensors.get("sinks"), dropout)

    def options(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The keywords of `attn`."""
        named = {name: self.features[name] for name in ("softcap", "dropout") if name in self.features}
        per_head = {name: tensors[name] for name in ("alibi", "sinks") if name in tensors}
        return {"window": (self.left, self.right), **named, **per_head}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(sq: int = 5, sk: int = 6, heads_kv: int = 2, d: int = 3) -> list[Tensor]:
    return [normal(1, h, s, d, seed=i) for i, (h, s) in enumerate(((4, sq), (heads_kv, sk), (heads_kv, sk)))]


def gradients(function: Any, tensors: dict[str, Tensor], weights: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out, lse = function(leaves)
    loss = (out * weights[0].to(out.dtype)).sum()
    loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * weights[1].to(lse.dtype)).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
