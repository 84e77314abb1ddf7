"""The calls of all ranks in one process, on a fake GPU: each has a kernel, and a group of hops is one launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_flash.distributed.accumulate import Scores
from cute_flash.distributed.ring import Schedule
from cute_flash.distributed.sharding import Sharding
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from tests.distributed.one_process import by_one_call, ring
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.gpu import FakeGpu, fake_gpu

N = 4


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest) -> Iterator[FakeGpu]:
    with fake_gpu(request.param) as gpu, claiming_cuda(), launching_operators():
        yield gpu


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["plain", "alibi", "dropout"])
@pytest.mark.parametrize(
    "band", [Band(None, 0), Band(), Band(40, 0), Band(40, 9)], ids=lambda band: str(band).replace(" ", "-")
)
def test_shares_sum_to_the_results_of_one_call(gpu: FakeGpu, band: Band, feature: str) -> None:
    torch.manual_seed(0)
    q, dout = (torch.randn(1, 4, 64 * N, 32, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, 2, 64 * N, 32, dtype=torch.bfloat16) for _ in range(2))
    alibi = torch.rand(4) / 8 if feature == "alibi" else None
    dropout, rng = (0.3, torch.tensor([5, 6])) if feature == "dropout" else (0.0, None)
    schedule = Schedule(Sharding.of("zigzag", N, 64 * N), band, by_segment=bool(dropout))
    # The second half of eight heads.
    scores = Scores(AttentionArgs(scale=32**-0.5, dropout=dropout), alibi, rng=rng, heads=(4, 8))
    results = ring(schedule, [q, k, v, dout], scores)
    calls = sum(schedule.num_calls(rank, schedule.groups) for rank in range(N))
    assert sum(name.startswith("fwd_sm") for name in gpu.kernels) == calls
    if not dropout and band in (exact := {Band(): 12, Band(None, 0): 13}):
        # A rank has a call for its own shard and one for each of two groups. With a causal mask, the first group of
        # rank 1 has an earlier and a later shard, which need a call each.
        assert calls == exact[band]

    args = AttentionArgs(
        scale=32**-0.5, window_left=band.left, window_right=band.right, alibi=alibi, dropout=dropout, rng=rng,
        dropout_origin=(0, 0, 4, 8),
    )  # fmt: skip
    for x, y in zip(results, by_one_call([q, k, v, dout], args), strict=True):
        assert (x - y).abs().max() <= 3e-2 * y.abs().max()
