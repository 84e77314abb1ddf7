"""Notices what a mod writes to captured variables and containers.

A mod runs only when it is traced, on copies of its variables and containers. So its writes would be lost. They are
noticed by a comparison of the copies before and after the trace, because nothing can intercept an assignment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CellType, FrameType, FunctionType
from typing import Any

from cute_flash.score_mod.proxy import user_line

NO_WRITES = "a mod runs only when it is traced, so it must not change captured values"


class WriteLog:
    """The variables and containers of a traced mod, and their contents before it runs."""

    def __init__(self) -> None:
        self._watched: list[tuple[str, Callable[[], dict], dict]] = []

    def watch(self, what: str, read: Callable[[], dict]) -> None:
        """Watch contents. `what` names a write to the contents; {} in it becomes the key that is written."""
        self._watched.append((what, read, read()))

    def watch_function(self, function: FunctionType) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        self.watch("an assignment to the nonlocal {}", lambda: {k: _contents(x) for k, x in cells.items()})
        # Python itself assigns to names such as __warningregistry__.
        names = function.__globals__
        self.watch("an assignment to the global {}", lambda: {k: x for k, x in names.items() if not k.startswith("__")})
        self.watch("an assignment to .{} of a captured function", lambda: dict(function.__dict__))

    def watch_container(self, x: Any) -> None:
        if isinstance(x, list):
            self.watch("a write to a captured list", lambda: dict(enumerate(x)))
        elif isinstance(x, (dict, set)):
            self.watch(
                f"a write to a captured {type(x).__name__}",
                lambda: dict(x) if isinstance(x, dict) else {k: k for k in x},
            )

    def first(self) -> str:
        """The first write since the contents were watched; "" if there is none."""
        for what, read, before in self._watched:
            now = read()
            for key in {**before, **now}:
                if key not in before or key not in now or before[key] is not now[key]:
                    return what.format(key)
        return ""


def _contents(cell: CellType) -> Any:
    return cell if cell == CellType() else cell.cell_contents


def line_of_first_write(run: Callable[[], Any], log: WriteLog) -> str:
    """The file and line of user code whose execution by `run` made the first write."""
    line = found = ""

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal line, found
        found = found or (line if log.first() else "")
        running = frame.f_back if event == "return" and frame.f_back else frame
        line = user_line([(running, running.f_lineno)]) or line
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        run()
    finally:
        sys.settrace(before)
    return found or line
