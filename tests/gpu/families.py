"""Kernel families that can run here. With `--tiles-of`, these are the families of that GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cute_flash.runtime.gpu import current_gpu
from cute_flash.spec.family import FAMILIES, use_kernels


def obstacle(family: str) -> str | None:
    """Why the first GPU cannot run a family, or None."""
    arch = current_gpu().arch(0)
    return None if FAMILIES[family](arch) else f"{family} kernels do not run on {arch.name}"


def runnable() -> list[str]:
    return [family for family in FAMILIES if obstacle(family) is None]


@contextmanager
def chosen(family: str) -> Iterator[None]:
    """Use one family. Functions that torch compiled for another family are dropped."""
    torch.compiler.reset()
    with use_kernels(family):
        yield
