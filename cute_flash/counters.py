"""Counters in device memory that persistent kernels draw their tiles from.

A kernel finds its counter at 0 and leaves it at 0, so launches that run one after the other may share one:
those of a stream do. What is captured into a graph may be replayed beside anything, and gets a counter of its
own that the graph itself zeroes; so does the per-thread stream, one handle for many streams.
"""

from __future__ import annotations

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
    if found is None or is_capturing:
        zero = torch.zeros(1, dtype=torch.int32, device=f"cuda:{device_index}")
        found = zero, zero.data_ptr()
        if not is_capturing and stream != PER_THREAD_STREAM:
            _counters[device_index, stream] = found
    return found
