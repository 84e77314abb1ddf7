"""Host time of calls: asynchronous loops, interleaved in shuffled order."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from profiling.measure.timing import TimedCall, Timer, interleave, repeat
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

    def one_loop(one: TimedCall) -> float:
        with one.context():
            one.call()
            timer.synchronize()
            start = clock()
            repeat(one.call, calls)
            end = clock()
            timer.synchronize()
        return 1e6 * (end - start) / calls

    def shuffled(places: list[Place], loop: int) -> list[Place]:
        note(f"loop {loop} of {repeats}")
        order.shuffle(places)
        return places

    was_collecting = gc.isenabled()
    gc.disable()
    try:
        actions = {place: partial(one_loop, one) for place, one in timed_calls.items()}
        loops, errors = interleave(actions, repeats + 1, timer, shuffled)
    finally:
        if was_collecting:
            gc.enable()
    # Loop 0 compiles, loads and warms up, and is not counted.
    return Times({place: statistics.median(us[1:]) for place, us in loops.items()}, errors)
