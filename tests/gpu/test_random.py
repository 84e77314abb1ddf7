"""Random calls of both families over all features, against an oracle that shares no code with the package.

`--random-calls=N` runs N calls of each kind; 40 kinds of a family have the default of 45.
"""

from __future__ import annotations

from collections import Counter

import pytest

from cute_flash.spec.family import FAMILIES
from tests.random_calls import Kind, check, drawn, kinds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::cute_flash.LayoutWarning"),
]
CALLS = 45
KINDS = [pytest.param(kind, kind.family, id=kind.id) for family in FAMILIES for kind in kinds(family)]


@pytest.mark.parametrize(("kind", "family"), KINDS, indirect=["family"])
def test_random_calls(kind: Kind, family: str, request: pytest.FixtureRequest) -> None:
    """Wrong calls are reported together; a kind is refused for all lengths, or for none."""
    failed, outcomes = [], Counter[str]()
    for seed in range(request.config.getoption("--random-calls") or CALLS):
        call = drawn(seed, kind, "cuda")
        try:
            outcomes[check(call, seed)] += 1
        except AssertionError as error:
            failed.append(f"seed {seed}: {call}: {error}")
    assert not failed, "\n".join([f"{len(failed)} failed", *failed[:5]])
    assert len(outcomes) == 1, outcomes
