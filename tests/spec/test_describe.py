"""From tensors and arguments to a `Problem`: presence is static, values are not, contradictions are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import BlockMask, UnsupportedError, masks
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from cute_flash.spec.describe import describe
from cute_flash.spec.problem import Problem
from tests.arguments import call_args
from tests.combinations import Combination
from tests.lengths import Lengths


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    shapes = shapes or ((2, 4, 5, 16), (2, 2, 6, 16), (2, 2, 6, 16))
    return [torch.ones(shape, dtype=torch.float16) for shape in shapes]


def plain(**fields: Any) -> AttentionArgs:
    return AttentionArgs(scale=0.3, **fields)


def test_a_dense_problem() -> None:
    found = describe(*inputs((2, 4, 5, 16), (2, 2, 6, 16), (2, 2, 6, 24)), plain(window_left=3, out_fp32=True))
    assert found == Problem(2, 4, 2, 5, 6, 16, "float16", Band(3, None), 24, out_fp32=True)


def test_a_varlen_problem_counts_all_tokens() -> None:
    lengths = Lengths([3, 0, 4], [2, 5, 0], [1, 5, 0], (1, 2))
    found = describe(*inputs((8, 4, 16), (9, 2, 16), (9, 2, 16)), plain(**lengths.args()))
    assert found == Problem(3, 4, 2, 8, 9, 16, "float16", varlen=True, seqused_k=True)


def test_presence_is_static_and_values_are_not() -> None:
    features = {"softcap": 2.0, "alibi": 2, "sinks": True, "dropout": 0.3}
    one, other = (
        Combination(2, 2, 2, 5, 6, 3, 3, torch.float64, 3, 1, {**features, **changes})
        for changes in ({}, {"softcap": 9.0, "alibi": 1, "dropout": 0.9})
    )
    problems = [describe(*(x[name] for name in "qkv"), case.args(x)) for case in (one, other) for x in [case.tensors()]]
    assert problems[0].static == problems[1].static
    assert problems[0].static.features == ("softcap", "alibi", "sinks", "dropout")
    assert describe(*inputs(), plain()).static.features == ()


def test_block_masks_are_geometry() -> None:
    mask = BlockMask.of(masks.causal(), (2, 4, 5, 6), tile=(2, 2))
    found = describe(*inputs(), call_args(inputs()[0], mask_mod=masks.causal(), block_mask=mask))
    assert found.block_sparse and found.features == ("mask_mod",) and found.mods.block_mask_tile == (2, 2)


@pytest.mark.parametrize("position", range(3))
def test_tensors_on_other_devices_and_of_other_dtypes(position: int) -> None:
    for change, message in ((lambda x: x.to("meta"), "is on"), (lambda x: x.float(), "is torch.float")):
        tensors = inputs()
        tensors[position] = change(tensors[position])
        with pytest.raises(ValueError, match=f"{message}.*they must agree"):
            describe(*tensors, plain())


def test_limits_are_those_of_the_device_that_computes() -> None:
    wide, args = inputs((1, 1, 3, 300), (1, 1, 3, 300), (1, 1, 3, 300)), plain(softcap=2e4)
    describe(*wide, args)
    with pytest.raises(UnsupportedError, match="head_dim=300"):
        describe(*wide, args, "cuda")
    with pytest.raises(UnsupportedError, match=r"softcap=20000\.0 on cuda"):
        describe(*inputs(), args, "cuda")
    with pytest.raises(UnsupportedError, match="batch_invariant on cpu: only on cuda"):
        describe(*inputs(), plain(batch_invariant=True))
    assert describe(*inputs(), plain(batch_invariant=True), "cuda").static.batch_invariant


def test_a_description_needs_no_seed() -> None:
    assert describe(*inputs(), plain(dropout=0.5)).features == ("dropout",)
