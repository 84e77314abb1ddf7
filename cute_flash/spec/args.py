"""The arguments of the general operators after their tensors, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cute_flash import operands
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Features

if TYPE_CHECKING:
    from cute_flash.reference.score import Score


def draw_rng(device: torch.device) -> Tensor:
    """(seed, offset) of one call, int64, from torch's generator of the device; no host sync."""
    return torch.randint((1 << 63) - 1, (2,), dtype=torch.int64, device=device)


class How(NamedTuple):
    """The arguments of both operators after their tensors; 0 and None: not asked for."""

    scale: float
    window_left: int | None
    window_right: int | None
    deterministic: bool = False
    softcap: float = 0.0
    alibi: Tensor | None = None  # (H) or (B, H)
    sinks: Tensor | None = None  # (H)
    dropout: float = 0.0
    rng: Tensor | None = None  # (seed, offset), int64
    max_logit: bool = False
    cu_seqlens_q: Tensor | None = None  # (B + 1), int32
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None  # (B), int32
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    float_out: bool = False  # out in fp32, whatever q is
    batch_invariant: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those of `TENSORS`."""
        return self.alibi, self.sinks, self.rng, self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k

    @property
    def has_tensors(self) -> bool:
        return bool([x for x in self.tensors if x is not None])

    @property
    def without_tensors(self) -> How:
        nothing: dict[str, Any] = dict.fromkeys(TENSORS)
        return self._replace(**nothing) if self.has_tensors else self

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> How:
        """Of one that has none."""
        if not [x for x in tensors if x is not None]:
            return self
        given: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
        return self._replace(**given)

    @property
    def described(self) -> tuple[Any, ...]:
        """All that a check of it asks about, to look up by."""
        if not self.has_tensors:
            return self
        return tuple([operands.described(x) if isinstance(x, Tensor) else x for x in self])

    def out_dtype(self, q: Tensor) -> torch.dtype:
        return torch.float32 if self.float_out else q.dtype

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right)

    @property
    def features(self) -> Features:
        return Features(
            softcap=self.softcap != 0,
            alibi=self.alibi is not None,
            sinks=self.sinks is not None,
            dropout=self.dropout != 0,
            return_max_logit=self.max_logit,
            varlen=self.cu_seqlens_q is not None,
            seqused_k=self.seqused_k is not None,
            out_dtype=self.float_out,
            batch_invariant=self.batch_invariant,
        )

    def score(self, batch: int, heads: int, sequence: int | None = None) -> Score | None:
        """The values, of the whole batch or of one sequence of a packed one."""
        if not (self.softcap or self.dropout or self.alibi is not None or self.sinks is not None):
            return None
        from cute_flash.reference.dropout import Dropout
        from cute_flash.reference.score import Score

        alibi = None if self.alibi is None else self.alibi.expand(batch, heads)
        first = 0
        if sequence is not None:
            first, alibi = sequence, None if alibi is None else alibi[sequence : sequence + 1]
        dropout = None
        if self.dropout:
            assert self.rng is not None
            dropout = Dropout(self.dropout, self.rng, heads, first)
        return Score(self.softcap or None, alibi, self.sinks, dropout)


SCHEMA = (
    "float scale, SymInt? window_left, SymInt? window_right, bool deterministic, float softcap, "
    "Tensor? alibi, Tensor? sinks, float dropout, Tensor? rng, bool max_logit, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "bool float_out=False, bool batch_invariant=False"
)
TENSORS = ("alibi", "sinks", "rng", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
