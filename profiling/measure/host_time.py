"""Host time of calls: asynchronous loops, interleaved in shuffled order."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from profiling.measure.timing import Failure, TimedCall, Timer, attempt, repeat
from profiling.measure.workers import note

# (case, name of the call), such as ("plain-fwd", "sdpa-flash").
Place = tuple[str, str]


@dataclass(frozen=True)
class Times:
    """Microseconds of each call in one process, and the errors of those that failed."""

    us: dict[Place, float] = field(default_factory=dict)
    errors: dict[Place, str] = field(default_factory=dict)


def host_times(
    timed_calls: Mapping[Place, TimedCall],
    timer: Timer,
    clock: Callable[[], float],
    calls: int,
    repeats: int,
    order: random.Random,
) -> Times:
    """Microseconds of host time per call: the median of `repeats` loops, interleaved in shuffled order."""
    loops: dict[Place, list[float]] = {place: [] for place in timed_calls}
    errors: dict[Place, str] = {}

    def one_loop(one: TimedCall) -> float:
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
                us = attempt(partial(one_loop, timed_calls[place]), timer)
                if isinstance(us, Failure):
                    errors[place] = us.message
                    del loops[place]
                elif loop > 0:
                    loops[place].append(us)
    finally:
        if was_collecting:
            gc.enable()
    return Times({place: statistics.median(us) for place, us in loops.items()}, errors)
