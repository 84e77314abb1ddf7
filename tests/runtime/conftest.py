from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.gpu import FakeGpu, fake_gpu


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest) -> Iterator[FakeGpu]:
    with fake_gpu(request.param) as gpu:
        yield gpu


@pytest.fixture
def sm_90() -> Iterator[FakeGpu]:
    with fake_gpu("sm_90") as gpu:
        yield gpu
