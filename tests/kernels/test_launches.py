"""The host code of compiled kernels accepts the launcher's arguments, and launches the planned grid.

The kernels are a part of those that the cubin lock (`tests.lock`) and the compile gates (`test_resources.py`) compile,
where their sources changed (`tests.lock.sources`). Sizes are different, and are not multiples of a tile.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_flash.jit import compile as compiling
from cute_flash.planning.plan import Plan
from cute_flash.planning.tiles.bwd_sm90 import SM90_BWD, SM90_BWD_SCORE
from cute_flash.planning.tiles.fwd_sm90 import SM90_FWD, SM90_FWD_BIAS, SM90_FWD_DROPOUT, FwdTileSm90
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import ceil_div
from tests.jit.gates import kernel_resources
from tests.kernels.launch_capture import Launch, Request, capture, has_compiler
from tests.kernels.test_resources import RISKY, SAMPLE
from tests.lock.cases import HOPPER, Case, cases, fwd, plan_of
from tests.lock.cubin import kernel_sections
from tests.lock.sources import is_reached
from tests.mod_cases import Sizes

CASES = {case.name: case for case in cases()}
SIZES = Sizes(3, 6, 2, 333, 4008)

LAUNCHED = {
    "fwd-sm80": (
        "fwd/sm80/sm_80/d64/bf16/window/plain/main",
        "fwd/sm80/sm_80/d128/bf16/full/plain/main",
        "fwd/sm80/sm_80/d128/bf16/window/varlen+softcap+alibi+sinks+dropout+max_logit/main",
        "fwd/sm80/sm_80/d128/bf16/causal/score_mod-relative/main",
        "fwd/sm80/sm_86/d192/bf16/full/score_mod-capped+mask_mod-prefix+bias-fp16-bhqk-pairs/main",
    ),
    "fwd-sm90": (
        "fwd/sm90/sm_90/d128/bf16/causal/plain/main",
        "fwd/sm90/sm_90/d192v128/bf16/full/plain/main",
        "fwd/sm90/sm_90/d128/bf16/causal/pack_gqa+q4/main",
        "fwd/sm90/sm_90/d256/bf16/full/softcap+alibi+sinks+dropout+max_logit/main",
        "fwd/sm90/sm_90/d128/bf16/causal/varlen/main",
        "fwd/sm90/sm_90/d128/bf16/full/mask_mod-document_causal+block_map/main",
        "fwd/sm90/sm_90/d64/bf16/full/score_mod-gated+mask_mod-by_head/main",
        "fwd/sm90/sm_90/d64/bf16/full/bias-bf16-bhqk-aligned/main",
    ),
    "bwd-sm80": (
        "bwd/sm80/sm_80/d64/bf16/causal/plain/main",
        "bwd/sm80/sm_86/d72v256/bf16/window/plain/main",
        "bwd/sm80/sm_80/d64/bf16/window/softcap+alibi+dropout/main",
        "bwd/sm80/sm_80/d128/bf16/window/varlen+deterministic/main",
        "bwd/sm80/sm_80/d128/bf16/window/score_mod-alibi+mask_mod-window+bias-bf16-bhqk-pairs/main",
        "bwd/sm80/sm_80/d384/bf16/window/plain/main",
        "bwd/sm80/sm_86/d512/bf16/window/varlen+softcap+alibi+dropout+deterministic/main",
    ),
    "bwd-sm90": (
        "bwd/sm90/sm_90/d128/bf16/window/plain/main",
        "bwd/sm90/sm_90/d256/bf16/window/plain/main",
        "bwd/sm90/sm_90/d256/bf16/window/softcap+alibi+dropout/main",
        "bwd/sm90/sm_90/d192/bf16/window/varlen+deterministic/main",
        "bwd/sm90/sm_90/d128/bf16/window/deterministic/main",
        "bwd/sm90/sm_90/d64/bf16/window/softcap+alibi+dropout/main",
        "bwd/sm90/sm_90/d128/bf16/causal/varlen+softcap+alibi/main",
        "bwd/sm90/sm_90/d128/bf16/causal/score_mod-relative+table_gradients/main",
        "bwd/sm90/sm_90/d64/bf16/full/mask_mod-document+block_map/main",
        "bwd/sm90/sm_90/d128/bf16/causal/bias-bf16-hqk-pairs/main",
    ),
}


def request_of(case: Case, number: int) -> Request:
    """A request with sizes that select the same kernel.

    Every other request has permuted strides; the others have the gradient of the LSE, if the case is a backward.
    """
    case = replace(case, has_dlse=case.direction == "bwd" and number % 2 == 0)
    sizes = replace(SIZES, seqlen_q=case.seqlen_q) if "pack_gqa" in case.features else SIZES
    is_bshd = number % 2 == 1 and not {"varlen", "pack_gqa"} & set(case.features)
    return Request(case, sizes, is_bshd)


def more_smem(plan: Plan) -> int:
    """Shared memory in addition to the tile's.

    A Hopper producer publishes tiles of a varlen batch or of a block mask in two longer slots. The forward with a block
    mask also publishes the indices of K/V blocks. The CTAs of wide heads have one tile each, which is not published.
    With deterministic gradients they have full and empty barriers for three more halves of dQ of each warpgroup.
    """
    static = plan.main.static
    if plan.main.kernel == "bwd_sm90_wide":
        return 8 * 2 * 2 * 3 * static.deterministic
    if plan.family == "sm80":
        return 0
    block_sparse = static.block_sparse and plan.main.kernel == "fwd_sm90"
    block_counts = 4 * plan.tile.stages if block_sparse else 0
    return 32 * (static.varlen or block_sparse) + block_counts


def check(request: Request, launches: list[Launch]) -> None:
    case, plan = request.case, plan_of(request.case, request.sizes)
    assert plan.main == plan_of(case).main, "a kernel that no gate compiles"
    assert [launch.kernel for launch in launches] == [key.kernel for key in plan.launches]
    main = next(launch for launch in launches if launch.kernel == plan.main.kernel)
    tile = plan.tile
    assert main.grid == (plan.sizes["num_ctas"], 1, 1)
    assert main.block == (tile.num_threads, 1, 1)
    # The DSL does not detect an overflow of shared memory, so a kernel must use as much as its tile declares.
    assert main.smem_bytes == tile.smem_bytes + more_smem(plan) <= plan.arch.smem_per_cta
    if case.direction == "fwd" and not {"varlen", "pack_gqa"} & set(case.features):
        tiles = ceil_div(request.sizes.seqlen_q, tile.tile_m) * request.sizes.heads * request.sizes.batch
        assert main.grid[0] == (min(tiles, plan.arch.num_sms) if plan.family == "sm90" else tiles)


@pytest.mark.compiles
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
@pytest.mark.parametrize("names", LAUNCHED.values(), ids=LAUNCHED)
def test_launches_are_as_planned(names: tuple[str, ...], tmp_path: Path) -> None:
    requests = [request_of(CASES[name], i) for i, name in enumerate(names) if is_reached(name)]
    for request, launches in zip(requests, capture(requests, tmp_path), strict=True):
        check(request, [Launch(*launch) for launch in launches])


# Numbers of stages and warpgroups that no row of the table has; an odd number of barriers is padded.
TILES = (
    FwdTileSm90(head_dim=32, tile_m=128, tile_n=16, stages=8, q_stages=2, ping_pong=False),
    FwdTileSm90(head_dim=64, tile_m=64, tile_n=80, stages=4),
    FwdTileSm90(head_dim=96, head_dim_v=192, tile_m=192, tile_n=48, stages=1, speculative_max=True),
    FwdTileSm90(head_dim=64, tile_m=192, tile_n=64, stages=4, q_stages=3, skips_blocks=True),
)


@pytest.mark.compiles
@pytest.mark.kernels("fwd_sm90")
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
def test_a_kernel_takes_the_shared_memory_of_its_tile(tmp_path: Path) -> None:
    requests = [
        Request(fwd(HOPPER, tile.head_dim, head_dim_v=tile.head_dim_v, mask="full"), SIZES, tile=tile) for tile in TILES
    ]
    for tile, (captured,) in zip(TILES, capture(requests, tmp_path), strict=True):
        launch = Launch(*captured)
        assert launch.block == (tile.num_threads, 1, 1)
        assert launch.smem_bytes == tile.smem_bytes


CHAINS = (
    ("bwd_sm90", "bwd/sm90/sm_90/d128/bf16/window/plain/main"),
    ("bwd_sm80", "bwd/sm80/sm_80/d128/bf16/window/varlen+deterministic/main"),
    ("bwd_sm80", "bwd/sm80/sm_80/d64/fp32/causal/plain/main"),
    ("bwd_sm90", "bwd/sm90/sm_90/d128/bf16/causal/bias-bf16-hqk-pairs/main"),
    ("fwd_sm90", "fwd/sm90/sm_90/d128/bf16/causal/varlen/main"),
)


@pytest.mark.compiles
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.kernels(kernel)) for kernel, name in CHAINS])
def test_one_host_call_launches_the_same_kernels_as_a_call_for_each(name: str, tmp_path: Path) -> None:
    """Machine code, order, grids, shared memory and attributes (programmatic dependent launch) are the same."""
    request = request_of(CASES[name], 0)
    separate, chained = capture([request, replace(request, is_chained=True)], tmp_path)
    assert len(chained) >= 2 and chained == separate
    plan = plan_of(request.case, request.sizes)
    (chain,) = plan.host_calls
    with compiling.lock:
        cubin = compiling.cute_compile(chain, f"--keep-cubin --dump-dir={tmp_path}").__cubin__
    expected = sorted(one for key in plan.launches for one in kernel_sections(kernel_resources(key).cubin))
    assert kernel_sections(cubin) == expected


@pytest.mark.parametrize("table", (SM90_FWD, SM90_FWD_DROPOUT, SM90_FWD_BIAS, SM90_BWD, SM90_BWD_SCORE))
def test_every_hopper_row_has_room_for_varlen_tiles_and_block_masks(table: tuple[Any, ...]) -> None:
    for row in table:
        assert row.smem_bytes + 32 + 4 * getattr(row, "stages", 0) <= ARCHS["sm_90"].smem_per_cta


def test_gates_compile_the_kernels_that_are_launched() -> None:
    assert {name for names in LAUNCHED.values() for name in names} <= {*SAMPLE, *RISKY}
