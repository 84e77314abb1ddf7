"""Compile gates of kernels for values of another width than keys, where they have no tile of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_flash.planning.plan import bwd_plan, plan
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Features, Problem
from tests.backward_capture import Request, capture
from tests.cute_flash.test_resources import CAUSAL, FULL, MASKS, WINDOW
from tests.gates import kernel_resources
from tests.launch_capture import has_compiler

# (family, target, D, Dv, mask, features): a sample, those of models and those nearest to the limit.
Gate = tuple[str, str, int, int, Band, tuple[str, ...]]
FORWARD: list[Gate] = [
    ("sm90", "sm_90", 128, 64, FULL, ("softcap",)),
    ("sm90", "sm_90", 192, 128, FULL, ("softcap", "alibi", "sinks", "dropout", "return_max_logit")),
    ("sm80", "sm_80", 192, 128, CAUSAL, ()),
    ("sm80", "sm_86", 128, 64, WINDOW, ("softcap", "dropout")),
]
BACKWARD: list[Gate] = [
    ("sm80", "sm_80", 192, 128, CAUSAL, ()),
    ("sm80", "sm_86", 72, 256, WINDOW, ()),
    ("sm80", "sm_80", 128, 72, WINDOW, ("softcap", "alibi", "dropout")),
    ("sm90", "sm_90", 192, 128, CAUSAL, ()),
    ("sm90", "sm_90", 72, 256, WINDOW, ()),
    ("sm90", "sm_90", 128, 64, WINDOW, ()),
]


def gate_id(gate: Gate) -> str:
    family, target, head_dim, head_dim_v, band, names = gate
    return "-".join((family, target, f"d{head_dim}v{head_dim_v}", MASKS[band], *names))


def problem_of(gate: Gate) -> Problem:
    *_, head_dim, head_dim_v, band, names = gate
    features = Features(**dict.fromkeys(names, True))
    return Problem(2, 8, 4, 1000, 1000, head_dim, "bfloat16", band, head_dim_v, features)


def check(key, gate: Gate) -> None:  # type: ignore[no-untyped-def]
    found = kernel_resources(key)
    assert f"_d{gate[2]}v{gate[3]}_bfloat16_" in found.symbol
    assert (found.spill_bytes, found.stack_bytes) == (0, 0)
    assert found.serialised_wgmma == ()
    assert found.smem_bytes <= ARCHS[gate[1]].smem_per_block


@pytest.mark.compiles
@pytest.mark.parametrize("gate", FORWARD, ids=gate_id)
def test_forward(gate: Gate) -> None:
    with use_kernels(gate[0]):
        check(plan(problem_of(gate), ARCHS[gate[1]]).key, gate)


@pytest.mark.compiles
@pytest.mark.parametrize("gate", BACKWARD, ids=gate_id)
def test_backward(gate: Gate) -> None:
    with use_kernels(gate[0]):
        check(bwd_plan(problem_of(gate), ARCHS[gate[1]]).main, gate)


CAPTURED = [
    Request("sm_80", 64, head_dim_v=128), Request("sm_90", 128, head_dim_v=64),
    Request("sm_90", 192, head_dim_v=128),
]  # fmt: skip


@pytest.mark.compiles
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
def test_kernels_take_what_the_host_path_gives(tmp_path: Path) -> None:
    for request, launches in zip(CAPTURED, capture(CAPTURED, tmp_path), strict=True):
        the_plan = request.plan()
        tile, keys = the_plan.tile, (the_plan.before(True), the_plan.main, the_plan.after)
        assert [one.kernel for one in launches] == [key.kernel for key in keys], request
        blocks = the_plan.num_blocks if the_plan.family == "sm90" else the_plan.num_tiles
        assert launches[1][1:] == ((blocks, 1, 1), (tile.num_threads, 1, 1), tile.smem_bytes), request
