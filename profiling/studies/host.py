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

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cute_flash.jit.compile import precompile_all
from cute_flash.planning.plan import CompileKey
from cute_flash.tools.progress import steps
from profiling.measure import machine
from profiling.measure.host_time import Place, Times, host_times
from profiling.measure.launches import floor_of, recorded_kernels
from profiling.measure.options import add_jobs, add_options, add_out, settings_of
from profiling.measure.record import write_json
from profiling.measure.study import FAILED, OK, Command, need_gpu
from profiling.measure.tables import print_lines, show
from profiling.measure.timing import EventTimer, Failure, TimedCall, attempt, describe
from profiling.measure.workers import Pool, Task, note
from profiling.peers.peer import KERNELS
from profiling.studies import start
from profiling.studies.host_cases import MADE_BY_TORCH, Case, Settings, timed_call
from profiling.studies.host_report import FLOOR, OURS, case_record, figures_of, has_failed, host_tables

# Seconds without a report after which a measuring process counts as hung.
LIMIT_S = 180.0


def _call_once(case: Case, settings: Settings) -> None:
    ours = timed_call(case, settings)
    with ours.context():
        ours.call()


def needed_kernels(settings: Settings) -> list[CompileKey]:
    """The compile keys of all cases, without compiling. `measure` reports the cases that fail."""
    timer, keys = EventTimer(), dict[CompileKey, None]()
    for case in settings.chosen():
        note(case.name)
        with recorded_kernels(keys):
            attempt(partial(_call_once, case, settings), timer)
    return list(keys)


# ---- one process
# ---------------------------------------------------------------------------------------------------------


def measure(settings: Settings, index: int) -> Times:
    """All calls of all cases in this process; `index` seeds the order."""
    timer, device = EventTimer(), torch.device(settings.device)
    timed_calls: dict[Place, TimedCall] = {}
    errors: dict[Place, str] = {}

    def prepare(place: Place, make: Callable[[], TimedCall | None]) -> None:
        note(" ".join(place))
        made = attempt(make, timer)
        if isinstance(made, Failure):
            errors[place] = made.message
        elif made is not None:
            timed_calls[place] = made

    for case in settings.chosen():
        ours = (case.name, OURS)
        prepare(ours, partial(timed_call, case, settings))
        if ours in timed_calls and not case.watcher:
            made_by_torch = MADE_BY_TORCH.get(case.feature)
            makes = made_by_torch(settings.shape, device) if made_by_torch else None
            prepare((case.name, FLOOR), partial(floor_of, timed_calls[ours], makes))
        for name, backend in case.sdpa.items():
            prepare((case.name, name), partial(timed_call, case, settings, backend))
    order = random.Random(index)
    times = host_times(timed_calls, timer, time.perf_counter, settings.calls, settings.repeats, order)
    return Times(times.us, {**errors, **times.errors})


# ---- all processes
# ---------------------------------------------------------------------------------------------------------


def fresh_process(environment: Mapping[str, str]) -> Callable[..., Any]:
    """A function that calls another function in a fresh process, and raises RuntimeError if it fails."""
    # Keeps the profiler from printing lines about itself. torch reads the variable when it is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def run(function: Callable[..., Any], *args: Any) -> Any:
        with Pool(1, environment, LIMIT_S) as pool:
            (outcome,) = pool.run([Task(function, args)])
        if outcome.error:
            raise RuntimeError(f"{outcome.error} (at: {outcome.note})")
        return outcome.value

    return run


def run_host(
    settings: Settings,
    run: Callable[..., Any],
    compile_all: Callable[[list[Any]], object],
    step: Callable[[str], None],
    base: Mapping[str, Any],
) -> dict[str, Any]:
    """Compile all kernels, then measure in one fresh process after another.

    `run(function, *args)` calls a function in a fresh process. `base`: the JSON of an earlier run, or empty.
    """
    cases, processes, failed = settings.chosen(), [], {}
    start = time.perf_counter()
    try:
        keys = run(needed_kernels, settings)
        compile_all(keys)
        step(f"{len(keys)} kernels compiled or loaded, {time.perf_counter() - start:.0f} s")
    except Exception as error:
        # Each process compiles the missing kernels itself.
        failed["compile"] = describe(error)
        step(f"compile: {failed['compile']}")
    for index in range(settings.processes):
        try:
            processes.append(run(measure, settings, index))
            us = processes[-1].us.get((cases[0].name, OURS), math.nan)
            line = f"{cases[0].name} {us:.1f} us"
        except RuntimeError as error:
            line = failed[f"process {index + 1}"] = describe(error)
        step(f"process {index + 1} of {settings.processes}: {line}, {time.perf_counter() - start:.0f} s")
    errors = {" ".join(place): text for times in processes for place, text in times.errors.items()}
    return {
        "settings": asdict(settings),
        "method": "host time per call: median of asynchronous loops in each process, timed_calls interleaved "
        "in shuffled order; median of the processes; bwd: torch.autograd.grad with retain_graph=True",
        "cases": {case.name: case_record(case, figures_of(case, processes), base) for case in cases},
        "errors": {**failed, **errors},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_options(parser, Settings)
    add_jobs(parser)
    add("--kernels", choices=KERNELS, default="auto", help="kernel family of cute_flash (default: %(default)s)")
    add("--base", type=Path, metavar="FILE", help="JSON of an earlier run, for the goals that compare with it")
    add("--start", action="store_true", help="measure the import and the first call too")
    add_out(parser, "write all results as JSON")


def run(args: argparse.Namespace) -> int:
    settings = settings_of(Settings, args)
    # Raises for an unknown case, before anything is measured.
    settings.chosen()
    base: dict[str, Any] = json.loads(args.base.read_text()) if args.base else {}
    need_gpu()
    environment = {} if args.kernels == "auto" else {"CUTE_FLASH_KERNELS": args.kernels}
    with steps("measuring host time", 1 + settings.processes + args.start) as done:
        run_process = fresh_process(environment)
        data = run_host(settings, run_process, lambda keys: list(precompile_all(keys, args.jobs)), done, base)
        starts = start.start_times("cuda", args.kernels) if args.start else {}
        if args.start:
            done("start")
    data.update(machine=machine.facts(), kernels=args.kernels, start=starts)
    if "error" in starts:
        data["errors"]["start"] = starts["error"]
    write_json(data, args.out)
    show([*host_tables(data), *([start.start_table(starts)] if "cold" in starts else [])])
    print_lines("Failures", [f"{name}: {error}" for name, error in data["errors"].items()])
    return FAILED if has_failed(data) else OK


COMMAND = Command(
    "host", "host time of calls beside SDPA and bare launches", ("--out host.json", "--start"), add_arguments, run
)
