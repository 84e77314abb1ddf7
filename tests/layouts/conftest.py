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
    """`cute_indices(build, size)`: the indices to which the CuTe layout `build()` maps 0 to size - 1, and its text."""

    def run(build: Callable[[], Any], size: int) -> tuple[list[int], str]:
        printed = []

        def traced() -> Any:
            layout = build()
            printed.append(str(layout))
            return layout

        # Filled with invalid indices, so that an index that is not written is detected.
        out = torch.full((size,), -1, dtype=torch.int32)
        cute.compile(_write_indices, from_dlpack(out), traced)(from_dlpack(out))
        return out.tolist(), printed[-1]

    return run
