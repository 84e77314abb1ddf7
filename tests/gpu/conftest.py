from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_flash.plan import FAMILIES
from tests.gpu import families
from tests.gpu.poison import poisoned_memory as poisoned_memory


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    """A test runs once with each family of kernels that the GPU can run."""
    if reason := families.obstacle(request.param):
        pytest.skip(reason)
    with families.everywhere(request.param):
        yield request.param
