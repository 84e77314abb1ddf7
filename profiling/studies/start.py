"""Start time: fresh processes import torch, then cute_flash, and call `attn` twice.

The first process starts with an empty compile cache; the others load the kernel that it stored there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from profiling.measure.machine import ROOT
from profiling.measure.tables import Table
from profiling.measure.timing import describe

WARM_STARTS = 3
START_SECONDS = 120

START = """
import json, sys, time
import torch
device = sys.argv[1]
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
steps = ("import_ms", "first_call_ms", "second_call_ms")
print(json.dumps({step: 1e3 * (b - a) for step, a, b in zip(steps, marks, marks[1:])}))
"""


def start_once(cache: Path, device: str, kernels: str, search_path: Path) -> dict[str, float]:
    """One fresh process: milliseconds of the import, the first and the second call."""
    paths = [str(search_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUTE_FLASH_CACHE_DIR": str(cache)}
    if kernels != "auto":
        environment["CUTE_FLASH_KERNELS"] = kernels
    done = subprocess.run(
        (sys.executable, "-c", START, device),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
        cwd=search_path,
        env=environment,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def start_times(device: str, kernels: str = "auto", search_path: Path = ROOT) -> dict[str, Any]:
    """Milliseconds of each step. `cold`: an empty cache; `warm`: the median of the processes after it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            start = partial(start_once, Path(folder), device, kernels, search_path)
            cold, warm = start(), [start() for _ in range(WARM_STARTS)]
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            return {"error": describe(error)}
    return {"cold": cold, "warm": {step: statistics.median(run[step] for run in warm) for step in cold}}


def start_table(times: dict[str, Any]) -> Table:
    """The table of a result of `start_times` without an error."""
    steps = tuple(times["cold"])
    rows = [(kind, *(f"{times[kind][step]:.0f}" for step in steps)) for kind in ("cold", "warm")]
    columns = ("compile cache", *(step.removesuffix("_ms").replace("_", " ") for step in steps))
    return Table("A fresh process after `import torch`, ms", columns, tuple(rows))
