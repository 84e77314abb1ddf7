"""Processes that compile kernels into the disk cache.

They run `serve`. Processes of `multiprocessing` would run the main module of the caller again, so a script that calls
`cute_flash.warmup` would need `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from cute_flash.jit.disk import DiskCache
from cute_flash.planning.launch import LaunchKey

# The process imports from the folders of its parent, which may have changed `sys.path`.
_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from cute_flash.jit.workers import serve; serve()"
)


def precompile_in_processes(keys: Sequence[LaunchKey], jobs: int, cache: DiskCache | None) -> Iterator[bool]:
    """Call `kernels.precompile` for each key in `jobs` processes; results are in the order of the keys."""
    workers = [_Worker() for _ in range(jobs)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def compile_one(key: LaunchKey) -> bool:
        worker = idle.get()
        try:
            return worker.precompile(key, cache)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(jobs)
    try:
        yield from pool.map(compile_one, keys)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.stop()


class _Worker:
    """A process that compiles one kernel at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _START]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send([os.path.abspath(folder) for folder in sys.path])

    def _send(self, value: Any) -> None:
        assert self.process.stdin is not None
        pickle.dump(value, self.process.stdin)
        self.process.stdin.flush()

    def precompile(self, key: LaunchKey, cache: DiskCache | None) -> bool:
        assert self.process.stdout is not None
        try:
            self._send((key, cache))
            result = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError) as error:
            status = self.process.wait()
            raise RuntimeError(f"the process that compiled {key.kernel} ended with status {status}") from error
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def serve() -> None:
    """Compile the keys (with the caches) that come from stdin, and write each result, or the error, to stdout."""
    from cute_flash.jit.kernels import precompile

    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the compiler may print
    while True:
        try:
            key, cache = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result: Any = precompile(key, cache)
        except BaseException as error:
            result = error
        try:
            content = pickle.dumps(result)
        except Exception:
            content = pickle.dumps(RuntimeError(f"{type(result).__name__}: {result}"))
        results.write(content)
        results.flush()
