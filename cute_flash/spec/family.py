"""The kernel families, sm80 and sm90, and the choice of one by the caller."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cute_flash.errors import UnsupportedError
from cute_flash.spec.arch import ArchSpec

# The compute capability whose instructions the family sm80 uses. Later GPUs have them too.
AMPERE = (8, 0)
# Kernel families in order of preference, and whether each runs on an architecture.
FAMILIES: dict[str, Callable[[ArchSpec], bool]] = {
    "sm90": lambda arch: arch.has_wgmma,
    "sm80": lambda arch: arch.capability >= AMPERE,
}

_DEFAULT = os.environ.get("CUTE_FLASH_KERNELS") or ""
_family: ContextVar[str] = ContextVar("cute_flash_kernels", default=_DEFAULT)


def requested_family() -> str:
    """The family chosen by `use_kernels` or `CUTE_FLASH_KERNELS`; "": the best family for the GPU."""
    return _family.get()


# A compiled function keeps the family of its first call, because Dynamo cannot trace context variables.
# `torch.compiler.assume_constant_result` would set the same attribute, but it imports torch._dynamo.
requested_family._dynamo_marked_constant = True  # type: ignore[attr-defined]
# `requested_family` as a C function, which is faster, for calls that are not compiled.
current_family = _family.get


@contextmanager
def use_kernels(family: str) -> Iterator[None]:
    """A context manager that selects the kernel family of calls on CUDA, for experiments and tests.

    The same family computes the gradients of these calls, also if `backward()` runs outside of the context. The
    environment variable `CUTE_FLASH_KERNELS`, which is read at import, sets the family of a process.

    Args:
        family: "sm80" (mma.sync, cp.async), "sm90" (wgmma, TMA), or "": the best family for the GPU.

    Raises:
        UnsupportedError: There is no such family.

    Examples:
        >>> import torch, cute_flash
        >>> x = torch.randn(1, 1, 8, 16)
        >>> with cute_flash.use_kernels("sm80"):
        ...     out = cute_flash.attn(x, x, x)
    """
    check_family(family)
    token = _family.set(family)
    try:
        yield
    finally:
        _family.reset(token)


def check_family(family: str) -> None:
    if family not in ("", *FAMILIES):
        raise UnsupportedError(f"kernel family {family!r}: use {' or '.join(FAMILIES)}, or '' for the best one")
