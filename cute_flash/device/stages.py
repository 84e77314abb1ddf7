"""Tiles in shared memory, one for each stage of a pipeline."""

import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cute_flash.device.smem import byte_swizzle, to_cute
from cute_flash.planning.tiles.common import SMEM_ALIGN
from cute_flash.smem.tile import SmemTile


def allocate_stages(smem: SmemAllocator, dtype, one: SmemTile, stages: int) -> cute.Tensor:
    """(rows, columns, stage). The swizzle rides on the pointer, in bytes; the layout over it stays affine."""
    return smem.allocate_tensor(dtype, to_cute(one.affine(stages)), SMEM_ALIGN, swizzle=byte_swizzle(one))
