"""Host time of a call: cute_flash beside torch's SDPA and beside a floor that is measured in the same run.

    case    One kind of call (plain, with a feature, varlen) in one direction. `fwd`: under no_grad; `train`:
            the forward with gradients recorded; `bwd`: `torch.autograd.grad(out, inputs, dout,
            retain_graph=True)` of one forward pass.
    floor   The same allocations and bare launches: the kernels of a warm call, launched again with the
            arguments of that call. Dropout's seed kernel and the fill of max_logit are part of the floor.
    SDPA    The flash and the cuDNN backend on the same tensors. The fastest backend is compared.
    plain   `attn` without a feature, in the same direction: the base of the ratios of features.

`few_queries` and `decode` are one token over a cache of 4096 keys, by `attn` and by `attn_decode`.

A loop of calls never waits for the GPU: the shape is so small that the GPU keeps up, and the GPU is
synchronised between loops, so the launch queue never fills. All calls of all cases run interleaved in
one process, in shuffled order, and the value of a call is the median of its loops. Fresh processes
repeat this, one after another. The reported value is the median of the processes, with the lowest and the
highest. Kernels are compiled before the first process starts, and every process loads them from the disk
cache.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from profiling.measure.host_time import Place, Times, host_times
from profiling.measure.launches import floor_of, needed_kernels
from profiling.measure.study import Record, Step, Study, Tools
from profiling.measure.timing import EventTimer, TimedCall, WallTimer, attempt_each
from profiling.measure.workers import Pool, TaskFailed, note
from profiling.peers.cute_flash import our_peer
from profiling.studies import start
from profiling.studies.host_cases import MADE_BY_TORCH, Settings, timed_call
from profiling.studies.host_report import FLOOR, OURS, case_record, failures, host_tables

# Seconds without a report after which a measuring process counts as hung.
LIMIT_S = 180.0


def measure(settings: Settings, index: int) -> Times:
    """All calls of all cases in this process; `index` seeds the order."""
    device = torch.device(settings.device)
    timer = EventTimer() if device.type == "cuda" else WallTimer()
    timed_calls: dict[Place, TimedCall] = {}
    errors: dict[Place, str] = {}

    def prepare(case: str, makes: Mapping[str, Callable[[], TimedCall | None]]) -> None:
        note(f"{case} {' '.join(makes)}")
        made, failed = attempt_each(makes, timer)
        timed_calls.update({(case, name): one for name, one in made.items() if one is not None})
        errors.update({(case, name): text for name, text in failed.items()})

    for case in settings.chosen():
        prepare(case.name, {OURS: partial(timed_call, case, settings)})
        ours = timed_calls.get((case.name, OURS))
        if ours is not None and not case.watcher:
            made_by_torch = MADE_BY_TORCH.get(case.feature)
            makes = made_by_torch(settings.shape, device) if made_by_torch else None
            prepare(case.name, {FLOOR: partial(floor_of, ours, makes)})
        prepare(case.name, {name: partial(timed_call, case, settings, one) for name, one in case.sdpa.items()})
    order = random.Random(index)
    times = host_times(timed_calls, timer, time.perf_counter, settings.calls, settings.repeats, order)
    return Times(times.us, {**errors, **times.errors})


def in_fresh_process(settings: Settings, index: int) -> Times:
    """`measure` in a new process."""
    # Keeps the profiler from printing lines about itself. torch reads the variable when it is imported.
    environment = {"KINETO_LOG_LEVEL": "99"}
    if settings.kernels != "auto":
        environment["CUTE_FLASH_KERNELS"] = settings.kernels
    with Pool(1, environment, LIMIT_S) as pool:
        times: Times = pool.call(measure, settings, index)
    return times


def steps(settings: Settings, tools: Tools) -> list[Step]:
    """A step for each process; it computes the figures of all cases again."""
    base = settings.earlier()
    processes: list[Times] = []

    def measure_process(index: int) -> Record:
        try:
            times = in_fresh_process(settings, index)
        except TaskFailed as error:
            return {"errors": {f"process {index + 1}": str(error)}}
        processes.append(times)
        cases = {case.name: case_record(case, processes, base) for case in settings.chosen()}
        return {"cases": cases, "errors": {" ".join(place): text for place, text in times.errors.items()}}

    numbers = range(settings.processes)
    measured = [Step(None, f"process {i + 1}", partial(measure_process, i)) for i in numbers]
    pack = Path(settings.pack) if settings.pack else None
    starting = Step("start", "start", partial(start.start_times, settings.device, settings.kernels, pack))
    return [*measured, *([starting] if settings.start else [])]


STUDY = Study(
    name="host",
    help="host time of calls beside SDPA and bare launches",
    examples=("--out host.json", "--start"),
    settings=Settings,
    check=Settings.earlier,
    context=lambda settings: our_peer(kernels=settings.kernels).context(),
    kernels=lambda settings, tools: needed_kernels(
        lambda case=case: timed_call(case, settings)()  # type: ignore[misc]
        for case in settings.chosen()
    ),
    method={
        "time": "host time per call: median of asynchronous loops in each process, interleaved in shuffled order; "
        "median of the processes; bwd: torch.autograd.grad with retain_graph=True"
    },
    parts=lambda settings, tools: {"cases": {}, "errors": {}, "start": {}},
    steps=steps,
    tables=host_tables,
    failures=failures,
    ours=(OURS, FLOOR),
)
