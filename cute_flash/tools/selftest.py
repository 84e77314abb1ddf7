"""`cute-flash selftest`: calls of all kinds on this GPU against an fp64 oracle, and a small benchmark beside SDPA.

It prints a table and writes a JSON file with the GPU, the driver, versions, clocks and results. The file has no names
of hosts or users, and no paths.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from cute_flash.errors import UnsupportedError
from cute_flash.jit.digest import source_digest
from cute_flash.jit.kernels import precompile_all
from cute_flash.planning.launch import LaunchKey
from cute_flash.runtime.gpu import Gpu, use_gpu
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.family import FAMILIES, use_kernels
from cute_flash.tools.progress import steps
from cute_flash.tools.selftest_benchmark import CELLS, LIBRARIES, OURS, Cell, Timing, measure
from cute_flash.tools.selftest_calls import CALLS, Call
from cute_flash.tools.selftest_check import FAILED, REFUSED, RIGHT, WRONG, Outcome, check, run
from cute_flash.version import __version__

FORMAT = 1  # of the JSON file
MAX_JOBS = 16
STYLES = {RIGHT: "green", REFUSED: "yellow", WRONG: "bold red", FAILED: "bold red"}
PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi")
# Name in the JSON file -> name of nvidia-smi.
STATE = {
    "driver": "driver_version", "sm_mhz": "clocks.sm", "max_sm_mhz": "clocks.max.sm", "memory_mhz": "clocks.mem",
    "power_w": "power.draw", "power_limit_w": "power.limit", "temperature_c": "temperature.gpu",
}  # fmt: skip


def planned_runs(gpu: ArchSpec, family: str = "") -> list[tuple[Call, str]]:
    """The calls, each with a kernel family; "" is the default of the GPU.

    If `family` is "", the core calls also run with the families that are not the default.
    """
    runnable = [name for name in FAMILIES if name != "sm90" or gpu.has_wgmma]
    if family and family not in runnable:
        raise UnsupportedError(f"kernel family {family!r}: {gpu.name} has no wgmma; use {' or '.join(runnable)}")
    runs = [(call, family) for call in CALLS]
    if family:
        return runs
    return runs + [(call, name) for name in runnable[1:] for call in CALLS if call.is_core]


def selftest(
    runs: Sequence[tuple[Call, str]], path: Path | None = None, cells: Sequence[Cell] = CELLS, device: str = "cuda"
) -> int:
    """Run the self-test, and return 0, or 1 if a call failed or has a wrong result.

    Args:
        runs: Calls and their kernel families.
        path: The JSON file to write; None: `default_path`.
        cells: What to time beside SDPA; on CUDA only.
        device: "cuda", or "cpu" to check the CPU path.
    """
    start = time.monotonic()
    if device == "cuda":
        compile_first(runs, cells)
    outcomes = []
    with steps("checking", len(runs)) as done:
        for call, chosen in runs:
            outcomes.append(check(call, chosen, device))
            done(f"{call.name}: {outcomes[-1].message}" if outcomes[-1].message else "")
    timings: list[Timing] = []
    states = [gpu_state(device)]
    with steps("timing", len(cells)) as done:
        for cell in cells:
            timings.append(measure(cell))
            states.append(gpu_state(device))
            done("")
    report = as_dict(outcomes, timings, states, device, time.monotonic() - start)
    path = path or default_path(report["gpu"]["name"])
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    console = Console(highlight=False, soft_wrap=True)
    console.print(calls_table(outcomes))
    if timings:
        console.print(benchmark_table(timings))
    counts = {verdict: sum(x.verdict == verdict for x in outcomes) for verdict in STYLES}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    console.print(f"wrote {path}; docs/hardware.md says how to contribute it")
    return 0 if all(outcome.is_right for outcome in outcomes) else 1


# ---- compilation


class KeyRecorder(Gpu):
    """Records the kernels of calls. Launches do nothing."""

    def __init__(self) -> None:
        self.keys: dict[LaunchKey, None] = {}

    def kernel(self, key: LaunchKey) -> Callable[..., None]:
        self.keys[key] = None
        return lambda *arguments: None

    chain = kernel


def compile_first(runs: Sequence[tuple[Call, str]], cells: Sequence[Cell]) -> None:
    """Compile all kernels of the calls and of the benchmark into the disk cache, in parallel."""
    recorder = KeyRecorder()
    with use_gpu(recorder):
        for call, family in runs:
            # `check` reports exceptions.
            with suppress(Exception), use_kernels(family):
                run(call, "cuda")
        for cell in cells:
            with suppress(Exception):
                cell.run_of(OURS)()
    with steps("compiling", len(recorder.keys)) as done:
        for _ in precompile_all(list(recorder.keys), num_jobs()):
            done("")


def num_jobs() -> int:
    """The number of processes that compile: one for each core, if each has 2 GB of memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory >> 31, MAX_JOBS))


# ---- the JSON file


def as_dict(
    outcomes: Sequence[Outcome],
    timings: Sequence[Timing],
    states: Sequence[dict[str, str]],
    device: str,
    seconds: float,
) -> dict[str, Any]:
    """The content of the JSON file. Messages of exceptions are left out, because they may have paths."""
    return {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": round(seconds),
        "gpu": gpu_facts(device),
        "versions": {
            "cute-flash": __version__,
            "source": source_digest()[:16],
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cuda": torch.version.cuda,
            **{name: _version(name) for name in PACKAGES},
        },
        "states": states,  # before the benchmark, and after each of its cells
        "calls": [{name: x for name, x in asdict(outcome).items() if name != "message"} for outcome in outcomes],
        "benchmark": [asdict(timing) for timing in timings],
    }


def gpu_facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }


def gpu_state(device: str) -> dict[str, str]:
    """Driver, clocks, power and temperature; empty without nvidia-smi."""
    if device == "cpu":
        return {}
    # torch and nvidia-smi number GPUs differently.
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    selector = () if uuid is None else ("-i", f"GPU-{str(uuid).removeprefix('GPU-')}")
    command = ("nvidia-smi", *selector, f"--query-gpu={','.join(STATE.values())}", "--format=csv,noheader,nounits")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(STATE, (value.strip() for value in answer.splitlines()[0].split(","))))


def default_path(gpu: str) -> Path:
    """cute-flash-selftest-<gpu>.json in the current folder."""
    return Path(f"cute-flash-selftest-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- tables of the terminal


def calls_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("call", "kernels", "result", "largest error / allowed", box=box.SIMPLE_HEAD)
    for x in outcomes:
        error = x.exception or (f"{x.ratio:.2f} {x.result}" if x.ratio is not None else f"not finite {x.result}")
        table.add_row(x.call, x.family or "default", f"[{STYLES[x.verdict]}]{x.verdict}[/]", error)
    return table


def benchmark_table(timings: Sequence[Timing]) -> Table:
    others = [library for library in LIBRARIES if library != OURS]
    table = Table("bf16, 4 x 4096 tokens", box=box.SIMPLE_HEAD)
    for title in ("ms", "TFLOP/s", *(f"speed / {library}" for library in others)):
        table.add_column(title, justify="right")
    for x in timings:
        ratios = [x.ratio(library) for library in others]
        cells = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        ours = (x.milliseconds.get(OURS), x.tflops.get(OURS))
        table.add_row(x.cell, *("-" if number is None else f"{number:.3g}" for number in ours), *cells)
    return table
