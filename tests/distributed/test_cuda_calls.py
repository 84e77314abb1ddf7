"""The calls of all ranks in one process, on a fake GPU: CUDA has the kernels, and a hop of a ring is one launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cute_flash.distributed.accumulate import Gradients, Output, Saved, Scores
from cute_flash.distributed.ring import Schedule
from cute_flash.distributed.sharding import Sharding, join, split
from cute_flash.reference.dense import dense
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.gpu import FakeGpu, fake_gpu

N = 4


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest) -> Iterator[FakeGpu]:
    with fake_gpu(request.param) as gpu, claiming_cuda(), launching_operators():
        yield gpu


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
    shards = [list(split(x, N, 2, "zigzag").unbind(0)) for x in (q, k, v, dout)]
    qs, ks, vs, douts = shards
    outs: list[Tensor] = []
    dqs, dks, dvs = [], [torch.zeros(x.shape) for x in ks], [torch.zeros(x.shape) for x in vs]
    positions = [schedule.sharding.positions(rank).int() for rank in range(N)]
    for rank in range(N):
        args = AttentionArgs(scale=32**-0.5, dropout=dropout)
        # The second half of eight heads.
        scores = Scores(args, alibi, False, positions[rank], rng, (4, 8))
        output = Output(qs[rank], vs[rank], schedule.num_calls(rank))
        for shard in range(N):
            for call in schedule.calls(rank, shard):
                output.add((ks[shard], vs[shard]), call, scores, positions[shard])
        out, lse = output.result(None, qs[rank].shape[2])
        gradients = Gradients(Saved(douts[rank], None, qs[rank], out, lse), scores)
        for shard in range(N):
            kv, sums = (ks[shard], vs[shard]), (dks[shard], dvs[shard])
            shares = gradients.add(kv, schedule.calls(rank, shard), positions[shard])
            dks[shard], dvs[shard] = gradients.sum_keys(kv, sums, shares)
        outs.append(out)
        dqs.append(gradients.dq)
    calls = sum(schedule.num_calls(rank) for rank in range(N))
    assert sum(name.startswith("fwd_sm") for name in gpu.kernels) == calls
    if band in (Band(), Band(None, 0)) and not dropout:
        assert calls == N * N

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    args = AttentionArgs(
        scale=32**-0.5, window_left=band.left, window_right=band.right, alibi=alibi, dropout=dropout, rng=rng,
        dropout_origin=(0, 0, 4, 8),
    )  # fmt: skip
    expected, _ = dense(*leaves, args=args)
    grads = torch.autograd.grad(expected, leaves, dout.double())
    for found, y in zip((outs, dqs, dks, dvs), (expected, *grads)):
        x = join(torch.stack(found), 2, "zigzag").double()
        assert (x - y).abs().max() <= 3e-2 * y.abs().max()
