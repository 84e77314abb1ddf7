"""The family of kernels that a caller asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cute_flash.errors import UnsupportedError

# Kernel families in the order of preference, and the least architecture each needs.
FAMILIES = {"sm90": (9, 0), "sm80": (8, 0)}

_DEFAULT = os.environ.get("CUTE_FLASH_KERNELS") or ""
_family: ContextVar[str] = ContextVar("cute_flash_kernels", default=_DEFAULT)


def requested_family() -> str:
    """The family asked for by `use_kernels` or `CUTE_FLASH_KERNELS`; "": the best one for the GPU."""
    return _family.get()


# What `torch.compiler.assume_constant_result` sets, which would import torch._dynamo: a compiled function keeps the
# family of its first call, as Dynamo cannot trace context variables.
requested_family._dynamo_marked_constant = True  # type: ignore[attr-defined]
# The same as a C function, for calls that are not compiled.
current_family = _family.get


@contextmanager
def use_kernels(family: str) -> Iterator[None]:
    """Choose the kernel family, for study and tests: `with use_kernels("sm80"): attn(q, k, v)`.

    The gradients of such a call are computed by the same family. The environment variable `CUTE_FLASH_KERNELS`,
    read at import, does the same for a whole process.
    """
    check_family(family)
    token = _family.set(family)
    try:
        yield
    finally:
        _family.reset(token)


def check_family(family: str) -> None:
    if family not in ("", *FAMILIES):
        raise UnsupportedError(f"kernel family {family!r}: there is {', '.join(FAMILIES)}")
