"""Kernel families that the GPU here can run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cute_flash.spec.family import FAMILIES, use_kernels

# Only this architecture has wgmma; later ones do not.
ONLY_ON = {"sm90": (9, 0)}


def obstacle(family: str) -> str | None:
    """Why the first GPU cannot run a family, or None."""
    capability, least = torch.cuda.get_device_capability(0), FAMILIES[family]
    if capability < least or capability != ONLY_ON.get(family, capability):
        return f"{family} kernels do not run on capability {capability[0]}.{capability[1]}"
    return None


def runnable() -> list[str]:
    return [family for family in FAMILIES if obstacle(family) is None]


@contextmanager
def chosen(family: str) -> Iterator[None]:
    """Use one family. Functions that torch compiled for another family are dropped."""
    torch.compiler.reset()
    with use_kernels(family):
        yield
