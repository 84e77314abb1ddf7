"""Random calls on the CPU path; `tests/gpu/test_random.py` has those of the kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.random_calls import FP64, check, drawn, kinds

CALLS = 120


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::cute_flash.LayoutWarning")
def test_random_calls(request: pytest.FixtureRequest) -> None:
    """Every other call is fp64, where no rounding hides an error. Short sequences look like (B, S, H, D)."""
    found, outcomes = kinds("sm80"), Counter[str]()
    for seed in range(request.config.getoption("--random-calls") or CALLS):
        kind = found[seed % len(found)]
        call = drawn(seed, replace(kind, dtype=FP64) if seed % 2 else kind, longest=65)
        try:
            outcomes[check(call, seed)] += 1
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {call}: {error}")
    assert outcomes["right"] == outcomes.total(), outcomes
