"""Tiles of decode with head dims above 256, whose columns are divided among warps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_flash.errors import UnsupportedError
from cute_flash.planning.decode import DecodeStatic
from cute_flash.planning.decode_tiles import DecodeTile, decode_tile
from cute_flash.spec.arch import ARCHS, ArchSpec, by_name

FP8 = "float8_e4m3fn"


def tile_of(arch: ArchSpec, head_dim: int, head_dim_v: int | None = None, cache_dtype: str = "") -> DecodeTile:
    static = DecodeStatic("bfloat16", head_dim, cache_dtype=cache_dtype, head_dim_v=head_dim_v)
    return decode_tile(static, 4, 8, arch)


@pytest.mark.parametrize(
    ("gpu", "head_dim", "cache_dtype", "tile"),
    [
        # Width, teams, warps, stages.
        ("H200", 512, "", (512, 2, 8, 3)),
        ("H200", 384, "", (384, 2, 6, 4)),
        ("H200", 512, FP8, (512, 2, 8, 6)),
        ("H200", 264, FP8, (384, 2, 6, 6)),
        ("A100", 512, "", (512, 1, 4, 4)),
        ("A100", 320, "", (384, 1, 3, 5)),
        ("A100", 512, FP8, (512, 2, 8, 4)),
        ("A10", 512, "", (512, 1, 4, 2)),
        ("A10", 384, "", (384, 1, 3, 3)),
        ("L40S", 512, FP8, (512, 1, 4, 4)),
        ("RTX 5090", 384, FP8, (384, 2, 6, 3)),
    ],
)
def test_tiles(gpu: str, head_dim: int, cache_dtype: str, tile: tuple[int, int, int, int]) -> None:
    found = tile_of(by_name(gpu), head_dim, cache_dtype=cache_dtype)
    assert (found.head_dim, found.num_teams, found.num_warps, found.stages) == tile


@pytest.mark.parametrize("cache_dtype", ["", FP8])
@pytest.mark.parametrize("name", ARCHS)
def test_every_head_dim_has_a_tile_that_fits(name: str, cache_dtype: str) -> None:
    arch = ARCHS[name]
    for head_dim in range(264, 513, 8):
        for head_dim_v in (None, 8, 512):
            tile = tile_of(arch, head_dim, head_dim_v, cache_dtype)
            assert tile.head_dim >= max(head_dim, head_dim_v or 0) > tile.head_dim - 128
            assert tile.smem_bytes <= arch.smem_per_cta and tile.stages >= 2
            # A warp has whole swizzle atoms, and the accumulators of head dim 128.
            assert tile.output_shape == (16, 128) and tile.kv_smem.cols == 128
            # The products of the columns, of two blocks, replace the queries as in global memory.
            assert 2 * tile.num_warps * tile.scores_bytes <= tile.q_smem.bytes and not tile.own_exchange
            # The exchange at the end replaces the stages.
            assert tile.exchange_bytes <= tile.kv_bytes


def test_up_to_256_columns_a_warp_has_all_of_them() -> None:
    for name, arch in ARCHS.items():
        assert tile_of(arch, 256).column_warps == tile_of(arch, 64, 256).column_warps == 1, name
        assert tile_of(arch, 8, 264).column_warps == 3, name


def test_an_architecture_with_little_shared_memory_is_refused() -> None:
    small = replace(ARCHS["sm_86"], smem_per_cta=80 << 10)
    with pytest.raises(UnsupportedError, match=r"^attn_decode with head_dim=512 on sm_86: not enough shared memory$"):
        tile_of(small, 512)
