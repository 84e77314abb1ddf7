"""Start time: fresh processes import torch, then cute_flash, and call `attn` and its backward.

The first process starts with an empty kernel cache; the next ones load the kernels that it stored there. With a pack,
more processes start with an empty cache and find the kernels in the pack. Python's bytecode is stored as an
installation by pip stores it. This module imports neither torch nor cute_flash, because the processes import them
before they measure.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from profiling.measure.workers import Pool, TaskFailed

WARM_STARTS = 3
LIMIT_S = 120.0
STEPS = ("import_ms", "first_call_ms", "second_call_ms", "first_backward_ms", "second_backward_ms")


def first_calls(device: str, bytecode: str | None = None) -> dict[str, Any]:
    """Milliseconds of `STEPS`, and whether the compiler was imported. Runs in a fresh process."""
    if bytecode is not None:
        sys.dont_write_bytecode, sys.pycache_prefix = False, bytecode
    import torch

    q, k, v = (torch.randn(2, 8, 512, 64, device=device).to(torch.bfloat16).requires_grad_() for _ in range(3))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    # Initializes CUDA and torch's autograd.
    (q * k).sum().backward()
    wait()
    marks = [time.perf_counter()]
    import cute_flash

    attn = cute_flash.attn
    marks.append(time.perf_counter())
    for _ in range(2):
        attn(q, k, v)
        wait()
        marks.append(time.perf_counter())
    for _ in range(2):
        loss = attn(q, k, v).sum()
        wait()
        start = time.perf_counter()
        loss.backward()
        wait()
        marks.append(marks[-1] + time.perf_counter() - start)
    times = {step: 1e3 * (after - before) for step, before, after in zip(STEPS, marks, marks[1:])}
    return {**times, "imports_compiler": "cutlass" in sys.modules}


def start_times(
    device: str, kernels: str = "auto", pack: Path | None = None, packages: Path | None = None
) -> dict[str, Any]:
    """Milliseconds of each step. "cold": an empty cache; "warm", "pack": the median of the processes with kernels.

    `pack`: a wheel of kernels. `packages`: a folder from which the processes import first.
    """
    family = {} if kernels == "auto" else {"CUTE_FLASH_KERNELS": kernels}
    with ExitStack() as stack:
        cache, empty, bytecode, unpacked = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(4))

        def start(cache: str, packages: Path | None) -> dict[str, Any]:
            with Pool(1, {**family, "CUTE_FLASH_CACHE_DIR": cache}, LIMIT_S, packages) as pool:
                times: dict[str, Any] = pool.call(first_calls, device, bytecode)
            return times

        try:
            times = {
                "cold": start(cache, packages),
                "warm": _medians([start(cache, packages) for _ in range(WARM_STARTS)]),
            }
            if pack is not None:
                zipfile.ZipFile(pack).extractall(unpacked)
                times["pack"] = _medians([start(empty, Path(unpacked)) for _ in range(WARM_STARTS)])
        except (TaskFailed, OSError, zipfile.BadZipFile) as error:
            return {"error": str(error)}
    return times


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {step: statistics.median(run[step] for run in runs) for step in STEPS}
    return {**medians, "imports_compiler": any(run["imports_compiler"] for run in runs)}
