"""The tile of rows of `fp8_ds_mla`: it fits every GPU, and its copies move every byte of a row once."""

from __future__ import annotations

import pytest

from cute_flash.planning.decode import DecodeStatic
from cute_flash.planning.decode_tiles import ATOM_BYTES, DsMlaTile, latent_tile
from cute_flash.planning.latent_sm90 import uses_wgmma
from cute_flash.planning.tiles.common import SMEM_ALIGN
from cute_flash.spec.arch import ARCHS, ArchSpec
from cute_flash.spec.ds_mla import DS_MLA, HEAD_DIM, LATENT_DIM, ROW_BYTES

each_gpu = pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)


def static(**changes: bool) -> DecodeStatic:
    return DecodeStatic(
        dtype="bfloat16", head_dim=HEAD_DIM, cache_dtype=DS_MLA, head_dim_v=LATENT_DIM, is_latent=True, **changes
    )


def tile(arch: ArchSpec, rows: int = 1) -> DsMlaTile:
    found = latent_tile(static(), rows, arch)
    assert isinstance(found, DsMlaTile)
    return found


@each_gpu
def test_every_gpu_has_a_tile(arch: ArchSpec) -> None:
    for rows in (1, 16, 17, 128):
        for has_query_tables in (False, True):
            found = latent_tile(static(has_query_tables=has_query_tables), rows, arch)
            assert found.smem_bytes <= arch.smem_per_cta and found.holds_queries and found.stages >= 2
        assert not uses_wgmma(static(), rows, arch, "")


@each_gpu
def test_every_byte_of_a_row_is_copied_once(arch: ArchSpec) -> None:
    found = tile(arch)
    sources = [byte for part in found.row_segments for byte in range(part.source, part.source + part.num_bytes)]
    assert sorted(sources) == list(range(ROW_BYTES))
    ends = []
    for part in sorted(found.row_segments, key=lambda part: part.target):
        assert part.target >= max(ends, default=0), "the parts of a stage do not overlap"
        # Whole atoms of 128 bytes, or one vector of 16 bytes, at multiples of their sizes.
        size = ATOM_BYTES if part.num_bytes >= ATOM_BYTES else 16
        assert part.num_bytes % size == 0 and part.source % 16 == 0
        ends.append(part.target + found.tile_n * part.num_bytes)
    assert ends[-1] == found.stage_bytes


@each_gpu
def test_swizzled_tiles_are_aligned_in_every_stage(arch: ArchSpec) -> None:
    found = tile(arch)
    assert found.stage_bytes % SMEM_ALIGN == 0 and found.rotary_offset % SMEM_ALIGN == 0
    assert found.p_smem.bytes % SMEM_ALIGN == 0
    # The value columns of a warp have one scale for each key.
    assert 128 % found.output_shape[1] == 0 and found.score_keys % 8 == 0
