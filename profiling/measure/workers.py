"""A pool of worker processes in which a task may fail, hang or kill its process while the others continue.

The pools of the standard library do not support that: `multiprocessing.Pool` waits forever for a task whose process
was killed, and `ProcessPoolExecutor` gives up all remaining tasks. Here a lost process is replaced, and its task ends
with an error. Functions and arguments are pickled; processes are spawned, so that none inherits a CUDA context. This
module imports only the standard library, so that a process can choose where it imports other packages from.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Seconds that a process may take to end.
END_S = 10.0
MAX_MESSAGE = 500
STDOUT, STDERR = 1, 2  # file descriptors


class Unusable(Exception):
    """Raised by a task that leaves its process unusable: the pool replaces the process."""


class TaskFailed(RuntimeError):
    """The error of a task that was called by `Pool.call`."""


@dataclass(frozen=True)
class Task:
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of the task at `index`: a value, or an error and the last note before it."""

    index: int
    value: Any = None
    error: str | None = None
    note: str | None = None


_to_parent: Connection | None = None


def _send(connection: Connection, message: Any) -> None:
    """Send by plain pickle: `Connection.send` would share the memory of tensors."""
    connection.send_bytes(pickle.dumps(message))


def note(text: str | None) -> None:
    """Report the next step from inside a task. The outcome of a task whose process dies has the last note."""
    if _to_parent is not None:
        _send(_to_parent, ("note", text))


def _describe(error: BaseException) -> str:
    text = str(error) if isinstance(error, Unusable) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:MAX_MESSAGE]


def _serve(connection: Connection, environment: Mapping[str, str], packages: str | None) -> None:
    """The main loop of a worker process: run tasks until the parent closes the connection."""
    global _to_parent
    _to_parent = connection
    os.environ.update(environment)
    if packages is not None:
        sys.path.insert(0, packages)
    # A new session: Ctrl-C reaches only the parent, which ends the worker with all processes that its tasks started.
    os.setsid()
    # The command's standard output is for tables.
    os.dup2(STDERR, STDOUT)
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        # The time limit of a task does not include the start and the imports of its process.
        note(None)
        try:
            _send(connection, ("value", task.function(*task.args)))
        except Unusable as error:
            _send(connection, ("lost", _describe(error)))
            return
        except Exception as error:
            _send(connection, ("error", _describe(error)))


class _Worker:
    def __init__(self, environment: Mapping[str, str], packages: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # Not a daemon, which could not start processes. `Pool` ends it.
        self.process = context.Process(target=_serve, args=(theirs, dict(environment), packages))
        self.process.start()
        # The worker holds the only other end now, so that reading fails if it dies.
        theirs.close()
        self.index = -1
        self.note: str | None = None
        self.heard = time.monotonic()

    def begin(self, index: int, task: Task) -> None:
        self.index, self.note, self.heard = index, None, time.monotonic()
        try:
            _send(self.connection, task)
        except OSError:
            # The worker has died; `read` reports it.
            pass

    def read(self) -> Outcome | None:
        """The end of the task, or None for a note."""
        try:
            kind, content = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return self.lost(f"its process ended with {self._exit()}")
        self.heard = time.monotonic()
        if kind == "note":
            self.note = content
            return None
        if kind == "value":
            return Outcome(self.index, value=content)
        return self.lost(content) if kind == "lost" else Outcome(self.index, None, content, self.note)

    def lost(self, error: str) -> Outcome:
        self.end(is_urgent=True)
        return Outcome(self.index, None, error, self.note)

    def _exit(self) -> str:
        self.process.join(END_S)
        code = self.process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"

    def end(self, is_urgent: bool = False) -> None:
        self.connection.close()
        if not is_urgent:
            self.process.join(END_S)
        assert self.process.pid
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(END_S)


class Pool:
    """Up to `size` processes with additions to the environment; one without a message for `limit_s` counts as hung.

    `packages`: a folder from which the processes import first.
    """

    def __init__(self, size: int, environment: Mapping[str, str], limit_s: float, packages: Path | None = None) -> None:
        self.size, self.limit_s = size, limit_s
        self._start = partial(_Worker, dict(environment), str(packages) if packages else None)
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._busy:
            worker.end(is_urgent=True)
        # All end at the same time.
        for worker in self._idle:
            worker.connection.close()
        for worker in self._idle:
            worker.end()

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """The outcomes in the order in which tasks end; `index` is that of the task."""
        waiting = deque(enumerate(tasks))
        while waiting or self._busy:
            while waiting and len(self._busy) < self.size:
                worker = self._idle.pop() if self._idle else self._start()
                worker.begin(*waiting.popleft())
                self._busy.append(worker)
            yield from self._heard()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of one task. Raises `TaskFailed`."""
        (outcome,) = self.run([Task(function, args)])
        if outcome.error is not None:
            raise TaskFailed(outcome.error + (f" (at: {outcome.note})" if outcome.note else ""))
        return outcome.value

    def _heard(self) -> Iterator[Outcome]:
        """Wait for a message of a worker, or until one exceeds the time limit."""
        until = min(worker.heard for worker in self._busy) + self.limit_s
        ready = wait([worker.connection for worker in self._busy], max(0.0, until - time.monotonic()))
        for worker in list(self._busy):
            outcome = worker.read() if worker.connection in ready else None
            if outcome is None and time.monotonic() > worker.heard + self.limit_s:
                outcome = worker.lost(f"no message for {self.limit_s:g} s")
            if outcome is not None:
                self._busy.remove(worker)
                if not worker.connection.closed:
                    self._idle.append(worker)
                yield outcome
