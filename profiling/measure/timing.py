"""GPU time of calls in interleaved rounds: clocks and temperature affect all alike.

Every round times every call once, in another order. After a kernel that uses little power, the card is cooler and
clocks are higher, so no call may always follow the same one. A batch is as many back-to-back calls
as fill the budget, between two events, after half as many untimed calls. Its result is the
median over rounds, and the spread (max - min) / median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import torch

from profiling.measure.workers import TaskFailed, Unusable

K = TypeVar("K")
T = TypeVar("T")

# Calls from which the time of one call is estimated.
ESTIMATE_CALLS = 3
MIN_CALLS, MAX_CALLS = 2, 1000
# The most calls in a graph: enough that the gaps between replays are negligible; more would cost memory and time.
CALLS_PER_GRAPH = 32


class DeviceLost(RuntimeError):
    """The CUDA context is lost: nothing more can be measured in this process."""


@dataclass(frozen=True)
class Failure:
    message: str


@dataclass(frozen=True)
class TimedCall:
    call: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self) -> Any:
        """The result of one call, inside the context."""
        with self.context():
            return self.call()


@dataclass(frozen=True)
class Batch:
    """`run` issues `calls` calls."""

    run: Callable[[], None]
    calls: int


@dataclass(frozen=True)
class Samples:
    """Milliseconds of one call, one value per round."""

    calls: int
    round_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.round_ms)

    @property
    def spread(self) -> float:
        return (max(self.round_ms) - min(self.round_ms)) / self.median_ms

    def as_dict(self) -> dict[str, Any]:
        """The entry of a result file."""
        return {"ms": self.median_ms, "spread": self.spread, "calls": self.calls, "round_ms": self.round_ms}

    def with_tflops(self, flops: float) -> dict[str, Any]:
        """The entry of a result file, for a call of so many FLOPs."""
        return {"tflops": flops / self.median_ms / 1e9, **self.as_dict()}


@dataclass(frozen=True)
class Measured:
    samples: dict[str, Samples]
    errors: dict[str, str]


class Timer(Protocol):
    def batch(self, call: Callable[[], Any], calls: int) -> Batch: ...

    def milliseconds(self, run: Callable[[], None]) -> float: ...

    def synchronize(self) -> None: ...

    def stream(self) -> AbstractContextManager[Any]:
        """For a forward pass whose gradients are timed: autograd computes them on the stream of the forward."""
        ...


def repeat(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        call()


class EventTimer:
    """CUDA events around calls from the host, as in a user's loop."""

    def batch(self, call: Callable[[], Any], calls: int) -> Batch:
        return Batch(lambda: repeat(call, calls), calls)

    def milliseconds(self, run: Callable[[], None]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()


class GraphTimer(EventTimer):
    """CUDA events around replays of a captured graph: no host time between the calls."""

    @cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """The stream that is captured: a capture may not wait for another stream."""
        self._capture_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._capture_stream):
            yield
        torch.cuda.current_stream().wait_stream(self._capture_stream)

    def batch(self, call: Callable[[], Any], calls: int) -> Batch:
        # At the first call on a stream, libraries allocate and choose kernels, which a capture does not allow.
        with self.stream():
            call()
        graph, captured = torch.cuda.CUDAGraph(), min(calls, CALLS_PER_GRAPH)
        with torch.cuda.graph(graph, stream=self._capture_stream):
            repeat(call, captured)
        replays = max(1, round(calls / captured))
        return Batch(lambda: repeat(graph.replay, replays), captured * replays)


class WallTimer(EventTimer):
    """Wall-clock time of calls on the CPU: to try a command, not to measure."""

    def milliseconds(self, run: Callable[[], None]) -> float:
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)

    def synchronize(self) -> None:
        pass


def describe(error: BaseException) -> str:
    """One line for a table and a file."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, TaskFailed) else f"{type(error).__name__}: {text}"


def attempt(action: Callable[[], T], timer: Timer) -> T | Failure:
    """The result of an action, or its failure; raises `DeviceLost` if the CUDA context is lost."""
    try:
        return action()
    except DeviceLost:
        raise
    except Exception as error:
        failure = Failure(describe(error))
        try:
            timer.synchronize()
        except Exception as fatal:
            raise DeviceLost(failure.message) from fatal
        return failure


@contextmanager
def unusable_if_lost(timer: Timer) -> Iterator[None]:
    """In a worker process: raise `Unusable` for a failure that lost the CUDA context."""
    try:
        yield
    except DeviceLost as lost:
        raise Unusable(str(lost)) from lost
    except Exception as error:
        try:
            timer.synchronize()
        except Exception:
            raise Unusable(describe(error)) from error
        raise


def attempt_each(actions: Mapping[K, Callable[[], T]], timer: Timer) -> tuple[dict[K, T], dict[K, str]]:
    """The results of the actions that succeed, and the messages of those that fail, by name."""
    results, errors = interleave(actions, 1, timer, order=lambda names, i: names)
    return {name: found[0] for name, found in results.items()}, errors


def interleave(
    actions: Mapping[K, Callable[[], T]],
    rounds: int,
    timer: Timer,
    order: Callable[[list[K], int], Sequence[K]] | None = None,
) -> tuple[dict[K, list[T]], dict[K, str]]:
    """The results of the actions in each round, and the messages of those that fail.

    An action that fails is left out of later rounds. `order`: of the names in a round; by default, that of `balanced`.
    """
    results: dict[K, list[T]] = {name: [] for name in actions}
    errors: dict[K, str] = {}
    for i in range(rounds):
        for name in (order or balanced)(list(results), i):
            result = attempt(actions[name], timer)
            if isinstance(result, Failure):
                errors[name] = result.message
                del results[name]
            else:
                results[name].append(result)
    return results, errors


def balanced(names: Sequence[K], round_index: int) -> list[K]:
    """The order of one round, by a Williams design.

    Over n rounds of n names, each name is first once. Each name follows every other name equally often over n rounds
    if n is even, and over 2 n rounds if n is odd.
    """
    count = len(names)
    if not count:
        return []
    zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(count)]
    if count % 2 and round_index // count % 2:
        zigzag.reverse()
    return [names[(offset + round_index) % count] for offset in zigzag]


def calls_for(budget_ms: float, call_ms: float) -> int:
    if call_ms <= 0:
        return MAX_CALLS
    return min(max(round(budget_ms / call_ms), MIN_CALLS), MAX_CALLS)


def warm_up(timed_call: TimedCall, timer: Timer, budget_ms: float) -> Batch:
    """Make the calls that compile and load; return the batch that each round times."""
    with timed_call.context():
        timed_call.call()
        timer.synchronize()
        few = timer.batch(timed_call.call, ESTIMATE_CALLS)
        call_ms = timer.milliseconds(few.run) / few.calls
        return timer.batch(timed_call.call, calls_for(budget_ms, call_ms))


def time_batch(timed_call: TimedCall, batch: Batch, timer: Timer) -> float:
    with timed_call.context():
        repeat(timed_call.call, max(1, batch.calls // 2))
        return timer.milliseconds(batch.run) / batch.calls


def measure(timed_calls: Mapping[str, TimedCall], timer: Timer, rounds: int, budget_ms: float) -> Measured:
    """Time all calls, interleaved. One that fails is left out of later rounds."""
    batches, errors = attempt_each(
        {name: partial(warm_up, timed_call, timer, budget_ms) for name, timed_call in timed_calls.items()}, timer
    )
    rounds_of = {name: partial(time_batch, timed_calls[name], batch, timer) for name, batch in batches.items()}
    times, later = interleave(rounds_of, rounds, timer)
    samples = {name: Samples(batches[name].calls, tuple(call_ms)) for name, call_ms in times.items()}
    return Measured(samples, errors | later)
