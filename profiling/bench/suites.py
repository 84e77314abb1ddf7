"""Shapes of the benchmark, grouped into suites.

The `paper` suite is the setting in which FlashAttention-2 and -3 publish their speed: 16,384 tokens in all,
hidden size 2048, as many K/V heads as query heads. Q, K, V and O have the same number of bytes in all cells, which
differ in the number of sequences and heads. In the `gqa` suites query heads share K/V heads; the suite `wide` has the
head dims above 256.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from profiling.measure.shapes import MASKS, Shape


@dataclass(frozen=True)
class Suite:
    tokens: int
    hidden: int
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    masks: tuple[str, ...] = MASKS
    group: int = 1  # query heads that share a K/V head
    batch: int | None = None  # None: tokens / length
    heads: int | None = None  # None: hidden / head dim

    def narrowed(
        self,
        lengths: Iterable[int] | None = None,
        head_dims: Iterable[int] | None = None,
        masks: Iterable[str] | None = None,
        batch: int | None = None,
        heads: int | None = None,
    ) -> Suite:
        """The suite with other lengths, head dims, masks, batch or number of query heads; None: its own."""
        return replace(
            self,
            lengths=self.lengths if lengths is None else tuple(lengths),
            head_dims=self.head_dims if head_dims is None else tuple(head_dims),
            masks=self.masks if masks is None else tuple(masks),
            batch=self.batch if batch is None else batch,
            heads=self.heads if heads is None else heads,
        )

    def shapes(self) -> list[Shape]:
        """All cells, in the order of the report: head dim, mask, length."""
        return [
            self._shape(head_dim, mask, seqlen)
            for head_dim in self.head_dims
            for mask in self.masks
            for seqlen in self.lengths
        ]

    def _shape(self, head_dim: int, mask: str, seqlen: int) -> Shape:
        if mask not in MASKS:
            raise ValueError(f"mask {mask!r}: choose from {', '.join(MASKS)}")
        if head_dim < 1 or seqlen < 1:
            raise ValueError(f"head dim {head_dim}, length {seqlen}: both must be 1 or more")
        # Rounded down to whole heads and sequences.
        heads_kv, batch = max(1, self.hidden // (head_dim * self.group)), max(1, self.tokens // seqlen)
        if self.batch is not None:
            batch = self.batch
        if self.heads is not None:
            heads_kv, rest = divmod(self.heads, self.group)
            if rest:
                raise ValueError(f"{self.heads} heads: the suite needs a multiple of {self.group}")
        if batch < 1 or heads_kv < 1:
            raise ValueError(f"batch {batch}, {heads_kv * self.group} heads: both must be 1 or more")
        return Shape(batch, heads_kv * self.group, heads_kv, seqlen, head_dim, mask == "causal")


SUITES = {
    "paper": Suite(16384, 2048, (512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256)),
    "quick": Suite(16384, 2048, (1024, 8192), (64, 128)),
    # Lengths at which launches, prologues and epilogues take most of the time.
    "short": Suite(16384, 2048, (64, 128, 256, 512, 1024), (64, 128)),
    # Head dims above 256: one sequence of 32 heads.
    "wide": Suite(16384, 16384, (4096, 16384), (320, 384, 512), batch=1, heads=32),
    # 32 query heads on 8 K/V heads, and 64 on 8, at D=128.
    "gqa": Suite(16384, 4096, (1024, 4096, 8192), (128,), group=4),
    "gqa8": Suite(16384, 8192, (1024, 4096, 8192), (128,), group=8),
}
