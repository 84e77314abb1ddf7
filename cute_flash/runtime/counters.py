"""Counters in device memory that persistent kernels draw their tiles from.

A kernel finds its counter at 0 and leaves it at 0, so launches that run one after the other may share one:
those of a stream do. What is captured into a graph may be replayed beside anything, and gets a counter of its
own that the graph itself zeroes. So does a launch on a stream whose handle may stand for another one at the
same time, or later: the per-thread stream, and streams that torch did not make.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

PER_THREAD_STREAM = 2

_counters: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}


def counter(device_index: int) -> tuple[torch.Tensor, int]:
    """A zeroed int32 for the next launch on the current stream of the current device, and its address.

    The tensor is to be held until the launch is enqueued.
    """
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    found = _counters.get((device_index, stream))
    is_capturing = torch._C._cuda_isCurrentStreamCapturing()
    if found is not None and not is_capturing:
        return found
    if is_capturing or stream == PER_THREAD_STREAM or _is_external(device_index, stream):
        zero = _zero(device_index)
        return zero, zero.data_ptr()
    # In a thread of its own: allocations of this one may go to the memory pool of a graph, which would take
    # them back one day.
    with ThreadPoolExecutor(1) as thread:
        zero = thread.submit(_lasting_zero, device_index).result()
    return _counters.setdefault((device_index, stream), (zero, zero.data_ptr()))


def _is_external(device_index: int, stream: int) -> bool:
    """Whether the current stream is not one of torch's: its id is then its handle."""
    return stream != 0 and torch._C._cuda_getCurrentStream(device_index)[0] == stream


def _zero(device_index: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device_index}")


def _lasting_zero(device_index: int) -> torch.Tensor:
    """Zeroed by a stream of this thread, for any other to find so."""
    with torch.cuda.device(device_index):
        zero = _zero(device_index)
        torch.cuda.current_stream().synchronize()
    return zero
