"""Compile gates of the forward kernels with users' functions, biases and block maps: a sample."""

from __future__ import annotations

import pytest

from cute_flash.planning.plan import plan as planned
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.family import use_kernels
from tests import mod_cases
from tests.cute_flash.test_resources import check_registers
from tests.gates import kernel_resources

KINDS = {kind.id: kind for kind in mod_cases.KINDS}
GATES = [
    ("sm90", "d128-document_causal-map"),
    ("sm90", "d64-gated-by_head"),
    ("sm90", "d64-bias-bfloat16-aligned"),
    ("sm80", "d192-capped-prefix-bias-float16"),
]


@pytest.mark.compiles
@pytest.mark.parametrize(("family", "name"), GATES)
def test_kernel_keeps_everything_in_registers(family: str, name: str) -> None:
    case = mod_cases.Case(KINDS[name], mod_cases.Sizes(2, 8, 4, 1000, 2048), device="cpu")
    problem, _ = case.problem()
    with use_kernels(family):
        the_plan = planned(problem, ARCHS["sm_90"])
    assert the_plan.key.kernel == f"fwd_{family}_custom"
    found = kernel_resources(the_plan.key)
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert found.serialised_wgmma == ()
    assert found.smem_bytes <= the_plan.arch.smem_per_block
    if isinstance(the_plan.tile, FwdTileSm90):
        check_registers(found, the_plan.tile)
