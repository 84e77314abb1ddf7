"""The table of score features, and its agreement with the kernels' operands."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_flash import attn, masks
from cute_flash.planning.bias import with_dbias
from cute_flash.planning.plan import plan_forward
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.describe import describe
from cute_flash.spec.features import (
    ADDS,
    FEATURE,
    FEATURES,
    MAPS,
    MODS,
    FeatureSpec,
    backward_features,
    feature_cost,
    features_of,
)  # fmt: skip
from cute_flash.spec.problem import Problem
from tests.arguments import call_args
from tests.combinations import RNG


def test_names_are_unique_keywords_of_attn() -> None:
    names = [feature.name for feature in FEATURES]
    assert len(set(names)) == len(names) and set(MODS) <= set(names) <= set(attn.__kwdefaults__)


PRESENT: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": torch.ones(4)},
    "sinks": {"sinks": torch.ones(4)},
    "dropout": {"dropout": 0.5, "rng": torch.tensor(RNG)},
    "return_max_logit": {"return_max_logit": True},
    "bias": {"bias": torch.ones(5, 6)},
    "score_mod": {"score_mod": lambda score, b, h, q, kv: score * 2},
    "mask_mod": {"mask_mod": masks.causal()},
}


def test_calls_have_the_features_that_they_ask_for_in_the_order_of_the_table() -> None:
    q, names = torch.empty(1, 4, 5, 8), [feature.name for feature in FEATURES]
    assert set(PRESENT) == set(names)
    for count in (0, 1, 2, len(names)):
        for chosen in itertools.combinations(names, count):
            options = {key: value for name in reversed(chosen) for key, value in PRESENT[name].items()}
            assert features_of(call_args(q, **options)) == chosen


def test_features_of_the_backward() -> None:
    """The backward has no sinks, which the LSE contains, and no max_logit, which has no gradient."""
    names = tuple(feature.name for feature in FEATURES)
    assert set(names) - set(backward_features(names)) == {"sinks", "return_max_logit"}


def test_costs_add_up_but_those_of_mods() -> None:
    assert feature_cost((), False) == 0 and feature_cost((), True) == 1
    assert feature_cost(("softcap", "sinks"), False) == feature_cost(("softcap",), False) + 1
    one = feature_cost(("bias",), False)
    assert one == feature_cost(("mask_mod",), True) == feature_cost(("score_mod",), False)
    # Two mods together cost more than the sum.
    assert feature_cost(("bias", "mask_mod"), False) == feature_cost(MODS, True) > 2 * one


@pytest.fixture(params=[ADDS, MAPS])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of the formula of a new feature "toy"."""
    monkeypatch.setitem(FEATURE, "toy", FeatureSpec("toy", lambda args: True, cost=1, formula=request.param))
    return request.param


def test_a_new_formula_keeps_the_hopper_forward_from_adding_alibi_twice(kind: str) -> None:
    """The fused pass, and the k-step that adds ALiBi on tensor cores, know one formula only."""
    pytest.importorskip("cutlass")
    from cute_flash.kernels.sm90.fwd_storage import Config

    key = plan_forward(Problem(1, 2, 2, 4096, 4096, 64, features=("alibi",)), ARCHS["sm_90"]).main
    config = Config(key.static, key.tile)
    assert config.fuses_exp2 and config.has_alibi_step
    both = Config(replace(key.static, features=("toy", "alibi")), key.tile)
    assert not both.fuses_exp2 and not both.has_alibi_step


def test_tma_stores_ds_as_the_gradient_of_a_bias_unless_a_formula_maps_scores(kind: str) -> None:
    q = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16)
    bias = torch.empty(1, 2, 256, 256, dtype=torch.bfloat16, requires_grad=True)
    problem = describe(q, q, q, call_args(q, bias=bias), "cuda")
    assert with_dbias(problem, deterministic=False).mods.dbias_tma
    problem = replace(problem, features=("toy", *problem.features))
    assert with_dbias(problem, deterministic=False).mods.dbias_tma == (kind == ADDS)
