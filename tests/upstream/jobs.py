"""One process per shard of a step: its job, its share of the cases, its time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]
VARIABLE = "CUTE_FLASH_UPSTREAM_JOB"
# After the limit a process is interrupted, so that pytest writes the results that it has, and killed later.
GRACE_SECONDS = 20.0
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What one process does: a step of a suite, for the cases of one shard."""

    suite: str
    step: str
    sources: str
    out: str
    index: int = 0
    processes: int = 1
    mods: tuple[str, ...] = ()

    @staticmethod
    def current() -> Job:
        """The job of this process."""
        return Job(**json.loads(os.environ[VARIABLE]))

    @property
    def folder(self) -> Path:
        return Path(self.out, self.suite, self.step)

    def path(self, suffix: str) -> Path:
        return self.folder / f"{self.index}.{suffix}"

    def source(self, path: str) -> Path:
        """A file or folder of `--sources`."""
        full = Path(self.sources, path)
        if not full.exists():
            raise FileNotFoundError(f"{full} does not exist; tests/upstream/__init__.py lists the sources")
        return full


def share(cases: Sequence[T], job: Job, group: Callable[[T], Hashable], cost: Callable[[T], float]) -> list[T]:
    """The cases of a job. A group stays in one process. Each group, the costliest first, goes to the least busy one."""
    groups: dict[Hashable, list[T]] = {}
    for case in cases:
        groups.setdefault(group(case), []).append(case)
    load = [0.0] * job.processes
    mine: list[T] = []
    for members in sorted(groups.values(), key=lambda members: -sum(map(cost, members))):
        i = load.index(min(load))
        load[i] += sum(map(cost, members))
        if i == job.index:
            mine += members
    return mine


def run_processes(job: Job, processes: int, command: Callable[[Job], list[str]], seconds: float) -> list[int]:
    """Run a step in several processes; write their exit codes to returncodes.json and return them."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for old in [*job.folder.glob("[0-9]*.*"), job.folder / "returncodes.json"]:
        old.unlink(missing_ok=True)
    cache = Path(job.out, "cache").absolute()
    caches = {"CUTE_FLASH_CACHE_DIR": "kernels", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    defaults = {name: str(cache / folder) for name, folder in caches.items()}
    defaults |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    begin, running = time.monotonic(), []
    for index in range(processes):
        own = replace(job, index=index, processes=processes)
        environment = {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(path), VARIABLE: json.dumps(asdict(own))}
        with open(own.path("log"), "w", encoding="utf-8") as log:
            running.append(
                subprocess.Popen(
                    command(own), cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )
    codes = [_wait(process, begin + seconds) for process in running]
    (job.folder / "returncodes.json").write_text(json.dumps(codes) + "\n", encoding="utf-8")
    print(f"{job.suite} {job.step}: {processes} processes, {time.monotonic() - begin:.0f} s", flush=True)
    return codes


def _wait(process: subprocess.Popen[bytes], end: float) -> int:
    for number, until in ((signal.SIGINT, end), (signal.SIGKILL, end + GRACE_SECONDS)):
        try:
            return process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, number)
    return process.wait()
