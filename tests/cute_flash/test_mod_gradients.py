"""The rule for gradients with users' functions, tried on the CPU path, and the kernels that the GPU's cases
need.
"""

from __future__ import annotations

import pytest

from cute_flash.spec.arch import ARCHS
from tests import mod_cases, mod_gradients
from tests.mod_cases import Case, Sizes

SIZES = Sizes(2, 4, 2, 40, 50)


@pytest.mark.parametrize("kind", mod_cases.KINDS, ids=lambda kind: kind.id)
def test_the_cpu_path_keeps_the_rule(kind: mod_cases.Kind) -> None:
    for seed in range(2):
        mod_gradients.assert_gradients(Case(kind, SIZES, seed, "cpu"))


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_few_kernels_serve_many_cases(family: str) -> None:
    found = list(mod_gradients.chosen(ARCHS["sm_90"], family, "cpu"))
    served = [plan for _, plan in found if plan is not None]
    assert len({plan.main for plan in served}) <= 45 and len(served) >= 140
    # Wide heads, and long functions.
    refused = {case.kind for case, plan in found if plan is None}
    assert all(kind.head_dim > 128 or kind.score in ("gated", "hiding") for kind in refused)
    assert bool(refused) == (family == "sm90")
