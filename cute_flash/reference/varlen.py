"""Sequences of different lengths, packed one after the other: q (Tq, H, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv).

Sequence b has the queries cu_seqlens_q[b] … cu_seqlens_q[b + 1] - 1 and the keys likewise; of the latter only
the first seqused_k[b], if that is given, which then is its Sk. Tokens after the last offset belong to nobody:
they give 0 and an LSE of -inf, and receive gradients of 0. The LSE is (H, Tq).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from cute_flash import operands
from cute_flash.reference import tiled as reference
from cute_flash.reference.score import Score
from cute_flash.reference.user_mods import Written
from cute_flash.spec.args import How
from cute_flash.spec.problem import Problem


@dataclass(frozen=True)
class Sequence:
    index: int
    queries: slice
    keys: slice

    def of_queries(self, x: Tensor) -> Tensor:
        """(1, H, Sq, D), a view."""
        return x[self.queries].transpose(0, 1)[None]

    def of_keys(self, x: Tensor) -> Tensor:
        return x[self.keys].transpose(0, 1)[None]


def problem_of(q: Tensor, k: Tensor, v: Tensor, how: How) -> Problem:
    """Describe a packed call by its longest sequence, as far as that is known without looking at offsets."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected packed sequences, (T, H, D)")
    cu_q, cu_k = how.cu_seqlens_q, how.cu_seqlens_k
    assert cu_q is not None
    if cu_k is None:
        raise ValueError("cu_seqlens_k is missing")
    _check_integers("cu_seqlens_q", cu_q, q, "B + 1")
    _check_integers("cu_seqlens_k", cu_k, q, "B + 1")
    batch = cu_q.shape[0] - 1
    if cu_k.shape[0] != batch + 1:
        raise ValueError(f"cu_seqlens_q has {batch + 1} offsets and cu_seqlens_k has {cu_k.shape[0]}")
    if how.seqused_k is not None:
        _check_integers("seqused_k", how.seqused_k, q, "B")
        if how.seqused_k.shape[0] != batch:
            raise ValueError(f"seqused_k has {how.seqused_k.shape[0]} lengths for {batch} sequences")
    Q, K, V = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    one = operands.problem_of(Q, K, V, (how.window_left, how.window_right))
    return replace(
        one,
        batch=batch,
        seqlen_q=_longest("max_seqlen_q", how.max_seqlen_q, one.seqlen_q),
        seqlen_k=_longest("max_seqlen_k", how.max_seqlen_k, one.seqlen_k),
    )


def _check_integers(name: str, x: Tensor, q: Tensor, size: str) -> None:
    if x.dim() != 1 or (size == "B + 1" and x.shape[0] == 0):
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected ({size})")
    if x.dtype != torch.int32:
        raise ValueError(f"{name} is {x.dtype}: use torch.int32")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q is on {q.device}: they must agree")


def _longest(name: str, value: int | None, total: int) -> int:
    if value is not None and value < 0:
        raise ValueError(f"{name}={value} is negative")
    return total if value is None else value


def outputs(q: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """out (Tq, H, Dv) and lse (H, Tq), not filled."""
    total, heads, _ = q.shape
    dtype = reference.accumulator_dtype(q.dtype)
    out = q.new_empty(total, heads, v.shape[2], dtype=how.out_dtype(q))
    return out, q.new_empty(heads, total, dtype=dtype)


def sequences(q: Tensor, k: Tensor, how: How) -> Iterator[Sequence]:
    """Read the offsets, on the CPU, and refuse what they may not be."""
    assert how.cu_seqlens_q is not None and how.cu_seqlens_k is not None
    queries = _offsets("cu_seqlens_q", how.cu_seqlens_q, len(q), ("max_seqlen_q", how.max_seqlen_q))
    keys = _offsets("cu_seqlens_k", how.cu_seqlens_k, len(k), ("max_seqlen_k", how.max_seqlen_k))
    used = None if how.seqused_k is None else how.seqused_k.tolist()
    for b in range(len(queries) - 1):
        first, last = keys[b : b + 2]
        if used is not None:
            if not 0 <= used[b] <= last - first:
                raise ValueError(f"seqused_k[{b}]={used[b]}: sequence {b} has {last - first} keys")
            last = first + used[b]
        yield Sequence(b, slice(*queries[b : b + 2]), slice(first, last))


def _offsets(name: str, offsets: Tensor, total: int, longest: tuple[str, int | None]) -> list[int]:
    values = offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} begins with {values[0]}: expected 0")
    for b, (first, last) in enumerate(pairwise(values)):
        if last < first:
            raise ValueError(f"{name}[{b + 1}]={last} is less than {name}[{b}]={first}: offsets may not fall")
        if longest[1] is not None and last - first > longest[1]:
            raise ValueError(f"{longest[0]}={longest[1]}: sequence {b} has {last - first}")
    if values[-1] > total:
        raise ValueError(f"{name} ends with {values[-1]}: there are {total} tokens")
    return values


def forward(
    q: Tensor, k: Tensor, v: Tensor, how: How, max_logit: Tensor | None, written: Written | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = outputs(q, v, how)
    out.zero_()
    lse.fill_(-torch.inf)
    heads = q.shape[1]
    for one in list(sequences(q, k, how)):
        given = one.of_queries(q), one.of_keys(k), one.of_keys(v)
        score = _score(how, heads, one, written)
        found, found_lse = reference.forward(*given, how.band, how.scale, score, max_logit, out.dtype)
        one.of_queries(out).copy_(found)
        lse[:, one.queries] = found_lse[0]
    return out, lse


def backward(
    douts: tuple[Tensor, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    how: How,
    written: Written | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dalibi (B, H), dsinks (H)."""
    dout, dlse = douts
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    heads, dtype = q.shape[1], reference.accumulator_dtype(q.dtype)
    dalibi, dsinks = q.new_zeros(_batch(how), heads, dtype=dtype), q.new_zeros(heads, dtype=dtype)
    for one in sequences(q, k, how):
        score = _score(how, heads, one, written)
        gradients = one.of_queries(dout), None if dlse is None else dlse[None, :, one.queries]
        given = (
            one.of_queries(q),
            one.of_keys(k),
            one.of_keys(v),
            one.of_queries(out),
            lse[None, :, one.queries],
        )
        found = reference.backward_with(score, gradients, *given, how.band, how.scale)
        one.of_queries(dq).copy_(found[0])
        one.of_keys(dk).copy_(found[1])
        one.of_keys(dv).copy_(found[2])
        dalibi[one.index] += found[3][0]
        dsinks += found[4]
    return dq, dk, dv, dalibi, dsinks


def _score(how: How, heads: int, one: Sequence, written: Written | None) -> Score | None:
    """Of one sequence; users' functions see its index."""
    found = how.score(_batch(how), heads, one.index)
    return found if written is None else replace(found or Score(), written=replace(written, first=one.index))


def _batch(how: How) -> int:
    assert how.cu_seqlens_q is not None
    return how.cu_seqlens_q.shape[0] - 1
