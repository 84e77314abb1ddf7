"""Accumulators of one thread, filled from a tile of values. Called while a program is traced."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, cute

FOR_HOPPER = "--gpu-arch sm_90a"  # the DSL refuses wgmma on other architectures, although no wgmma runs on the CPU


def coordinates(mma: Any, thread: Any, shape: tuple[int, int]) -> Any:
    """(row, column) of each of the thread's elements."""
    return mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))


def accumulators(mma: Any, thread: Any, shape: tuple[int, int], dtype: Any = Float32) -> Any:
    return cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C(shape), dtype)


def load(mma: Any, thread: Any, values: Any, shape: tuple[int, int]) -> Any:
    """The thread's accumulators, with its elements of a tile of values."""
    acc, coords = accumulators(mma, thread, shape), coordinates(mma, thread, shape)
    for i in range(cute.size(acc)):
        acc[i] = values[coords[i]]
    return acc


def store(acc: Any, coords: Any, out: Any, factor: Any = None) -> None:
    """Write accumulators to the thread's elements of a tile, times a factor if there is one."""
    for i in range(cute.size(acc)):
        x = acc[i].to(Float32)
        out[coords[i]] = x if factor is None else x * factor
