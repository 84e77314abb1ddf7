"""Plans of the forward pass: kernel family, grid, L2 groups of heads, limits, and `use_kernels`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from cute_flash.planning.plan import L2_SHARE, MAX_SEQLEN, CompileKey, plan_backward, plan_forward
from cute_flash.planning.registry import KERNELS
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.spec.arch import ARCHS, ArchSpec
from cute_flash.spec.band import Band
from cute_flash.spec.family import FAMILIES, use_kernels
from cute_flash.spec.problem import Problem, UnsupportedError

A100, H100 = ARCHS["sm_80"], ARCHS["sm_90"]
MIB = 1 << 20


def with_l2(share_bytes: int, arch: ArchSpec = A100) -> ArchSpec:
    """A GPU whose share of L2 for K and V has this many bytes, and a few more because of rounding."""
    return dataclasses.replace(arch, l2_bytes=int((share_bytes + 1) / L2_SHARE) + 1)


# K and V of 4096 keys of 128 columns of 2 bytes are 2 MiB together.
@pytest.mark.parametrize(
    ("batch", "heads", "heads_kv", "seqlen_k", "share_mib", "l2_group"),
    [
        (4, 16, 16, 4096, 16, 8),  # 16 MiB hold 8 heads
        (4, 16, 16, 4096, 17, 8),  # 17 MiB hold no ninth head
        (4, 16, 4, 4096, 16, 32),  # 8 K/V heads with 4 query heads each
        (4, 16, 1, 4096, 16, 64),  # all 4 * 16 heads; there are fewer than 8 * 16
        (1, 4, 4, 4096, 16, 4),  # at most all heads
        (4, 16, 16, 1 << 20, 16, 1),  # no head fits: one at a time
        (4, 16, 4, 1 << 20, 16, 4),  # at least the query heads of one K/V head
        (1, 6, 3, 8192, 8, 2),  # two K/V heads fit, but three heads are not a multiple of two
        (2, 4, 4, 1, 16, 8),
    ],
)
def test_l2_groups_of_heads(
    batch: int, heads: int, heads_kv: int, seqlen_k: int, share_mib: int, l2_group: int
) -> None:
    problem = Problem(batch, heads, heads_kv, 1000, seqlen_k, 128)
    assert plan_forward(problem, with_l2(share_mib * MIB)).sizes["heads_per_l2_group"] == l2_group


def test_a_share_of_l2_is_left_to_the_other_tensors() -> None:
    problem = Problem(4, 16, 16, 1000, 4096, 128)
    assert 0 < L2_SHARE < 1
    assert (
        plan_forward(problem, dataclasses.replace(A100, l2_bytes=40 * MIB)).sizes["heads_per_l2_group"]
        == int(40 * L2_SHARE) // 2
    )


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (3, 6), (17, 5)])
@pytest.mark.parametrize("num_sms", [1, 78, 132])
def test_ctas_cover_every_row_once(batch: int, heads: int, num_sms: int) -> None:
    """On Hopper, CTAs are persistent: as many as tiles or SMs."""
    for seqlen_q, arch in itertools.product((1, 63, 64, 65, 128, 129, 192, 193, 1000, 5000), (A100, H100)):
        found = plan_forward(Problem(batch, heads, 1, seqlen_q, 77, 64), dataclasses.replace(arch, num_sms=num_sms))
        tiles = len(range(0, seqlen_q, found.tile.tile_m)) * heads * batch
        assert found.sizes["num_tiles"] == tiles and not found.is_dynamic
        assert found.sizes["num_ctas"] == (min(tiles, num_sms) if arch is H100 else tiles)
        assert arch is A100 or found.sizes["seqlen_q"] == seqlen_q


@pytest.mark.parametrize("band", [Band(), Band(5, None), Band(None, 0), Band(5, 5)], ids=str)
def test_tiles_of_different_length_are_fetched_from_a_counter(band: Band) -> None:
    problem = Problem(2, 4, 2, 1000, 1000, 128, band=band)
    found = plan_forward(problem, H100)
    assert found.is_dynamic == (band != Band())
    assert not plan_forward(problem, H100, "sm80").is_dynamic


@pytest.mark.parametrize("band", [Band(), Band(None, 0)], ids=str)
def test_few_queries_of_grouped_heads_use_pack_gqa(band: Band) -> None:
    problem = Problem(3, 32, 4, 5, 1000, 128, band=band)
    found, apart = plan_forward(problem, H100, can_pack_gqa=True), plan_forward(problem, H100)
    assert found.pack_gqa and not apart.pack_gqa
    # 8 heads of 5 queries are 40 rows of one tile.
    assert (found.sizes["num_tiles"], apart.sizes["num_tiles"]) == (3 * 4, 3 * 32)
    # An L2 group then consists of K/V heads.
    assert found.sizes["heads_per_l2_group"] * problem.group == apart.sizes["heads_per_l2_group"]
    assert found.sizes["seqlen_q"] == 5
    # Only a mask needs the position of a row.
    assert (found.main == apart.main) == (band == Band())
    assert "packed" in found.lines()[-1] and "packed" not in apart.lines()[-1]
    assert not plan_forward(problem, H100, "sm80", can_pack_gqa=True).pack_gqa
    assert not plan_forward(problem, A100, can_pack_gqa=True).pack_gqa


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "pays"),
    [(8, 1, True), (8, 64, True), (8, 127, False), (2, 64, True), (2, 65, False), (1, 5, False), (8, 128, False)],
)
def test_pack_gqa_is_used_if_it_needs_fewer_tiles(heads: int, seqlen_q: int, pays: bool) -> None:
    found = plan_forward(Problem(1, heads, 1, seqlen_q, 4000, 128), H100, can_pack_gqa=True)
    assert found.tile.tile_m == 128
    assert found.pack_gqa == pays
    assert found.sizes["num_tiles"] == (-(-heads * seqlen_q // 128) if pays else heads)


def test_dv_other_than_d_has_its_own_kernel() -> None:
    problem = Problem(1, 4, 2, 100, 4096, 192, head_dim_v=128)
    found = plan_forward(problem, with_l2(8 * MIB, H100))
    assert (found.main.static.head_dim, found.main.static.head_dim_v) == (192, 128)
    assert found.main != plan_forward(dataclasses.replace(problem, head_dim_v=None), H100).main
    # K and V of 4096 keys are 2.5 MiB together: two heads of them fit, with two query heads each.
    assert found.sizes["heads_per_l2_group"] == 4
    assert "D=192/128 " in found.lines()[0]
    # An explicit Dv equal to D gives the same kernel.
    same = dataclasses.replace(problem, head_dim_v=192)
    assert plan_forward(same, H100).main == plan_forward(dataclasses.replace(problem, head_dim_v=None), H100).main
    # mma.sync uses a tile as wide as the keys.
    assert (
        plan_forward(problem, A100).tile == plan_forward(same, A100).tile
        and plan_forward(problem, A100).main.static == problem.static
    )


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_ctas_per_sm_is_what_shared_memory_and_threads_allow(arch: ArchSpec) -> None:
    families = [name for name, runs_on in FAMILIES.items() if runs_on(arch)]
    for head_dim, family in itertools.product((64, 128), families):
        found = plan_forward(Problem(1, 1, 1, 100, 100, head_dim), arch, family)
        ctas = found.ctas_per_sm
        assert ctas >= 1
        # CUDA reserves 1 KB of shared memory per CTA.
        fit = [n for n in range(1, 33) if n * (found.tile.smem_bytes + 1024) <= arch.smem_per_sm]
        assert ctas == max(n for n in fit if n * found.tile.num_threads <= arch.max_threads_per_sm)


def test_the_key_is_what_is_compiled_in() -> None:
    problem = Problem(2, 4, 2, 100, 200, 64, band=Band(None, 0))
    longer = dataclasses.replace(problem, batch=9, seqlen_q=5000, band=Band(None, 77))
    other = dataclasses.replace(problem, dtype="float16")
    # Only the target "sm_90a" has wgmma.
    for arch, family, target in (
        (A100, "sm80", "sm_80"),
        (H100, "sm80", "sm_90"),
        (H100, "sm90", "sm_90a"),
        (ARCHS["sm_120"], "sm80", "sm_120a"),
        (ARCHS["sm_121"], "sm80", "sm_121a"),
    ):
        found, kernel = plan_forward(problem, arch, family), f"fwd_{family}"
        assert found.main == CompileKey(kernel, problem.static, found.tile, target, KERNELS[kernel].names)
        # The number of SMs and the size of L2 are not compiled in, so all GPUs of an architecture share the kernel.
        part = dataclasses.replace(arch, gpu="another part", num_sms=arch.num_sms - 1, l2_bytes=arch.l2_bytes + MIB)
        assert plan_forward(longer, part, family).main == found.main
        assert plan_forward(other, arch, family).main != found.main


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_the_family_is_the_first_that_the_gpu_can_run(arch: ArchSpec) -> None:
    problem, family = Problem(1, 1, 1, 10, 10, 64), "sm90" if arch is H100 else "sm80"
    # Plans do not depend on the context: autograd threads do not see it.
    with use_kernels("sm80"):
        found = plan_forward(problem, arch)
        assert found.family == plan_backward(problem, arch).family == family
    assert isinstance(found.tile, FwdTileSm90 if family == "sm90" else FwdTileSm80)
    assert plan_forward(problem, arch, "sm80").family == plan_backward(problem, arch, family="sm80").family == "sm80"
    if arch is not H100:
        with pytest.raises(UnsupportedError, match=f"family 'sm90' does not run on {arch.name}"):
            plan_forward(problem, arch, "sm90")
    with pytest.raises(UnsupportedError, match="family 'sm80' does not run on sm_75"):
        plan_forward(problem, dataclasses.replace(arch, name="sm_75"), "sm80")
    for plan in (plan_forward, plan_backward):
        with pytest.raises(UnsupportedError, match="kernel family 'sm70': use sm90 or sm80"):
            plan(problem, arch, family="sm70")


@pytest.mark.parametrize("side", ["seqlen_q", "seqlen_k"])
def test_the_longest_sequence(side: str) -> None:
    lengths = {"seqlen_q": 10, "seqlen_k": 10}
    plan_forward(Problem(1, 1, 1, head_dim=64, **{**lengths, side: MAX_SEQLEN}), A100)
    with pytest.raises(UnsupportedError, match=f"^{side}={MAX_SEQLEN + 1}: at most {MAX_SEQLEN}$"):
        plan_forward(Problem(1, 1, 1, head_dim=64, **{**lengths, side: MAX_SEQLEN + 1}), A100)


def test_the_largest_grid() -> None:
    # Below 2^31 by more than the number of SMs, because persistent CTAs count past the last tile.
    most = (1 << 31) - (1 << 16)
    assert plan_forward(Problem(1, most, 1, 1, 1, 64), A100).sizes["num_ctas"] == most
    for arch in (A100, H100):
        with pytest.raises(UnsupportedError, match=f"^{1 << 31} tiles: at most {most}; split the batch"):
            plan_forward(Problem(1 << 16, 1 << 15, 1, 1, 1, 64), arch)


@pytest.mark.parametrize("plan", [plan_forward, plan_backward])
def test_a_plan_checks_its_problem(plan: Callable) -> None:
    with pytest.raises(UnsupportedError, match="head_dim=60"):
        plan(Problem(1, 1, 1, 10, 10, 60), A100)


@pytest.mark.parametrize(
    ("arch", "part"), [(A100, "A100 (sm_80), 108 SMs"), (H100, "H100 (sm_90), 132 SMs")], ids=("A100", "H100")
)
def test_a_plan_prints_what_it_decided(arch: ArchSpec, part: str) -> None:
    found = plan_forward(Problem(2, 16, 4, 1000, 3000, 64, band=Band(128, 0)), arch)
    text = "\n".join(found.lines())
    expected = [
        "B=2 H=16 Hkv=4 Sq=1000 Sk=3000 D=64 bfloat16, window of 128 keys before and 0 after",
        part,
        found.main.kernel,
        str(found.tile),
        f"{found.tile.smem_bytes / 1024:.0f} KB of {arch.smem_per_cta // 1024} KB",
        "{num_ctas} CTAs, {num_tiles} tiles, L2 groups of {heads_per_l2_group} head(s)".format(**found.sizes),
    ]
    assert [line for line in expected if line not in text] == []
    assert ", full" in plan_forward(Problem(1, 1, 1, 10, 10, 64), A100).lines()[0]
    assert ", causal" in plan_forward(Problem(1, 1, 1, 10, 10, 64, band=Band(None, 0)), A100).lines()[0]
