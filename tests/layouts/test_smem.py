from __future__ import annotations

import pytest
from cutlass import BFloat16, cute
from cutlass.cute.nvgpu import warpgroup
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_flash.device.memory.smem import byte_swizzle
from layouts import (
    HOPPER_VARIANTS,
    VARIANTS,
    ComposedLayout,
    Layout,
    SmemTile,
    Swizzle,
    atom_of,
    layout_of,
    staged,
    transposed,
)
from tests.layouts.convert import to_cute

ALL_VARIANTS = tuple(dict.fromkeys(VARIANTS + HOPPER_VARIANTS))
deterministic = settings(derandomize=True, deadline=None, max_examples=40)

tiles = st.builds(
    lambda blocks, halves, element_bytes, variant: SmemTile(
        8 * blocks, 64 // element_bytes * halves, element_bytes, variant
    ),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(ALL_VARIANTS),
)


def indices(tile: SmemTile) -> list[int]:
    return [layout_of(tile)(row, col) for row in range(tile.rows) for col in range(tile.cols)]


@deterministic
@given(tiles)
def test_every_element_has_its_own_place(tile: SmemTile) -> None:
    places = sorted(indices(tile))
    assert len(set(places)) == tile.rows * tile.cols
    assert places[-1] == tile.cosize - 1
    if tile.variant != "padded":
        assert places == list(range(tile.rows * tile.cols))


@deterministic
@given(tiles)
def test_sixteen_bytes_stay_together(tile: SmemTile) -> None:
    for row in range(tile.rows):
        for col in range(0, tile.cols, tile.chunk_cols):
            first = layout_of(tile)(row, col)
            assert first * tile.element_bytes % 16 == 0
            assert [layout_of(tile)(row, col + i) - first for i in range(tile.chunk_cols)] == list(
                range(tile.chunk_cols)
            )


@deterministic
@given(tiles)
def test_transposed_is_the_same_memory(tile: SmemTile) -> None:
    assert transposed(tile).extents == (tile.cols, tile.rows)
    assert all(
        transposed(tile)(c, r) == layout_of(tile)(r, c) for r in range(0, tile.rows, 3) for c in range(tile.cols)
    )


@deterministic
@given(tiles, st.integers(1, 4))
def test_stages_follow_each_other(tile: SmemTile, stages: int) -> None:
    layout = staged(tile, stages)
    assert layout.cosize == stages * tile.cosize
    for stage in range(stages):
        assert layout(5, 13, stage) == layout_of(tile)(5, 13) + stage * tile.cosize


@deterministic
@given(tiles, st.integers(1, 4))
def test_kernels_get_the_layout_before_its_swizzle(tile: SmemTile, stages: int) -> None:
    layout = staged(tile, stages)
    assert Layout(*tile.staged(stages)) == (layout.layout if isinstance(layout, ComposedLayout) else layout)
    assert Layout(*tile.affine).modes == Layout(*tile.staged(stages)).modes[:2]
    assert tile.cosize == layout_of(tile).cosize


@pytest.mark.parametrize(
    ("tile", "swizzle", "atom_shape"),
    [
        (SmemTile(64, 64), Swizzle(3, 3, 3), (8, 64)),
        (SmemTile(64, 96), Swizzle(2, 3, 3), (8, 32)),
        (SmemTile(64, 32, 4), Swizzle(3, 2, 3), (8, 32)),
        (SmemTile(64, 16, 4), Swizzle(2, 2, 3), (8, 16)),
        (SmemTile(64, 128, 1), Swizzle(3, 4, 3), (8, 128)),
        (SmemTile(64, 64, 1), Swizzle(2, 4, 3), (8, 64)),
    ],
)
def test_atoms(tile: SmemTile, swizzle: Swizzle, atom_shape: tuple[int, int]) -> None:
    assert atom_of(tile) == ComposedLayout(swizzle, 0, Layout(atom_shape, (atom_shape[1], 1)))


@pytest.mark.parametrize(
    ("tile", "cosize", "num_bytes"),
    [
        (SmemTile(64, 64), 4096, 8192),
        (SmemTile(64, 64, variant="plain"), 4096, 8192),
        # 63 rows of 64 + 8 elements, and a last one that needs no padding.
        (SmemTile(64, 64, variant="padded"), 63 * 72 + 64, 9200),
        (SmemTile(64, 32, 4, "padded"), 63 * 36 + 32, 9200),
        (SmemTile(64, 128, 1, "padded"), 63 * 144 + 128, 9200),
    ],
)
def test_sizes(tile: SmemTile, cosize: int, num_bytes: int) -> None:
    assert (tile.cosize, tile.bytes) == (cosize, num_bytes)


def test_a_swizzle_reserves_its_last_block_whole() -> None:
    # The swizzle shifts the second of two rows by 8 to 15 elements, so 64 + 9 elements would be too few.
    ragged = ComposedLayout(Swizzle(3, 3, 3), 0, Layout((2, 9), (64, 1)))
    assert max(ragged(r, c) for r in range(2) for c in range(9)) == 79 < ragged.cosize == 128


@pytest.mark.compiles
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("rows", "cols", "element_bytes"),
    [(64, 64, 2), (32, 128, 2), (64, 96, 2), (8, 32, 2), (32, 16, 2), (64, 64, 4), (64, 64, 1)],
)
def test_cute_agrees_index_by_index(cute_indices, rows: int, cols: int, element_bytes: int, variant: str) -> None:
    tile = SmemTile(rows, cols, element_bytes, variant)
    theirs, printed = cute_indices(lambda: to_cute(layout_of(tile)), rows * cols)
    # An integer coordinate counts rows first.
    assert theirs == [layout_of(tile)(row, col) for col in range(cols) for row in range(rows)]
    assert printed == str(layout_of(tile))


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("rows", "cols", "bits", "atom_cols"), [(64, 64, 3, 64), (32, 128, 3, 64), (32, 96, 2, 32), (32, 16, 1, 16)]
)
def test_is_what_cute_tiles_itself(cute_indices, rows: int, cols: int, bits: int, atom_cols: int) -> None:
    def build():
        inner = cute.make_layout((8, atom_cols), stride=(atom_cols, 1))
        atom = cute.make_composed_layout(cute.make_swizzle(bits, 3, 3), 0, inner)
        return cute.tile_to_shape(atom, (rows, cols), (0, 1))

    layout = layout_of(SmemTile(rows, cols))
    theirs, printed = cute_indices(build, rows * cols)
    assert theirs == [layout(i) for i in range(rows * cols)]
    assert printed == str(layout)


@pytest.mark.compiles
@pytest.mark.parametrize(
    "view", [lambda tile: transposed(tile), lambda tile: staged(tile, 2)], ids=["transposed", "staged"]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_views_convert_to_cute(cute_indices, variant: str, view) -> None:
    layout = view(SmemTile(32, 96, variant=variant))
    theirs, printed = cute_indices(lambda: to_cute(layout), layout.size)
    assert theirs == [layout(i) for i in range(layout.size)]
    assert printed == str(layout)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("cols", "variant", "kind"),
    [
        (64, "swizzled", warpgroup.SmemLayoutAtomKind.K_SW128),
        (32, "swizzled", warpgroup.SmemLayoutAtomKind.K_SW64),
        (16, "swizzled", warpgroup.SmemLayoutAtomKind.K_SW32),
        (64, "swizzled64", warpgroup.SmemLayoutAtomKind.K_SW64),
        (64, "swizzled32", warpgroup.SmemLayoutAtomKind.K_SW32),
        (64, "interleaved", warpgroup.SmemLayoutAtomKind.K_INTER),
    ],
)
def test_is_the_swizzle_of_wgmma(cute_indices, cols: int, variant: str, kind) -> None:
    """CuTe's atoms for wgmma have the same element order; CuTe writes their swizzle for byte addresses, S<b,4,3>."""
    atom = atom_of(SmemTile(8, cols, variant=variant))
    assert isinstance(atom, ComposedLayout)
    in_bytes = Swizzle(atom.swizzle.bits, 4, 3)
    _, printed = cute_indices(lambda: warpgroup.make_smem_layout_atom(kind, BFloat16), 1)
    assert printed == f"{in_bytes} o 0 o {atom.layout}"
    assert all(in_bytes(2 * i) == 2 * atom.swizzle(i) for i in range(1024))


@pytest.mark.compiles
@pytest.mark.parametrize("element_bytes", [1, 2, 4])
@pytest.mark.parametrize("row_bytes", [128, 192])
def test_byte_swizzle_moves_the_same_bytes(cute_indices, row_bytes: int, element_bytes: int) -> None:
    """A plain layout with a pointer that swizzles byte addresses gives the same addresses."""
    tile = SmemTile(16, row_bytes // element_bytes, element_bytes)
    layout = layout_of(tile)
    assert isinstance(layout, ComposedLayout)
    moved, _ = cute_indices(
        lambda: cute.make_composed_layout(byte_swizzle(tile), 0, cute.make_layout(tile.bytes)), tile.bytes
    )
    for row in range(tile.rows):
        for col in range(tile.cols):
            assert moved[layout.layout(row, col) * element_bytes] == layout(row, col) * element_bytes


@pytest.mark.parametrize("variant", ["padded", "plain"])
def test_no_swizzle_for_the_pointer(variant: str) -> None:
    tile = SmemTile(64, 64, variant=variant)
    assert byte_swizzle(tile) is None


@deterministic
@given(tiles)
def test_columns_flip_bits_or_add_up(tile: SmemTile) -> None:
    """A kernel computes one swizzled address per row, and the others from it without another swizzle."""
    for row in range(tile.rows):
        first = layout_of(tile)(row, 0)
        for col in range(0, tile.cols, tile.chunk_cols):
            flipped, added = tile.column(col)
            assert layout_of(tile)(row, col) == (first ^ flipped) + added


@deterministic
@given(tiles)
def test_rows_of_an_atom_are_a_stride_apart(tile: SmemTile) -> None:
    affine = Layout(*tile.affine)
    assert all(affine(row, 0) == row * tile.row_stride for row in range(tile.rows))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64, 64, 2, "twisted"), "variant='twisted': choose one of swizzled, padded, plain"),
        ((64, 64, 3), "element_bytes=3: choose 1, 2 or 4"),
        ((12, 64), "rows=12: must be a positive multiple of 8"),
        ((0, 64), "rows=0"),
        ((64, 40), r"cols=40: must be a positive multiple of 16 \(32 bytes of 2-byte elements\)"),
        ((64, 16, 2, "swizzled64"), r"cols=16: must be a positive multiple of 32 \(64 bytes of 2-byte elements\)"),
        ((64, 20, 4), "cols=20: must be a positive multiple of 8"),
        ((64, -64), "cols=-64"),
    ],
)
def test_rejects(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmemTile(*arguments)


def test_rejects_no_stages() -> None:
    with pytest.raises(ValueError, match="stages=0"):
        SmemTile(64, 64).staged(0)
