"""Counts calls of Python functions: a cost that does not depend on the load of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def python_calls(function: Callable[[], Any]) -> int:
    """The number of Python functions that run inside `function()`."""
    calls = -1  # `function` itself does not count

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls
