"""Backends of `torch.nn.functional.scaled_dot_product_attention`: FlashAttention-2, cuDNN, memory-efficient, math."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiling.peers.peer import NO_GPU, BackwardCall, Call, through_autograd


@dataclass(frozen=True)
class Sdpa:
    """One backend of `torch.nn.functional.scaled_dot_product_attention`, called as users call it."""

    name: str
    backend: SDPBackend
    is_ours: ClassVar[bool] = False
    is_bshd: ClassVar[bool] = False

    def available(self, direction: str = "fwd") -> str | None:
        return None if torch.cuda.is_available() else NO_GPU

    def context(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(self.backend)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        is_grouped = q.shape[1] != k.shape[1]
        return lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=is_grouped)

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        return through_autograd(lambda q, k, v: self.prepare(q, k, v, causal)(), (q, k, v), dout)
