"""The kernel family, sm80 or sm90, that a caller may choose."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cute_flash.errors import UnsupportedError

# Kernel families in order of preference, with the lowest compute capability of each.
FAMILIES = {"sm90": (9, 0), "sm80": (8, 0)}

_DEFAULT = os.environ.get("CUTE_FLASH_KERNELS") or ""
_family: ContextVar[str] = ContextVar("cute_flash_kernels", default=_DEFAULT)


def requested_family() -> str:
    """The family chosen by `use_kernels` or `CUTE_FLASH_KERNELS`; "": the best one for the GPU."""
    return _family.get()


# A compiled function keeps the family of its first call, because Dynamo cannot trace context variables. This attribute
# is the one that `torch.compiler.assume_constant_result` sets; calling that would import torch._dynamo.
requested_family._dynamo_marked_constant = True  # type: ignore[attr-defined]
# The same, as a C function, for calls that are not compiled.
current_family = _family.get


@contextmanager
def use_kernels(family: str) -> Iterator[None]:
    """Choose the kernel family, for experiments and tests: `with use_kernels("sm80"): attn(q, k, v)`.

    The same family computes the gradients of the call. The environment variable `CUTE_FLASH_KERNELS`, read at import,
    sets the family of a process.
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
