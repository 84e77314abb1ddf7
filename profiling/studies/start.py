"""Start time: fresh processes import torch, then cute_flash, and call `attn` twice.

The first process starts with an empty compile cache; the others load the kernel that it stored there. This module
imports neither torch nor cute_flash, because the processes import it before they measure.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from profiling.measure.workers import Pool, TaskFailed

WARM_STARTS = 3
LIMIT_S = 120.0
STEPS = ("import_ms", "first_call_ms", "second_call_ms")


def first_calls(device: str) -> dict[str, float]:
    """Milliseconds of the import, the first and the second call. Runs in a fresh process."""
    import torch

    q, k, v = (torch.randn(2, 8, 512, 64, device=device).to(torch.bfloat16) for _ in range(3))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    marks = [time.perf_counter()]
    import cute_flash

    attn = cute_flash.attn
    marks.append(time.perf_counter())
    for _ in range(2):
        attn(q, k, v)
        wait()
        marks.append(time.perf_counter())
    return {step: 1e3 * (after - before) for step, before, after in zip(STEPS, marks, marks[1:])}


def start_times(device: str, kernels: str = "auto", packages: Path | None = None) -> dict[str, Any]:
    """Milliseconds of each step. `cold`: an empty cache; `warm`: the median of the processes after it.

    `packages`: a folder from which the processes import first.
    """

    def start() -> dict[str, float]:
        with Pool(1, environment, LIMIT_S, packages) as pool:
            times: dict[str, float] = pool.call(first_calls, device)
        return times

    with tempfile.TemporaryDirectory() as folder:
        environment = {"CUTE_FLASH_CACHE_DIR": folder, **({} if kernels == "auto" else {"CUTE_FLASH_KERNELS": kernels})}
        try:
            cold, warm = start(), [start() for _ in range(WARM_STARTS)]
        except TaskFailed as error:
            return {"error": str(error)}
    return {"cold": cold, "warm": {step: statistics.median(run[step] for run in warm) for step in cold}}
