"""Tiles in shared memory, one for each stage of a pipeline."""

import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cute_flash.planning.tiles.common import SMEM_ALIGN
from layouts.smem import SmemTile, byte_swizzle, to_cute


def allocate_stages(smem: SmemAllocator, dtype, one: SmemTile, stages: int) -> cute.Tensor:
    """(rows, columns, stage). The swizzle rides on the pointer, in bytes; the layout over it stays affine."""
    return smem.allocate_tensor(dtype, to_cute(one.affine(stages)), SMEM_ALIGN, swizzle=byte_swizzle(one))
