"""The table of score features, and its agreement with the kernels' operands."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from cute_flash import attn, masks
from cute_flash.spec.features import FEATURES, MODS, backward_features, feature_cost, features_of
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
