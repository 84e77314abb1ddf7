"""Progress of a slow step on stderr: elapsed seconds in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

UPDATE_SECONDS = 0.5
CLEAR_LINE = "\r\x1b[K"


@contextmanager
def progress(step: str, stream: TextIO | None = None) -> Iterator[None]:
    """Print that a step runs and, at its end, how long it took.

    `sys.stderr` is read once, at the start, because the step may redirect it to capture the compiler's output.
    """
    stream = stream or sys.stderr
    start, done = time.monotonic(), threading.Event()
    is_terminal = stream.isatty()

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    def count_seconds() -> None:
        while not done.wait(UPDATE_SECONDS):
            write(f"{CLEAR_LINE}{step} ... {time.monotonic() - start:.0f} s")

    write(f"{step} ..." + ("" if is_terminal else "\n"))
    thread = threading.Thread(target=count_seconds, daemon=True)
    if is_terminal:
        thread.start()
    outcome = "failed after"
    try:
        yield
        outcome = "took"
    finally:
        done.set()
        if is_terminal:
            thread.join()
        write(f"{CLEAR_LINE if is_terminal else ''}{step}: {outcome} {time.monotonic() - start:.1f} s\n")
