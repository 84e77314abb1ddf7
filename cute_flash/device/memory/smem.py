"""The tiles of `cute_flash/smem` as CuTe layouts, and their allocation in shared memory."""

from typing import Any

from cutlass import AddressSpace, Int32, cute
from cutlass.memory import SmemAllocator

from cute_flash.planning.tiles.common import SMEM_ALIGN
from cute_flash.smem.tile import SmemTile


def byte_swizzle(tile: SmemTile) -> Any:
    """The tile's swizzle as a CuTe swizzle of byte addresses, for a pointer or a TMA descriptor; None: no swizzle."""
    swizzle = tile.swizzle
    if swizzle is None:
        return None
    return cute.make_swizzle(swizzle.bits, swizzle.base + tile.element_bytes.bit_length() - 1, swizzle.shift)


def affine_layout(tile: SmemTile) -> cute.Layout:
    """The layout of a tile without its swizzle, which the pointer or the TMA descriptor applies."""
    shape, stride = tile.affine
    return cute.make_layout(shape, stride=stride)


def tile_at(address: Any, dtype: type, tile: SmemTile) -> cute.Tensor:
    """A tile at an address of shared memory: (rows, columns, 1). As in `allocate_stages`, the layout is affine."""
    pointer = cute.make_ptr(dtype, address, AddressSpace.smem, assumed_align=SMEM_ALIGN)
    shape, stride = tile.staged(1)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def allocate_stages(smem: SmemAllocator, dtype: type, tile: SmemTile, stages: int) -> cute.Tensor:
    """Allocate a tile per stage: (rows, columns, stage). The pointer carries the swizzle; the layout stays affine."""
    shape, stride = tile.staged(stages)
    layout = cute.make_layout(shape, stride=stride)
    return smem.allocate_tensor(dtype, layout, SMEM_ALIGN, swizzle=byte_swizzle(tile))


def part_of(sX: cute.Tensor, tile: SmemTile, first_row: Int32, rows: int, first_col: Int32, cols: int) -> cute.Tensor:
    """`rows` x `cols` elements of a swizzled tile: (rows, columns, 1). As in `allocate_stages`, the layout is affine.

    `first_row` is a multiple of 8 rows. The columns are a part of one atom or whole atoms.
    """
    atom = tile.atom_cols
    offset = first_row * atom + first_col // atom * (tile.rows * atom) + first_col % atom
    address = Int32(sX.iterator.toint()) + offset * tile.element_bytes
    pointer = cute.make_ptr(sX.element_type, address, AddressSpace.smem, assumed_align=16)
    atoms = -(-cols // atom)
    layout = cute.make_layout(
        ((8, rows // 8), (cols // atoms, atoms), 1), stride=((atom, 8 * atom), (1, tile.rows * atom), 0)
    )
    return cute.make_tensor(pointer, layout)


def element_at(sX: cute.Tensor, tile: SmemTile, row: Int32, column: Int32) -> cute.Tensor:
    """An element of a swizzled tile whose pointer has no swizzle."""
    atom, chunk = tile.atom_cols, tile.chunk_cols
    offset = column // atom * (tile.rows * atom) + row * atom + (column % atom // chunk ^ row % 8) * chunk
    address = Int32(sX.iterator.toint()) + (offset + column % chunk) * tile.element_bytes
    pointer = cute.make_ptr(sX.element_type, address, AddressSpace.smem, assumed_align=tile.element_bytes)
    return cute.make_tensor(pointer, cute.make_layout(1))
