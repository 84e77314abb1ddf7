"""cute_flash as the benchmark calls it, and the features of `attn` that studies measure."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from profiling.peers.peer import BackwardCall, Call, missing, through_autograd


@dataclass(frozen=True)
class CuteFlash:
    name: str = "cute_flash"
    kernels: str = "auto"
    is_ours: ClassVar[bool] = True
    is_bshd: ClassVar[bool] = False

    def available(self, direction: str = "fwd") -> str | None:
        return missing(lambda: importlib.import_module("cute_flash").attn)

    def context(self) -> AbstractContextManager[Any]:
        if self.kernels == "auto":
            return nullcontext()
        return importlib.import_module("cute_flash").use_kernels(self.kernels)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        attn = importlib.import_module("cute_flash").attn
        return lambda: attn(q, k, v, causal=causal)

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        return through_autograd(lambda q, k, v: self.prepare(q, k, v, causal)(), (q, k, v), dout)
