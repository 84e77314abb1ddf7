"""Progress of a slow step on stderr: seconds counted in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

TICK_SECONDS = 0.5
CLEAR_LINE = "\r\x1b[K"


@contextmanager
def ticking(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Say that `what` is under way, and at its end how long it took.

    The stream is taken once, here: a step may redirect sys.stderr to read what the compiler prints.
    """
    stream = stream or sys.stderr
    start, done = time.monotonic(), threading.Event()
    is_terminal = stream.isatty()

    def tick() -> None:
        while not done.wait(TICK_SECONDS):
            stream.write(f"{CLEAR_LINE}{what} ... {time.monotonic() - start:.0f} s")
            stream.flush()

    def say(text: str) -> None:
        stream.write(text)
        stream.flush()

    say(f"{what} ..." + ("" if is_terminal else "\n"))
    thread = threading.Thread(target=tick, daemon=True)
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
        say(f"{CLEAR_LINE if is_terminal else ''}{what}: {outcome} {time.monotonic() - start:.1f} s\n")
