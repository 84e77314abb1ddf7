"""Kernel families that the GPU here can run."""

import torch

from cute_flash.plan import FAMILIES

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
