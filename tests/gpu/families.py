"""Kernel families that the GPU here can run."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cute_flash import ops
from cute_flash.spec.family import FAMILIES, use_kernels

# wgmma is on this architecture alone: not on those after it.
ONLY_ON = {"sm90": (9, 0)}


def obstacle(family: str) -> str | None:
    """Why the first GPU cannot run it, or None."""
    found, least = torch.cuda.get_device_capability(0), FAMILIES[family]
    if found < least or found != ONLY_ON.get(family, found):
        return f"{family} kernels do not run on capability {found[0]}.{found[1]}"
    return None


def runnable() -> list[str]:
    return [family for family in FAMILIES if obstacle(family) is None]


@contextmanager
def everywhere(family: str) -> Iterator[None]:
    """The family also for compiled functions and recomputed activations, which do not see `use_kernels` in
    autograd's threads.

    There the best one is not asked for: the next computes the gradients that it has no kernel for.
    """
    # What was compiled or prepared for another family must not serve this one.
    torch.compiler.reset()
    ops._launches.clear()
    with use_kernels(family), pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUTE_FLASH_KERNELS", raising=False)
        if family != runnable()[0]:
            patch.setenv("CUTE_FLASH_KERNELS", family)
        yield
