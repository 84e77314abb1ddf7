"""The way to a launch of what is more than plain attention, on CPU tensors: see `tests.fake_gpu`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError, forward, general
from cute_flash.spec.args import How
from cute_flash.spec.problem import MAX_DROPOUT, MAX_SOFTCAP, check_dropout, check_softcap
from tests.combinations import RNG
from tests.fake_gpu import D, FakeGpu, inputs, normal

HEADS, BATCH = 4, 2
SLOPES, SINKS = normal(HEADS, dtype=torch.float32) / 8, normal(HEADS, seed=1, dtype=torch.float32)
EACH: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5},
    "slopes by head": {"alibi": SLOPES},
    "slopes by batch": {"alibi": normal(BATCH, HEADS, seed=2, dtype=torch.float32)},
    "slopes in fp16": {"alibi": SLOPES.half()},
    "slopes apart": {"alibi": normal(HEADS, 3, dtype=torch.float32)[:, 1]},
    "sinks": {"sinks": SINKS},
    "sinks in fp64": {"sinks": SINKS.double()},
    "dropout": {"dropout": 0.25, "rng": torch.tensor(RNG)},
    "much dropout": {"dropout": 0.75, "rng": torch.tensor([[1, 2], [3, 4]])[:, 1]},
    "largest logit": {"max_logit": True},
    "all": {
        "softcap": 3.0, "alibi": SLOPES, "sinks": SINKS, "dropout": 0.5, "rng": torch.tensor(RNG),
        "max_logit": True,
    },
}  # fmt: skip
BANDS = [(None, None), (None, 0), (3, None), (4, 1)]


def run(tensors: list[Tensor], how: How) -> tuple[Tensor, Tensor, Tensor]:
    """The CUDA path, compared with the CPU path."""
    before = [x.clone() for x in tensors]
    found = forward.fwd_cuda(*tensors, how, general.checked_problem(*tensors, how))
    expected = general.general_fwd(*tensors, *how)
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine, wanted)
        assert (mine.dtype, mine.stride()) == (wanted.dtype, wanted.stride())
    assert all(map(torch.equal, tensors, before)), "inputs were written"
    return found


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("name", EACH)
def test_each(gpu: FakeGpu, name: str, scale: float) -> None:
    for left, right in BANDS:
        run(inputs(), How(scale, left, right, **EACH[name]))
        features = gpu.last.plan.problem.features
        assert gpu.last.plan.key.static.features == features
        assert gpu.last.plan.key.kernel.endswith("_general")
        assert features.names


def test_values_need_no_new_kernel(gpu: FakeGpu) -> None:
    for softcap, dropout, window in itertools.product((0.5, 7.0), (0.1, 0.9), (0, 3)):
        run(inputs(), How(0.3, None, window, softcap=softcap, dropout=dropout, rng=torch.tensor(RNG)))
    run(inputs(), How(0.3, None, 0, softcap=1.0, dropout=0.5, rng=torch.tensor([5, 6])))
    assert len(gpu.plans) == 1


def test_strides_are_repaired_and_outputs_in_order(gpu: FakeGpu) -> None:
    how = How(0.3, None, 0, **EACH["all"])
    for turn in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x, x], dim=-1)[..., :D],
    ):
        run([turn(x) for x in inputs()], how)


def test_few_rows_of_heads_are_packed_where_heads_are_alike(gpu: FakeGpu) -> None:
    tensors = [normal(2, 16, 5, D), normal(2, 2, 40, D), normal(2, 2, 40, D, seed=1)]
    slopes = normal(16, dtype=torch.float32)
    ways: list[dict[str, Any]] = [
        {"alibi": slopes}, {"sinks": slopes}, {"dropout": 0.5, "rng": torch.tensor(RNG)}, {"max_logit": True}
    ]  # fmt: skip
    run(tensors, How(0.3, None, 0, softcap=2.0))
    assert gpu.last.plan.packs_heads == (gpu.name == "sm_90")
    for way in ways:
        run(tensors, How(0.3, None, 0, softcap=2.0, **way))
        assert not gpu.last.plan.packs_heads


def test_rows_without_keys(gpu: FakeGpu) -> None:
    """Nothing is launched without keys or without rows; rows above a causal mask see none."""
    q, k, v = inputs()
    for how in (How(0.3, None, None, sinks=SINKS, max_logit=True), How(0.3, None, None, softcap=1.0)):
        out, lse, most = run([q, k[:, :, :0], v[:, :, :0]], how)
        assert not out.any() and torch.equal(most, torch.full_like(most, -math.inf))
        expected = torch.full((HEADS,), -math.inf) if how.sinks is None else SINKS
        assert torch.equal(lse, expected[:, None].expand_as(lse))
        run([q[:, :, :0], k, v], how)
        run([x[:0] for x in (q, k, v)], how)
    assert not gpu.launches
    out, lse, _ = run([q, k[:, :, :3], v[:, :, :3]], How(0.3, None, 0, sinks=SINKS))
    assert not out[:, :, :4].any() and torch.equal(lse[0, :, :4], SINKS[:, None].expand(-1, 4))


def test_another_device_becomes_current(gpu: FakeGpu) -> None:
    gpu.current = 3
    run(inputs(), How(0.3, None, None, softcap=1.0))
    assert gpu.entered == [None] and gpu.current == 3


def test_extreme_numbers_stay_finite() -> None:
    most = torch.zeros(0)
    for scale, softcap in ((1e30, 1e-40), (1e-30, 1e-40), (3.0, 1e-300), (1e38, 1e-3)):
        arguments = forward.extra_arguments(How(scale, None, None, softcap=softcap), scale, most, (1, 1))
        quotient = torch.tensor(scale, dtype=torch.float32) / torch.tensor(arguments[0], dtype=torch.float32)
        assert torch.isfinite(quotient * 2.9)
    check_softcap(MAX_SOFTCAP)
    with pytest.raises(UnsupportedError, match=r"softcap=20000\.0 on cuda: at most 16384; leave it out"):
        check_softcap(2e4)
    check_dropout(MAX_DROPOUT)
    with pytest.raises(UnsupportedError, match=r"dropout=0\.97 on cuda: at most 0\.96875"):
        check_dropout(0.97)


def test_dropout_needs_its_draw(gpu: FakeGpu) -> None:
    how = How(0.3, None, None, dropout=0.5)
    q, k, v = inputs()
    with pytest.raises(ValueError, match="dropout needs rng"):
        forward.fwd_cuda(q, k, v, how, general.checked_problem(q, k, v, how))
    with pytest.raises(ValueError, match="rng is on meta and q is on cpu"):
        general.checked_problem(q, k, v, how._replace(rng=torch.zeros(2, dtype=torch.int64, device="meta")))
