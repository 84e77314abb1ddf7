"""Compile gates of the backward kernels with functions, a bias and block maps, and their launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_flash.jit.resources import nvdisasm
from cute_flash.planning.plan import BwdPlan
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.family import use_kernels
from tests import mod_gradients
from tests.backward_capture import Request, capture, case_of
from tests.gates import kernel_resources
from tests.launch_capture import has_compiler

# (family, target, kind, seed): a sample of what is nearest to the limit. The seed decides which scores share
# an entry of the bias: 0, those of a key.
GATES = [
    ("sm90", "sm_90", "d128-relative-r", 1),
    ("sm90", "sm_90", "d128-bias-bfloat16-r", 0),
    ("sm90", "sm_90", "d64-document-map", 1),
    ("sm80", "sm_80", "d128-alibi-window-bias-bfloat16", 1),
]


def plan_of(family: str, target: str, kind: str, seed: int) -> BwdPlan:
    with use_kernels(family):
        return mod_gradients.plan_of(case_of(kind, seed), ARCHS[target])


@pytest.mark.compiles
@pytest.mark.parametrize(("family", "target", "kind", "seed"), GATES)
def test_kernel_keeps_everything_in_registers(family: str, target: str, kind: str, seed: int) -> None:
    the_plan = plan_of(family, target, kind, seed)
    found = kernel_resources(the_plan.main)
    assert the_plan.main.kernel == f"bwd_{family}_custom"
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert found.serialised_wgmma == ()
    assert found.smem_bytes <= the_plan.arch.smem_per_block
    tile = the_plan.tile
    if nvdisasm() is not None and not isinstance(tile, BwdTileSm80):
        s, dkv = tile.head_dim // 16, tile.tile_m // 16
        assert found.num_mma == 3 * (2 * s + 2 * dkv + tile.dq_part[0] // 64 * (tile.tile_n // 16))


CAPTURED = {
    "bwd_sm90_custom": Request("sm_90", kind="d128-document_causal-map"),
    "bwd_sm80_custom": Request("sm_90", kind="d64-gated-document-bias-bfloat16-map-r"),
}


@pytest.mark.compiles
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
def test_kernels_take_what_the_host_path_gives(tmp_path: Path) -> None:
    found = capture(list(CAPTURED.values()), tmp_path)
    for (kernel, request), (before, main, after) in zip(CAPTURED.items(), found, strict=True):
        assert before.kernel.startswith("bwd_preprocess") and after.kernel.startswith("bwd_postprocess")
        with use_kernels(kernel.split("_")[1]):
            the_plan = request.plan()
        blocks = the_plan.num_blocks if the_plan.family == "sm90" else the_plan.num_tiles
        tile = the_plan.tile
        assert main == (kernel, (blocks, 1, 1), (tile.num_threads, 1, 1), tile.smem_bytes), request
