"""Varlen batches for the GPU tests, and the oracle on each of their sequences."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import cute_flash
from cute_flash import reference
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from tests.lengths import Lengths

CAUSAL, WINDOW = Band(None, 0), Band(100, 37)


@dataclass(frozen=True)
class VarlenCase:
    lengths: Lengths
    heads: int
    heads_kv: int
    head_dim: int
    band: Band = field(default_factory=Band)
    head_dim_v: int | None = None

    @property
    def id(self) -> str:
        queries = self.lengths.queries
        batch = "-".join(map(str, queries)) if len(queries) < 6 else f"{len(queries)}seqs"
        used = "-used" if self.lengths.used else ""
        return f"{batch}-h{self.heads}.{self.heads_kv}-d{self.head_dim}-{self.band}{used}".replace(" ", "_")

    def inputs(self, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> tuple[Tensor, ...]:
        """q, k, v; rows that belong to no sequence hold NaN."""
        generator = torch.Generator().manual_seed(len(self.id))
        queries, keys = self.lengths.totals
        width_v = self.head_dim_v or self.head_dim
        shapes = (queries, self.heads, self.head_dim), (keys, self.heads_kv, self.head_dim)
        made = [torch.randn(shape, generator=generator) for shape in (*shapes, (*shapes[1][:2], width_v))]
        made[0][sum(self.lengths.queries) :] = torch.nan
        for x in made[1:]:
            x[self.lengths.unused_keys()] = torch.nan
        return tuple(x.to(device, dtype) for x in made)

    def args(self, q: Tensor) -> AttentionArgs:
        return reference.plain_args(q, self.band)._replace(**self.lengths.args(q.device))

    def options(self) -> dict[str, Any]:
        """The keywords of `attn_varlen`."""
        return {"window": self.band.bounds, "return_lse": True, **self.lengths.args("cuda")}

    def attend(self, **more: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        """(q, k, v) -> (out, lse)"""
        options = {**self.options(), **more}
        return lambda q, k, v: cute_flash.attn_varlen(q, k, v, **options)


def exact(case: VarlenCase, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return reference.dense(q, k, v, args=case.args(q))


def rough(case: VarlenCase, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return reference.dense_low_precision(q, k, v, args=case.args(q))


def _cases() -> list[VarlenCase]:
    ragged = Lengths([257, 1, 0, 130, 64, 500], [391, 3, 77, 0, 64, 129], None, (70, 33))
    long = Lengths([1500, 20, 300, 1, 0, 700], [1500, 20, 300, 1, 0, 700])
    used = Lengths([200, 50, 0, 129, 40], [300, 64, 50, 129, 40], [250, 0, 20, 128, 40], (3, 200))
    many = Lengths.drawn(5)
    cases = [VarlenCase(ragged, 4, 2, d, band) for d in (64, 128) for band in (Band(), CAUSAL, WINDOW)]
    cases += [VarlenCase(ragged, 4, 2, d, CAUSAL) for d in (72, 192)]
    cases += [VarlenCase(ragged, 4, 2, d, WINDOW) for d in (96, 256)]
    cases += [VarlenCase(long, 4, 4, d, band) for d in (64, 128) for band in (Band(), CAUSAL)]
    cases += [VarlenCase(used, 6, 2, d, band) for d in (64, 128, 256) for band in (Band(), CAUSAL)]
    cases += [VarlenCase(many, 8, 1, 128, band) for band in (CAUSAL, Band(64, None), Band(None, 20))]
    # More sequences than the scheduler kernel has threads.
    tiny = Lengths([(7 * b) % 5 for b in range(1500)], [(5 * b) % 7 for b in range(1500)])
    cases += [VarlenCase(tiny, 2, 1, 64, band) for band in (Band(), CAUSAL)]
    # More tiles than SMs.
    busy = Lengths([300, 40, 999, 128] * 6, [300, 40, 999, 128] * 6)
    cases += [VarlenCase(busy, 8, 2, d, CAUSAL) for d in (64, 128, 256)]
    return cases


CASES = _cases()
IN_FP16 = CASES[:3]
# Head dims whose gradients are also compared bit by bit.
DETERMINISTIC_DIMS = (64, 128, 256)
OTHER_WIDTHS = [VarlenCase(CASES[0].lengths, 4, 2, d, CAUSAL, dv) for d, dv in ((192, 128), (64, 256), (128, 64))]
