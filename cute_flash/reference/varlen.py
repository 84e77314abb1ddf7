"""Splits a varlen batch, q (Tq, H, D), k (Tk, Hkv, D) and v (Tk, Hkv, Dv), into views of its sequences.

A dense batch is one part, all of its tensors: the CPU path has one loop for both.

Sequence b has the queries cu_seqlens_q[b] … cu_seqlens_q[b + 1] - 1, and likewise the keys. With `seqused_k`, only its
first seqused_k[b] keys are used, and Sk is their number. Tokens after the last offset are padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from cute_flash.spec.args import AttentionArgs


@dataclass(frozen=True)
class SeqlenInfo:
    """The position of one sequence in the tensors of its batch; without slices, a whole dense batch."""

    index: int
    queries: slice | None = None
    keys: slice | None = None

    def of_queries(self, x: Tensor) -> Tensor:
        """The view (1, H, Sq, D) of a (Tq, H, D) tensor."""
        return x if self.queries is None else x[self.queries].transpose(0, 1)[None]

    def of_keys(self, x: Tensor) -> Tensor:
        return x if self.keys is None else x[self.keys].transpose(0, 1)[None]

    def of_rows(self, x: Tensor) -> Tensor:
        """The view (1, H, Sq) of a (H, Tq) tensor."""
        return x if self.queries is None else x[None, :, self.queries]


def sequences(q: Tensor, k: Tensor, args: AttentionArgs) -> list[SeqlenInfo]:
    """Read the offsets of a call; raise `ValueError` if they are wrong."""
    if args.cu_seqlens_q is None or args.cu_seqlens_k is None:
        return [SeqlenInfo(0)]
    queries = read_offsets("q", args.cu_seqlens_q, len(q), args.max_seqlen_q)
    keys = read_offsets("k", args.cu_seqlens_k, len(k), args.max_seqlen_k)
    used = None if args.seqused_k is None else args.seqused_k.tolist()
    result = []
    for b, (begin, end) in enumerate(pairwise(keys)):
        if used is not None:
            if not 0 <= used[b] <= end - begin:
                raise ValueError(
                    f"seqused_k[{b}]={used[b]}: sequence {b} has {end - begin} keys, use 0 to {end - begin}"
                )
            end = begin + used[b]
        result.append(SeqlenInfo(b, slice(*queries[b : b + 2]), slice(begin, end)))
    return result


def read_offsets(side: str, offsets: Tensor, total: int, max_seqlen: int | None = None) -> list[int]:
    """Read offsets, cu_seqlens_q or cu_seqlens_k, into `total` tokens; raise `ValueError` if they are wrong."""
    name, values = f"cu_seqlens_{side}", offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} begins with {values[0]}: expected 0")
    for b, (begin, end) in enumerate(pairwise(values)):
        if end < begin:
            raise ValueError(f"{name}[{b + 1}]={end} is less than {name}[{b}]={begin}: offsets may not decrease")
        if max_seqlen is not None and end - begin > max_seqlen:
            raise ValueError(f"max_seqlen_{side}={max_seqlen}: sequence {b} has {end - begin} tokens, use that or more")
    if values[-1] > total:
        raise ValueError(f"{name} ends with {values[-1]}: there are {total} tokens in {side}")
    return values
