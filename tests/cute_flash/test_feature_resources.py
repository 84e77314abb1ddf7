"""Compile gates of the forward kernels with what is more than plain attention, and their launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_flash.jit.resources import nvdisasm
from cute_flash.planning.plan import Plan, plan
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Features, Problem
from tests.cute_flash.test_resources import (
    CAUSAL,
    FULL,
    MASKS,
    WINDOW,
    check_hopper_instructions,
    check_instructions,
    check_registers,
)
from tests.gates import kernel_resources
from tests.launch_capture import Request, capture, has_compiler

EACH = ("softcap", "alibi", "sinks", "dropout", "return_max_logit")
# (family, target, head dim, mask, names): a sample. Each by itself where the row is most used; all together,
# and those that cost most registers, where rows are fullest.
Gate = tuple[str, str, int, Band, tuple[str, ...]]
GATES: list[Gate] = [
    *(("sm90", "sm_90", 128, CAUSAL, (name,)) for name in ("softcap", "alibi", "dropout")),
    ("sm90", "sm_90", 64, FULL, ("softcap",)),
    ("sm90", "sm_90", 64, FULL, ("dropout",)),
    ("sm90", "sm_90", 64, WINDOW, EACH),
    ("sm90", "sm_90", 128, WINDOW, EACH),
    ("sm90", "sm_90", 256, WINDOW, ("softcap",)),
    ("sm90", "sm_90", 256, FULL, EACH),
    ("sm80", "sm_80", 64, WINDOW, ("softcap",)),
    ("sm80", "sm_80", 128, WINDOW, EACH),
    ("sm80", "sm_80", 256, WINDOW, ("dropout",)),
]


def gate_id(gate: Gate) -> str:
    family, target, head_dim, band, names = gate
    what = "all" if names == EACH else "+".join(names)
    return f"{family}-{target}-d{head_dim}-{MASKS[band]}-{what}"


def plan_of(gate: Gate) -> Plan:
    family, target, head_dim, band, names = gate
    features = Features(**dict.fromkeys(names, True))
    problem = Problem(2, 8, 4, 1000, 1 << 14, head_dim, "bfloat16", band, features=features)
    with use_kernels(family):
        return plan(problem, ARCHS[target])


@pytest.mark.compiles
@pytest.mark.parametrize("gate", GATES, ids=gate_id)
def test_kernel_keeps_everything_in_registers(gate: Gate) -> None:
    the_plan, (family, _, head_dim, _, names) = plan_of(gate), gate
    found = kernel_resources(the_plan.key)
    assert found.symbol.startswith(f"cute_flash_fwd_{family}_d{head_dim}_bfloat16_")
    assert all(f"_{name}" in found.symbol for name in names) and "cutlass" not in found.symbol
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert found.serialised_wgmma == ()
    assert found.smem_bytes <= the_plan.arch.smem_per_block
    tile = the_plan.tile
    if isinstance(tile, FwdTileSm90):
        check_registers(found, tile)
    else:
        assert tile.accumulator_registers < found.registers <= 255
    if nvdisasm() is None:
        pytest.skip("no disassembler: the instructions were not counted")
    if isinstance(tile, FwdTileSm80):
        check_instructions(found, the_plan)
    else:
        check_hopper_instructions(found, the_plan)


REQUESTS = [
    Request("sm_80", 3, 6, 2, 300, 77, 64, features=list(EACH)),
    Request("sm_80", 3, 1, 1, 300, 77, 64, features=["dropout", "alibi"]),
    Request("sm_90", 2, 4, 2, 1000, 1000, 128, right=0, family="sm90", features=list(EACH)),
    Request("sm_90", 2, 4, 2, 1000, 1000, 256, family="sm90", features=["dropout"]),
    Request("sm_90", 17, 50, 10, 20, 33, 128, family="sm90", is_packed=True, features=["softcap"]),
]


@pytest.mark.compiles
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
def test_launches_are_as_planned(tmp_path: Path) -> None:
    """Arguments pass the checks of the compiled host code: their number, types, shapes and strides."""
    for number, (request, answer) in enumerate(
        zip(REQUESTS, capture(REQUESTS, tmp_path), strict=True), start=1
    ):
        the_plan = request.plan()
        assert answer.launches == number
        assert answer.grid == (the_plan.num_blocks, 1, 1)
        assert answer.block == (the_plan.tile.num_threads, 1, 1)
        assert answer.smem_bytes == the_plan.tile.smem_bytes <= the_plan.arch.smem_per_block
