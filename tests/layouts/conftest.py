"""The real CuTe DSL as an oracle: a jit function that launches no kernel is compiled for the CPU and runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def cute_indices() -> Callable[[Callable[[], Any], int], tuple[list[int], str]]:
    """`cute_indices(build, size)`: the indices to which the CuTe layout `build()` maps 0 to size - 1, and its text."""
    # Imported here, because most tests of this folder do without the DSL, which takes seconds.
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    from tests.layouts.convert import write_indices

    def run(build: Callable[[], Any], size: int) -> tuple[list[int], str]:
        printed = []

        def traced() -> Any:
            layout = build()
            printed.append(str(layout))
            return layout

        # Filled with invalid indices, so that an index that is not written is detected.
        out = torch.full((size,), -1, dtype=torch.int32)
        cute.compile(write_indices, from_dlpack(out), traced)(from_dlpack(out))
        return out.tolist(), printed[-1]

    return run
