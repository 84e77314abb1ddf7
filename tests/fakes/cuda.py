"""CPU tensors that claim to be on CUDA, and operators whose CPU kernels are those of CUDA.

With `claiming_cuda`, `attn` bypasses the dispatcher and launches through the `Gpu` in use. Calls through the operators
run their CPU kernels and launch nothing, unless `launching_operators` is active.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from cute_flash.runtime import launcher
from cute_flash.spec.args import from_schema


@contextmanager
def claiming_cuda() -> Iterator[None]:
    with mock.patch.object(Tensor, "is_cuda", property(lambda x: True)):
        yield


@contextmanager
def launching_operators() -> Iterator[None]:
    """Operators on CPU tensors call the launcher, as those on CUDA do."""

    def tensors(results, q):
        return [q.new_empty(0) if x is None else x for x in results]

    def forward(q, k, v, *values):
        return tuple(tensors(launcher.forward(q, k, v, from_schema(values)), q))

    def backward(dout, dlse, q, k, v, out, lse, *values):
        *qkv, others = launcher.backward(dout, dlse, q, k, v, out, lse, from_schema(values))
        return *qkv, tensors(others, q)

    with torch.library._scoped_library("cute_flash", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of kernels that replace others
            library.impl("attention_fwd", forward, "CPU", allow_override=True)
            library.impl("attention_bwd", backward, "CPU", allow_override=True)
        yield
