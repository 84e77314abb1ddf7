"""Progress of slow work on stderr: a bar with the time left on a terminal, plain lines elsewhere.

rich draws the bar. It follows NO_COLOR and draws nothing on a dumb terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)


def _console(stream: TextIO | None) -> Console:
    # The current `sys.stderr`, because resources.py redirects `sys.stderr` while the compiler runs.
    return Console(file=stream or sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


class _Times(ProgressColumn):
    """Elapsed time, and the time left by the mean of all steps; rich's own estimate uses the last 30 s only."""

    def render(self, task: Task) -> str:
        elapsed = task.elapsed or 0.0
        text = f"{timedelta(seconds=int(elapsed))} elapsed"
        if not task.completed:
            return text
        left = task.fields["mean_seconds"] * (task.total or 0) - elapsed
        return f"{text}, {timedelta(seconds=max(0, round(left)))} left"


@contextmanager
def steps(activity: str, total: int, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Show the progress of `total` steps.

    Args:
        activity: The text beside the bar.
        total: The number of steps.
        stream: Where to show it; `sys.stderr` by default.

    Yields:
        A function to call after each step with a line about it, which is printed with its number. "" prints nothing.
    """
    console, num_done, start = _console(stream), 0, time.monotonic()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _Times(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, get_time=time.monotonic
    ) as bar:
        task = bar.add_task(activity, total=total, mean_seconds=0.0)

        def done(line: str) -> None:
            nonlocal num_done
            num_done += 1
            if line:
                console.print(f"[{num_done}/{total}] {line}")
            bar.update(task, advance=1, mean_seconds=(time.monotonic() - start) / num_done)

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
