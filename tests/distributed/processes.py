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

TIMEOUT = 20.0


def _worker(rank: int, size: int, store: str, timeout: float, tasks: Sequence[Callable[[], Any]], queue: Any) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    for i, task in enumerate(tasks):
        try:
            queue.put((rank, i, None, task()))
        except BaseException:
            queue.put((rank, i, traceback.format_exc(), None))
            # The other ranks may wait for this one. They raise errors when its process ends.
            return
    dist.destroy_process_group()


def run(
    size: int, tasks: Sequence[Callable[[], Any]], folder: Path, seconds: float, timeout: float = TIMEOUT
) -> list[dict[int, tuple[str | None, Any]]]:
    """For each task, the (error, result) of each rank that ran it. Processes end after `seconds` at the latest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.distributed.cases"])
    queue: Any = context.Queue()
    store = str(folder / f"store-{size}-{time.monotonic_ns()}")
    processes = [
        context.Process(target=_worker, args=(rank, size, store, timeout, tasks, queue), daemon=True)
        for rank in range(size)
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
