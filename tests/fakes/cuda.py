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

from cute_flash import ops


@contextmanager
def claiming_cuda() -> Iterator[None]:
    with mock.patch.object(Tensor, "is_cuda", property(lambda x: True)):
        yield


@contextmanager
def launching_operators() -> Iterator[None]:
    """Operators on CPU tensors call the launcher, as those on CUDA do."""

    with torch.library._scoped_library("cute_flash", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of kernels that replace others
            library.impl("attention_fwd", ops._fwd_cuda, "CPU", allow_override=True)
            library.impl("attention_bwd", ops._bwd_cuda, "CPU", allow_override=True)
        yield
