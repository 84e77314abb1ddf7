"""Host time of a call: cute_flash beside torch's SDPA and beside a floor that is measured in the same run.

    case    One kind of call (plain, with a feature, varlen) in one direction. `fwd`: under no_grad; `train`:
            the forward with gradients recorded; `bwd`: `torch.autograd.grad(out, inputs, dout,
            retain_graph=True)` of one forward pass.
    floor   The same allocations and bare launches: the kernels of a warm call, launched again with the
            arguments of that call. Dropout's seed kernel and the fill of max_logit are part of the floor.
    SDPA    The flash and the cuDNN backend on the same tensors. The fastest backend is compared.

A loop of calls never waits for the GPU: the shape is so small that the GPU keeps up, and the GPU is
synchronised between loops, so the launch queue never fills. All contenders of all cases run interleaved in
one process, in shuffled order, and the value of a contender is the median of its loops. Fresh processes
repeat this, one after another. The reported value is the median of the processes, with the lowest and the
highest. Kernels are compiled before the first process starts, and every process loads them from the disk
cache.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_flash.planning.plan import CompileKey
from profiling.measure.timing import Contender, EventTimer, Failure, Timer, attempt, describe, repeat
from profiling.measure.workers import Pool, Task, note
from profiling.studies.host_cases import MADE_BY_TORCH, Case, Settings, contender
from profiling.studies.host_report import FLOOR, OURS, Place, Times, case_record, figures_of

# Seconds without a report after which a measuring process counts as hung.
LIMIT_S = 180.0


# ---- floor
# ---------------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    key: CompileKey
    function: Callable[..., None]
    args: tuple[Any, ...]


@contextmanager
def recorded_launches(is_dry: bool = False) -> Iterator[list[Launch]]:
    """Record every kernel launch of cute_flash inside the block, in order, with its positional arguments.

    With `is_dry` nothing is compiled or launched: the list has the kernels that the calls need. `use_gpu` restores
    the functions that were bound before, so that timed calls do not run through the recorder.
    """
    from cute_flash.runtime.gpu import current_gpu, use_gpu

    launches: list[Launch] = []
    recorder, kernel_of = copy(current_gpu()), current_gpu().kernel

    def kernel(key: CompileKey) -> Callable[..., None]:
        function = (lambda *args: None) if is_dry else kernel_of(key)

        def launch(*args: Any) -> None:
            launches.append(Launch(key, function, args))
            function(*args)

        return launch

    recorder.kernel = kernel  # type: ignore[method-assign]
    with use_gpu(recorder):
        yield launches


@contextmanager
def recorded_kernels(keys: dict[CompileKey, None]) -> Iterator[None]:
    """Add the kernels that the calls inside the block need to `keys`; nothing is compiled or launched."""
    with recorded_launches(is_dry=True) as launches:
        yield
    keys.update(dict.fromkeys(one.key for one in launches))


def floor_of(ours: Contender, made_by_torch: Callable[[], Tensor] | None = None) -> Contender | None:
    """The allocations and the launches of a call, without anything else; None if it launches no kernel.

    An argument in memory that two calls do not share was allocated by the call. Launches of one stream are
    ordered, so the floor's launches may share the recorded outputs, workspace and counters. `made_by_torch` makes an
    operand by a torch kernel; the floor runs it in place of that operand's allocation.
    """
    with ours.context(), recorded_launches() as launches:
        ours.call()
        num_first = len(launches)
        ours.call()
    first, second = launches[:num_first], launches[num_first:]
    if [one.key for one in first] != [one.key for one in second]:
        raise RuntimeError("two calls of one case launch different kernels")
    if not second:
        return None
    shared = set(_memory(first))
    made = None if made_by_torch is None else made_by_torch()
    allocations: list[Callable[[], Tensor]] = []
    for address, x in _memory(second).items():
        if address in shared:
            continue
        is_made = made is not None and (x.shape, x.dtype) == (made.shape, made.dtype)
        allocations.append(made_by_torch if is_made and made_by_torch else partial(torch.empty_like, x))
    bare = [partial(one.function, *one.args) for one in second]

    def floor() -> None:
        _held = [allocate() for allocate in allocations]
        for launch in bare:
            launch()

    return Contender(floor, ours.context)


def _memory(launches: Sequence[Launch]) -> dict[int, Tensor]:
    """The tensors among the arguments, by the address of their memory; one per address."""
    tensors: dict[int, Tensor] = {}
    for one in launches:
        for x in one.args:
            for tensor in x if isinstance(x, (list, tuple)) else (x,):
                if isinstance(tensor, Tensor):
                    tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return tensors


def _call_once(case: Case, settings: Settings) -> None:
    ours = contender(case, settings)
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


def host_times(
    contenders: Mapping[Place, Contender],
    timer: Timer,
    clock: Callable[[], float],
    calls: int,
    repeats: int,
    order: random.Random,
) -> Times:
    """Microseconds of host time per call: the median of `repeats` loops, interleaved in shuffled order."""
    loops: dict[Place, list[float]] = {place: [] for place in contenders}
    errors: dict[Place, str] = {}

    def one_loop(one: Contender) -> float:
        with one.context():
            one.call()
            timer.synchronize()
            start = clock()
            repeat(one.call, calls)
            end = clock()
            timer.synchronize()
        return 1e6 * (end - start) / calls

    was_collecting = gc.isenabled()
    gc.disable()
    try:
        # Loop 0 compiles, loads and warms up, and is not counted.
        for loop in range(repeats + 1):
            note(f"loop {loop} of {repeats}")
            places = list(loops)
            order.shuffle(places)
            for place in places:
                us = attempt(partial(one_loop, contenders[place]), timer)
                if isinstance(us, Failure):
                    errors[place] = us.message
                    del loops[place]
                elif loop > 0:
                    loops[place].append(us)
    finally:
        if was_collecting:
            gc.enable()
    return Times({place: statistics.median(us) for place, us in loops.items()}, errors)


def measure(settings: Settings, index: int) -> Times:
    """All contenders of all cases in this process; `index` seeds the order."""
    timer, device = EventTimer(), torch.device(settings.device)
    contenders: dict[Place, Contender] = {}
    errors: dict[Place, str] = {}

    def prepare(place: Place, make: Callable[[], Contender | None]) -> None:
        note(" ".join(place))
        made = attempt(make, timer)
        if isinstance(made, Failure):
            errors[place] = made.message
        elif made is not None:
            contenders[place] = made

    for case in settings.chosen():
        ours = (case.name, OURS)
        prepare(ours, partial(contender, case, settings))
        if ours in contenders and not case.watcher:
            made_by_torch = MADE_BY_TORCH.get(case.feature)
            makes = made_by_torch(settings.shape, device) if made_by_torch else None
            prepare((case.name, FLOOR), partial(floor_of, contenders[ours], makes))
        for name, backend in case.sdpa.items():
            prepare((case.name, name), partial(contender, case, settings, backend))
    order = random.Random(index)
    times = host_times(contenders, timer, time.perf_counter, settings.calls, settings.repeats, order)
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
        "method": "host time per call: median of asynchronous loops in each process, contenders interleaved "
        "in shuffled order; median of the processes; bwd: torch.autograd.grad with retain_graph=True",
        "cases": {case.name: case_record(case, figures_of(case, processes), base) for case in cases},
        "errors": {**failed, **errors},
    }
