"""Packed batches for the GPU tests, and the oracle on each of their sequences."""

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

import cute_flash
from cute_flash import reference
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Features, Problem
from tests.lengths import Lengths

CAUSAL, WINDOW = Band(None, 0), Band(100, 37)


@dataclass(frozen=True)
class Packed:
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

    def inputs(self, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
        """q, k, v; rows of nobody are no numbers."""
        generator = torch.Generator().manual_seed(len(self.id))
        queries, keys = self.lengths.totals
        width_v = self.head_dim_v or self.head_dim
        shapes = (queries, self.heads, self.head_dim), (keys, self.heads_kv, self.head_dim)
        made = [torch.randn(shape, generator=generator) for shape in (*shapes, (*shapes[1][:2], width_v))]
        made[0][sum(self.lengths.queries) :] = torch.nan
        for x in made[1:]:
            x[unused_keys(self.lengths)] = torch.nan
        return tuple(x.to("cuda", dtype) for x in made)

    def options(self) -> dict:
        used = self.lengths.used_k
        window = self.band.left, self.band.right
        return {"window": window, "return_lse": True, "seqused_k": None if used is None else used.cuda()}

    def attend(self):
        """(q, k, v) -> (out, lse)"""
        cu = self.lengths.cu_q.cuda(), self.lengths.cu_k.cuda()
        options = self.options()
        return lambda q, k, v: cute_flash.attn_varlen(q, k, v, *cu, **options)

    def sequences(self):
        """(queries, keys) of each, as slices."""
        begins = zip(self.lengths.cu_q.tolist(), self.lengths.cu_k.tolist(), strict=True)
        counts = zip(self.lengths.queries, self.lengths.used or self.lengths.keys, strict=True)
        for (q0, k0), (sq, sk) in zip(begins, counts, strict=False):
            yield slice(q0, q0 + sq), slice(k0, k0 + sk)


def problem_of(case: Packed, dtype: torch.dtype) -> Problem:
    """As kernels are planned for: all tokens together."""
    features = Features(varlen=True, seqused_k=case.lengths.used is not None)
    sizes = (len(case.lengths.queries), case.heads, case.heads_kv, *case.lengths.totals, case.head_dim)
    name = str(dtype).removeprefix("torch.")
    return Problem(*sizes, name, case.band, case.head_dim_v, features)


def unused_keys(lengths: Lengths) -> Tensor:
    """Whether a key is one of nobody's: after what is used of its sequence, or after the last."""
    unused = torch.ones(lengths.totals[1], dtype=torch.bool)
    for begin, count in zip(lengths.cu_k.tolist(), lengths.used or lengths.keys, strict=False):
        unused[begin : begin + count] = False
    return unused


def one_by_one(case: Packed, attend, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`attend` on each sequence; padding gives 0 and -inf. Differentiable."""
    outs, lses = [], []
    for queries, keys in case.sequences():
        given = (x[span].transpose(0, 1)[None] for x, span in ((q, queries), (k, keys), (v, keys)))
        out, lse = attend(*given)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    rest = case.lengths.padding[0]
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[2]))
    lses.append(lses[0].new_full((q.shape[1], rest), -torch.inf))
    return torch.cat(outs), torch.cat(lses, dim=1)


def exact(case: Packed, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    return one_by_one(case, functools.partial(reference.dense, band=case.band), *inputs)


def rough(case: Packed, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    return one_by_one(case, functools.partial(reference.dense_low_precision, band=case.band), *inputs)


def _cases() -> list[Packed]:
    ragged = Lengths([257, 1, 0, 130, 64, 500], [391, 3, 77, 0, 64, 129], None, (70, 33))
    long = Lengths([1500, 20, 300, 1, 0, 700], [1500, 20, 300, 1, 0, 700])
    used = Lengths([200, 50, 0, 129, 40], [300, 64, 50, 129, 40], [250, 0, 20, 128, 40], (3, 200))
    many = Lengths.drawn(5)
    found = [Packed(ragged, 4, 2, d, band) for d in (64, 128) for band in (Band(), CAUSAL, WINDOW)]
    found += [Packed(ragged, 4, 2, d, CAUSAL) for d in (72, 192)]
    found += [Packed(ragged, 4, 2, d, WINDOW) for d in (96, 256)]
    found += [Packed(long, 4, 4, d, band) for d in (64, 128) for band in (Band(), CAUSAL)]
    found += [Packed(used, 6, 2, d, band) for d in (64, 128, 256) for band in (Band(), CAUSAL)]
    found += [Packed(many, 8, 1, 128, band) for band in (CAUSAL, Band(64, None), Band(None, 20))]
    # More sequences than threads of the kernel that lists their tiles, and more than warps.
    tiny = Lengths([(7 * b) % 5 for b in range(1500)], [(5 * b) % 7 for b in range(1500)])
    found += [Packed(tiny, 2, 1, 64, band) for band in (Band(), CAUSAL)]
    # More tiles than SMs.
    busy = Lengths([300, 40, 999, 128] * 6, [300, 40, 999, 128] * 6)
    found += [Packed(busy, 8, 2, d, CAUSAL) for d in (64, 128, 256)]
    return found


CASES = _cases()
IN_FP16 = CASES[:3]
# Also computed in order.
ORDERED_DIMS = (64, 128, 256)
OTHER_WIDTHS = [Packed(CASES[0].lengths, 4, 2, d, CAUSAL, dv) for d, dv in ((192, 128), (64, 256), (128, 64))]
