from __future__ import annotations

import itertools
from collections import Counter
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from profiling.measure.timing import (
    CALLS_PER_GRAPH,
    MAX_CALLS,
    MIN_CALLS,
    DeviceLost,
    EventTimer,
    Failure,
    GraphTimer,
    Samples,
    TimedCall,
    attempt,
    balanced,
    calls_for,
    measure,
)
from tests.profiling.fakes import FakeTimer


class Recorder:
    """Calls on one fake clock. Records the caller of each call, and whether its context was active."""

    def __init__(self) -> None:
        self.timer = FakeTimer(event_ms=0.0)
        self.calls: list[str] = []
        self.inside: list[str] = []

    def timed_call(self, name: str, *costs: float) -> TimedCall:
        """Each call takes the next time of `costs`, then always the last. An infinite time is a failure."""
        left = list(costs)

        @contextmanager
        def context():
            self.inside.append(name)
            try:
                yield
            finally:
                self.inside.remove(name)

        def call() -> None:
            assert self.inside == [name]
            self.calls.append(name)
            cost = left.pop(0) if len(left) > 1 else left[0]
            if cost == float("inf"):
                raise RuntimeError("no kernel for this shape")
            self.timer.now_ms += cost

        return TimedCall(call, context)


def batches_of(calls: list[str]) -> list[str]:
    """The timed_calls in order, with consecutive calls merged into one batch."""
    return [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]


def test_every_round_times_every_call_once():
    recorder = Recorder()
    timed_calls = {name: recorder.timed_call(name, 1.0) for name in "abcd"}
    measured = measure(timed_calls, recorder.timer, rounds=4, budget_ms=10)
    # Warm-up first. If a round ends with the first timed_call of the next round, their batches are merged.
    orders = ["abcd", "abdc", "bcad", "cdba", "dacb"]
    assert batches_of(recorder.calls) == batches_of(list("".join(orders)))
    assert all(len(samples.round_ms) == 4 for samples in measured.samples.values())
    assert recorder.inside == []


@pytest.mark.parametrize("names", ["", "a", "ab", "abc", "abcd", "abcde", "abcdef"])
def test_no_call_always_follows_the_same_one(names):
    rounds = len(names) * (1 + len(names) % 2)
    orders = [balanced(names, i) for i in range(rounds)]
    assert all(sorted(order) == list(names) for order in orders)
    firsts = Counter(order[0] for order in orders)
    assert len(set(firsts.values())) <= 1 and len(firsts) == len(names)
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(pairs) == len(names) * (len(names) - 1 if names else 0)
    assert len(set(pairs.values())) <= 1


def test_calls_fill_the_budget_and_half_as_many_before_are_untimed():
    recorder = Recorder()
    measured = measure({"a": recorder.timed_call("a", 2.0)}, recorder.timer, rounds=2, budget_ms=25)
    assert measured.samples["a"] == Samples(calls=12, round_ms=(2.0, 2.0))
    # First call, estimate of three, and per round the untimed calls and the batch.
    assert len(recorder.calls) == 1 + 3 + 2 * (6 + 12)
    assert recorder.timer.intervals == [6.0, 24.0, 24.0]


def test_the_first_slow_call_is_not_in_the_result():
    recorder = Recorder()
    measured = measure({"a": recorder.timed_call("a", 5000.0, 1.0)}, recorder.timer, rounds=3, budget_ms=5)
    assert measured.samples["a"].round_ms == (1.0, 1.0, 1.0)


def test_median_ignores_one_disturbed_round_and_the_spread_shows_it():
    samples = Samples(calls=5, round_ms=(1.0, 9.0, 1.1, 0.9, 1.0))
    assert samples.median_ms == 1.0
    assert samples.spread == pytest.approx(8.1)


def test_number_of_calls_is_bounded():
    assert calls_for(25, 1e9) == MIN_CALLS
    assert calls_for(25, 1e-9) == calls_for(25, 0.0) == MAX_CALLS
    assert calls_for(25, 0.5) == 50


@pytest.mark.parametrize("when", [0, 1, 4, 7], ids=["first call", "estimate", "first round", "second round"])
def test_a_failing_call_leaves_and_the_others_go_on(when):
    recorder = Recorder()
    bad = recorder.timed_call("bad", *[2.5] * when, float("inf"))
    timed_calls = {"a": recorder.timed_call("a", 1.0), "bad": bad, "b": recorder.timed_call("b", 1.0)}
    measured = measure(timed_calls, recorder.timer, rounds=3, budget_ms=5)
    assert set(measured.samples) == {"a", "b"}
    assert all(len(samples.round_ms) == 3 for samples in measured.samples.values())
    assert measured.errors == {"bad": "RuntimeError: no kernel for this shape"}


def test_a_failure_that_the_gpu_does_not_survive_ends_the_measurement():
    recorder = Recorder()
    recorder.timer.is_lost = True
    with pytest.raises(DeviceLost, match="no kernel for this shape"):
        measure({"bad": recorder.timed_call("bad", float("inf"))}, recorder.timer, rounds=3, budget_ms=5)


def test_an_error_becomes_one_line():
    def fail() -> None:
        raise ValueError("first\n   second " + "x" * 1000)

    failure = attempt(fail, FakeTimer())
    assert isinstance(failure, Failure)
    assert failure.message.startswith("ValueError: first second x")
    assert len(failure.message) < 400


class FakeCuda:
    """A fake `torch.cuda`: events read the clock of `calls`, and a graph replays the captured calls."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.log: list[str] = []
        self.captured: list[float] | None = None
        self.entered: list[SimpleNamespace] = []

    def call(self) -> None:
        if self.captured is not None:
            self.captured.append(0.25)
        else:
            self.now_ms += 0.25

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(at=0.0)

        def record() -> None:
            event.at = self.now_ms
            self.log.append("record")

        event.record, event.synchronize = record, lambda: self.log.append("wait")
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def Stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    def stream(self, stream: SimpleNamespace) -> AbstractContextManager[None]:
        self.entered.append(stream)
        return nullcontext()

    def CUDAGraph(self) -> SimpleNamespace:
        graph = SimpleNamespace(costs=[])

        def replay() -> None:
            self.log.append("replay")
            self.now_ms += sum(graph.costs)

        graph.replay = replay
        return graph

    @contextmanager
    def graph(self, graph: SimpleNamespace, stream: SimpleNamespace):
        # The one on which the calls were warmed up.
        assert self.entered[-1] is stream
        self.captured = graph.costs
        yield
        self.captured = None


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_events_enclose_the_calls_and_are_synchronized(cuda):
    timer = EventTimer()
    batch = timer.batch(cuda.call, 8)
    assert timer.milliseconds(batch.run) / batch.calls == 0.25
    assert cuda.log == ["record", "record", "wait"]


@pytest.mark.parametrize(("calls", "replays"), [(1, 1), (CALLS_PER_GRAPH, 1), (100, 3), (1000, 31)])
def test_a_graph_replays_as_many_calls_as_it_says(cuda, calls, replays):
    timer = GraphTimer()
    batch = timer.batch(cuda.call, calls)
    assert batch.calls == min(calls, CALLS_PER_GRAPH) * replays
    assert timer.milliseconds(batch.run) / batch.calls == 0.25
    assert cuda.log == ["record", *["replay"] * replays, "record", "wait"]


def test_what_is_prepared_for_a_graph_runs_on_the_stream_that_is_captured(cuda):
    timer = GraphTimer()
    with timer.stream():
        prepared = cuda.entered[-1]
    timer.batch(cuda.call, 4)
    timer.batch(cuda.call, 4)
    assert all(stream is prepared for stream in cuda.entered) and len(cuda.entered) == 3
    with EventTimer().stream():
        assert len(cuda.entered) == 3
