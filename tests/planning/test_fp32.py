"""Plans of fp32 calls: split kernels, pieces in the workspace, L2 groups, limits and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_flash import UnsupportedError
from cute_flash.planning.plan import L2_SHARE, plan_backward, plan_forward
from cute_flash.spec.arch import ARCHS, SM_80, SM_90
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem

PROBLEM = Problem(2, 4, 2, 300, 500, 72, "float32", Band(None, 0))


@pytest.mark.parametrize("arch", ARCHS)
def test_launches(arch: str) -> None:
    """The split kernel comes before all kernels that read pieces or norms, and has neither mask nor features."""
    problem = replace(PROBLEM, features=("softcap", "dropout"))
    forward, backward = (plan(problem, ARCHS[arch]) for plan in (plan_forward, plan_backward))
    assert [key.kernel for key in forward.launches] == ["split_fp32_fwd", "fwd_sm80_fp32"]
    assert [key.kernel for key in backward.launches] == [
        "split_fp32_bwd", "bwd_preprocess_fp32", "bwd_sm80_fp32", "bwd_postprocess_sm80",
    ]  # fmt: skip
    for plan in (forward, backward):
        split = plan.launches[0].static
        assert not split.features and not split.is_bounded and split.head_dim == 72
        assert {key.target for key in plan.launches} == {ARCHS[arch].target} and plan.tile.pieces == 2
        assert plan.tile.fits(ARCHS[arch])
        assert "two fp16 pieces of each element" in "\n".join(plan.lines())


def test_workspace_has_pieces_as_wide_as_the_tile_and_norms() -> None:
    forward = {buffer.name: buffer for buffer in plan_forward(PROBLEM, SM_80).workspace}
    assert forward["q_pieces"].shape == (2, 4, 300, 256) and forward["k_pieces"].shape == (2, 2, 500, 256)
    assert forward["v_pieces"] == forward["k_pieces"]._replace(name="v_pieces")
    assert {forward[f"{name}_pieces"].dtype for name in "qkv"} == {"float16"}
    # Atomic operations raise the norms, so they start at 0.
    assert forward["norms"].shape == (4, 2, 4) and forward["norms"].init == "zeros"
    backward = {buffer.name: buffer for buffer in plan_backward(PROBLEM, SM_80).workspace}
    assert backward["dout_cast_pieces"].shape == (2, 4, 300, 256) and backward["norms"].shape == (5, 2, 4)
    varlen = {buffer.name: buffer for buffer in plan_forward(replace(PROBLEM, varlen=True), SM_80).workspace}
    assert varlen["q_pieces"].shape == (1, 4, 300, 256)
    # Norms of each sequence, and of the padding.
    assert varlen["norms"].shape == (4, 3, 4)


def test_l2_groups_count_four_bytes_of_an_element() -> None:
    problem = Problem(1, 16, 16, 4096, 4096, 128)
    kv_bytes = 4096 * 256 * 2
    arch = replace(SM_80, l2_bytes=int((8 * kv_bytes + 1) / L2_SHARE) + 1)
    sizes = [plan_forward(replace(problem, dtype=dtype), arch).sizes for dtype in ("float16", "float32")]
    assert [x["heads_per_l2_group"] for x in sizes] == [8, 4]
    # Q and dO, and fp32 sums of dQ.
    row_bytes = 4096 * 128 * (2 + 2 + 4)
    arch = replace(SM_80, l2_bytes=int((6 * row_bytes + 1) / L2_SHARE) + 1)
    sizes = [plan_backward(replace(problem, dtype=dtype), arch).sizes for dtype in ("float16", "float32")]
    assert [x["heads_per_l2_group"] for x in sizes] == [4, 4]
    sizes = [
        plan_backward(replace(problem, dtype=dtype), replace(arch, l2_bytes=arch.l2_bytes * 3 // 4)).sizes
        for dtype in ("float16", "float32")
    ]
    assert [x["heads_per_l2_group"] for x in sizes] == [4, 2]


def test_limits_of_the_grid_of_the_split_kernel() -> None:
    """Batch and heads lie along y and z of its grid."""
    for changes in ({"batch": 65536}, {"heads": 65536, "heads_kv": 1}):
        many = replace(PROBLEM, seqlen_q=1, seqlen_k=1, **changes)
        with pytest.raises(UnsupportedError, match=r"attn in float32 with (batch|heads)=65536: at most 65535; split"):
            plan_forward(many, SM_80)
        plan_forward(replace(many, dtype="bfloat16"), SM_80)
    # In the grid, a varlen batch has a batch size of 1, so its number of sequences is not limited.
    plan_forward(replace(PROBLEM, batch=65536, varlen=True), SM_80)


def test_refusals_name_a_way_out() -> None:
    with pytest.raises(
        UnsupportedError, match=r"float32 by kernel family 'sm90': .* call use_kernels with 'sm80', or with ''"
    ):
        plan_forward(PROBLEM, SM_90, "sm90")
    with pytest.raises(UnsupportedError, match="float32 by kernel family 'sm90'"):
        plan_backward(PROBLEM, SM_90, family="sm90")
    assert plan_forward(PROBLEM, SM_90, "sm80").main == plan_forward(PROBLEM, SM_90).main
    with pytest.raises(UnsupportedError, match="head_dim=136 of float32 on cuda: at most 128; use bfloat16 or float16"):
        plan_backward(replace(PROBLEM, head_dim=136), SM_90)
