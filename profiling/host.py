"""What a call costs the host, and what the first call costs.

Host time: a loop of warm calls that never waits for the GPU, on a shape so small that the GPU keeps up, with
a synchronisation between loops so that the launch queue never fills. Start time: fresh processes import
cute_flash after torch and finish one kernel, with an empty compile cache and then with what this left there.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from profiling.accuracy import draw
from profiling.machine import ROOT
from profiling.providers import Provider
from profiling.suites import DTYPES, Shape
from profiling.terminal import Table
from profiling.timing import Contender, Failure, Timer, attempt, balanced, describe, repeat

SHAPE = Shape(batch=2, heads=8, heads_kv=8, seqlen=512, head_dim=64, causal=False)
NAMES = ("cute_flash", "sdpa-flash", "sdpa-cudnn", "fa3", "fa4")
# Fewer launches than the queue holds, so that the host never waits for a free place.
CALLS, REPEATS = 200, 20
WARM_STARTS = 3
START_SECONDS = 120
PROFILE_LINES = 15

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


@dataclass(frozen=True)
class HostTime:
    median_us: float
    lowest_us: float
    highest_us: float
    repeat_us: tuple[float, ...]


def host_times(
    contenders: Mapping[str, Contender], timer: Timer, clock: Callable[[], float], calls: int, repeats: int
) -> tuple[dict[str, HostTime], dict[str, str]]:
    """Microseconds of host time per call, in balanced order, and the errors of the contenders that failed."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    errors: dict[str, str] = {}

    def one_repeat(contender: Contender) -> float:
        with contender.context():
            contender.call()
            timer.synchronize()
            start = clock()
            repeat(contender.call, calls)
            return 1e6 * (clock() - start) / calls

    was_collecting = gc.isenabled()
    gc.disable()
    try:
        # One more turn than is kept: the first compiles and loads.
        for turn in range(repeats + 1):
            for name in balanced(list(times), turn):
                value = attempt(partial(one_repeat, contenders[name]), timer)
                if isinstance(value, Failure):
                    errors[name] = value.message
                    del times[name]
                elif turn > 0:
                    times[name].append(value)
                timer.synchronize()
    finally:
        if was_collecting:
            gc.enable()
    found = {n: HostTime(statistics.median(us), min(us), max(us), tuple(us)) for n, us in times.items()}
    return found, errors


def prepare_all(
    providers: Sequence[Provider], timer: Timer, device: torch.device
) -> tuple[dict[str, Contender], dict[str, str]]:
    inputs = draw(SHAPE, DTYPES["bf16"], device, seed=0)
    contenders: dict[str, Contender] = {}
    errors: dict[str, str] = {}
    for provider in providers:
        call = attempt(partial(provider.prepare, *inputs, SHAPE.causal), timer)
        if isinstance(call, Failure):
            errors[provider.name] = call.message
        else:
            contenders[provider.name] = Contender(call, provider.context)
    return contenders, errors


def python_profile(contender: Contender, timer: Timer, calls: int = CALLS) -> list[dict[str, Any]]:
    """Where the Python time of a warm call goes. The profiler slows every frame: read shares, not times."""
    profile = cProfile.Profile()
    with contender.context():
        contender.call()
        timer.synchronize()
        profile.runcall(repeat, contender.call, calls)
    timer.synchronize()
    # (file, line, name) -> (primitive calls, calls, own seconds, cumulative seconds, callers)
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(profile).stats  # type: ignore
    rows = sorted(stats.items(), key=lambda item: item[1][2], reverse=True)[:PROFILE_LINES]
    return [
        {"where": f"{Path(file).name}:{line}({name})", "calls": n / calls, "own_us": 1e6 * own / calls}
        for (file, line, name), (_, n, own, _, _) in rows
    ]


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
    """`cold`: an empty cache; `warm`: the median of fresh processes that find the cache it left."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            start = partial(start_once, Path(folder), device, kernels, search_path)
            cold, warm = start(), [start() for _ in range(WARM_STARTS)]
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            return {"error": describe(error)}
    return {"cold": cold, "warm": {step: statistics.median(run[step] for run in warm) for step in cold}}


@torch.no_grad()
def run_host(
    providers: Sequence[Provider],
    unavailable: dict[str, str],
    timer: Timer,
    device: torch.device,
    start: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    contenders, errors = prepare_all(providers, timer, device)
    found, failed = host_times(contenders, timer, time.perf_counter, CALLS, REPEATS)
    ours = next((p.name for p in providers if p.is_ours and p.name in found), None)
    profile = [] if ours is None else attempt(partial(python_profile, contenders[ours], timer), timer)
    has_ours = any(provider.is_ours for provider in providers)
    return {
        "shape": asdict(SHAPE),
        "method": f"{CALLS} asynchronous calls x {REPEATS} repeats, synchronised between repeats; median",
        "host": {name: asdict(value) for name, value in found.items()},
        "errors": {**errors, **failed},
        "unavailable": unavailable,
        "profile": [] if isinstance(profile, Failure) else profile,
        "start": start() if has_ours else {"error": "cute_flash is not available"},
    }


def host_tables(data: dict[str, Any]) -> list[Table]:
    rows = [
        (name, *(f"{value[key]:.1f}" for key in ("median_us", "lowest_us", "highest_us")))
        for name, value in data["host"].items()
    ]
    tables = [Table("Host time per warm call, us", ("provider", "median", "lowest", "highest"), tuple(rows))]
    if "cold" in data["start"]:
        steps = tuple(data["start"]["cold"])
        kinds = ("cold", "warm")
        starts = [(kind, *(f"{data['start'][kind][step]:.0f}" for step in steps)) for kind in kinds]
        columns = ("compile cache", *(step.removesuffix("_ms").replace("_", " ") for step in steps))
        tables.append(Table("A fresh process after `import torch`, ms", columns, tuple(starts)))
    if data["profile"]:
        lines = [(row["where"], f"{row['calls']:.1f}", f"{row['own_us']:.2f}") for row in data["profile"]]
        title = "Python time of our call under the profiler, per call (shares, not times)"
        tables.append(Table(title, ("function", "calls", "own us"), tuple(lines)))
    return tables
