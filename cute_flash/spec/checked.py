"""The checked mode, for debugging: lengths, offsets and indices that only the GPU knows are checked before a launch.

The CPU path always checks them. On CUDA a check must wait for the GPU, so calls check nothing unless `use_checks` or
the environment variable `CUTE_FLASH_CHECK=1` asks for it. The functions that `CudaFunctions` holds are then replaced by
versions that check first, so calls without checks take no time for the choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.decode import DecodeArgs

Args = TypeVar("Args", AttentionArgs, DecodeArgs)

_is_on = os.environ.get("CUTE_FLASH_CHECK", "") not in ("", "0")


class CudaFunctions:
    """Functions of a module of `runtime`, imported at the first call on CUDA to keep `import cute_flash` fast.

    `checks` has the check of each function that has one. It takes the arguments of the function.
    """

    all: list[CudaFunctions] = []  # noqa: RUF012

    def __init__(self, module: str, **checks: Callable[..., None]) -> None:
        self._module, self._checks = module, checks
        self.all.append(self)

    def __getattr__(self, name: str) -> Any:
        function = getattr(import_module(self._module), name)
        if _is_on and name in self._checks:
            function = _checked(function, self._checks[name])
        setattr(self, name, function)  # later accesses find the attribute
        return function

    def forget(self) -> None:
        """Choose between functions and their checked versions again."""
        for name in [name for name in vars(self) if not name.startswith("_")]:
            delattr(self, name)


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*arguments: Any) -> Any:
        if not _is_capturing():
            check(*arguments)
        return function(*arguments)

    return checked


def _is_capturing() -> bool:
    """Whether a CUDA graph is captured, during which the host cannot wait for the GPU."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_checked(lengths: Tensor) -> bool:
    """Whether the host reads lengths: on the CPU, and in the checked mode on CUDA. Compilers cannot read them."""
    if type(lengths) is not Tensor or torch.compiler.is_dynamo_compiling() or lengths.is_meta:
        return False
    return not lengths.is_cuda or (_is_on and not _is_capturing())


@contextmanager
def use_checks(enabled: bool = True) -> Iterator[None]:
    """A context manager that checks the lengths and indices of calls on CUDA, for debugging.

    Inside it, `attn_varlen`, its gradients, `attn_nested` and `attn_decode` read `cu_seqlens`, `seqused_k`,
    `cache_seqlens`, `leftpad`, `cache_batch_idx` and the pages in use of `page_table`, and raise a `ValueError` that
    names the wrong element before anything is launched, as on the CPU. Each call waits for the GPU. Calls that are
    captured into a CUDA graph are not checked. The mode holds for all threads.

    The environment variable `CUTE_FLASH_CHECK=1`, which is read at import, checks all calls of a process.

    Args:
        enabled: False: check nothing inside the context.

    Examples:
        >>> import torch, cute_flash
        >>> q = torch.randn(5, 4, 32)
        >>> cu_seqlens = torch.tensor([0, 3, 2], dtype=torch.int32)
        >>> try:
        ...     with cute_flash.use_checks():
        ...         cute_flash.attn_varlen(q, q, q, cu_seqlens, cu_seqlens)
        ... except ValueError as error:
        ...     print(error)
        cu_seqlens_q[2]=2 is less than cu_seqlens_q[1]=3: offsets may not decrease
    """
    global _is_on
    before = _is_on
    _set(enabled)
    try:
        yield
    finally:
        _set(before)


def _set(is_on: bool) -> None:
    global _is_on
    _is_on = is_on
    for functions in CudaFunctions.all:
        functions.forget()


def on_host(args: Args) -> Args:
    """The arguments with lengths and indices, which are the int32 tensors, in host memory: one copy of each."""
    copies: dict[str, Any] = {
        name: x.cpu() for name, x in zip(args._fields, args) if isinstance(x, Tensor) and x.dtype == torch.int32
    }
    return args._replace(**copies)
