"""Gates read of kernels what `resources` does, and compile each once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_flash.jit import resources as reading
from cute_flash.planning.plan import bwd_plan
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import Problem
from tests import gates


@pytest.mark.compiles
def test_each_kernel_is_compiled_once_and_read_the_same(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = bwd_plan(Problem(2, 8, 4, 1000, 1000, 64), ARCHS["sm_90"]).after
    expected = reading.kernel_resources(key)
    assert expected.registers > 0 and expected.cubin and expected.ptx
    assert gates.kernel_resources(key) == expected
    monkeypatch.setattr(reading, "kernel_resources", None)
    assert gates.kernel_resources(key) == expected
    assert not list(fresh_cache.glob("*.so")), "no entry of the product's"
