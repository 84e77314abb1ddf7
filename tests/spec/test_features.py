"""The table of score features, and its agreement with the kernels' operands."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cute_flash import attn, masks
from cute_flash.planning.registry import KERNELS
from cute_flash.spec.features import FEATURES, MODS, backward_features, feature_cost, features_of
from tests.arguments import call_args
from tests.combinations import RNG

DIRECTIONS = {"fwd": ("fwd_sm80", "fwd_sm90"), "bwd": ("bwd_sm80", "bwd_sm90")}


def test_names_are_unique() -> None:
    names = [feature.name for feature in FEATURES]
    assert len(set(names)) == len(names) and set(MODS) <= set(names)


def test_names_are_keywords_of_attn() -> None:
    keywords = set(attn.__kwdefaults__)
    assert {feature.name for feature in FEATURES} <= keywords


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kernels_take_the_operands_of_every_feature(feature: Any, direction: str) -> None:
    for kernel in DIRECTIONS[direction]:
        operands = KERNELS[kernel].operands
        for operand in getattr(feature, direction):
            (found,) = [x for x in operands if x.name == operand.name]
            # The row of the kernel adds the condition that the kernel has the feature.
            assert found._replace(when=operand.when) == operand, kernel


def test_an_operand_of_several_features_is_one() -> None:
    operands: dict[str, Any] = {}
    for feature in FEATURES:
        for operand in (*feature.fwd, *feature.bwd):
            assert operands.setdefault(operand.name, operand) == operand


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
