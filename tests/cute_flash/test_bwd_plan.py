"""Which kernels compute the gradients of a problem, and which problems are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_flash import UnsupportedError
from cute_flash.planning.plan import bwd_plan
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Features, Problem
from tests import mod_gradients
from tests.mod_cases import Case, Kind, Sizes


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("widths", [(64, 128), (128, 64), (192, 128), (192, 256), (40, 24), (256, 8)])
def test_values_of_another_width_are_padded_to_a_tile(arch: str, widths: tuple[int, int]) -> None:
    head_dim, head_dim_v = widths
    features = Features(), Features(softcap=True, alibi=True, dropout=True), Features(varlen=True)
    for asked in features:
        problem = Problem(1, 2, 2, 100, 300, head_dim, "bfloat16", Band(), head_dim_v, asked)
        found = bwd_plan(problem, ARCHS[arch])
        wider = dataclasses.replace(problem, head_dim=max(widths), head_dim_v=None)
        assert found.tile == bwd_plan(wider, ARCHS[arch]).tile
        assert found.main.static.head_dim_v == head_dim_v and str(head_dim_v) in found.main.static.widths


def test_the_sums_of_narrow_keys_leave_more_heads_in_l2() -> None:
    problem = Problem(4, 8, 8, 8192, 8192, 64, "bfloat16", Band(), 256)
    wide = dataclasses.replace(problem, head_dim=256, head_dim_v=64)
    assert bwd_plan(problem, ARCHS["sm_90"]).section > bwd_plan(wide, ARCHS["sm_90"]).section


@pytest.mark.parametrize(
    ("arch", "head_dim", "family", "kernel"),
    [
        ("sm_80", 64, "sm80", "bwd_sm80"),
        ("sm_90", 128, "sm90", "bwd_sm90"),
        ("sm_90", 136, "sm90", "bwd_sm90_wide"),
        ("sm_90", 256, "sm90", "bwd_sm90_wide"),
    ],
)
def test_family_of_the_gradients(arch: str, head_dim: int, family: str, kernel: str) -> None:
    """wgmma where there is one, mma.sync elsewhere."""
    found = bwd_plan(Problem(1, 2, 2, 3000, 3000, head_dim, "bfloat16", Band(None, 0)), ARCHS[arch])
    assert (found.family, found.main.kernel) == (family, kernel)
    assert found.main.target == (arch + "a" if family == "sm90" else arch)
    assert found.main.static.has_right and not found.before(True).static.has_right
    with use_kernels("sm80"):
        assert bwd_plan(found.problem, found.arch).family == "sm80"


def test_a_family_that_lacks_the_kernel_is_not_replaced() -> None:
    problem = Problem(1, 2, 2, 100, 100, 64, "bfloat16", Band())
    message = r"head_dim=64 on sm_80 by kernel family 'sm90': .*\(only on sm_90\); ask for 'sm80'"
    with use_kernels("sm90"), pytest.raises(UnsupportedError, match=message):
        bwd_plan(problem, ARCHS["sm_80"])


@pytest.mark.parametrize(("head_dim", "is_persistent"), [(128, True), (136, False)])
@pytest.mark.parametrize("band", [Band(), Band(None, 0)])
def test_wide_heads_have_a_thread_block_for_each_tile(head_dim: int, is_persistent: bool, band: Band) -> None:
    found = bwd_plan(Problem(2, 20, 10, 3000, 3001, head_dim, "bfloat16", band), ARCHS["sm_90"])
    assert found.num_tiles == -(-3001 // found.tile.tile_n) * 20
    assert found.num_blocks == (132 if is_persistent else found.num_tiles)
    assert found.draws_tiles == (is_persistent and band != Band())


def test_wide_heads_with_features_are_left_to_mma_sync() -> None:
    problem = Problem(1, 2, 2, 100, 300, 256, features=Features(softcap=True, sinks=True))
    found = bwd_plan(problem, ARCHS["sm_90"])
    assert (found.family, found.main.kernel, found.main.target) == ("sm80", "bwd_sm80_general", "sm_90")
    message = r"attn with softcap and head_dim=256 .*'sm90': .*up to head_dim=128\); ask for 'sm80'"
    with use_kernels("sm90"), pytest.raises(UnsupportedError, match=message):
        bwd_plan(problem, ARCHS["sm_90"])
    only_sinks = dataclasses.replace(problem, features=Features(sinks=True))
    assert bwd_plan(only_sinks, ARCHS["sm_90"]).main.kernel == "bwd_sm90_wide"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 136, 192, 256])
def test_every_head_dim_has_gradients_with_features(arch: str, head_dim: int) -> None:
    problem = Problem(1, 2, 2, 100, 300, head_dim, features=Features(softcap=True, alibi=True, dropout=True))
    found = bwd_plan(problem, ARCHS[arch])
    assert found.tile.head_dim >= head_dim and found.tile.fits(ARCHS[arch])
    # One part of each warp that multiplies.
    warps = 8 if found.family == "sm90" else found.main.tile.num_warps
    assert found.slope_sums == (-(-300 // found.tile.tile_n), warps)


@pytest.mark.parametrize(
    ("kind", "tile_m"),
    [
        (Kind(64, has_map=True), 128),
        (Kind(64, mask="document_causal", has_map=True), 128),
        (Kind(64, score="alibi", bounds=(False, True)), 128),
        # Asked for every score, of two kinds, read or differentiated for every score.
        (Kind(64, mask="document"), 64),
        (Kind(64, score="alibi", mask="document", has_map=True), 64),
        (Kind(64, score="relative"), 64),
        (Kind(64, score="capped"), 64),
        (Kind(64, bias=torch.bfloat16), 64),
        (Kind(72, score="alibi"), 64),
    ],
    ids=lambda x: x.id if isinstance(x, Kind) else str(x),
)
def test_light_functions_have_the_tile_of_plain_gradients(kind: Kind, tile_m: int) -> None:
    case = Case(kind, Sizes(1, 2, 2, 300, 300), device="cpu")
    found = mod_gradients.plan_of(case, ARCHS["sm_90"])
    assert (found.main.kernel, found.tile.tile_m, found.tile.tile_n) == ("bwd_sm90_custom", tile_m, 128)


def test_an_unknown_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_FLASH_KERNELS", "sm99")
    with pytest.raises(UnsupportedError, match="kernel family 'sm99'"):
        bwd_plan(Problem(1, 2, 2, 100, 100, 64, "bfloat16", Band()), ARCHS["sm_90"])


def test_deterministic_gradients_are_ordered() -> None:
    sm_90 = ARCHS["sm_90"]
    long = Problem(1, 2, 2, 4000, 128 * sm_90.num_sms, 64, "bfloat16", Band())
    assert not bwd_plan(long, sm_90).is_ordered
    found = bwd_plan(long, sm_90, deterministic=True)
    # A thread block for each tile: who is waited for has begun before.
    assert found.is_ordered and found.num_blocks == found.num_tiles and not found.draws_tiles
    assert found.after == bwd_plan(long, sm_90).after
    window = Problem(1, 2, 2, 1000, 1000, 128, "bfloat16", Band(100, 100))
    assert bwd_plan(window, sm_90, deterministic=True).main.kernel == "bwd_sm90_ordered"
    # Wide heads on Hopper, and all on others, by mma.sync.
    wide, both = dataclasses.replace(long, head_dim=136), dataclasses.replace(long, head_dim_v=256)
    for problem, found_arch in (
        (wide, sm_90),
        (both, sm_90),
        (window, ARCHS["sm_80"]),
        (wide, ARCHS["sm_86"]),
    ):
        found = bwd_plan(problem, found_arch, deterministic=True)
        assert (found.main.kernel, found.family, found.is_ordered) == ("bwd_sm80_ordered", "sm80", True)
        assert found.before(True).kernel == "bwd_preprocess_ordered_dlse"
        assert found.after == bwd_plan(problem, found_arch).after or found_arch is sm_90
    capped = dataclasses.replace(wide, features=Features(softcap=True))
    assert bwd_plan(capped, sm_90, deterministic=True).main.kernel == "bwd_sm80_ordered_general"
    message = r"deterministic gradients of attn with head_dim=136 on sm_90 by kernel family 'sm90': .*=128\)"
    with use_kernels("sm90"), pytest.raises(UnsupportedError, match=message):
        bwd_plan(wide, sm_90, deterministic=True)


@pytest.mark.parametrize("change", [{"batch": 70_000}, {"heads": 70_000, "heads_kv": 70_000}])
def test_grids_that_no_gpu_takes_are_refused(change: dict[str, int]) -> None:
    problem = dataclasses.replace(Problem(1, 2, 2, 100, 100, 64, "bfloat16", Band()), **change)
    with pytest.raises(UnsupportedError, match="at most 65535"):
        bwd_plan(problem, ARCHS["sm_90"])
