"""Whether calls may compile kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_is_on = os.environ.get("CUTE_FLASH_JIT", "") != "0"


def jit_is_on() -> bool:
    return _is_on


@contextmanager
def use_jit(enabled: bool = True) -> Iterator[None]:
    """A context manager that decides whether calls on CUDA may compile kernels.

    With `enabled=False`, a call whose kernel was not compiled before raises `NotCompiledError` instead of compiling it
    for seconds. The message names the kernel and the call of `warmup` that compiles it. `warmup` and `cute-flash
    precompile` still compile. The mode holds for all threads.

    The environment variable `CUTE_FLASH_JIT=0`, which is read at import, sets the mode of a process.

    Args:
        enabled: False: calls compile nothing inside the context.

    Examples:
        >>> import torch, cute_flash
        >>> x = torch.randn(1, 1, 8, 16)
        >>> with cute_flash.use_jit(False):
        ...     out = cute_flash.attn(x, x, x)  # on the CPU, no call compiles
    """
    global _is_on
    before, _is_on = _is_on, enabled
    try:
        yield
    finally:
        _is_on = before
