"""Plans of the backward pass: which kernels compute the gradients of a problem, and which problems are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_flash import UnsupportedError
from cute_flash.planning.plan import Plan, plan_backward, plan_forward
from cute_flash.planning.varlen import num_padded_blocks
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem
from tests import mod_gradients
from tests.fakes.recording import main_key
from tests.mod_cases import Case, Kind, Sizes

ALL = ("softcap", "alibi", "dropout")


def shape_of(plan: Plan, name: str) -> tuple[int, ...]:
    """The shape of a workspace tensor."""
    return next(buffer.shape for buffer in plan.workspace if buffer.name == name)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("widths", [(64, 128), (128, 64), (192, 128), (192, 256), (40, 24), (256, 8)])
def test_dv_other_than_d_is_padded_to_a_tile(arch: str, widths: tuple[int, int]) -> None:
    head_dim, head_dim_v = widths
    plain = Problem(1, 2, 2, 100, 300, head_dim, "bfloat16", Band(), head_dim_v)
    for fields in ({}, {"features": ALL}, {"varlen": True}):
        problem = dataclasses.replace(plain, **fields)
        found = plan_backward(problem, ARCHS[arch])
        wider = dataclasses.replace(problem, head_dim=max(widths), head_dim_v=None)
        assert found.tile == plan_backward(wider, ARCHS[arch]).tile
        assert found.main.static.head_dim_v == head_dim_v and str(head_dim_v) in found.main.static.widths


def test_the_sums_of_narrow_keys_leave_more_heads_in_l2() -> None:
    problem = Problem(4, 8, 8, 8192, 8192, 64, "bfloat16", Band(), 256)
    wide = dataclasses.replace(problem, head_dim=256, head_dim_v=64)
    assert (
        plan_backward(problem, ARCHS["sm_90"]).sizes["heads_per_l2_group"]
        > plan_backward(wide, ARCHS["sm_90"]).sizes["heads_per_l2_group"]
    )


H200 = dataclasses.replace(ARCHS["sm_90"], l2_bytes=60 << 20, num_sms=132)


@pytest.mark.parametrize(
    ("head_dim", "causal", "deterministic", "groups"),
    [
        # S = 512, 1024, 4096, 16384. 40 % of L2 without a mask, and at D = 128 with one.
        (64, False, False, (64, 32, 8, 2)),
        (128, False, False, (32, 16, 4, 1)),
        (128, True, False, (32, 16, 4, 1)),
        (256, False, False, (16, 8, 2, 1)),
        # With a mask: four waves of tiles of 128 keys, or two of 80 keys.
        (64, True, False, (128, 64, 16, 4)),
        (256, True, False, (16, 16, 4, 2)),
        # Two waves; wide heads up to four, if they fit into 90 % of L2, but at most 132 / 8 heads.
        (64, True, True, (64, 32, 8, 2)),
        (128, True, True, (32, 32, 8, 2)),
        (192, True, True, (32, 16, 8, 2)),
        (256, True, True, (16, 16, 4, 2)),
        (256, False, True, (16, 16, 4, 2)),
    ],
)
def test_l2_groups_of_heads(head_dim: int, causal: bool, deterministic: bool, groups: tuple[int, ...]) -> None:
    """On an H200, 16384 tokens, hidden size 2048. The sizes were measured: profiling/notes/bwd_sm90.md."""
    band, heads = Band(None, 0) if causal else Band(), 2048 // head_dim
    problems = [Problem(16384 // s, heads, heads, s, s, head_dim, "bfloat16", band) for s in (512, 1024, 4096, 16384)]
    found = [plan_backward(one, H200, deterministic).sizes["heads_per_l2_group"] for one in problems]
    assert tuple(found) == groups


@pytest.mark.parametrize(("head_dim", "deterministic", "group"), [(64, False, 4), (256, False, 2), (256, True, 2)])
def test_l2_groups_of_grouped_heads_fit_into_l2(head_dim: int, deterministic: bool, group: int) -> None:
    """A K/V head has the Q, dO and dQ of four query heads."""
    problem = Problem(4, 32, 8, 4096, 4096, head_dim, "bfloat16", Band(None, 0))
    assert plan_backward(problem, H200, deterministic).sizes["heads_per_l2_group"] == group


@pytest.mark.parametrize("deterministic", [False, True])
def test_l2_groups_of_mma_sync_and_of_varlen_batches_have_a_share_of_l2(deterministic: bool) -> None:
    causal = Problem(4, 8, 8, 4096, 4096, 256, "bfloat16", Band(None, 0))
    assert plan_backward(causal, H200, deterministic, family="sm80").sizes["heads_per_l2_group"] == 2
    varlen = dataclasses.replace(causal, seqlen_q=16384, seqlen_k=16384, varlen=True)
    assert plan_backward(varlen, H200, deterministic).sizes["heads_per_l2_group"] == 1


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
    """wgmma if it has a kernel for the call, mma.sync otherwise."""
    found = plan_backward(Problem(1, 2, 2, 3000, 3000, head_dim, "bfloat16", Band(None, 0)), ARCHS[arch])
    assert (found.family, found.main.kernel) == (family, kernel)
    assert found.main.target == (arch + "a" if family == "sm90" else arch)
    assert found.main.static.has_right and not found.launch("bwd_preprocess").static.has_right
    assert plan_backward(found.problem, found.arch, family="sm80").family == "sm80"


def test_a_family_that_lacks_the_kernel_is_not_replaced() -> None:
    problem = Problem(1, 2, 2, 100, 100, 64, "bfloat16", Band())
    message = r"head_dim=64 on sm_80 by kernel family 'sm90': .*\(only on sm_90\); call use_kernels with 'sm80'"
    with pytest.raises(UnsupportedError, match=message):
        plan_backward(problem, ARCHS["sm_80"], family="sm90")


@pytest.mark.parametrize(("head_dim", "is_persistent"), [(128, True), (136, False)])
@pytest.mark.parametrize("band", [Band(), Band(None, 0)])
def test_wide_heads_have_a_cta_for_each_tile(head_dim: int, is_persistent: bool, band: Band) -> None:
    found = plan_backward(Problem(2, 20, 10, 3000, 3001, head_dim, "bfloat16", band), ARCHS["sm_90"])
    assert found.sizes["num_tiles"] == -(-3001 // found.tile.tile_n) * 20
    assert found.sizes["num_ctas"] == (132 if is_persistent else found.sizes["num_tiles"])
    assert found.is_dynamic == (is_persistent and band != Band())


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(136, None), (192, None), (192, 128), (256, None), (64, 256)])
def test_wide_heads_with_features_have_a_smaller_tile(head_dim: int, head_dim_v: int | None) -> None:
    """Fewer keys leave registers for features, varlen lengths and deterministic additions to dQ."""
    plain = Problem(1, 2, 2, 100, 300, head_dim, head_dim_v=head_dim_v)
    calls = [(dataclasses.replace(plain, features=(name,)), False) for name in ("softcap", "alibi", "dropout")]
    calls += [(dataclasses.replace(plain, features=ALL, varlen=True), True), (plain, True)]
    calls += [(dataclasses.replace(plain, varlen=True), False)]
    for problem, deterministic in calls:
        found = plan_backward(problem, ARCHS["sm_90"], deterministic)
        assert (found.main.kernel, found.tile.tile_m, found.tile.tile_n) == ("bwd_sm90_wide", 64, 64)
        assert plan_backward(problem, ARCHS["sm_90"], deterministic, family="sm90") == found
        assert not found.is_dynamic and found.sizes["num_ctas"] == found.sizes["num_tiles"]
    for features in ((), ("sinks",)):
        found = plan_backward(dataclasses.replace(plain, features=features), ARCHS["sm_90"])
        assert (found.main.kernel, found.tile.tile_n) == ("bwd_sm90_wide", 80)


@pytest.mark.parametrize(("head_dim", "kernel"), [(64, "bwd_sm90"), (128, "bwd_sm90"), (256, "bwd_sm90_wide")])
def test_long_mods_are_computed_by_mma_sync(head_dim: int, kernel: str) -> None:
    for score, expected in (("alibi", kernel), ("gated", "bwd_sm80")):
        case = Case(Kind(head_dim, score=score, mask="by_head"), Sizes(1, 2, 2, 300, 300), device="cpu")
        key = main_key(mod_gradients.keys_of(case, ARCHS["sm_90"]))
        assert key.kernel == expected  # type: ignore[union-attr]
    most = 10 if head_dim == 128 else 24
    message = rf"attn with score_mod and mask_mod .*'sm90': .*at most {most} operations per score .*use_kernels"
    with pytest.raises(UnsupportedError, match=message):
        mod_gradients.keys_of(case, ARCHS["sm_90"], "sm90")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 136, 192, 256])
def test_every_head_dim_has_gradients_with_features(arch: str, head_dim: int) -> None:
    problem = Problem(1, 2, 2, 100, 300, head_dim, features=ALL)
    found = plan_backward(problem, ARCHS[arch])
    assert found.tile.head_dim >= head_dim and found.tile.fits(ARCHS[arch])
    # One part per MMA warp.
    warps = 8 if found.family == "sm90" else found.tile.num_warps
    assert found.sizes["dalibi_warps"] == warps
    assert shape_of(found, "dalibi_partial") == (1, 2, -(-300 // found.tile.tile_n) * warps)


@pytest.mark.parametrize(
    ("kind", "tile_m"),
    [
        (Kind(64, has_block_mask=True), 128),
        (Kind(64, mask="document_causal", has_block_mask=True), 128),
        (Kind(64, score="alibi", bounds=(False, True)), 128),
        # Mods that evaluate, load or differentiate something for every score, and two mods together.
        (Kind(64, mask="document"), 64),
        (Kind(64, score="alibi", mask="document", has_block_mask=True), 64),
        (Kind(64, score="relative"), 64),
        (Kind(64, score="capped"), 64),
        (Kind(64, bias=torch.bfloat16), 64),
        (Kind(72, score="alibi"), 64),
    ],
    ids=lambda x: x.id if isinstance(x, Kind) else str(x),
)
def test_cheap_mods_have_the_tile_of_plain_gradients(kind: Kind, tile_m: int) -> None:
    key = main_key(mod_gradients.keys_of(Case(kind, Sizes(1, 2, 2, 300, 300), device="cpu"), ARCHS["sm_90"]))
    assert (key.kernel, key.tile.tile_m, key.tile.tile_n) == ("bwd_sm90", tile_m, 128)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["softcap", "alibi", "sinks", "dropout", "return_max_logit"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_features_are_compiled_into_the_main_kernel(name: str, arch: str) -> None:
    dense = Problem(3, 4, 4, 800, 800, 64, features=(name,))
    # The LSE contains the sink, and max_logit has no gradient.
    in_backward = () if name in ("sinks", "return_max_logit") else (name,)
    for problem in (dense, dataclasses.replace(dense, varlen=True, seqused_k=True)):
        forward, found = plan_forward(problem, ARCHS[arch]), plan_backward(problem, ARCHS[arch], has_dlse=True)
        assert forward.main.static.features == (name,) and found.main.static.features == in_backward
        before, after = found.launch("bwd_preprocess").static, found.launch("bwd_postprocess").static
        assert before.features == after.features == () and before.varlen == problem.varlen
        assert [gradient.field for gradient in found.finalizers] == ([name] if name in ("alibi", "sinks") else [])
        assert found.launches[0].kernel == ("varlen_scheduler_bwd" if problem.varlen else "bwd_preprocess")
    assert [key.kernel for key in forward.launches] == ["varlen_scheduler_fwd", forward.main.kernel]
    # The tile list contains the number of used keys.
    assert forward.main.static.varlen and not forward.main.static.seqused_k
    assert forward.launch("varlen_scheduler").static.seqused_k
    if name == "alibi":
        # Every sequence starts with a new K/V block.
        blocks = num_padded_blocks(800, found.tile.tile_n, 3)
        assert blocks == 800 // found.tile.tile_n + 3 + 1
        assert shape_of(found, "dalibi_partial") == (1, 4, blocks * found.sizes["dalibi_warps"])


def test_deterministic_gradients() -> None:
    sm_90 = ARCHS["sm_90"]
    long = Problem(1, 2, 2, 4000, 128 * sm_90.num_sms, 64, "bfloat16", Band())
    assert not plan_backward(long, sm_90).deterministic
    found = plan_backward(long, sm_90, deterministic=True)
    # One CTA per tile: a tile that others wait for has started before them.
    assert found.deterministic and found.sizes["num_ctas"] == found.sizes["num_tiles"] and not found.is_dynamic
    # Deterministic kernels claim no blocks of dQ, so postprocess reads all of it.
    assert found.launches[-1].static.deterministic and not plan_backward(long, sm_90).launches[-1].static.deterministic
    window = Problem(1, 2, 2, 1000, 1000, 128, "bfloat16", Band(100, 100))
    main = plan_backward(window, sm_90, deterministic=True).main
    assert main.kernel == "bwd_sm90" and main.static.deterministic
    wide, both = dataclasses.replace(long, head_dim=136), dataclasses.replace(long, head_dim_v=256)
    for problem, found_arch in ((wide, sm_90), (both, sm_90), (window, ARCHS["sm_80"]), (wide, ARCHS["sm_86"])):
        found = plan_backward(problem, found_arch, deterministic=True)
        kernel = "bwd_sm90_wide" if found_arch is sm_90 else "bwd_sm80"
        assert found.main.kernel == kernel and found.main.static.deterministic
        assert found.launch("bwd_preprocess").static.deterministic
        assert len(shape_of(found, "dq_progress")) == 3
        assert found.launches[-1].static.deterministic == (found_arch is sm_90)


@pytest.mark.parametrize("change", [{"batch": 70_000}, {"heads": 70_000, "heads_kv": 70_000}])
def test_grids_that_no_gpu_takes_are_refused(change: dict[str, int]) -> None:
    problem = dataclasses.replace(Problem(1, 2, 2, 100, 100, 64, "bfloat16", Band()), **change)
    with pytest.raises(UnsupportedError, match="at most 65535"):
        plan_backward(problem, ARCHS["sm_90"])
