from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_flash import forward, operands, ops
from cute_flash.jit import compile as compiling
from cute_flash.runtime import counters
from cute_flash.spec import arch
from tests.fake_gpu import COUNTER, FakeGpu


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu(request.param)
    monkeypatch.setattr(arch, "detect", lambda index: arch.ARCHS[fake.name])
    monkeypatch.setattr(compiling, "compiled", fake.compiled)
    monkeypatch.setattr(counters, "counter", lambda index: (torch.zeros(1), COUNTER))
    monkeypatch.setattr(operands, "current_device", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(ops, "_launches", {})
    monkeypatch.setattr(forward, "_launches", {})
    # New memory holds NaN: what a launch forgets to write is seen.
    torch.use_deterministic_algorithms(True)
    yield fake
    torch.use_deterministic_algorithms(False)
