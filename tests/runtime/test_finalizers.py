"""Gradients of slopes and sinks from partial sums; `test_dense` and `test_varlen` test them in whole calls."""

from __future__ import annotations

import pytest
import torch

from cute_flash.planning.varlen import num_padded_blocks, padded_block
from cute_flash.runtime.finalizers import alibi_gradient, sinks_gradient
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.problem import Problem
from tests.lengths import Lengths
from tests.runtime.calls import normal, plain

TILE_N, WARPS = 64, 4


def problem_of(lengths: Lengths, heads: int) -> Problem:
    return Problem(len(lengths.keys), heads, heads, *lengths.totals, 16, varlen=True)


def test_the_gradient_of_slopes_is_a_sum_over_the_blocks_of_each_sequence() -> None:
    keys = [300, 0, 1, 64, 63, 0, 129]
    lengths = Lengths(keys, keys, None, (9, 100))
    blocks = num_padded_blocks(lengths.totals[1], TILE_N, len(keys))
    partial = torch.zeros(1, 3, blocks, WARPS)
    expected = torch.zeros(len(keys), 3)
    for b, (begin, count) in enumerate(zip(lengths.cu_k.tolist(), keys, strict=False)):
        first, num = padded_block(begin, b, TILE_N), -(-count // TILE_N)
        assert not partial[:, :, first : first + num].any(), "two sequences in one place"
        partial[:, :, first : first + num] = normal(1, 3, num, WARPS, seed=b, dtype=torch.float32)
        expected[b] = partial[0, :, first : first + num].sum(dim=(1, 2))

    def gradient(slopes: torch.Tensor) -> torch.Tensor:
        args = plain(right=0, alibi=slopes, **lengths.args())
        return alibi_gradient(args, problem_of(lengths, 3), partial.flatten(2), TILE_N, WARPS)

    torch.testing.assert_close(gradient(torch.zeros(len(keys), 3)), expected)
    torch.testing.assert_close(gradient(torch.zeros(3)), expected.sum(dim=0))
    # A NaN stays in its sequence.
    partial[:, :, 0] = torch.nan
    found = gradient(torch.zeros(len(keys), 3))
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1:], expected[1:])


@pytest.mark.parametrize("offsets", [[0, 100, 50, 557], [0, 9999, 9999, 3], [7, 7, -5, 9], [500, 0, 500, 0]])
def test_wrong_offsets_stay_within_the_tensors(offsets: list[int]) -> None:
    wrong, total = torch.tensor(offsets).int(), 557
    blocks, problem = num_padded_blocks(total, TILE_N, 3), Problem(3, 2, 2, total, total, 16, varlen=True)
    args = AttentionArgs(scale=0.3, window_right=0, cu_seqlens_q=wrong, cu_seqlens_k=wrong)
    slopes = args._replace(alibi=torch.zeros(3, 2))
    assert alibi_gradient(slopes, problem, torch.ones(1, 2, blocks * WARPS), TILE_N, WARPS).shape == (3, 2)
    lse, delta = torch.zeros(2, total), torch.ones(1, 2, blocks * TILE_N)
    dsinks = sinks_gradient(args._replace(sinks=torch.zeros(2)), problem, lse, delta, None, TILE_N)
    assert dsinks.shape == (2,) and dsinks.isfinite().all()
