"""Plans: kernel family, grid, sections of heads, limits, and the choice by hand."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from cute_flash.arch import ARCHS, ArchSpec
from cute_flash.band import Band
from cute_flash.plan import FAMILIES, L2_SHARE, MAX_SEQLEN, CompileKey, plan, requested_family, use_kernels
from cute_flash.problem import Problem, UnsupportedError

A100 = ARCHS["sm_80"]
MIB = 1 << 20


def with_l2(share_bytes: int) -> ArchSpec:
    """A GPU whose share of L2 for K and V is that many bytes (and a little, against rounding)."""
    return dataclasses.replace(A100, l2_bytes=int((share_bytes + 1) / L2_SHARE) + 1)


# K and V of 4096 keys of 128 columns of 2 bytes are 2 MiB together.
@pytest.mark.parametrize(
    ("batch", "heads", "heads_kv", "seqlen_k", "share_mib", "section"),
    [
        (4, 16, 16, 4096, 16, 8),  # 16 MiB hold 8 of them
        (4, 16, 16, 4096, 17, 8),  # no half one
        (4, 16, 4, 4096, 16, 32),  # groups of 4 query heads share each
        (4, 16, 1, 4096, 16, 64),  # all 4 * 16 heads: 8 * 16 would be more than there are
        (1, 4, 4, 4096, 16, 4),  # no more than there are
        (4, 16, 16, 1 << 20, 16, 1),  # not even one fits: one at a time
        (4, 16, 4, 1 << 20, 16, 4),  # but never less than a group
        (1, 6, 3, 8192, 8, 2),  # two would fit, but leave one over
        (2, 4, 4, 1, 16, 8),
    ],
)
def test_section(batch: int, heads: int, heads_kv: int, seqlen_k: int, share_mib: int, section: int) -> None:
    problem = Problem(batch, heads, heads_kv, 1000, seqlen_k, 128)
    assert plan(problem, with_l2(share_mib * MIB)).section == section


def test_a_share_of_l2_is_left_to_the_other_tensors() -> None:
    problem = Problem(4, 16, 16, 1000, 4096, 128)
    assert 0 < L2_SHARE < 1
    assert plan(problem, dataclasses.replace(A100, l2_bytes=40 * MIB)).section == int(40 * L2_SHARE) // 2


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (3, 6), (17, 5)])
def test_num_blocks_covers_every_row_once(batch: int, heads: int) -> None:
    for seqlen_q in (1, 2, 63, 64, 65, 127, 128, 129, 1000):
        found = plan(Problem(batch, heads, 1, seqlen_q, 77, 64), A100)
        tiles = len(range(0, seqlen_q, found.tile.tile_m))
        assert found.num_blocks == tiles * heads * batch


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_blocks_per_sm_is_what_shared_memory_and_threads_allow(arch: ArchSpec) -> None:
    for head_dim in (64, 128):
        with use_kernels("sm80"):
            found = plan(Problem(1, 1, 1, 100, 100, head_dim), arch)
        blocks = found.blocks_per_sm
        assert blocks >= 1
        # The system takes 1 KB for itself with every block.
        fit = [n for n in range(1, 33) if n * (found.tile.smem_bytes + 1024) <= arch.smem_per_sm]
        assert blocks == max(n for n in fit if n * found.tile.num_threads <= arch.max_threads_per_sm)


def test_the_key_is_what_is_compiled_in() -> None:
    problem = Problem(2, 4, 2, 100, 200, 64, band=Band(None, 0))
    with use_kernels("sm80"):
        found = plan(problem, A100)
        longer = plan(dataclasses.replace(problem, batch=9, seqlen_q=5000, band=Band(None, 77)), A100)
        other = plan(dataclasses.replace(problem, dtype="float16"), A100)
    assert found.key == CompileKey("fwd_sm80", problem.static, found.tile, "sm_80")
    assert longer.key == found.key
    assert other.key != found.key
    with use_kernels("sm80"):
        assert plan(problem, ARCHS["sm_90"]).key.target == "sm_90"


def test_a_detected_gpu_has_the_key_of_its_architecture() -> None:
    problem = Problem(2, 4, 2, 100, 200, 64)
    detected = dataclasses.replace(A100, gpu="NVIDIA A100-SXM4-80GB", num_sms=107, l2_bytes=41 * MIB)
    assert plan(problem, detected).key == plan(problem, A100).key


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_the_family_is_the_first_that_the_gpu_can_run(arch: ArchSpec) -> None:
    found = plan(Problem(1, 1, 1, 10, 10, 64), arch)
    assert found.family == next(name for name, least in FAMILIES.items() if least <= arch.capability)


def test_use_kernels_nests_and_ends() -> None:
    assert requested_family() is None
    with use_kernels("sm80"):
        assert requested_family() == "sm80"
        with use_kernels("sm80"):
            assert requested_family() == "sm80"
        assert requested_family() == "sm80"
        assert plan(Problem(1, 1, 1, 10, 10, 64), ARCHS["sm_90"]).family == "sm80"
    assert requested_family() is None
    with pytest.raises(RuntimeError, match="inside"), use_kernels("sm80"):
        raise RuntimeError("inside")
    assert requested_family() is None


def test_use_kernels_is_for_one_thread() -> None:
    seen = []
    with use_kernels("sm80"):
        thread = threading.Thread(target=lambda: seen.append(requested_family()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_use_kernels_refuses_an_unknown_family_at_once() -> None:
    with (
        pytest.raises(UnsupportedError, match=f"^kernel family 'sm70': there is {', '.join(FAMILIES)}$"),
        use_kernels("sm70"),
    ):
        pytest.fail("entered")
    assert requested_family() is None


def test_the_environment_chooses_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(1, 1, 1, 10, 10, 64)
    monkeypatch.setenv("CUTE_FLASH_KERNELS", "sm80")
    assert requested_family() == "sm80"
    assert plan(problem, ARCHS["sm_90"]).family == "sm80"
    monkeypatch.setenv("CUTE_FLASH_KERNELS", "sm99")
    with pytest.raises(UnsupportedError, match="kernel family 'sm99': there is sm80"):
        plan(problem, A100)
    with use_kernels("sm80"):
        # The nearer choice wins.
        assert plan(problem, A100).family == "sm80"
    monkeypatch.setenv("CUTE_FLASH_KERNELS", "")
    assert requested_family() is None


def test_a_family_that_the_gpu_cannot_run() -> None:
    old = dataclasses.replace(A100, name="sm_75")
    with use_kernels("sm80"), pytest.raises(UnsupportedError, match="family 'sm80' needs more than sm_75"):
        plan(Problem(1, 1, 1, 10, 10, 64), old)


@pytest.mark.parametrize("side", ["seqlen_q", "seqlen_k"])
def test_the_longest_sequence(side: str) -> None:
    lengths = {"seqlen_q": 10, "seqlen_k": 10}
    plan(Problem(1, 1, 1, head_dim=64, **{**lengths, side: MAX_SEQLEN}), A100)
    with pytest.raises(UnsupportedError, match=f"^{side}={MAX_SEQLEN + 1}: at most {MAX_SEQLEN}$"):
        plan(Problem(1, 1, 1, head_dim=64, **{**lengths, side: MAX_SEQLEN + 1}), A100)


def test_the_largest_grid() -> None:
    # 2^31 blocks are one too many for the x dimension of a grid.
    most = (1 << 31) - 1
    assert plan(Problem(1, most, 1, 1, 1, 64), A100).num_blocks == most
    with pytest.raises(UnsupportedError, match=f"^{most + 1} thread blocks: at most {most}; split the batch"):
        plan(Problem(1 << 16, 1 << 15, 1, 1, 1, 64), A100)


def test_a_plan_checks_its_problem() -> None:
    with pytest.raises(UnsupportedError, match="head_dim=60"):
        plan(Problem(1, 1, 1, 10, 10, 60), A100)
    with pytest.raises(UnsupportedError, match="dtype float32 on cuda"):
        plan(Problem(1, 1, 1, 10, 10, 64, "float32"), A100)
    with pytest.raises(ValueError, match="q has 4 heads and k, v have 3"):
        plan(Problem(1, 4, 3, 10, 10, 64), A100)


def test_a_plan_prints_what_it_decided() -> None:
    found = plan(Problem(2, 16, 4, 1000, 3000, 64, band=Band(128, 0)), A100)
    text = "\n".join(found.lines())
    expected = [
        "B=2 H=16 Hkv=4 Sq=1000 Sk=3000 D=64 bfloat16, window of 128 keys before and 0 after",
        "A100 (sm_80), 108 SMs",
        found.key.kernel,
        str(found.tile),
        f"{found.tile.smem_bytes / 1024:.0f} KB of 163 KB",
        f"{found.num_blocks} blocks, sections of {found.section} head(s)",
    ]
    assert [part for part in expected if part not in text] == []
    assert ", full" in plan(Problem(1, 1, 1, 10, 10, 64), A100).lines()[0]
    assert ", causal" in plan(Problem(1, 1, 1, 10, 10, 64, band=Band(None, 0)), A100).lines()[0]
