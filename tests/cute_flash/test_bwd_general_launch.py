"""The way from CUDA tensors to the launches of gradients with features, on CPU tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError, backward_general, general, use_kernels
from cute_flash.spec.args import How
from tests.combinations import RNG
from tests.cute_flash.test_bwd_launch import faked
from tests.fake_backward import FakeBackward
from tests.fake_gpu import inputs, normal

EACH: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi": torch.tensor([0.3, -0.2, 0.0, 1.5])},
    "alibi by batch": {"alibi": normal(2, 4, seed=8)},
    "sinks": {"sinks": torch.tensor([0.3, -math.inf, 4.0, -2.0], dtype=torch.float64)},
    "dropout": {"dropout": 0.4, "rng": torch.tensor(RNG)},
}
ALL = {**EACH["softcap"], **EACH["alibi"], **EACH["sinks"], **EACH["dropout"]}


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeBackward:
    monkeypatch.setattr(backward_general, "_launches", {})
    return faked(request.param, monkeypatch)


def run(
    tensors: list[Tensor],
    asked: dict[str, Any],
    scale: float = 0.3,
    left: int | None = None,
    right: int | None = None,
    dlse: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, ...]:
    """The gradients of the CUDA path, compared with those of the CPU path."""
    how = How(scale, left, right, **asked)
    out, lse, _ = general.general_fwd(*tensors, *how)
    dout = normal(*out.shape, seed=5, dtype=out.dtype)
    given = (dout, dlse, *tensors, out, lse, *how._replace(**more))
    found, expected = general._bwd_cuda(*given), general._bwd_cpu(*given)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.03)
    fake = general._bwd_fake(*given)
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in found]
    return found


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (3, 1)])
@pytest.mark.parametrize("asked", [*EACH.values(), ALL], ids=[*EACH, "all"])
def test_gradients(
    gpu: FakeBackward, asked: dict[str, Any], left: int | None, right: int | None, with_dlse: bool
) -> None:
    # The last ones: queries without keys.
    for tensors in (inputs(), inputs(sk=4)):
        dlse = normal(2, 4, 7, dtype=torch.float32) if with_dlse else None
        for scale in (0.3, -0.3, 0.0):
            run(tensors, asked, scale, left, right, dlse)
    general_one = "_general" * (asked is not EACH["sinks"])
    assert gpu.bwd_plans[-1].main.kernel == f"bwd_sm{gpu.name[3:]}{general_one}"
    # Values are no part of a signature.
    assert len(gpu.bwd_plans) == 2


def test_blind_queries_give_their_sink_the_gradient_of_the_lse(gpu: FakeBackward) -> None:
    tensors, dlse = inputs(sk=4), normal(2, 4, 7, dtype=torch.float32)
    how = How(0.3, None, 0, sinks=torch.tensor([0.3, 1.0, 4.0, -2.0]))
    out, lse, _ = general.general_fwd(*tensors, *how)
    dout = normal(*out.shape, seed=5)
    plain = general._bwd_cuda(dout, dlse, *tensors, out, lse, *how)
    # NaN that flows into rows without keys reaches nothing but, here, the stand-in's dv.
    dout[:, :, :3] = torch.nan
    dsinks = general._bwd_cuda(dout, dlse, *tensors, out, lse, *how)[4]
    torch.testing.assert_close(dsinks, plain[4])


@pytest.mark.parametrize("sk", [0, 9])
def test_nothing_to_launch(gpu: FakeBackward, sk: int) -> None:
    tensors = inputs(sk=0) if sk == 0 else [inputs()[0][:, :, :0], *inputs()[1:]]
    rows = tensors[0].shape[2]
    dlse = normal(2, 4, rows, dtype=torch.float32)
    grads = run(tensors, ALL, dlse=dlse)
    assert gpu.calls == []
    expected = dlse.sum(dim=(0, 2)).where(ALL["sinks"] > -math.inf, 0.0)
    torch.testing.assert_close(grads[4], expected.double())
    run(tensors, ALL)


def test_whatever_decides_a_launch_is_in_the_signature(gpu: FakeBackward) -> None:
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (EACH["softcap"], {}),
        (EACH["alibi"], {}),
        (EACH["sinks"], {}),
        (EACH["dropout"], {}),
        (ALL, {}),
        (ALL, {"left": 3}),
        (ALL, {"right": 3}),
        (ALL, {"dlse": normal(2, 4, 7, dtype=torch.float32)}),
    ]
    if gpu.name == "sm_90":
        calls.append((ALL, {"deterministic": True}))
    for number, (asked, more) in enumerate(calls, start=1):
        for _ in range(2):
            run(inputs(), asked, **more)
        assert len(gpu.bwd_plans) == number
    run(inputs(), {**ALL, "softcap": 3.0, "dropout": 0.1})
    assert len(gpu.bwd_plans) == len(calls)


def test_ordered_where_asked_for(gpu: FakeBackward) -> None:
    run(inputs(), ALL, deterministic=True)
    assert gpu.bwd_plans[-1].main.kernel == f"bwd_sm{gpu.name[3:]}_ordered_general"
    message = (
        r"deterministic gradients of attn with softcap and alibi and dropout and head_dim=136 on .*'sm90'"
    )
    tensors = [normal(1, 4, 7, 136, seed=i) for i in range(3)]
    asked = {**ALL, "alibi": EACH["alibi"]["alibi"]}
    with use_kernels("sm90"), pytest.raises(UnsupportedError, match=message):
        run(tensors, asked, deterministic=True)


def test_gradients_are_computed_by_the_family_of_their_forward(
    gpu: FakeBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cute_flash import attn
    from cute_flash.spec.family import requested_family

    seen = []

    def watched(*args: Any) -> Any:
        seen.append(requested_family())
        return general._bwd_cpu(*args)

    monkeypatch.setattr(general, "general_bwd", watched)
    q, k, v = (x.requires_grad_() for x in inputs())
    with use_kernels("sm80"):
        out = attn(q, k, v, softcap=1.0)
    out.sum().backward()
    assert seen == ["sm80"] and requested_family() is None
