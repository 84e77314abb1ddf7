"""Processes that share a GPU and compile at the same time, but time one after the other.

Each holds a file's lock with the others while it compiles and checks, and alone while it times: whoever times
waits until nobody else is at work on the GPU.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Turns:
    """Without a file there is nobody to wait for."""

    def __init__(self, path: Path | None = None) -> None:
        self._file: IO[str] | None = path.open("a") if path else None
        self._lock(fcntl.LOCK_SH)

    def _lock(self, how: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, how)

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._lock(fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_SH)

    def close(self) -> None:
        self._lock(fcntl.LOCK_UN)
        if self._file is not None:
            self._file.close()
            self._file = None
