"""Runs functions on all ranks of a gloo group, in processes that a fork server starts: torch is imported once."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Guards against a hang; a loaded machine must not reach them. Ranks of a process that ended fail at once.
COLLECTIVE, WHOLE_RUN = timedelta(seconds=300), 900.0


def _worker(rank: int, size: int, store: str, tasks: Sequence[Callable[[], Any]], queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=COLLECTIVE)
    for i, task in enumerate(tasks):
        try:
            queue.put((rank, i, None, task()))
        except BaseException:
            queue.put((rank, i, traceback.format_exc(), None))
            # The other ranks may wait for this one. They raise errors when its process ends.
            return
    dist.destroy_process_group()


def run(
    size: int, tasks: Sequence[Callable[[], Any]], folder: Path, seconds: float = WHOLE_RUN
) -> list[dict[int, tuple[str | None, Any]]]:
    """For each task, the (error, result) of each rank that ran it. Processes are ended after `seconds`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.distributed.cases"])
    queue: Any = context.Queue()
    store = str(folder / f"store-{size}-{time.monotonic_ns()}")
    processes = [
        context.Process(target=_worker, args=(rank, size, store, tasks, queue), daemon=True) for rank in range(size)
    ]
    for process in processes:
        process.start()
    outcomes: list[dict[int, tuple[str | None, Any]]] = [{} for _ in tasks]
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if not queue.empty():
                rank, i, error, result = queue.get()
                outcomes[i][rank] = error, result
            elif not any(process.is_alive() for process in processes) and queue.empty():
                break
            else:
                time.sleep(0.01)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return outcomes
