"""All ranks of a ring in one process, with groups of many steps: results and gradients are those of one call."""

from __future__ import annotations

import pytest
import torch

from cute_flash.distributed.accumulate import Scores
from cute_flash.distributed.ring import Schedule, max_steps
from cute_flash.distributed.sharding import SHARDINGS, Sharding
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from tests.distributed.one_process import by_one_call, ring

N, LENGTH, HEADS = 8, 128, 8


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["plain", "alibi", "dropout"])
@pytest.mark.parametrize("kind", SHARDINGS)
@pytest.mark.parametrize(
    "band", [Band(None, 0), Band(), Band(20, 0), Band(70, 9), Band(20, None)], ids=lambda x: str(x).replace(" ", "-")
)
def test_eight_ranks_with_one_key_head(band: Band, kind: str, feature: str) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, heads, LENGTH, 8, dtype=torch.float64) for heads in (HEADS, 1, 1, HEADS))
    alibi = torch.rand(HEADS, dtype=torch.float64) / 8 if feature == "alibi" else None
    dropout, rng = (0.3, torch.tensor([5, 6])) if feature == "dropout" else (0.0, None)
    schedule = Schedule(Sharding.of(kind, N, LENGTH), band, bool(dropout), max_steps(HEADS, 1))
    if band in (Band(), Band(None, 0)) and not dropout:
        assert [len(steps) for steps in schedule.groups] == [1, 2, 5]
        assert [len(steps) for steps in schedule.backward_groups] == [1, 2, 3, 2]
    args = AttentionArgs(scale=8**-0.5, dropout=dropout)
    results = ring(schedule, [q, k, v, dout], Scores(args, alibi, rng=rng, heads=(0, HEADS)))

    full = args._replace(
        window_left=band.left, window_right=band.right, alibi=alibi, rng=rng, dropout_origin=(0, 0, 0, HEADS)
    )
    for x, y in zip(results, by_one_call([q, k, v, dout], full), strict=True):
        assert (x - y).abs().max() <= 1e-12 * max(1.0, float(y.abs().max()))
