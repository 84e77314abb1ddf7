"""`tests.jit.gates` reads the same resources as `jit.resources`, compiles once, and writes the cache entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_flash.jit import compile as compiling
from cute_flash.jit import resources as reading
from cute_flash.jit.kernels import compiled_kernel, precompile
from cute_flash.planning.plan import plan_backward
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import Problem
from tests.jit import gates


@pytest.mark.compiles
def test_a_kernel_is_compiled_once(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = plan_backward(Problem(2, 8, 4, 1000, 1000, 64), ARCHS["sm_90"]).launch("bwd_postprocess")
    expected = reading.kernel_resources(key)
    assert expected.registers > 0 and expected.cubin and expected.ptx
    assert gates.kernel_resources(key) == expected
    monkeypatch.setattr(compiling, "cute_compile", None)
    assert gates.kernel_resources(key) == expected
    assert precompile(key) is False, "the entry is there"
    assert callable(compiled_kernel(key))
