"""The rungs of examples/ladder on a GPU, against SDPA in fp64: odd lengths, both masks, both head dims."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from examples.ladder import harness
from examples.ladder.__main__ import BACKWARD, CASES, FORWARD, rung_class

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"d{case[0]}-{'causal' if case[1] else 'full'}")
@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_a_rung_is_right(name: str, case: tuple[int, bool]) -> None:
    rung = rung_class(name)
    if reason := harness.obstacle(rung(*case)):
        pytest.skip(reason)
    errors = {seqlen: harness.check(rung, *case, seqlen) for seqlen in harness.ODD_SEQLENS}
    assert max(errors.values()) <= harness.MAX_ERROR_RATIO, errors
