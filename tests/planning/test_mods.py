"""Plans of calls with user mods, a bias and block masks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_flash import UnsupportedError
from cute_flash.planning.plan import plan_forward
from cute_flash.score_mod.bound import BoundMods
from cute_flash.score_mod.graphs import Graphs
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.describe import describe
from cute_flash.spec.problem import Problem
from tests.mod_cases import Case, Kind, Sizes

SIZES = Sizes(2, 4, 2, 300, 200)
PLACES = [("sm90", "sm_90"), *(("sm80", name) for name in ARCHS)]
MANY: list[dict[str, Any]] = [{}, {"score": "gated", "mask": "by_head", "bias": torch.float32}]


def case_of(**kind: Any) -> Case:
    return Case(Kind(64, **kind), SIZES, device="cpu")


def problem_of(**kind: Any) -> Problem:
    case = case_of(**kind)
    return describe(*case.inputs(), case.args(), "cuda")


def test_gradients_are_no_part_of_the_forward_key() -> None:
    case = case_of(score="alibi")
    problem = problem_of(score="alibi")
    mods = BoundMods.of(case.options["score_mod"], None, lambda g, s, b, h, q, kv: g)
    other = replace(problem, mods=replace(problem.mods, graphs=mods.graphs, captures_needing_grad=(0,)))
    key = plan_forward(problem, ARCHS["sm_90"]).main
    assert key == plan_forward(other, ARCHS["sm_90"]).main
    assert key.static.mods.graphs == Graphs(mods.graphs.score)


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_tiles_divide_the_blocks_of_a_block_mask(family: str) -> None:
    problem = problem_of(mask="document", has_block_mask=True)

    def plan(block: tuple[int, int]) -> Any:
        return plan_forward(replace(problem, mods=replace(problem.mods, block_mask_tile=block)), ARCHS["sm_90"], family)

    for block in ((128, 128), (256, 128), (128, 512)):
        tile = plan(block).tile
        assert not (block[0] % tile.tile_m or block[1] % tile.tile_n)
    with pytest.raises(UnsupportedError, match="block_mask of blocks of 16 x 16"):
        plan((16, 16))


def test_sequences_too_long_for_mods() -> None:
    problem = replace(problem_of(score="alibi"), seqlen_k=1 << 23)
    with pytest.raises(
        UnsupportedError, match="seqlen_k=8388608 with a bias, mods or a block mask on cuda: use less than 8388608"
    ):
        plan_forward(problem, ARCHS["sm_90"])


@pytest.mark.parametrize("kind", MANY, ids=str)
def test_every_head_dim_has_a_tile_for_block_masks(kind: dict[str, Any]) -> None:
    problem = problem_of(has_block_mask=True, **kind)
    for head_dim, (family, target) in itertools.product(range(8, 513, 8), PLACES):
        if family == "sm90" and head_dim > 256:
            continue
        tile = plan_forward(replace(problem, head_dim=head_dim), ARCHS[target], family).tile
        assert head_dim <= tile.head_dim <= -(-head_dim // 64) * 64


@pytest.mark.parametrize("kind", MANY, ids=str)
@pytest.mark.parametrize("has_block_mask", [False, True])
def test_dv_other_than_d_has_a_tile(kind: dict[str, Any], has_block_mask: bool) -> None:
    problem = problem_of(has_block_mask=has_block_mask, **kind)
    for head_dim, width in itertools.product((32, 64, 128, 192, 256), (40, 128, 256)):
        wide = replace(problem, head_dim=head_dim, head_dim_v=width)
        for family, target in PLACES:
            tile = plan_forward(wide, ARCHS[target], family).tile
            assert tile.head_dim >= head_dim and getattr(tile, "width_v", tile.head_dim) >= width
