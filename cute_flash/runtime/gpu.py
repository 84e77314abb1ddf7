"""`Gpu`: everything that a launch needs from CUDA, as one object.

Tests without a GPU, and tools that record launches, replace it through `use_gpu`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cute_flash.errors import NotRunWarning
from cute_flash.jit.kernels import compiled_kernel
from cute_flash.planning.launch import CompileKey, LaunchChain
from cute_flash.runtime import counters
from cute_flash.spec.arch import ARCHS, ArchSpec, detect
from cute_flash.spec.features import Buffer


class Gpu:
    """CUDA through torch, with kernels from the compile cache."""

    # The C function does not initialize CUDA. CUDA is already initialized, because a CUDA tensor exists.
    current_device = staticmethod(getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device))

    def arch(self, index: int | None) -> ArchSpec:
        """The architecture of one device, for a call on it."""
        arch = detect(index)
        if not arch.was_run:
            _warn_not_run()
        return arch

    def kernel(self, key: CompileKey) -> Callable[..., None]:
        """The function that launches a kernel on the current stream; its arguments are the key's operands, in order."""
        return compiled_kernel(key)

    def chain(self, key: LaunchChain) -> Callable[..., None]:
        """The function that launches several kernels on the current stream; its arguments are `key.parameters`."""
        return compiled_kernel(key)

    def tile_counter(self, index: int) -> tuple[Tensor, int]:
        """A zeroed counter for a dynamic tile scheduler on the current stream, and its address."""
        return counters.counter(index)

    def workspace(self, buffers: tuple[Buffer, ...], index: int, num_launches: int) -> Callable[[], tuple[Tensor, ...]]:
        """A function that returns workspace for the next launches on the current stream, which share its memory."""
        return counters.stream_workspace(buffers, index, num_launches)

    def scratch(self, shape: tuple[int, ...], index: int) -> Tensor | None:
        """A tensor that launches write to and that nothing reads; None if a CUDA graph capture prevents it."""
        return counters.scratch(shape, index)

    # Held while a call launches several kernels that share workspace.
    launch_lock = counters.launch_lock

    def on_device(self, index: int, launch: Callable[..., Any], *arguments: Any) -> Any:
        """Call a bound function with another current device."""
        with torch.cuda.device(index):
            return launch(*arguments)


@cache
def _warn_not_run() -> None:
    """Warn once per process."""
    names = " and ".join(arch.name for arch in ARCHS.values() if not arch.was_run)
    warnings.warn(
        f"kernels are compiled for {names}, but have not been run there: `cute-flash selftest` compares their results "
        "with the reference on your GPU",
        NotRunWarning,
        stacklevel=2,
    )


_gpu = Gpu()
# Functions bound by the launcher for the GPU in use, by signature.
bound: dict[tuple, Callable[..., Any]] = {}
# Bounds the memory of a program that never repeats a shape.
MAX_SIGNATURES = 4096


def remember(signature: tuple, launch: Callable[..., Any]) -> Callable[..., Any]:
    """Bind a function to a signature, and return it."""
    if len(bound) >= MAX_SIGNATURES:
        bound.clear()
    bound[signature] = launch
    return launch


def current_gpu() -> Gpu:
    return _gpu


@contextmanager
def use_gpu(gpu: Gpu) -> Iterator[Gpu]:
    """Launch through another `Gpu`. Afterwards the previous `Gpu` and its bound functions are restored."""
    global _gpu
    before, _gpu = _gpu, gpu
    functions = dict(bound)
    bound.clear()
    try:
        yield gpu
    finally:
        _gpu = before
        bound.clear()
        bound.update(functions)
