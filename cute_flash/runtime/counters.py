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
from cute_flash.spec.features import Buffer

T = TypeVar("T")

PER_THREAD_STREAM = 2
# The size in bytes of the smallest arena, the alignment of its views, and the largest number of views that are kept.
MIN_ARENA, VIEW_ALIGN, MAX_VIEWS = 1 << 20, 256, 4096
MIN_SCRATCH = 1 << 16
# Each device has a reserve of zeroed counters for captured CUDA graphs: GRAPH_COUNTERS for each of MAX_GRAPHS graphs.
GRAPH_COUNTERS, MAX_GRAPHS = 4096, 256

_counters: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
_arenas: dict[tuple[int, int, bool], list[torch.Tensor]] = {}  # the last one is in use
_views: dict[tuple[int, int, Hashable], tuple[torch.Tensor, ...]] = {}  # of arenas
_zeroed: dict[tuple[int, int, tuple[int, ...]], torch.Tensor] = {}  # counters that launches reset to 0
# Held while a call launches several kernels that use the same arena.
launch_lock = threading.RLock()
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
    zero = _in_new_thread(_on_stream, _current_stream(device_index), partial(_zero, device_index))
    return _counters.setdefault((device_index, stream), (zero, zero.data_ptr()))


def stream_workspace(
    buffers: tuple[Buffer, ...], device_index: int, num_launches: int
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A function that returns workspace for the next launches on the current stream of the current device.

    Launches on one stream never run concurrently, so all calls on a stream use the same memory: an arena for calls of
    one launch, and an arena for calls of several launches, which hold `launch_lock`. Buffers of zeros are zeroed once,
    and launches reset them to 0. Launches that are being captured, and launches on streams whose handle does not
    identify them, get new memory.
    """
    key = num_launches > 1, tuple([(buffer.shape, buffer.dtype, buffer.init) for buffer in buffers])
    if any(buffer.init == "zeros" for buffer in buffers):
        reserve(device_index)

    def fetch() -> tuple[torch.Tensor, ...]:
        if torch._C._cuda_isCurrentStreamCapturing():
            return _new_workspace(buffers, device_index, is_captured=True)
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        cached = _views.get((device_index, stream, key))
        if cached is not None:
            return cached
        if stream == PER_THREAD_STREAM or _is_external(device_index, stream):
            return _new_workspace(buffers, device_index)
        if len(_views) >= MAX_VIEWS:
            _views.clear()
        return _views.setdefault((device_index, stream, key), _arena_views(buffers, (device_index, stream, key[0])))

    return fetch


def _new_workspace(
    buffers: tuple[Buffer, ...], device_index: int, is_captured: bool = False
) -> tuple[torch.Tensor, ...]:
    made = []
    for buffer in buffers:
        if buffer.init == "zeros" and is_captured:
            made.append(graph_counters(math.prod(buffer.shape), device_index))
        else:
            make = torch.zeros if buffer.init == "zeros" else torch.empty
            made.append(make(buffer.shape, dtype=getattr(torch, buffer.dtype), device=f"cuda:{device_index}"))
    return tuple(made)


def _arena_views(buffers: tuple[Buffer, ...], place: tuple[int, int, bool]) -> tuple[torch.Tensor, ...]:
    """The buffers as views of the arena at a place (device, stream, whether calls have several launches)."""
    device_index, stream, _ = place
    dtypes = [getattr(torch, buffer.dtype) for buffer in buffers]
    sizes = [math.prod(buffer.shape) * dtype.itemsize for buffer, dtype in zip(buffers, dtypes)]
    offsets, end = [], 0
    for buffer, size in zip(buffers, sizes):
        offsets.append(end)
        end += 0 if buffer.init == "zeros" else -(-size // VIEW_ALIGN) * VIEW_ALIGN
    allocate, arenas = partial(_in_new_thread, _on_stream, _current_stream(device_index)), _arenas.setdefault(place, [])
    if not arenas or arenas[-1].numel() < end:
        # Outgrown arenas are kept, because launches in progress and CUDA graphs may still use them.
        num = max(MIN_ARENA, 1 << (end - 1).bit_length())
        arenas.append(allocate(partial(_bytes, num, device_index)))
    views = []
    for buffer, dtype, size, offset in zip(buffers, dtypes, sizes, offsets):
        if buffer.init == "zeros":
            zeros = _zeroed.get((device_index, stream, buffer.shape))
            if zeros is None:
                zeros = allocate(partial(_zeros, buffer.shape, device_index))
                zeros = _zeroed.setdefault((device_index, stream, buffer.shape), zeros)
            views.append(zeros)
        else:
            views.append(arenas[-1][offset : offset + size].view(dtype).view(buffer.shape))
    return tuple(views)


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


def _bytes(num: int, device_index: int) -> torch.Tensor:
    return torch.empty(num, dtype=torch.uint8, device=f"cuda:{device_index}")


def _floats(num: int, device_index: int) -> torch.Tensor:
    return torch.empty(num, dtype=torch.float32, device=f"cuda:{device_index}")


def _current_stream(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device_index)


def _on_stream(stream: torch.cuda.Stream, make: Callable[[], T]) -> T:
    """Call `make` on a stream. Later launches on this stream see the values of the tensors, without a host sync."""
    with torch.cuda.stream(stream):
        return make()


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
