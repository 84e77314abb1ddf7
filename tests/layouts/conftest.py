"""The real CuTe DSL as an oracle: a jit function that launches no kernel is compiled for the CPU and runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack


@cute.jit
def _write_indices(out: cute.Tensor, build: cutlass.Constexpr):
    layout = build()
    for i in range(out.shape[0]):
        out[i] = Int32(cute.crd2idx(i, layout))


@pytest.fixture
def cute_indices() -> Callable[[Callable[[], Any], int], tuple[list[int], str]]:
    """`cute_indices(build, size)`: what the CuTe layout `build()` maps 0 .. size - 1 to, and its print."""

    def run(build: Callable[[], Any], size: int) -> tuple[list[int], str]:
        printed = []

        def traced() -> Any:
            layout = build()
            printed.append(str(layout))
            return layout

        # Poisoned: an index that is not written cannot pass for a right one.
        out = torch.full((size,), -1, dtype=torch.int32)
        cute.compile(_write_indices, from_dlpack(out), traced)(from_dlpack(out))
        return out.tolist(), printed[-1]

    return run
