"""Processes that share a GPU and compile at the same time, but time one after the other.

Each holds a file's lock with the others while it compiles and checks, and alone while it times: whoever times
waits until nobody else is at work on the GPU. Compile everything first: a process that went back to compiling
would keep all others waiting.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        fcntl.flock(self._file, fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Once; afterwards it no longer takes part."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()
