"""The algebra of shape:stride layouts (`layout.py`): coalesce, composition, complement, division."""

from __future__ import annotations

from typing import overload

from layouts.layout import AnyLayout, ComposedLayout, IntTuple, Layout, flat_modes, join_modes, size_of


def idx2crd(index: int, shape: IntTuple) -> IntTuple:
    """The coordinate, nested like `shape`, of the position `index`; the first mode is the fastest."""
    if isinstance(shape, int):
        return index
    coord: list[IntTuple] = []
    for mode in shape[:-1]:
        index, inner = divmod(index, size_of(mode))
        coord.append(idx2crd(inner, mode))
    return (*coord, idx2crd(index, shape[-1])) if shape else ()


def _from_pairs(pairs: list[tuple[int, int]]) -> Layout:
    """The flat layout of (extent, stride) pairs. For one pair, shape and stride are ints instead of tuples."""
    if len(pairs) == 1:
        return Layout(*pairs[0])
    return Layout(tuple(extent for extent, _ in pairs), tuple(step for _, step in pairs))


def coalesce(layout: Layout) -> Layout:
    """A layout without nesting and with as few modes as possible that is the same function of an integer."""
    merged: list[tuple[int, int]] = []
    for extent, step in flat_modes(layout):
        if extent == 1:
            continue
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * extent, merged[-1][1])
        else:
            merged.append((extent, step))
    return _from_pairs(merged or [(1, 0)])


@overload
def composition(outer: Layout, inner: Layout) -> Layout: ...
@overload
def composition(outer: ComposedLayout, inner: Layout) -> ComposedLayout: ...
def composition(outer: AnyLayout, inner: Layout) -> AnyLayout:
    """`coord -> outer(inner(coord))`, nested like `inner`, whose indices should be less than the size of `outer`.

    Raises:
        ValueError: extents and strides do not divide each other, or modes of `inner` overlap.
    """
    if isinstance(outer, ComposedLayout):
        return ComposedLayout(outer.swizzle, outer.offset, composition(outer.layout, inner))
    rest, step = inner.shape, inner.stride
    *modes, (_, last_stride) = flat_modes(coalesce(outer))
    if isinstance(rest, tuple) or isinstance(step, tuple):
        # If `outer` is a single mode, it is linear, and carries do not matter.
        if modes:
            _check_no_carry(outer, inner)
        return join_modes(*(composition(outer, mode) for mode in inner.modes))
    if step == 0:
        return inner
    pairs: list[tuple[int, int]] = []
    # Distribute the steps of `inner` over the modes of `outer`: each mode takes the steps that stay within it.
    for extent, stride in modes:
        if rest == 1:
            break
        if extent % step and step % extent:
            raise ValueError(f"composition {outer} o {inner}: neither of {step} and {extent} divides the other")
        taken = min(max(1, extent // step), rest)
        if rest % taken:
            raise ValueError(f"composition {outer} o {inner}: {rest} steps do not split into runs of {taken}")
        if taken > 1:
            pairs.append((taken, step * stride))
        rest, step = rest // taken, -(-step // extent)
    if rest > 1 or not pairs:
        pairs.append((rest, step * last_stride))
    return _from_pairs(pairs)


def _check_no_carry(outer: Layout, inner: Layout) -> None:
    """Raise ValueError if the modes of `inner` overlap.

    Modes can be composed one by one only if they are like the digits of a number, whose sum never carries.
    """
    reach = 1
    for step, extent in sorted((step, extent) for extent, step in flat_modes(inner) if extent > 1 and step > 0):
        if step < reach:
            raise ValueError(f"composition {outer} o {inner}: the modes of {inner} overlap at stride {step}")
        reach = step * extent


def complement(layout: Layout, size: int) -> Layout:
    """The layout of the indices that `layout` leaves out: together they reach every index of `[0, size)` once."""
    pairs: list[tuple[int, int]] = []
    covered = 1
    for step, extent in sorted((step, extent) for extent, step in flat_modes(layout) if extent > 1 and step > 0):
        if step % covered:
            raise ValueError(f"complement of {layout}: stride {step} is not a multiple of {covered}")
        pairs.append((step // covered, covered))
        covered = step * extent
    pairs.append((-(-size // covered), covered))
    return coalesce(_from_pairs(pairs))


def logical_divide(layout: Layout, tiler: int | Layout | tuple[int | Layout, ...]) -> Layout:
    """`(tile, rest)`: mode 0 runs inside a tile, mode 1 from tile to tile. A tuple divides mode by mode."""
    if isinstance(tiler, tuple):
        if len(tiler) > layout.rank:
            raise ValueError(f"{len(tiler)} tilers for {layout}, which has {layout.rank} modes")
        divided = tuple(map(logical_divide, layout.modes, tiler))
        return join_modes(*divided, *layout.modes[len(tiler) :])
    tile = Layout(tiler, 1) if isinstance(tiler, int) else tiler
    if layout.size % tile.size:
        raise ValueError(f"tiles of {tile.size} do not divide {layout}, which has {layout.size} elements")
    return composition(layout, join_modes(tile, complement(tile, layout.size)))
