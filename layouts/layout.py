"""CuTe's shape:stride layouts in plain Python, and the layouts of the kernels' tiles.

A layout maps a coordinate to an index: the inner product of the coordinate and the strides. Shape and stride are tuples
of ints with the same nesting. An integer coordinate runs through a nested shape with the first mode fastest. Layouts
print as in the CuTe DSL, so that they can be compared with layouts printed in a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from operator import mul
from typing import TypeAlias, overload

from cute_flash.smem.swizzle import Swizzle
from cute_flash.smem.tile import SmemTile

IntTuple: TypeAlias = "int | tuple[IntTuple, ...]"


def flatten(value: IntTuple) -> tuple[int, ...]:
    """The ints of a nested tuple, left to right."""
    return (value,) if isinstance(value, int) else tuple(i for part in value for i in flatten(part))


def size_of(shape: IntTuple) -> int:
    return prod(flatten(shape))


def _are_congruent(a: IntTuple, b: IntTuple) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int)
    return len(a) == len(b) and all(map(_are_congruent, a, b))


def _spell(value: IntTuple) -> str:
    return str(value) if isinstance(value, int) else f"({','.join(map(_spell, value))})"


def crd2idx(coord: IntTuple, shape: IntTuple, stride: IntTuple) -> int:
    """The index of `coord`. An integer coordinate of a nested mode is split, the first mode fastest.

    As in CuTe, the last mode is not bounded: a layout is also defined for indices beyond its size.
    """
    if isinstance(coord, int) and isinstance(stride, int):
        return coord * stride
    if isinstance(shape, int) or isinstance(stride, int) or (isinstance(coord, tuple) and len(coord) != len(shape)):
        raise ValueError(f"coordinate {_spell(coord)} does not fit shape {_spell(shape)}")
    if isinstance(coord, int):
        index = 0
        for mode, step in zip(shape[:-1], stride[:-1], strict=True):
            coord, inner = divmod(coord, size_of(mode))
            index += crd2idx(inner, mode, step)
        return index + (crd2idx(coord, shape[-1], stride[-1]) if shape else 0)
    return sum(map(crd2idx, coord, shape, stride))


@dataclass(frozen=True)
class Layout:
    """`shape:stride`, for example `Layout((8, 64), (64, 1))`: 8 rows of 64, row-major."""

    shape: IntTuple
    stride: IntTuple

    def __post_init__(self) -> None:
        if not _are_congruent(self.shape, self.stride):
            raise ValueError(f"layout {self}: shape and stride must be nested alike")
        if any(extent < 1 or step < 0 for extent, step in flat_modes(self)):
            raise ValueError(f"layout {self}: extents must be 1 or more and strides 0 or more")

    def __call__(self, *coord: IntTuple) -> int:
        """`layout(5)`, `layout(1, 2)` and `layout((1, 2))` all work."""
        return crd2idx(coord[0] if len(coord) == 1 else coord, self.shape, self.stride)

    def __str__(self) -> str:
        return f"{_spell(self.shape)}:{_spell(self.stride)}"

    @cached_property
    def modes(self) -> tuple[Layout, ...]:
        if isinstance(self.shape, int) or isinstance(self.stride, int):
            return (self,)
        return tuple(map(Layout, self.shape, self.stride))

    @property
    def rank(self) -> int:
        return len(self.modes)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """The size of each top-level mode."""
        return tuple(mode.size for mode in self.modes)

    @property
    def size(self) -> int:
        return size_of(self.shape)

    @property
    def cosize(self) -> int:
        """One more than the largest index."""
        return 1 + sum((extent - 1) * step for extent, step in flat_modes(self))

    def select(self, *modes: int) -> Layout:
        """The layout of some modes, in the order of the arguments; `select(1, 0)` transposes."""
        return join_modes(*(self.modes[mode] for mode in modes))


@dataclass(frozen=True)
class ComposedLayout:
    """`coord -> swizzle(offset + layout(coord))`."""

    swizzle: Swizzle
    offset: int
    layout: Layout

    def __call__(self, *coord: IntTuple) -> int:
        return self.swizzle(self.offset + self.layout(*coord))

    def __str__(self) -> str:
        return f"{self.swizzle} o {self.offset} o {self.layout}"

    @property
    def rank(self) -> int:
        return self.layout.rank

    @property
    def extents(self) -> tuple[int, ...]:
        return self.layout.extents

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def cosize(self) -> int:
        """Elements to allocate. A swizzle moves indices within its period, so the last period counts in full."""
        period = self.swizzle.period
        return -(-(self.offset + self.layout.cosize) // period) * period

    def select(self, *modes: int) -> ComposedLayout:
        return ComposedLayout(self.swizzle, self.offset, self.layout.select(*modes))


AnyLayout: TypeAlias = Layout | ComposedLayout


def join_modes(*modes: Layout) -> Layout:
    """The layout whose modes are the arguments."""
    return Layout(tuple(mode.shape for mode in modes), tuple(mode.stride for mode in modes))


def flat_modes(layout: Layout) -> Iterator[tuple[int, int]]:
    """(extent, stride) of every mode, without nesting."""
    return zip(flatten(layout.shape), flatten(layout.stride), strict=True)


@overload
def tile_to_shape(atom: Layout, shape: tuple[int, ...]) -> Layout: ...
@overload
def tile_to_shape(atom: ComposedLayout, shape: tuple[int, ...]) -> ComposedLayout: ...
def tile_to_shape(atom: AnyLayout, shape: tuple[int, ...]) -> AnyLayout:
    """Repeat `atom` to cover `shape`, along the first mode first: `cute.tile_to_shape(atom, shape, (0, 1, ...))`.

    Modes of `shape` that the atom does not have count copies, such as the stages of a pipeline.
    """
    if isinstance(atom, ComposedLayout):
        return ComposedLayout(atom.swizzle, atom.offset, tile_to_shape(atom.layout, shape))
    modes = (*atom.modes, *[Layout(1, 0)] * (len(shape) - atom.rank))
    if len(modes) != len(shape) or any(extent % mode.size for extent, mode in zip(shape, modes, strict=True)):
        raise ValueError(f"shape {_spell(shape)} is not a multiple of the atom {atom}")
    counts = [extent // mode.size for extent, mode in zip(shape, modes, strict=True)]
    steps = accumulate(counts[:-1], mul, initial=atom.cosize)
    # CuTe gives a mode of extent 1 the stride 0.
    blocks = [Layout(count, step if count > 1 else 0) for count, step in zip(counts, steps, strict=True)]
    return join_modes(*(join_modes(mode, block) for mode, block in zip(modes, blocks, strict=True)))


# ---- tiles of the kernels


def atom_of(tile: SmemTile) -> AnyLayout:
    """The smallest layout that repeats in a tile; without a swizzle, the full tile."""
    if tile.swizzle:
        return ComposedLayout(tile.swizzle, 0, Layout((8, tile.atom_cols), (tile.atom_cols, 1)))
    return Layout((tile.rows, tile.cols), (tile.row_stride, 1))


@lru_cache
def layout_of(tile: SmemTile) -> AnyLayout:
    """(row, col) -> element index."""
    return tile_to_shape(atom_of(tile), (tile.rows, tile.cols)) if tile.swizzle else atom_of(tile)


@lru_cache
def transposed(tile: SmemTile) -> AnyLayout:
    """(col, row) -> element index in the same memory, such as V as (d, keys), which ldmatrix.trans reads."""
    return layout_of(tile).select(1, 0)


def staged(tile: SmemTile, stages: int) -> AnyLayout:
    """(row, col, stage) -> element index, for `stages` tiles one after the other."""
    return tile_to_shape(atom_of(tile), (tile.rows, tile.cols, stages))
