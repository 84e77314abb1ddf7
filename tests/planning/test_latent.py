"""Plans of `attn_decode` with one latent cache (MLA): the kernel, the tile and the head groups of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_flash.planning.decode import DecodePlan, DecodeStatic, SplitSizes, plan_decode, plan_splits
from cute_flash.spec import arch
from cute_flash.spec.decode import DecodeArgs, describe_decode

FP8 = "float8_e4m3fn"
STATIC = DecodeStatic("bfloat16", 576, head_dim_v=512, has_right=True, is_latent=True)
MMA_SYNC, WGMMA = "decode_latent", "decode_latent_sm90"


def plan(
    gpu: str,
    heads: int,
    tokens: int = 1,
    *,
    batch: int = 4,
    heads_kv: int = 1,
    num_splits: int | None = None,
    family: str = "",
    **static: Any,
) -> DecodePlan:
    sizes = SplitSizes(batch, tokens, heads * heads_kv, heads_kv, 4096)
    return plan_splits(MMA_SYNC, replace(STATIC, **static), sizes, arch.by_name(gpu), num_splits, family)


@pytest.mark.parametrize(
    ("gpu", "heads", "tokens", "options", "kernel"),
    [
        ("H200", 16, 1, {}, MMA_SYNC),
        ("H200", 8, 2, {}, MMA_SYNC),
        ("H200", 17, 1, {}, WGMMA),
        ("H200", 1, 17, {}, WGMMA),
        ("H200", 128, 1, {"family": "sm90"}, WGMMA),
        ("H200", 128, 1, {"family": "sm80"}, MMA_SYNC),
        ("H200", 128, 1, {"cache_dtype": FP8}, MMA_SYNC),
        ("A100", 128, 1, {}, MMA_SYNC),
        ("L40S", 128, 1, {}, MMA_SYNC),
        ("RTX 5090", 128, 1, {}, MMA_SYNC),
    ],
)
def test_wgmma_computes_many_rows_of_16_bit_caches_on_hopper(
    gpu: str, heads: int, tokens: int, options: dict, kernel: str
) -> None:
    assert plan(gpu, heads, tokens, **options).key.kernel == kernel


@pytest.mark.parametrize(
    ("gpu", "heads", "options", "tile"),
    [
        # Rows, keys, warps, stages.
        ("H200", 16, {}, (16, 64, 8, 3)),
        ("H200", 64, {}, (64, 64, 16, 2)),
        ("H200", 64, {"family": "sm80"}, (32, 64, 8, 2)),
        ("H200", 64, {"cache_dtype": FP8}, (16, 128, 8, 2)),
        # Lists have blocks of 64 keys, because a page is looked up for each row.
        ("H200", 64, {"cache_dtype": FP8, "has_query_tables": True, "page_lookup": "row"}, (16, 64, 8, 5)),
        ("A100", 16, {}, (16, 64, 8, 2)),
        ("A100", 17, {}, (32, 64, 8, 2)),
        # A stage of FP8 has no room for two copies of 32 rows of Q.
        ("A100", 64, {"cache_dtype": FP8}, (16, 64, 8, 3)),
        ("A10", 64, {}, (16, 32, 4, 2)),
        ("A10", 64, {"cache_dtype": FP8}, (16, 64, 8, 2)),
    ],
)
def test_tiles(gpu: str, heads: int, options: dict, tile: tuple[int, int, int, int]) -> None:
    found = plan(gpu, heads, **options).tile
    assert (found.tile_m, found.block_keys, found.num_warps, found.stages) == tile
    assert found.smem_bytes <= arch.by_name(gpu).smem_per_cta


@pytest.mark.parametrize("gpu", ["A100", "A10", "H200"])
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize(
    ("head_dim", "values", "width", "width_v"),
    [(576, 512, 576, 512), (512, 512, 512, 512), (520, 264, 576, 512), (320, 256, 320, 256), (48, 32, 256, 256)],
)
def test_widths_of_tiles(gpu: str, heads: int, head_dim: int, values: int, width: int, width_v: int) -> None:
    """Values have 256 or 512 columns, and keys are at least as wide."""
    tile = plan(gpu, heads, head_dim=head_dim, head_dim_v=None if values == head_dim else values).tile
    assert (tile.head_dim, tile.width_v) == (width, width_v)
    assert tile.smem_bytes <= arch.by_name(gpu).smem_per_cta
    # With wgmma, at least 64 columns of Q stay in shared memory.
    assert gpu != "H200" or heads == 16 or 16 * tile.q_steps == min(256, width - 64)


@pytest.mark.parametrize(
    ("gpu", "heads", "tokens", "groups"),
    [
        ("A100", 32, 1, 1),
        ("A100", 64, 1, 2),
        ("A100", 128, 4, 16),
        ("A100", 127, 1, 1),
        # A group fills half of a tile; less is not enough.
        ("A100", 10, 8, 5),
        ("A100", 5, 8, 1),
        ("H200", 64, 1, 1),
        ("H200", 128, 1, 2),
        ("H200", 40, 1, 1),
        ("H200", 20, 4, 2),
        ("A10", 128, 1, 8),
    ],
)
@pytest.mark.parametrize("heads_kv", [1, 3])
def test_head_groups_count_as_kv_heads(gpu: str, heads: int, tokens: int, groups: int, heads_kv: int) -> None:
    found = plan(gpu, heads, tokens, heads_kv=heads_kv)
    row_tiles = -(-heads // groups * tokens // found.tile.tile_m)
    assert found.head_groups == groups == found.sizes["head_groups"]
    assert found.num_query_tiles == 4 * heads_kv * groups * row_tiles
    assert found.heads_at_once in (1, heads_kv * groups) and found.num_ctas % found.heads_at_once == 0


@pytest.mark.parametrize(
    ("multicasts", "heads", "tokens", "changes"),
    [
        (True, 128, 1, {}),
        (True, 64, 2, {}),
        (True, 128, 2, {"page_lookup": "chunk"}),
        (True, 128, 1, {"page_lookup": "chunk", "heads_kv": 2}),
        # 132 CTAs are not divided among 20 head groups.
        (False, 128, 1, {"heads_kv": 10}),
        # One head group, three, and parts of keys that each have a CTA of their own.
        (False, 64, 1, {}),
        (False, 192, 1, {}),
        (False, 128, 1, {"num_splits": 4}),
        # cp.async loads all keys.
        (False, 128, 1, {"page_lookup": "row"}),
        (False, 128, 1, {"appends": True}),
    ],
)
def test_two_head_groups_form_clusters(multicasts: bool, heads: int, tokens: int, changes: dict[str, Any]) -> None:
    """CTAs of neighbouring head groups, which read the same keys by TMA."""
    found = plan("H200", heads, tokens, **changes)
    assert found.key.kernel == WGMMA and found.key.static.multicasts == multicasts
    assert ("multicasts" in found.key.static.tags) == multicasts
    if multicasts:
        assert found.heads_at_once % 2 == found.num_ctas % found.heads_at_once == 0
    assert not plan("H200", heads, tokens, family="sm80", **changes).key.static.multicasts


@pytest.mark.parametrize(("gpu", "heads", "kernel", "tiles"), [("H200", 16, MMA_SYNC, 12), ("H200", 128, WGMMA, 24)])
def test_each_query_with_a_list_is_a_sequence(gpu: str, heads: int, kernel: str, tiles: int) -> None:
    """The rows of its tiles are its heads, and not those of other queries."""
    q, rows = torch.empty(4, 3, heads, 576, dtype=torch.bfloat16), torch.empty(999, 1, 1, 576, dtype=torch.bfloat16)
    lengths, tables = torch.zeros(4, 3, dtype=torch.int32), torch.zeros(4, 3, 2048, dtype=torch.int32)
    args = DecodeArgs(lengths, 0.07, page_table=tables, window_right=0, value_dim=512)
    found = plan_decode(describe_decode(q, rows, None, args, "cuda"), arch.by_name(gpu))
    assert (found.key.kernel, found.num_query_tiles) == (kernel, tiles)
    assert not found.key.static.has_right, "positions have no meaning in a list"
