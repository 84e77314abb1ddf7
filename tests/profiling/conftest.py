from __future__ import annotations

import pytest

from profiling.measure import timing


@pytest.fixture
def few_calls(monkeypatch):
    """Limit the number of calls: a call that takes no time on the fake clock would be repeated very often."""
    monkeypatch.setattr(timing, "MAX_CALLS", 20)
