from __future__ import annotations

import pytest

from profiling import timing


@pytest.fixture
def few_calls(monkeypatch):
    """What takes no time on the fake clock would be called very often."""
    monkeypatch.setattr(timing, "MAX_CALLS", 20)
