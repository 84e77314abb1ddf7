"""Tile counters (int32 in device memory, from which persistent CTAs fetch tile indices), and other shared workspace.

A kernel starts with its counter at 0 and resets it to 0. Launches on one stream never run concurrently, so they share
a counter. A launch that is captured into a CUDA graph gets a new counter, which the graph zeroes, because the graph may
be replayed on any stream. `graph_counters` has the rule for captured decode launches. A launch also gets a new counter
if the stream's handle does not identify the stream: on the per-thread default stream, and on streams that torch did not
create.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from cute_flash.jit.capture import capture_id

T = TypeVar("T")

PER_THREAD_STREAM = 2
# The largest number of workspaces that are kept. Further ones are allocated for every call.
MAX_SHARED = 64
MIN_SCRATCH = 1 << 16
# Each device has a reserve of zeroed counters for captured CUDA graphs: GRAPH_COUNTERS for each of MAX_GRAPHS graphs.
GRAPH_COUNTERS, MAX_GRAPHS = 4096, 256

_counters: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
_shared: dict[tuple[int, int, Hashable], object] = {}
_reserve: dict[int, torch.Tensor] = {}  # by device: zeros, (graph, counter)
_scratch: dict[int, list[torch.Tensor]] = {}  # by device: fp32 scratch memory, sorted by size
_lock = threading.Lock()
_graphs: dict[tuple[int, int, int], int] = {}  # device, capture, stream -> row of the reserve


def counter(device_index: int) -> tuple[torch.Tensor, int]:
    """A zeroed int32 for the next launch on the current stream of the current device, and its address.

    The caller must hold the tensor until the launch is enqueued.
    """
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    cached = _counters.get((device_index, stream))
    is_capturing = torch._C._cuda_isCurrentStreamCapturing()
    if cached is not None and not is_capturing:
        return cached
    if is_capturing or stream == PER_THREAD_STREAM or _is_external(device_index, stream):
        zero = _zero(device_index)
        return zero, zero.data_ptr()
    zero = _in_new_thread(_lasting_zero, device_index)
    return _counters.setdefault((device_index, stream), (zero, zero.data_ptr()))


def shared(key: Hashable, device_index: int, make: Callable[[], T]) -> T:
    """Tensors that all launches with this key on the current stream share. The first call allocates them with `make`.

    Launches must reset counters among them to 0. Not for launches that are being captured.
    """
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    if (cached := _shared.get((device_index, stream, key))) is not None:
        return cached  # type: ignore[return-value]
    if len(_shared) >= MAX_SHARED or stream == PER_THREAD_STREAM or _is_external(device_index, stream):
        return make()
    return _shared.setdefault((device_index, stream, key), _in_new_thread(_lasting, device_index, make))  # type: ignore


def reserve(device_index: int) -> None:
    """Allocate the reserve of counters for captured graphs, unless a capture is in progress."""
    if device_index not in _reserve and not torch._C._cuda_isCurrentStreamCapturing():
        shape = MAX_GRAPHS, GRAPH_COUNTERS
        _reserve[device_index] = _in_new_thread(_lasting, device_index, lambda: _zeros(shape, device_index))


def graph_counters(num: int, device_index: int) -> torch.Tensor:
    """Zeroed int32 counters for a launch that is being captured. The launch must reset them to 0.

    Launches captured into one graph on one stream share counters of the reserve, which is outside of the graph's
    memory pool. If the reserve is missing or used up, the graph zeroes new counters for every launch.
    """
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    capture = capture_id(stream) if num <= GRAPH_COUNTERS and device_index in _reserve else None
    if capture is None:
        return _zeros((num,), device_index)
    with _lock:
        row = _graphs.setdefault((device_index, capture, stream), len(_graphs))
    return _reserve[device_index][row] if row < MAX_GRAPHS else _zeros((num,), device_index)


def scratch(shape: tuple[int, ...], device_index: int) -> torch.Tensor | None:
    """A scratch tensor, fp32: launches on all streams write to it, and nothing reads it.

    Its memory is never freed, because CUDA graphs may write to it. None if a capture is in progress and no tensor of
    this size was allocated before it.
    """
    num, memory = math.prod(shape), _scratch.setdefault(device_index, [])
    if not memory or memory[-1].numel() < num:
        if torch._C._cuda_isCurrentStreamCapturing():
            return None
        size = max(MIN_SCRATCH, 1 << (num - 1).bit_length())
        made = _in_new_thread(_lasting, device_index, partial(_floats, size, device_index))
        with _lock:
            memory.append(made)
            memory.sort(key=torch.Tensor.numel)
    return memory[-1][:num].view(shape)


def _is_external(device_index: int, stream: int) -> bool:
    """Whether torch did not create the current stream. The id of such a stream is its handle."""
    return stream != 0 and torch._C._cuda_getCurrentStream(device_index)[0] == stream


def _zero(device_index: int) -> torch.Tensor:
    return _zeros((1,), device_index)


def _zeros(shape: tuple[int, ...], device_index: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=f"cuda:{device_index}")


def _floats(num: int, device_index: int) -> torch.Tensor:
    return torch.empty(num, dtype=torch.float32, device=f"cuda:{device_index}")


def _lasting_zero(device_index: int) -> torch.Tensor:
    return _lasting(device_index, lambda: _zero(device_index))


def _lasting(device_index: int, make: Callable[[], T]) -> T:
    """Call `make`, and synchronize the stream, so that all streams see the values of the tensors."""
    with torch.cuda.device(device_index):
        made = make()
        torch.cuda.current_stream().synchronize()
    return made


def _in_new_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a new thread, whose allocations do not come from the memory pool of a CUDA graph."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()
