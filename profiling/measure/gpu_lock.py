"""A lock for processes that share a GPU: they compile at the same time and measure one after the other.

Each process holds a shared lock on a file while it compiles and checks, and an exclusive lock while it measures. A
process that measures therefore waits until no other uses the GPU. Each process must compile everything before it
measures.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class GpuLock:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        fcntl.flock(self._file, fcntl.LOCK_SH)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the GPU exclusively. Use it once, because the lock is released afterwards."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()
