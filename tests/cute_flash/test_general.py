"""The general operators: registration, torch.compile, what is compiled in, and refusals before any work."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_flash import UnsupportedError, api, attn, general, supports
from cute_flash.planning.plan import bwd_plan, plan
from cute_flash.reference import tiled
from cute_flash.spec import arch
from cute_flash.spec.args import How
from cute_flash.spec.problem import PLAIN, Features, Problem
from tests.combinations import RNG, Combination, gradients, normal, qkv

FULL = Combination(
    2, 2, 2, 5, 6, 3, 3, torch.float64, 3, 1, {"softcap": 2.0, "alibi": 2, "sinks": True, "dropout": 0.3}
)
ALONE = [{}, *({name: value} for name, value in FULL.features.items()), FULL.features, {"alibi": 1}]


def how_of(case: Combination, tensors: dict[str, Tensor], max_logit: bool = False) -> How:
    rng = torch.tensor(RNG) if "dropout" in case.features else None
    numbers = case.features.get("softcap", 0.0), case.features.get("dropout", 0.0)
    per_head = tensors.get("alibi"), tensors.get("sinks")
    return How(0.3, case.left, case.right, False, numbers[0], *per_head, numbers[1], rng, max_logit)


@pytest.mark.parametrize("features", ALONE, ids=lambda x: "-".join(x) or "none")
@pytest.mark.parametrize("wants_grad", [False, True])
def test_opcheck(features: dict[str, Any], wants_grad: bool) -> None:
    case = Combination(2, 2, 2, 5, 6, 3, 3, torch.float64, 3, 1, features)
    tensors = {name: x.requires_grad_(wants_grad) for name, x in case.tensors().items()}
    how = how_of(case, tensors, max_logit=True)
    inputs = [tensors[name] for name in "qkv"]
    results = torch.library.opcheck(general.general_fwd, (*inputs, *how))
    assert set(results.values()) == {"SUCCESS"}
    if not wants_grad:
        out, lse, _ = general.general_fwd(*inputs, *how)
        arguments = (torch.ones_like(out), None, *inputs, out, lse, *how)
        results = torch.library.opcheck(general.general_bwd, arguments)
        assert set(results.values()) == {"SUCCESS"}


def test_compiled() -> None:
    torch._dynamo.reset()
    tensors = {name: x.requires_grad_() for name, x in FULL.tensors().items()}

    def layer(x: dict[str, Tensor]) -> Any:
        x = {name: 1 * value for name, value in x.items()}
        return attn(x["q"], x["k"], x["v"], softcap=2.0, alibi=x["alibi"], sinks=x["sinks"], return_lse=True)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    weights = normal(2, 4, 5, 3, seed=3), normal(2, 4, 5, seed=4)
    torch.testing.assert_close(compiled(tensors), layer(tensors))
    torch.testing.assert_close(gradients(compiled, tensors, weights), gradients(layer, tensors, weights))


def test_compiled_dropout_has_one_mask_both_ways() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attn(q, k, v, dropout=0.5), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    q, k, v = (x.requires_grad_() for x in qkv(20, 30))
    out = compiled(q, k, v)
    # out is linear in v: the gradient of its sum, times v, is the sum.
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((dv * v).sum(), out.sum())
    assert not torch.equal(compiled(q, k, v), out)


def test_a_plain_call_of_the_general_operator_is_plain() -> None:
    q, k, v = qkv()
    out, lse, most = general.general_fwd(q, k, v, *How(0.3, None, 0))
    torch.testing.assert_close((out, lse), attn(q, k, v, causal=True, scale=0.3, return_lse=True))
    assert most.shape == (0,)


# Refusals

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"softcap": -1.0}, ValueError, "softcap=-1.0: use a positive number"),
    ({"softcap": math.nan}, ValueError, "softcap=nan"),
    ({"softcap": math.inf}, ValueError, "softcap=inf"),
    ({"dropout": 1.0}, ValueError, "dropout=1.0: use a probability from 0 up to, not including, 1"),
    ({"dropout": -0.1}, ValueError, "dropout=-0.1"),
    ({"dropout": math.nan}, ValueError, "dropout=nan"),
    ({"alibi": torch.ones(3)}, ValueError, r"alibi has shape \(3,\): expected \(4,\) or \(1, 4\)"),
    ({"alibi": torch.ones(2, 4)}, ValueError, r"alibi has shape \(2, 4\)"),
    ({"alibi": [1.0] * 4}, ValueError, "alibi is a list: give a tensor"),
    ({"sinks": torch.ones(1, 4)}, ValueError, r"sinks has shape \(1, 4\): expected \(4,\)"),
    ({"sinks": torch.ones(4, device="meta")}, ValueError, "sinks is on meta and q is on cpu"),
    (
        {"sinks": torch.ones(4, dtype=torch.int64)},
        UnsupportedError,
        "sinks is torch.int64: use one of float16",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=lambda x: str(x)[:40])
def test_refusals_come_before_any_work(
    options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "forward", lambda *_: pytest.fail("computed"))
    q, k, v = qkv()
    with pytest.raises(error, match=message) as raised:
        attn(q, k, v, **options)
    assert type(raised.value) is error
    answer = supports(q, k, v, **options)
    assert not answer and answer.reason == str(raised.value)


NAMES = ("softcap", "alibi", "sinks", "dropout", "return_max_logit")


@pytest.mark.parametrize("name", NAMES)
def test_kernels_have_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "detect", lambda index: arch.ARCHS["sm_90"])
    monkeypatch.setattr(api, "draw_rng", lambda device: torch.empty(2, dtype=torch.int64, device=device))
    with FakeTensorMode():
        x = torch.empty(1, 4, 8, 64, dtype=torch.float16, device="cuda:0")
        slopes = torch.empty(4, device="cuda:0")
        options: dict[str, Any] = {
            name: slopes if name in ("alibi", "sinks") else 0.5 if name != "return_max_logit" else True
        }
        found = attn(x, x, x, return_lse=True, **options)
        assert [t.shape for t in found[:2]] == [x.shape, x.shape[:3]]
        assert supports(x, x, x, **options)
        assert supports(x, x, x, **options, deterministic=True)
    problem = Problem(1, 4, 4, 8, 8, 64, features=Features(**{name: True}))
    for found_arch in ("sm_80", "sm_86", "sm_90"):
        assert plan(problem, arch.ARCHS[found_arch]).key.static.features == problem.features
        gradients = bwd_plan(problem, arch.ARCHS[found_arch])
        # A sink is in the LSE, and the largest logit has no gradient.
        changes_main = name not in ("sinks", "return_max_logit")
        assert gradients.main.kernel.endswith("_general") == changes_main
        assert gradients.main.static.features == (problem.features if changes_main else PLAIN)
        assert gradients.before(True).static.features == gradients.after.static.features == PLAIN
    problem.check("cpu")


@pytest.mark.parametrize("name", ["softcap", "alibi", "sinks", "dropout"])
def test_kernels_have_it_of_packed_sequences(name: str) -> None:
    problem = Problem(3, 4, 4, 800, 800, 64, features=Features(varlen=True, seqused_k=True, **{name: True}))
    for found_arch in ("sm_80", "sm_86", "sm_90"):
        found = plan(problem, arch.ARCHS[found_arch]).key.static.features
        assert found == replace(problem.features, seqused_k=False)
        gradients = bwd_plan(problem, arch.ARCHS[found_arch])
        assert gradients.main.kernel.endswith("_general")
        assert gradients.main.static.features == found.in_gradients
        assert gradients.before(True).static.features == Features(varlen=True)
        # Every sequence begins with a key block of its own.
        blocks = 800 // gradients.tile.tile_n + 3 + 1
        assert gradients.slope_sums[0] == blocks


def test_presence_is_static_and_values_are_not() -> None:
    tensors = FULL.tensors()
    inputs = [tensors[name] for name in "qkv"]
    how = how_of(FULL, tensors)
    problem = general.checked_problem(*inputs, how)
    assert problem.static.features == Features(softcap=True, alibi=True, sinks=True, dropout=True)
    other = Combination(
        2, 2, 2, 5, 6, 3, 3, torch.float64, 3, 1, {**FULL.features, "softcap": 9.0, "alibi": 1}
    )
    other_how = how_of(other, other.tensors())
    assert general.checked_problem(*inputs, other_how).static == problem.static
    assert Problem(1, 4, 4, 8, 8, 64).static.features == PLAIN
    assert PLAIN.names == ()
