"""Compile gates of the backward kernels with functions, a bias and block maps, and their launches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cute_flash.arch import ARCHS
from cute_flash.plan import BwdPlan, use_kernels
from cute_flash.resources import nvdisasm
from cute_flash.tiles_bwd import BwdTile
from tests import mod_cases, mod_gradients
from tests.backward_capture import case_of
from tests.gates import kernel_resources
from tests.launch_capture import has_compiler

# (family, target, kind, seed): a sample of what is nearest to the limit. The seed decides which scores share
# an entry of the bias: 0, those of a key.
GATES = [
    ("sm90", "sm_90", "d128-relative-r", 1),
    ("sm90", "sm_90", "d128-bias-bfloat16-r", 0),
    ("sm90", "sm_90", "d128-document_causal-map", 1),
    ("sm80", "sm_80", "d128-alibi-window-bias-bfloat16", 1),
]


def plan_of(family: str, target: str, kind: str, deterministic: bool = False, seed: int = 1) -> BwdPlan:
    with use_kernels(family):
        return mod_gradients.plan_of(case_of(kind, seed), ARCHS[target], deterministic)


@pytest.mark.compiles
@pytest.mark.parametrize(("family", "target", "kind", "seed"), GATES)
def test_kernel_keeps_everything_in_registers(family: str, target: str, kind: str, seed: int) -> None:
    the_plan = plan_of(family, target, kind, seed=seed)
    found = kernel_resources(the_plan.main)
    assert the_plan.main.kernel == f"bwd_{family}_custom"
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert found.serialised_wgmma == ()
    assert found.smem_bytes <= the_plan.arch.smem_per_block
    tile = the_plan.tile
    if nvdisasm() is not None and not isinstance(tile, BwdTile):
        s, dkv = tile.head_dim // 16, tile.tile_m // 16
        assert found.num_mma == 3 * (2 * s + 2 * dkv + tile.dq_part[0] // 64 * (tile.tile_n // 16))


CAPTURED = [
    ("sm_90", "d128-document_causal-map", False, "bwd_sm90_custom"),
    ("sm_90", "d64-gated-document-bias-bfloat16-map-r", False, "bwd_sm80_custom"),
]


@pytest.mark.compiles
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
@pytest.mark.parametrize(("arch", "kind", "is_ordered", "kernel"), CAPTURED)
def test_kernels_take_what_the_host_path_gives(
    tmp_path: Path, arch: str, kind: str, is_ordered: bool, kernel: str
) -> None:
    head_dim = next(one.head_dim for one in mod_cases.KINDS if one.id == kind)
    arguments = (tmp_path, arch, head_dim, int(is_ordered), f"kind={kind}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.backward_capture", *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, main, after = json.loads(done.stdout)
    assert before[0].startswith("bwd_preprocess") and after[0].startswith("bwd_postprocess")
    assert main[0] == kernel
    the_plan = plan_of(kernel.split("_")[1], arch, kind, is_ordered)
    blocks = the_plan.num_blocks if the_plan.family == "sm90" else the_plan.num_tiles
    assert main[1:] == [[blocks, 1, 1], [the_plan.tile.num_threads, 1, 1], the_plan.tile.smem_bytes]
