"""Compile gates of the backward kernels with softcap, ALiBi and dropout, and their launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_flash.jit.resources import nvdisasm
from cute_flash.planning.plan import BwdPlan, bwd_plan
from cute_flash.planning.tiles.bwd_sm80 import SM80_BWD_SCORE, BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import SM90_BWD_SCORE
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Features, Problem
from tests.backward_capture import Request, capture
from tests.cute_flash.test_resources import CAUSAL, FULL, MASKS, WINDOW
from tests.gates import kernel_resources
from tests.launch_capture import has_compiler

ALL = ("softcap", "alibi", "dropout")
# (family, target, head dim, mask, names, whether in order): a sample of what is nearest to the limit.
Gate = tuple[str, str, int, Band, tuple[str, ...], bool]
GATES: list[Gate] = [
    ("sm90", "sm_90", 128, WINDOW, ALL, False),
    ("sm90", "sm_90", 128, WINDOW, ("softcap", "alibi"), False),
    ("sm90", "sm_90", 128, CAUSAL, ALL, True),
    ("sm90", "sm_90", 64, WINDOW, ALL, False),
    ("sm90", "sm_90", 64, WINDOW, ("dropout",), False),
    ("sm80", "sm_80", 64, WINDOW, ALL, False),
    ("sm80", "sm_80", 128, CAUSAL, ALL, False),
    ("sm80", "sm_90", 256, WINDOW, ALL, False),
    ("sm80", "sm_80", 128, FULL, ("softcap",), True),
]


def gate_id(gate: Gate) -> str:
    family, target, head_dim, band, names, is_ordered = gate
    what = "all" if names == ALL else "+".join(names)
    return f"{family}-{target}-d{head_dim}-{MASKS[band]}-{what}{'-ordered' * is_ordered}"


def plan_of(gate: Gate) -> BwdPlan:
    family, target, head_dim, band, names, is_ordered = gate
    features = Features(**dict.fromkeys(names, True))
    problem = Problem(2, 8, 4, 1000, 1000, head_dim, "bfloat16", band, features=features)
    with use_kernels(family):
        return bwd_plan(problem, ARCHS[target], is_ordered)


@pytest.mark.compiles
@pytest.mark.parametrize("gate", GATES, ids=gate_id)
def test_kernel_keeps_everything_in_registers(gate: Gate) -> None:
    the_plan, (family, target, head_dim, _, names, _) = plan_of(gate), gate
    tile = the_plan.tile
    assert tile in (SM90_BWD_SCORE if family == "sm90" else SM80_BWD_SCORE[target])
    found = kernel_resources(the_plan.main)
    assert found.symbol.startswith(f"cute_flash_bwd_{family}_d{head_dim}_bfloat16_")
    assert all(f"_{name}" in found.symbol for name in names)
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert found.serialised_wgmma == ()
    assert found.smem_bytes <= the_plan.arch.smem_per_block
    if isinstance(tile, BwdTileSm80):
        assert tile.accumulator_registers < found.registers <= 255
    if nvdisasm() is None:
        pytest.skip("no disassembler: the instructions were not counted")
    if not isinstance(tile, BwdTileSm80):
        s, dkv = tile.head_dim // 16, tile.tile_m // 16
        assert found.num_mma == 3 * (2 * s + 2 * dkv + tile.dq_part[0] // 64 * (tile.tile_n // 16))
    # In every copy of the loop at least one call: seven rounds of two products, and four of words.
    copies = 1 if isinstance(tile, BwdTileSm80) else 3
    if "dropout" in names:
        assert found.sass["IMAD"] >= 18 * copies


# Each kind of kernel, with all features and with some; wide heads where they go to another family.
CAPTURED = {
    "bwd_sm90_general": [Request("sm_90", 64, ALL), Request("sm_90", 64, ("varlen", "alibi", "sinks"))],
    "bwd_sm90_ordered_general": [Request("sm_90", 64, ("alibi", "dropout"), deterministic=True)],
    "bwd_sm80_general": [
        Request("sm_80", 128, ("softcap", "sinks")), Request("sm_80", 64, ("varlen", "alibi", "dropout"))
    ],
    "bwd_sm80_ordered_general": [Request("sm_80", 64, ("softcap",), deterministic=True)],
    "bwd_sm80_ordered": [Request("sm_90", 136, deterministic=True)],
}  # fmt: skip


@pytest.mark.compiles
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
def test_kernels_take_what_the_host_path_gives(tmp_path: Path) -> None:
    wanted = [(kernel, request) for kernel, requests in CAPTURED.items() for request in requests]
    found = capture([request for _, request in wanted], tmp_path)
    for (kernel, request), (*prepare, before, main, after) in zip(wanted, found, strict=True):
        assert [one.kernel for one in prepare] == ["prepare_bwd"] * request.is_packed, request
        assert before.kernel.startswith("bwd_preprocess") and after.kernel.startswith("bwd_postprocess")
        the_plan = request.plan()
        blocks = the_plan.num_blocks if the_plan.family == "sm90" else the_plan.num_tiles
        assert main[:3] == (kernel, (blocks, 1, 1), (the_plan.tile.num_threads, 1, 1)), request
        # What a told tile takes more than one of a batch.
        assert main.smem_bytes - the_plan.tile.smem_bytes in ((0, 32) if request.is_packed else (0,)), request
