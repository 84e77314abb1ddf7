"""Tile counters: int32 in device memory from which persistent CTAs fetch tile indices.

A kernel expects its counter at 0 and resets it to 0, so launches that never run concurrently can share one: all
launches on a stream share a counter. A launch that is captured into a CUDA graph gets a new counter, which the graph
zeroes, because the graph may be replayed on any stream. A launch also gets a new counter if the stream's handle does
not identify the stream: on the per-thread default stream, and on streams that torch did not create.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

PER_THREAD_STREAM = 2

_counters: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}


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
    # Allocated in a new thread: allocations of this thread may come from the memory pool of a CUDA graph, which would
    # reuse the memory.
    with ThreadPoolExecutor(1) as thread:
        zero = thread.submit(_lasting_zero, device_index).result()
    return _counters.setdefault((device_index, stream), (zero, zero.data_ptr()))


def _is_external(device_index: int, stream: int) -> bool:
    """Whether torch did not create the current stream. The id of such a stream is its handle."""
    return stream != 0 and torch._C._cuda_getCurrentStream(device_index)[0] == stream


def _zero(device_index: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device_index}")


def _lasting_zero(device_index: int) -> torch.Tensor:
    """A zeroed int32 that all streams see as 0, because the stream that zeroes it is synchronized."""
    with torch.cuda.device(device_index):
        zero = _zero(device_index)
        torch.cuda.current_stream().synchronize()
    return zero
