"""Tile counters and workspace: the launches of one stream share them; launches that may run at once do not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cute_flash.runtime import counters
from cute_flash.runtime.counters import (
    GRAPH_COUNTERS,
    PER_THREAD_STREAM,
    counter,
    graph_counters,
    reserve,
    scratch,
    stream_workspace,
)
from cute_flash.spec.features import Buffer


@dataclass
class Current:
    """The current stream, and the capture that is in progress on it."""

    stream: int = 0
    is_capturing: bool = False
    is_external: bool = False
    capture: int | None = 1


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Current:
    """A machine with CPU memory in place of GPU memory."""
    now, main_thread = Current(), threading.get_ident()
    for name in ("_counters", "_arenas", "_views", "_zeroed", "_reserve", "_graphs", "_scratch"):
        monkeypatch.setattr(counters, name, {})

    def lasting(_place: int, make: Callable[[], Tensor]) -> Tensor:
        is_main = threading.get_ident() == main_thread
        assert not is_main, "allocated in this thread: the memory may belong to the pool of a graph"
        return make()

    def on_stream(stream: int, make: Callable[[], Tensor]) -> Tensor:
        assert stream == now.stream, "allocated on another stream: its pending work may still use the memory"
        return lasting(stream, make)

    of_torch = {
        "_cuda_getCurrentRawStream": lambda device: now.stream,
        "_cuda_isCurrentStreamCapturing": lambda: now.is_capturing,
        "_cuda_getCurrentStream": lambda device: (now.stream if now.is_external else 3, device, 1),
    }
    for name, function in of_torch.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    of_counters = {
        "capture_id": lambda handle: now.capture,
        "_lasting": lasting,
        "_current_stream": lambda device: now.stream,
        "_on_stream": on_stream,
        "_zeros": lambda shape, device: torch.zeros(shape, dtype=torch.int32),
        "_floats": lambda num, device: torch.empty(num),
        "_bytes": lambda num, device: torch.empty(num, dtype=torch.uint8),
    }
    for name, function in of_counters.items():
        monkeypatch.setattr(counters, name, function)
    return now


# ---- tile counters


def test_a_counter_is_one_zeroed_number(current: Current) -> None:
    held, address = counter(0)
    assert (held.dtype, held.tolist()) == (torch.int32, [0])
    assert address == held.data_ptr()


def test_launches_of_one_stream_share_a_counter_and_no_others_do(current: Current) -> None:
    places = [(device, stream) for device in (0, 1) for stream in (0, 0x7F00, 0x7F10)]
    found = {}
    for _ in range(3):
        for device, current.stream in places:
            found.setdefault((device, current.stream), counter(device))
            assert counter(device)[0] is found[device, current.stream][0]
    assert len({address for _, address in found.values()}) == len(places)


@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_captured_has_a_counter_of_its_own(current: Current, is_known: bool) -> None:
    """A graph may be replayed beside the stream, and beside another graph."""
    outside = [counter(0)] if is_known else []
    current.is_capturing = True
    captured = [counter(0) for _ in range(3)]
    current.is_capturing = False
    after = counter(0)
    assert len({address for _, address in (after, *captured)}) == 4
    assert not is_known or after is outside[0]


@pytest.mark.parametrize(("stream", "is_external"), [(PER_THREAD_STREAM, False), (0x7F00, True)])
def test_a_handle_that_does_not_identify_its_stream_shares_nothing(
    current: Current, stream: int, is_external: bool
) -> None:
    """The per-thread stream, and streams that their owner may destroy."""
    current.stream, current.is_external = stream, is_external
    found = [counter(0) for _ in range(3)]
    assert len({address for _, address in found}) == 3
    assert counters._counters == {}
    # The default stream has no unique handle, and always exists.
    current.stream = 0
    assert counter(0) is counter(0)


# ---- workspace


@pytest.fixture
def fetch(current: Current, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Tensor, ...]]:
    """The workspace of the next launches: fp32 of `rows` rows, int32 of `rows`, and zeroed counters if wanted."""
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(torch, "empty", lambda shape, dtype=None, device="cpu": empty(shape, dtype=dtype))
    monkeypatch.setattr(torch, "zeros", lambda shape, dtype=None, device="cpu": zeros(shape, dtype=dtype))

    def fetch(rows: int = 8, num_launches: int = 1, has_counters: bool = True) -> tuple[Tensor, ...]:
        buffers = [Buffer("a", (rows, 3), is_shared=True), Buffer("b", (rows,), "int32", is_shared=True)]
        if has_counters:
            buffers.append(Buffer("c", (100,), "int32", "zeros", is_shared=True))
        made = stream_workspace(tuple(buffers), 0, num_launches)()
        assert [(x.shape, x.dtype) for x in made[:2]] == [((rows, 3), torch.float32), ((rows,), torch.int32)]
        assert not has_counters or (made[2].numel() >= 100 and not made[2].any())
        return made

    return fetch


Fetch = Callable[..., tuple[Tensor, ...]]


def addresses(tensors: tuple[Tensor, ...]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def test_calls_on_a_stream_share_memory(fetch: Fetch, current: Current) -> None:
    """Also calls of different sizes. Captured launches, and calls of several launches, have other memory."""
    first = fetch()
    assert fetch() is first
    a, b, c = addresses(first)
    assert b - a >= 8 * 3 * 4 and b % 256 == a % 256 and c not in (a, b), "buffers do not overlap"
    other = fetch(5)
    assert addresses(other)[0] == a and addresses(other)[2] == c, "all sizes share the arena and the counters"
    assert fetch(num_launches=3)[0].data_ptr() != a
    current.stream = 0x7F00
    assert not set(addresses(fetch())) & set(addresses(first))
    current.stream = 0
    reserve(0)
    current.is_capturing = True
    captured = [fetch(), fetch()]
    assert captured[0][0].data_ptr() not in (a, captured[1][0].data_ptr())
    assert captured[0][2].data_ptr() == captured[1][2].data_ptr() != c
    current.is_capturing = False
    assert fetch() is first


def test_an_outgrown_arena_is_kept(fetch: Fetch) -> None:
    """Launches in progress may still use it."""
    first = fetch()
    large = fetch(counters.MIN_ARENA)
    assert len(counters._arenas[0, 0, False]) == 2 and large[0].data_ptr() != first[0].data_ptr()
    assert fetch(6)[0].data_ptr() == large[0].data_ptr(), "new sizes use the larger one"


def test_streams_that_a_handle_does_not_identify_share_nothing(fetch: Fetch, current: Current) -> None:
    for current.stream, current.is_external in ((PER_THREAD_STREAM, False), (0x7F00, True)):
        first, second = fetch(), fetch()
        assert not set(addresses(first)) & set(addresses(second))
    assert not counters._views and not counters._arenas


def test_the_number_of_views_is_bounded(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "MAX_VIEWS", 3)
    first = fetch(1, has_counters=False)
    for rows in range(2, 9):
        fetch(rows)
        assert len(counters._views) <= 3
    assert addresses(fetch(1, has_counters=False)) == addresses(first)


def test_calls_without_lse_share_its_memory(current: Current) -> None:
    first, other = scratch((2, 4, 1), 0), scratch((3, 8, 1), 0)
    assert first is not None and other is not None and first.data_ptr() == other.data_ptr()
    assert first.shape == (2, 4, 1) and first.dtype == torch.float32 and scratch((3,), 1) is not None
    num = counters.MIN_SCRATCH + 1
    current.is_capturing = True
    assert scratch((num,), 0) is None, "a capture allocates nothing outside of its pool"
    assert scratch((5,), 0) is not None
    current.is_capturing = False
    larger = scratch((num,), 0)
    assert larger is not None and larger.data_ptr() != first.data_ptr()
    kept = [x.data_ptr() for x in counters._scratch[0]]
    assert kept == [first.data_ptr(), larger.data_ptr()], "captured graphs may still use the first"


# ---- counters of captured graphs


def test_counters_in_reserve_are_allocated_once_and_not_in_a_capture(current: Current) -> None:
    current.is_capturing = True
    reserve(0)
    assert not counters._reserve
    found = [graph_counters(10, 0) for _ in range(2)]
    assert found[0].data_ptr() != found[1].data_ptr() and not counters._reserve
    current.is_capturing = False
    reserve(0)
    held = counters._reserve[0]
    reserve(0)
    assert counters._reserve[0] is held and not held.any()


def test_counters_of_a_graph(current: Current) -> None:
    """Launches of one graph share counters; graphs do not, because they may be replayed at the same time."""
    reserve(0)
    current.is_capturing = True
    first = graph_counters(10, 0)
    assert first.numel() >= 20 and graph_counters(20, 0).data_ptr() == first.data_ptr()
    assert first.untyped_storage().data_ptr() == counters._reserve[0].untyped_storage().data_ptr()
    found = {first.data_ptr()}
    current.capture = 2
    found.add(graph_counters(10, 0).data_ptr())
    # Two branches of one graph.
    current.stream = 0x7F00
    found.add(graph_counters(10, 0).data_ptr())
    assert len(found) == 3
    # If a graph needs more counters than are in reserve, or the capture is unknown, each launch gets its own.
    for num, current.capture in ((GRAPH_COUNTERS + 1, 2), (10, None)):
        one, other = (graph_counters(num, 0) for _ in range(2))
        assert one.data_ptr() != other.data_ptr()


def test_more_graphs_than_the_reserve_has(current: Current, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "MAX_GRAPHS", 3)
    reserve(0)
    current.is_capturing = True
    found = []
    for current.capture in range(5):
        found.append(graph_counters(10, 0))
    assert len({x.data_ptr() for x in found}) == 5
    assert [x.numel() for x in found] == [GRAPH_COUNTERS] * 3 + [10] * 2
