from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_flash import api
from cute_flash.spec.family import FAMILIES
from profiling.measure.launches import tiles_of
from tests.combinations import RNG
from tests.fakes import gpu as fakes
from tests.gpu import families
from tests.gpu.calls import Call


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> Iterator[None]:
    """Use at most two CPU threads, because test files run in parallel and compute little on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, 2))
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --tiles-of, tests run the mma.sync kernels with the tiles of that GPU, compiled for the GPU here."""
    name = request.config.getoption("--tiles-of")
    if not name:
        yield
        return
    with tiles_of(name):
        yield


def by(family: str) -> Iterator[None]:
    if reason := families.obstacle(family):
        pytest.skip(reason)
    with families.chosen(family):
        yield


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test once with each kernel family that the GPU can run."""
    for _ in by(request.param):
        yield request.param


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Iterator[Call]:
    """A call of `tests.gpu.calls`, by its own family."""
    for _ in by(request.param.family):
        yield request.param


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New memory holds NaN, so that elements that no kernel writes are detected."""
    with fakes.poisoned_memory():
        yield


@pytest.fixture
def known_rng(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every call with dropout the same seed."""
    monkeypatch.setattr(api, "_seed", lambda q: torch.tensor(RNG, device=q.device))
