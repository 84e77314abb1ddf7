"""Tile counters: one per stream. Launches that may run concurrently never share one."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch

from cute_flash.runtime import counters
from cute_flash.runtime.counters import PER_THREAD_STREAM, counter


@dataclass
class Current:
    stream: int = 0
    is_capturing: bool = False
    is_external: bool = False


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Current:
    """The current stream, with CPU memory in place of GPU memory."""
    now, main_thread = Current(), threading.get_ident()
    monkeypatch.setattr(counters, "_counters", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: now.stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: now.is_capturing, raising=False)
    monkeypatch.setattr(
        torch._C,
        "_cuda_getCurrentStream",
        lambda device: (now.stream if now.is_external else 3, device, 1),
        raising=False,
    )
    monkeypatch.setattr(counters, "_zero", lambda device: torch.zeros(1, dtype=torch.int32))

    def lasting(device: int) -> torch.Tensor:
        assert threading.get_ident() != main_thread, (
            "allocated in this thread: the memory may belong to the pool of a graph"
        )
        return torch.zeros(1, dtype=torch.int32)

    monkeypatch.setattr(counters, "_lasting_zero", lasting)
    return now


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


def test_what_is_captured_has_a_counter_of_its_own(current: Current) -> None:
    outside = counter(0)
    current.is_capturing = True
    captured = [counter(0) for _ in range(3)]
    current.is_capturing = False
    # A graph may be replayed beside the stream, and beside another graph.
    assert len({address for _, address in (outside, *captured)}) == 4
    assert counter(0) is outside


def test_a_stream_first_seen_in_a_capture_keeps_nothing_of_it(current: Current) -> None:
    current.is_capturing = True
    captured, _ = counter(0)
    current.is_capturing = False
    assert counter(0)[0] is not captured


def test_the_handle_of_many_streams_shares_nothing(current: Current) -> None:
    current.stream = PER_THREAD_STREAM
    found = [counter(0) for _ in range(3)]
    assert len({address for _, address in found}) == 3
    assert counters._counters == {}


def test_a_stream_that_its_owner_may_destroy_shares_nothing(current: Current) -> None:
    current.stream, current.is_external = 0x7F00, True
    found = [counter(0) for _ in range(3)]
    assert len({address for _, address in found}) == 3
    assert counters._counters == {}
    # The default stream has no unique handle, and always exists.
    current.stream = 0
    assert counter(0) is counter(0)
