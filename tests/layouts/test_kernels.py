"""Predictions for the tiles that the forward kernels run with; `test_draw` has the table of one tile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_flash.planning.tiles.fwd_sm80 import SM80_FWD, FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import SM90_FWD
from cute_flash.spec.arch import ARCHS
from layouts import HOPPER_VARIANTS, VARIANTS, Work, predict, sm80_uses, sm90_uses

ONE = Work(row_tiles=1, key_blocks=1)
TILE = FwdTileSm80(128, 128, 48, 4, 2)


# Architectures share most of their tiles. The part of Q in registers changes the number of reads, not their pattern.
SHAPES = dict.fromkeys(replace(row, q_steps=0, max_bounds=2) for arch in ARCHS for row in SM80_FWD[arch])


@pytest.mark.slow
@pytest.mark.parametrize("row", SHAPES, ids=str)
def test_default_kernels_have_no_conflicts(row: FwdTileSm80) -> None:
    assert not any(count.conflicts for count in predict(sm80_uses(row), ONE).values())


@pytest.mark.parametrize("variant", HOPPER_VARIANTS)
def test_no_form_of_wgmma_conflicts_in_the_epilogue(variant: str) -> None:
    for row in SM90_FWD:
        found = predict(sm90_uses(replace(row, layout=variant)), ONE)
        assert not any(count.conflicts for count in found.values()), row
        # 16 x 16 elements per warp instruction; with one stage of Q the output is stored directly to global memory.
        expected = row.tile_m * row.width_v // 256 if row.q_stages > 1 else 0
        assert found["stmatrix"].instructions == expected


def test_padding_fails_where_rows_end_within_the_banks() -> None:
    """Rows of 192 bytes are read 64 bytes at a time, two rows together; 16 bytes are too short a shift."""
    wide = FwdTileSm80(96, 128, 64, 4, 2, q_steps=2, layout="padded")
    found = predict(sm80_uses(wide), ONE)
    assert found["ldmatrix"].conflicts == found["st.shared"].conflicts == 0
    assert found["cp.async"].conflicts * 15 == found["cp.async"].wavefronts * 7
    assert found["ld.shared"].conflicts == found["ld.shared"].wavefronts // 2


def test_kept_columns_of_q_are_read_once() -> None:
    some, none = replace(TILE, q_steps=3), TILE
    work = Work(row_tiles=1, key_blocks=10)
    columns = 128 // 16
    per_step = 2 * 4  # 16 rows each, 2 of every warp
    saved = 3 * per_step * 9
    assert predict(sm80_uses(none), work)["ldmatrix"].instructions == 10 * (columns * per_step + 192)
    assert (
        predict(sm80_uses(some), work)["ldmatrix"].instructions
        == predict(sm80_uses(none), work)["ldmatrix"].instructions - saved
    )
    kept = replace(TILE, q_steps=columns)
    assert [use.is_per_block for use in sm80_uses(kept) if use.name == "Q ldmatrix"] == [False]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_launch_is_so_many_tiles_and_blocks(variant: str) -> None:
    uses = sm80_uses(replace(TILE, layout=variant))
    whole, tile, block = (predict(uses, work) for work in (Work(6, 50), Work(1, 0), Work(0, 1)))
    for name, count in whole.items():
        assert count == tile[name] * 6 + block[name] * 50
