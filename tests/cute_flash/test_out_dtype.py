"""`out_dtype=torch.float32`: the parts of ring attention, before they are merged."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_flash
from cute_flash import UnsupportedError, attn, attn_varlen, backward_general, general, merge, reference
from cute_flash.jit.resources import nvdisasm
from cute_flash.planning.plan import plan, use_kernels
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.args import How
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Features, Problem
from tests.combinations import RNG
from tests.combinations import normal as exact_normal
from tests.cute_flash.test_bwd_launch import faked
from tests.cute_flash.test_forward_launch import run as run_forward
from tests.cute_flash.test_packed_launch import LENGTHS, how_of, run_backward
from tests.cute_flash.test_packed_launch import run as run_packed
from tests.cute_flash.test_packed_launch import tensors as packed_tensors
from tests.cute_flash.test_resources import CAUSAL, WINDOW
from tests.fake_backward import FakeBackward
from tests.fake_gpu import D, FakeGpu, inputs, normal
from tests.fake_packed import FakePacked
from tests.fake_packed import faked as faked_packed
from tests.gates import kernel_resources
from tests.launch_capture import Request, capture, has_compiler

FLOATS = How(0.3, None, 0, float_out=True)


# What it is


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_out_is_not_rounded(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype=dtype)
    rounded, lse = attn(q, k, v, causal=True, return_lse=True)
    out, same_lse = attn(q, k, v, causal=True, return_lse=True, out_dtype=torch.float32)
    assert out.dtype == torch.float32 and torch.equal(lse, same_lse)
    assert torch.equal(out.to(dtype), rounded) and not torch.equal(out, rounded.float())
    oracle, _ = reference.dense(q.double(), k.double(), v.double(), Band(None, 0))
    torch.testing.assert_close(out.double(), oracle, rtol=1e-5, atol=1e-6)


def test_layouts_strides_and_widths() -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs())
    out = attn(q, k, v[..., :8], layout="bshd", out_dtype=torch.float32)
    assert isinstance(out, Tensor)
    assert (out.shape, out.dtype) == ((*q.shape[:3], 8), torch.float32) and out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_of_q_is_the_default(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype=dtype)
    assert torch.equal(attn(q, k, v, out_dtype=dtype), attn(q, k, v))  # type: ignore[arg-type]
    assert torch.equal(attn(q, k, v, out_dtype=None), attn(q, k, v))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [torch.float16, torch.float64, torch.int32])
def test_others_are_refused(wrong: torch.dtype) -> None:
    q, k, v = inputs()
    message = f"out_dtype={wrong}: use None, torch.float32, or torch.bfloat16"
    with pytest.raises(UnsupportedError, match=message):
        attn(q, k, v, out_dtype=wrong)
    assert not (found := cute_flash.supports(q, k, v, out_dtype=wrong)) and message in found.reason
    assert cute_flash.supports(q, k, v, out_dtype=torch.float32)
    cu = torch.tensor([0, 7], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=message):
        attn_varlen(*(x[0].transpose(0, 1)[:7] for x in (q, k, v)), cu, cu, out_dtype=wrong)


@pytest.mark.parametrize("features", [{}, {"softcap": 2.0, "dropout": 0.3}], ids=str)
def test_opcheck(features: dict[str, Any]) -> None:
    rng = torch.tensor(RNG) if "dropout" in features else None
    how = FLOATS._replace(rng=rng, **features)
    tensors = [x.requires_grad_() for x in inputs()]
    results = torch.library.opcheck(general.general_fwd, (*tensors, *how))
    assert set(results.values()) == {"SUCCESS"}


def test_gradients_of_the_cpu_path() -> None:
    """From an output and a gradient in fp32: nearer to the oracle than from rounded ones."""
    leaves = [x.float().requires_grad_() for x in inputs()]
    dout = normal(2, 4, 7, D, dtype=torch.float32)
    exact = torch.autograd.grad(attn(*leaves, causal=True), leaves, dout)  # type: ignore[arg-type]
    rounded = [x.detach().bfloat16().requires_grad_() for x in leaves]
    out = attn(*rounded, causal=True, out_dtype=torch.float32)
    found = torch.autograd.grad(out, rounded, dout)  # type: ignore[arg-type]
    for grad, expected in zip(found, exact, strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.float(), expected, rtol=0.01, atol=0.01)


# Ring attention


@pytest.mark.parametrize("causal", [False, True])
def test_merged_parts_are_the_whole(causal: bool) -> None:
    """Keys in parts, as on the devices of a ring; outputs and gradients of the merged equal the whole's."""
    q, k, v = (exact_normal(2, h, 24, 8, seed=i).float() for i, h in enumerate((4, 2, 2)))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    bounds, dout = [0, 5, 16, 24], exact_normal(2, 4, 24, 8, seed=9).float()

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn(q, k, v, causal=causal, out_dtype=torch.float32)  # type: ignore[return-value]

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs, lses = [], []
        for a, b in itertools.pairwise(bounds):
            # The last query is aligned with the last key of a part, b - 1, and sees more than that.
            window = (None, 24 - b) if causal else (None, None)
            out, lse = attn(
                q, k[:, :, a:b], v[:, :, a:b], window=window, return_lse=True, out_dtype=torch.float32
            )
            outs.append(out)
            lses.append(lse)
        return merge(outs, lses)[0]

    results = []
    for attend in (whole, ring):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        assert out.dtype == torch.float32
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-6)
    for found, expected in zip(results[1][1:], results[0][1:], strict=True):
        # Sums of three parts, each rounded to bf16.
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.02, atol=0.03)


def test_packed_parts() -> None:
    q, k, v = packed_tensors(LENGTHS)
    attend = functools.partial(attn_varlen, q, k, v, LENGTHS.cu_q, LENGTHS.cu_k, seqused_k=LENGTHS.used_k)
    out, rounded = attend(out_dtype=torch.float32), attend()
    assert isinstance(out, Tensor) and isinstance(rounded, Tensor)
    assert out.dtype == torch.float32 and torch.equal(out.bfloat16(), rounded)


# Launches


@pytest.fixture(params=["sm_80", "sm_90"])
def bwd_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeBackward:
    monkeypatch.setattr(backward_general, "_launches", {})
    return faked(request.param, monkeypatch)


def test_forward_kernels_write_floats(gpu: FakeGpu) -> None:
    for turn in (
        lambda x: x,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.clone().mT,
    ):
        out, _, _ = run_forward([turn(x) for x in inputs()], FLOATS)
        assert out.dtype == torch.float32
        assert gpu.last.plan.key.kernel.endswith("_general") and gpu.last.plan.key.static.features.out_dtype
    # Few rows of heads that share keys: packed as without it.
    run_forward([normal(2, 4, 3, D), *inputs(heads_kv=1)[1:]], FLOATS)
    assert gpu.last.plan.packs_heads == (gpu.name == "sm_90")
    # No keys.
    run_forward([inputs()[0], *(x[:, :, :0] for x in inputs()[1:])], FLOATS)


@pytest.fixture(params=["sm_80", "sm_90"])
def packed_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakePacked:
    return faked_packed(request.param, monkeypatch)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("features", [{}, {"softcap": 0.7}], ids=str)
@pytest.mark.parametrize("turn", ["contiguous", "by sequence", "columns late", "expanded"])
def test_gradients_round_for_the_products_alone(
    bwd_gpu: FakeBackward, with_dlse: bool, features: dict[str, Any], turn: str
) -> None:
    how, tensors = FLOATS._replace(**features), inputs()
    out, lse, _ = general.general_fwd(*tensors, *how)
    dout = {
        "contiguous": normal(2, 4, 7, D, dtype=torch.float32),
        "by sequence": normal(2, 7, 4, D, dtype=torch.float32).transpose(1, 2),
        "columns late": normal(2, 4, D, 7, dtype=torch.float32).mT,
        "expanded": normal(1, 4, 7, D, dtype=torch.float32).expand(2, -1, -1, -1),
    }[turn]
    dlse = normal(2, 4, 7, dtype=torch.float32) if with_dlse else None
    given = (dout, dlse, *tensors, out, lse, *how)
    for found, expected in zip(general._bwd_cuda(*given), general._bwd_cpu(*given), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.03)
    before = bwd_gpu.arguments("bwd_preprocess")
    main = bwd_gpu.arguments(f"bwd_sm{bwd_gpu.name[3:]}")
    assert before[0].dtype == before[1].dtype == torch.float32
    assert torch.equal(before[1], dout) and main[3].dtype == torch.bfloat16 and main[3].is_contiguous()
    plan = bwd_gpu.bwd_plans[-1]
    assert plan.before(with_dlse).static.features.out_dtype and not plan.main.static.features.out_dtype
    assert plan.main.kernel.endswith("_general") == bool(features)


def test_packed_kernels(packed_gpu: FakePacked) -> None:
    how = how_of(LENGTHS, (None, 0), float_out=True)
    out, _, _ = general._fwd_cuda(*packed_tensors(LENGTHS), *how)
    assert out.dtype == torch.float32
    run_backward(packed_tensors(LENGTHS), how)
    before, main = packed_gpu.arguments("bwd_preprocess"), packed_gpu.arguments("bwd_sm")
    assert before[0].dtype == before[1].dtype == torch.float32 and main[3].dtype == torch.bfloat16
    run_packed(packed_tensors(LENGTHS), how._replace(float_out=False))


# Kernels

GATES = [
    ("sm90", "sm_90", 64, WINDOW, ()),
    ("sm90", "sm_90", 128, CAUSAL, ()),
    ("sm90", "sm_90", 256, WINDOW, ()),
    ("sm90", "sm_90", 128, WINDOW, ("softcap", "dropout")),
    ("sm90", "sm_90", 128, CAUSAL, ("varlen",)),
    ("sm80", "sm_80", 128, WINDOW, ()),
    ("sm80", "sm_86", 256, CAUSAL, ("softcap",)),
]


@pytest.mark.compiles
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_kernels_keep_everything_in_registers(gate: tuple[str, str, int, Band, tuple[str, ...]]) -> None:
    family, target, head_dim, band, names = gate
    features = Features(**dict.fromkeys((*names, "out_dtype"), True))
    problem = Problem(2, 8, 4, 1000, 1000, head_dim, "bfloat16", band, features=features)
    with use_kernels(family):
        key = plan(problem, ARCHS[target]).key
    found = kernel_resources(key)
    assert "_out_dtype" in found.symbol
    assert (found.spill_bytes, found.stack_bytes) == (0, 0) and found.serialised_wgmma == ()
    # From registers to global memory, 8 bytes at a time.
    assert found.sass["UTMASTG"] == 0
    if nvdisasm() is not None:
        assert found.sass["STG"] >= key.tile.head_dim // 4


@pytest.mark.compiles
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
def test_launches_are_as_planned(tmp_path: Path) -> None:
    requests = [
        Request("sm_80", 3, 6, 2, 300, 77, 64, features=["out_dtype"]),
        Request("sm_90", 2, 4, 2, 1000, 1000, 64, right=0, family="sm90", features=["out_dtype"]),
        Request("sm_90", 17, 50, 10, 20, 33, 64, family="sm90", is_packed=True, features=["out_dtype"]),
    ]
    for request, answer in zip(requests, capture(requests, tmp_path), strict=True):
        the_plan = request.plan()
        assert answer.grid == (the_plan.num_blocks, 1, 1)
        assert answer.smem_bytes == the_plan.tile.smem_bytes
