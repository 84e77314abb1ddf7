"""Parts of flash-attn's functions in torch operations: `seqused_q`, rotary embedding, and an append without queries."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cute_flash import reference
from cute_flash.decode import attn_decode
from cute_flash.spec.checked import is_checked
from cute_flash.spec.describe import check_int32
from cute_flash.spec.shapes import lse_dtype


def check_lengths(name: str, lengths: Tensor, q: Tensor, batch: int) -> None:
    check_int32(name, lengths, q, "B")
    if lengths.shape[0] != batch:
        raise ValueError(f"{name} has {lengths.shape[0]} lengths: expected {batch}, one for each sequence")


def _check_used(used: list[int], offsets: list[int]) -> None:
    for b, (begin, end) in enumerate(pairwise(offsets)):
        if end >= begin and not 0 <= used[b] <= end - begin:  # `attn_varlen` raises the error for decreasing offsets
            raise ValueError(
                f"seqused_q[{b}]={used[b]}: sequence {b} has {end - begin} queries, use 0 to {end - begin}"
            )


def sequence_of_tokens(offsets: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token of a varlen batch, B for padding, and the token's index in the sequence."""
    tokens = torch.arange(num_tokens, device=offsets.device)
    sequence = torch.bucketize(tokens, offsets[1:].contiguous(), right=True)
    return sequence, tokens - offsets[sequence]


class UsedQueries(NamedTuple):
    """The queries that `seqused_q` selects, as a varlen batch whose padding is the unused ones."""

    q: Tensor
    cu_seqlens: Tensor
    places: Tensor  # where each of the original queries is

    @staticmethod
    def of(q: Tensor, cu_seqlens_q: Tensor, seqused_q: Tensor) -> UsedQueries:
        """Gather the first seqused_q[b] queries of each sequence. No length is read by the host."""
        check_int32("cu_seqlens_q", cu_seqlens_q, q, "B + 1")
        check_lengths("seqused_q", seqused_q, q, cu_seqlens_q.shape[0] - 1)
        if is_checked(seqused_q):
            _check_used(seqused_q.tolist(), cu_seqlens_q.tolist())
        sequence, index = sequence_of_tokens(cu_seqlens_q, q.shape[0])
        lengths = seqused_q.minimum(cu_seqlens_q.diff()).clamp(min=0)
        is_unused = index >= pad(lengths, (0, 1))[sequence]
        order = is_unused.byte().argsort(stable=True)
        return UsedQueries(q.index_select(0, order), pad(lengths.cumsum(0), (1, 0)).int(), order.argsort())

    def restored(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """out (T, H, D) and lse (H, T) in the order of the original queries; 0 and -inf for unused ones."""
        return out.index_select(0, self.places), lse.index_select(1, self.places)


class Rotary(NamedTuple):
    """Rotary embedding by torch operations: token i of sequence b has the position starts[b] + i."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool
    starts: Tensor | int  # (B), or one number for all sequences

    @staticmethod
    def of(cos: Tensor | None, sin: Tensor | None, is_interleaved: bool, starts: Tensor | int) -> Rotary | None:
        """None without tables."""
        if cos is None and sin is None:
            return None
        if cos is None or sin is None:
            name = "rotary_sin" if cos is None else "rotary_cos"
            raise ValueError(f"{name} alone: give both rotary_cos and rotary_sin")
        return Rotary(cos, sin, is_interleaved, starts)

    def rotated(self, x: Tensor, offsets: Tensor | None, moves: bool = True) -> Tensor:
        """x, (B, T, H, D) or with offsets (T, H, D), rotated in fp32 (fp64 for fp64) and rounded once.

        Without `moves`, all tokens of a sequence have its first position.
        """
        cos, sin = self.cos, self.sin
        if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
            raise ValueError(
                f"rotary_cos has shape {tuple(cos.shape)} and rotary_sin {tuple(sin.shape)}: "
                f"expected (positions, rotary_dim / 2), with rotary_dim at most {x.shape[-1]}"
            )
        wide, positions = x.to(lse_dtype(x.dtype)), self._positions(x, offsets, moves)
        return reference.decode.rotated(wide, positions, cos, sin, self.is_interleaved).to(x.dtype)

    def _positions(self, x: Tensor, offsets: Tensor | None, moves: bool) -> Tensor:
        """The position of each token, within the tables; 0 for padding."""
        if offsets is None:
            starts = self.starts[:, None] if isinstance(self.starts, Tensor) else self.starts
            positions = (starts + moves * torch.arange(x.shape[1], device=x.device)).expand(x.shape[:2])
        else:
            sequence, index = sequence_of_tokens(offsets, x.shape[0])
            starts = pad(self.starts, (0, 1))[sequence] if isinstance(self.starts, Tensor) else self.starts
            positions = (starts + moves * index).where(sequence < offsets.shape[0] - 1, 0)
        # On CUDA the host does not read positions.
        if x.device.type == "cpu" and not torch.compiler.is_dynamo_compiling() and positions.numel():
            last, rows = int(positions.max()), len(self.cos)
            if last >= rows:
                raise ValueError(f"position {last}: rotary_cos has {rows} rows, one for each position from 0")
        return positions.clamp(0, len(self.cos) - 1)


def append(caches: tuple[Tensor, Tensor], cache_seqlens: Tensor | int, offsets: Tensor | None, **keywords: Any) -> None:
    """Append k_new and v_new, (B, T, Hkv, D) or with offsets (T, Hkv, D), by a call of `attn_decode`.

    The call appends a key for each query. So its queries are zeros in the shape of k_new, and see only their own row.
    """
    with torch.no_grad():
        queries = torch.zeros_like(keywords["k_new"])
        attn_decode(queries, *caches, cache_seqlens=cache_seqlens, cu_seqlens_q=offsets, window=(0, 0), **keywords)
