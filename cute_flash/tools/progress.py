"""Progress of slow work on stderr: a bar with the time left on a terminal, plain lines elsewhere.

rich draws the bar. It follows NO_COLOR and draws nothing on a dumb terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def _console(stream: TextIO | None) -> Console:
    # The stream of now: resources.py redirects `sys.stderr` while the compiler runs, and the bar must not follow.
    return Console(file=stream or sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


@contextmanager
def steps(activity: str, total: int, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Show the progress of `total` steps.

    Args:
        activity: What is being done, beside the bar.
        total: The number of steps.
        stream: Where to show it; `sys.stderr` by default.

    Yields:
        A function to call with a line about each step that is done. The line is printed with its number.
    """
    console, num_done = _console(stream), 0
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(activity, total=total)

        def done(line: str) -> None:
            nonlocal num_done
            num_done += 1
            console.print(f"[{num_done}/{total}] {line}")
            bar.advance(task)

        yield done


@contextmanager
def step(activity: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show that one step runs, with the elapsed time on a terminal, and at its end print how long it took."""
    console, start = _console(stream), time.monotonic()
    if not console.is_terminal:
        console.print(f"{activity} ...")
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    outcome = "failed after"
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            bar.add_task(activity, total=None)
            yield
        outcome = "took"
    finally:
        console.print(f"{activity}: {outcome} {time.monotonic() - start:.1f} s")
