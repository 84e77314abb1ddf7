from __future__ import annotations

from itertools import pairwise

import pytest
from cutlass import cute
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from layouts import (
    ComposedLayout,
    Layout,
    Swizzle,
    coalesce,
    complement,
    composition,
    crd2idx,
    idx2crd,
    logical_divide,
    tile_to_shape,
)
from layouts.layout import IntTuple, flatten
from tests.layouts.convert import to_cute

deterministic = settings(derandomize=True, deadline=None, max_examples=80)

shapes = st.recursive(st.integers(1, 6), lambda s: st.lists(s, min_size=1, max_size=3).map(tuple), max_leaves=4)


def _strides_like(shape: IntTuple, strides: st.SearchStrategy[int]) -> st.SearchStrategy[IntTuple]:
    return strides if isinstance(shape, int) else st.tuples(*(_strides_like(mode, strides) for mode in shape))


@st.composite
def any_layouts(draw: st.DrawFn) -> Layout:
    shape = draw(shapes)
    return Layout(shape, draw(_strides_like(shape, st.integers(0, 40))))


@st.composite
def power_of_two_bijections(draw: st.DrawFn) -> Layout:
    """Compact layouts of 2**k elements, their modes in any order: every composition of two is defined."""
    extents = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4))
    stride, strides = 1, [0] * len(extents)
    for mode in draw(st.permutations(range(len(extents)))):
        strides[mode], stride = stride, stride * extents[mode]
    return Layout(tuple(extents), tuple(strides))


def values(layout: Layout | ComposedLayout) -> list[int]:
    return [layout(i) for i in range(layout.size)]


@pytest.mark.parametrize(
    ("layout", "text", "size", "cosize", "extents"),
    [
        (Layout((8, 64), (64, 1)), "(8,64):(64,1)", 512, 512, (8, 64)),
        (Layout(((2, 3), 4), ((1, 8), 24)), "((2,3),4):((1,8),24)", 24, 90, (6, 4)),
        (Layout(5, 0), "5:0", 5, 1, (5,)),
        (Layout((64, 64), (72, 1)), "(64,64):(72,1)", 4096, 4600, (64, 64)),
    ],
)
def test_attributes(layout: Layout, text: str, size: int, cosize: int, extents: tuple[int, ...]) -> None:
    assert (str(layout), layout.size, layout.cosize, layout.extents) == (text, size, cosize, extents)
    assert layout.rank == len(extents)


def test_the_ways_to_call() -> None:
    layout = Layout(((2, 3), 4), ((1, 8), 24))
    # Coordinate (row 5, column 2) = ((1, 2), 2) = index 5 + 6 * 2.
    assert layout(17) == layout(5, 2) == layout((5, 2)) == layout((1, 2), 2) == 1 + 2 * 8 + 2 * 24


@deterministic
@given(any_layouts())
def test_coordinates_round_trip(layout: Layout) -> None:
    seen = [idx2crd(i, layout.shape) for i in range(layout.size)]
    assert len(set(seen)) == layout.size
    assert [crd2idx(coord, layout.shape, layout.stride) for coord in seen] == values(layout)


@deterministic
@given(any_layouts())
def test_cosize_is_the_largest_index(layout: Layout) -> None:
    assert layout.cosize == max(values(layout)) + 1


@deterministic
@given(any_layouts())
def test_coalesce_keeps_the_function_and_merges_all_it_can(layout: Layout) -> None:
    merged = coalesce(layout)
    assert values(merged) == values(layout)
    pairs = list(zip(flatten(merged.shape), flatten(merged.stride), strict=True))
    assert all(b[1] != a[0] * a[1] for a, b in pairwise(pairs))


@deterministic
@given(power_of_two_bijections(), power_of_two_bijections())
def test_composition_is_function_composition(outer: Layout, inner: Layout) -> None:
    assume(inner.cosize <= outer.size)
    composed = composition(outer, inner)
    assert values(composed) == [outer(inner(i)) for i in range(inner.size)]
    assert composed.extents == inner.extents


@deterministic
@given(any_layouts(), any_layouts())
@example(Layout((4, 4), (1, 100)), Layout((4, 2), (1, 1)))
@example(Layout((6, 2), (1, 100)), Layout((4, 2), (1, 3)))
@example(Layout((4, 6), (7, 1)), Layout(6, 1))
def test_composition_is_right_or_refused(outer: Layout, inner: Layout) -> None:
    assume(inner.cosize <= outer.size)
    try:
        composed = composition(outer, inner)
    except ValueError:
        return
    assert values(composed) == [outer(inner(i)) for i in range(inner.size)]


def test_composition_with_a_swizzle() -> None:
    outer = ComposedLayout(Swizzle(3, 3, 3), 64, Layout((8, 64), (64, 1)))
    columns_first = composition(outer, Layout((64, 8), (8, 1)))
    assert values(columns_first) == [outer(row, col) for row in range(8) for col in range(64)]
    assert columns_first.select(1, 0)(3, 5) == columns_first(5, 3) == outer(3, 5)


@deterministic
@given(power_of_two_bijections(), st.sampled_from([1, 2, 4]))
def test_complement_reaches_the_rest_once(layout: Layout, spread: int) -> None:
    # Spreading the strides leaves holes below the layout, a larger size leaves some above it.
    spread_out = Layout(layout.shape, tuple(step * spread for step in flatten(layout.stride)))
    size = 2 * spread * layout.size
    rest = complement(spread_out, size)
    assert sorted(a + b for a in values(spread_out) for b in values(rest)) == list(range(size))


@deterministic
@given(power_of_two_bijections(), st.sampled_from([1, 2, 4, 8]))
def test_logical_divide_by_an_int(layout: Layout, tile: int) -> None:
    assume(layout.size % tile == 0)
    divided = logical_divide(layout, tile)
    assert divided.extents == (tile, layout.size // tile)
    assert values(divided) == values(layout)


@deterministic
@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))
def test_logical_divide_by_mode(row_tiles: int, col_tiles: int, tile_m: int, tile_n: int) -> None:
    layout = Layout((row_tiles * tile_m, col_tiles * tile_n), (100, 1))
    divided = logical_divide(layout, (tile_m, tile_n))
    for row in range(layout.extents[0]):
        for col in range(layout.extents[1]):
            coord = ((row % tile_m, row // tile_m), (col % tile_n, col // tile_n))
            assert divided(coord) == layout(row, col)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda: composition(Layout((16, 8), (8, 1)), Layout((4, 8), (32, 2))),
            lambda: cute.composition(
                cute.make_layout((16, 8), stride=(8, 1)), cute.make_layout((4, 8), stride=(32, 2))
            ),
        ),
        (
            lambda: logical_divide(Layout((12, 32), (32, 1)), (4, 8)),
            lambda: cute.logical_divide(
                cute.make_layout((12, 32), stride=(32, 1)), (cute.make_layout(4), cute.make_layout(8))
            ),
        ),
        (
            lambda: complement(Layout((4, 2), (2, 16)), 64),
            lambda: cute.complement(cute.make_layout((4, 2), stride=(2, 16)), 64),
        ),
        (
            lambda: coalesce(Layout((2, (1, 6), 3), (1, (7, 2), 20))),
            lambda: cute.coalesce(cute.make_layout((2, (1, 6), 3), stride=(1, (7, 2), 20))),
        ),
        (
            lambda: tile_to_shape(Layout((8, 32), (32, 1)), (24, 96, 2)),
            lambda: cute.tile_to_shape(cute.make_layout((8, 32), stride=(32, 1)), (24, 96, 2), (0, 1, 2)),
        ),
    ],
    ids=["composition", "logical_divide", "complement", "coalesce", "tile_to_shape"],
)
def test_agrees_with_cute(cute_indices, ours, theirs) -> None:
    layout = ours()
    indices, printed = cute_indices(theirs, layout.size)
    assert indices == values(layout)
    assert printed == str(layout)


@pytest.mark.compiles
def test_to_cute_keeps_an_offset(cute_indices) -> None:
    layout = ComposedLayout(Swizzle(3, 3, 3), 64, Layout((8, 64), (64, 1)))
    indices, _ = cute_indices(lambda: to_cute(layout), layout.size)
    assert indices == values(layout)


ROWS = Layout((8, 64), (64, 1))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: composition(Layout((4, 4), (1, 100)), Layout((4, 2), (1, 1))), "overlap"),
        (lambda: composition(Layout((4, 6), (7, 1)), Layout(6, 1)), "runs of 4"),
        (lambda: composition(Layout((4, 6), (7, 1)), Layout(4, 3)), "divides"),
        (lambda: complement(Layout((2, 2), (1, 3)), 12), "stride 3 is not a multiple of 2"),
        (lambda: logical_divide(Layout(8, 1), 3), "tiles of 3 do not divide"),
        (lambda: logical_divide(Layout((8, 8), (8, 1)), (2, 2, 2)), "3 tilers"),
        (lambda: tile_to_shape(ROWS, (12, 64)), "not a multiple of the atom"),
        (lambda: tile_to_shape(ROWS, (8, 63)), "not a multiple of the atom"),
        (lambda: tile_to_shape(ROWS, (8,)), "not a multiple of the atom"),
        (lambda: Layout((2, 3), (1,)), "nested alike"),
        (lambda: Layout((2, 3), 1), "nested alike"),
        (lambda: Layout((2, (3, 4)), (1, 2)), "nested alike"),
        (lambda: Layout((0, 2), (1, 1)), "extents must be 1 or more"),
        (lambda: Layout((2,), (-1,)), "strides 0 or more"),
        (lambda: ROWS((1, 2, 3)), "does not fit"),
        (lambda: ROWS(((1, 2), 3)), "does not fit"),
        (lambda: ROWS((1,)), "does not fit"),
    ],
)
def test_refuses(call, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call()
