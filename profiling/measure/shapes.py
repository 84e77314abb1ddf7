"""Shapes of problems: sizes, FLOPs as the papers count them, and bytes of the tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem
from cute_flash.tools import roofline

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# `DTYPES`, and the dtype of `profiling fp32`.
ALL_DTYPES = {**DTYPES, "fp32": torch.float32}
MASKS = ("full", "causal")
# FLOPs of each direction relative to the forward pass, as the papers count them.
FLOPS_FACTOR = {"fwd": 1.0, "bwd": 2.5}
HBM_BYTES = {"fwd": roofline.hbm_bytes, "bwd": roofline.hbm_bytes_backward}


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    head_dim: int
    causal: bool

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def id(self) -> str:
        heads = f"h{self.heads}" if self.heads == self.heads_kv else f"h{self.heads}kv{self.heads_kv}"
        return f"d{self.head_dim}-{self.mask}-s{self.seqlen}-b{self.batch}{heads}"

    def problem(self, dtype: str) -> Problem:
        name = str(ALL_DTYPES[dtype]).removeprefix("torch.")
        lengths = (self.seqlen, self.seqlen)
        band = Band.of(self.causal, (None, None))
        return Problem(self.batch, self.heads, self.heads_kv, *lengths, self.head_dim, dtype=name, band=band)

    def flops(self, direction: str = "fwd") -> float:
        """FLOPs as the papers count them: all pairs, half of them if causal."""
        return roofline.flops_nominal(self.problem("bf16")) * FLOPS_FACTOR[direction]

    def hbm_bytes(self, dtype: str, direction: str = "fwd") -> int:
        """Bytes of the tensors that a call must read or write."""
        return HBM_BYTES[direction](self.problem(dtype))
