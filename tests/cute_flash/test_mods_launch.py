"""Calls with functions, a bias and block maps, up to a launch: what the host makes of them, and that the
compiled host code takes it.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_flash import BlockMask, UnsupportedError, custom_cuda, masks, use_kernels
from cute_flash.planning.plan import plan
from cute_flash.score_mod.bound import BoundMods, Graphs
from cute_flash.spec.arch import ARCHS
from tests import mod_cases
from tests.launch_capture import Request, capture, has_compiler
from tests.mod_cases import Case, Kind, Sizes

SIZES = Sizes(2, 4, 2, 300, 200)


def case_of(**kind: Any) -> Case:
    return Case(Kind(64, **kind), SIZES, device="cpu")


def test_arguments() -> None:
    problem, given = case_of(score="gated", mask="by_head", bias=torch.bfloat16, has_map=True).problem()
    assert given.bias is not None and given.bias.shape == (2, 4, 300, 200)
    assert given.tables is not None and given.numbers == [40]
    assert [x.dtype for x in given.tables] == [
        torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.uint8,
    ]  # fmt: skip
    # A single value is one of a row.
    assert [x.dim() for x in given.tables] == [2, 1, 1, 1, 2]
    assert given.lists is not None
    shapes = [(2, 4, 3), (2, 4, 3, 2)] * 2
    assert [tuple(x.shape) for x in given.lists] == shapes
    assert all(x.stride(-1) == 1 and x.dtype == torch.int32 for x in given.lists)
    mods = problem.mods
    assert (mods.bias_dtype, mods.bias_paired_loads, mods.block_mask_tile) == ("bfloat16", True, (128, 128))


def test_rows_of_a_bias_are_within_reach_of_each_other() -> None:
    problem = case_of(bias=torch.bfloat16).problem()[0]
    sizes = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    far = torch.empty_strided(sizes, (8, 1 << 45, 1 << 30, 1), dtype=torch.bfloat16, device="meta")
    assert custom_cuda.as_bias(far, problem).stride(2) == problem.seqlen_k
    near = torch.empty_strided(sizes, (8, 1 << 45, 1 << 29, 1), dtype=torch.bfloat16, device="meta")
    assert custom_cuda.as_bias(near, problem).stride() == near.stride()


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        (torch.zeros(2, 4, 3, 8), True),
        (torch.zeros(2, 4, 3, 8).bfloat16(), True),
        (torch.zeros(1, 8).expand(2, 4, 3, 8), True),
        (torch.zeros(2, 4, 3, 10)[..., :8], True),
        (torch.zeros(2, 4, 3, 9)[..., :8], False),  # odd rows
        (torch.zeros(2, 4, 3, 10)[..., 1:9], False),  # begins between pairs
        (torch.zeros(2, 4, 3, 8)[..., :7], False),  # ends with half a pair
        (torch.zeros(2, 4, 8, 3).mT, False),
        (torch.zeros(2, 4, 3, 1).expand(2, 4, 3, 8), False),
    ],
)
def test_pairs_of_a_bias(bias: torch.Tensor, expected: bool) -> None:
    assert custom_cuda.reads_pairs(bias) == expected


def test_forward_and_backward_share_nothing_needless() -> None:
    """A function's own gradient and what wants one are no part of the forward's key."""
    case = case_of(score="alibi")
    problem = case.problem()[0]
    call = BoundMods.of(case.options["score_mod"], None, lambda g, s, b, h, q, kv: g)
    from dataclasses import replace

    other = replace(problem, mods=replace(problem.mods, graphs=call.graphs, captures_needing_grad=(0,)))
    assert plan(problem, ARCHS["sm_90"]).key == plan(other, ARCHS["sm_90"]).key
    assert plan(problem, ARCHS["sm_90"]).key.static.mods.graphs == Graphs(call.graphs.score)


def test_blocks_that_tiles_do_not_divide() -> None:
    from dataclasses import replace

    problem = case_of(mask="document", has_map=True).problem()[0]
    for family in ("sm90", "sm80"):
        for block in ((128, 128), (256, 128), (128, 512)):
            with use_kernels(family):
                found = plan(
                    replace(problem, mods=replace(problem.mods, block_mask_tile=block)), ARCHS["sm_90"]
                )
            assert not (block[0] % found.tile.tile_m or block[1] % found.tile.tile_n)
        with use_kernels(family), pytest.raises(UnsupportedError, match="block_map of blocks of 16 x 16"):
            plan(replace(problem, mods=replace(problem.mods, block_mask_tile=(16, 16))), ARCHS["sm_90"])


def test_sequences_too_long_for_functions() -> None:
    from dataclasses import replace

    problem = replace(case_of(score="alibi").problem()[0], seqlen_k=1 << 23)
    with pytest.raises(UnsupportedError, match="seqlen_k=8388608 with functions: less than 8388608"):
        plan(problem, ARCHS["sm_90"])


def test_every_head_dim_has_a_tile_for_maps() -> None:
    from dataclasses import replace

    for more in ({}, {"score": "gated", "mask": "by_head", "bias": torch.float32}):
        problem = case_of(has_map=True, **more).problem()[0]
        for head_dim in range(8, 257, 8):
            for family, target in (("sm90", "sm_90"), *(("sm80", name) for name in ARCHS)):
                with use_kernels(family):
                    tile = plan(replace(problem, head_dim=head_dim), ARCHS[target]).tile
                assert head_dim <= tile.head_dim <= -(-head_dim // 64) * 64


@pytest.mark.parametrize("more", [{}, {"score": "gated", "mask": "by_head", "bias": torch.float32}], ids=str)
def test_values_of_another_width_have_a_tile(more: dict[str, Any]) -> None:
    from dataclasses import replace

    problems = [case_of(has_map=has_map, **more).problem()[0] for has_map in (False, True)]
    for problem, head_dim, width in itertools.product(problems, (32, 64, 128, 192, 256), (40, 128, 256)):
        asked = replace(problem, head_dim=head_dim, head_dim_v=width)
        for family, target in (("sm90", "sm_90"), *(("sm80", name) for name in ARCHS)):
            with use_kernels(family):
                tile = plan(asked, ARCHS[target]).tile
            assert tile.head_dim >= head_dim and getattr(tile, "width_v", tile.head_dim) >= width


@pytest.mark.compiles
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
def test_launches(tmp_path: Path) -> None:
    """Lists of tensors and numbers, broadcast strides and all; the grid is that of the plan."""
    kind = "d64-gated-document-bias-bfloat16-map-r"
    requests = [
        Request("sm_90", 2, 4, 2, 300, 200, 64, None, 5, family, kind=kind) for family in ("sm80", "sm90")
    ]
    for request, answer in zip(requests, capture(requests, tmp_path), strict=True):
        chosen = request.plan()
        assert answer.grid == (chosen.num_blocks, 1, 1)
        assert answer.block == (chosen.tile.num_threads, 1, 1)


def test_kinds_are_few_and_cases_many() -> None:
    assert len(mod_cases.KINDS) <= 30 and len(mod_cases.cases("cpu")) >= 200
    assert BlockMask.of(masks.causal(), (1, 1, 256, 256)).sizes[:2] == mod_cases.BLOCK
