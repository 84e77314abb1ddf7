"""torch's SDPA with the kernels of cute_flash, against its math backend: `integrations.sdpa` on a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from cute_flash import UnsupportedError
from cute_flash.integrations.sdpa import activate, restore, sdpa
from tests.gpu.captured import Captured

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="needs torch 2.10 or later"
    ),
]
# dtype, query heads, K/V heads, S, D, keywords.
CASES = [
    pytest.param(torch.bfloat16, 4, 4, 515, 64, {}, id="plain"),
    pytest.param(torch.float16, 8, 2, 640, 128, {"is_causal": True, "enable_gqa": True, "scale": 0.1}, id="causal gqa"),
    pytest.param(torch.bfloat16, 2, 2, 300, 256, {"is_causal": True}, id="D = 256"),
    pytest.param(torch.bfloat16, 3, 3, 257, 36, {"is_causal": True}, id="D not a multiple of 8"),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def tensors(dtype: torch.dtype, heads: int, heads_kv: int, seqlen: int, head_dim: int) -> list[Tensor]:
    """q, k and v, (2, H, S, D), as models have them: views of (2, S, H, D)."""
    sizes = (heads, heads_kv, heads_kv)
    return [
        torch.randn(2, seqlen, h, head_dim, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_() for h in sizes
    ]


def small() -> list[Tensor]:
    return tensors(torch.bfloat16, 4, 4, 256, 64)


def results(call: Callable[..., Tensor], qkv: list[Tensor], seed: int | None = None) -> list[Tensor]:
    """out, dq, dk and dv. The gradients are computed in this thread, where `use_kernels` selects the family."""
    if seed is not None:
        torch.manual_seed(seed)
    with torch.autograd.set_multithreading_enabled(False):
        out = call(*qkv)
        return [out, *torch.autograd.grad(out, qkv, direction_of(out))]


def direction_of(out: Tensor) -> Tensor:
    return torch.cos(torch.arange(out.numel(), device="cuda")).reshape(out.shape).to(out.dtype)


def of_math(qkv: list[Tensor], dtype: torch.dtype | None = None, **keywords: Any) -> list[Tensor]:
    qkv = [x.detach().to(dtype or x.dtype).requires_grad_() for x in qkv]
    with sdpa_kernel(SDPBackend.MATH):
        return results(lambda *qkv: scaled_dot_product_attention(*qkv, **keywords), qkv)


def assert_as_good_as_math(found: list[Tensor], qkv: list[Tensor], **keywords: Any) -> None:
    """Errors against the math backend in fp64 are at most four times those of the math backend in the same dtype."""
    wanted, rounded = of_math(qkv, torch.float64, **keywords), of_math(qkv, **keywords)
    for name, x, y, exact in zip(("out", "dq", "dk", "dv"), found, rounded, wanted, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        error, allowed = ((z.double() - exact).abs().max().item() for z in (x, y))
        assert error <= 4 * allowed + 1e-3 * exact.abs().max().item(), f"{name}: {error} against {allowed} of math"


def ops_of(call: Callable[[], Any]) -> tuple[set[str], set[str]]:
    """The operators and the kernels of a call."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    events = profile.events()
    kernels = {x.name for x in events if x.device_type == torch.autograd.DeviceType.CUDA}
    return {x.name for x in events if x.name.startswith(("aten::", "cute_flash::"))}, kernels


def is_ours(call: Callable[[], Any]) -> bool:
    return "cute_flash::attention_fwd" in ops_of(call)[0]


# ---- results


@pytest.mark.parametrize(("dtype", "heads", "heads_kv", "seqlen", "head_dim", "keywords"), CASES)
def test_forward_and_gradients(family, dtype, heads, heads_kv, seqlen, head_dim, keywords) -> None:  # type: ignore[no-untyped-def]
    qkv = tensors(dtype, heads, heads_kv, seqlen, head_dim)
    with sdpa(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = results(lambda *qkv: scaled_dot_product_attention(*qkv, **keywords), qkv)
    assert_as_good_as_math(found, qkv, **keywords)
    if head_dim % 8 == 0:
        assert [x.stride() for x in found] == [x.stride() for x in (qkv[0], *qkv)]


def test_more_queries_than_keys() -> None:
    q, k, v = small()
    qkv = [q, k[:, :, :77], v[:, :, :77]]
    with sdpa(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = results(scaled_dot_product_attention, qkv)
    assert_as_good_as_math(found, qkv)


def test_our_kernels_run() -> None:
    qkv = small()
    with sdpa():
        results(scaled_dot_product_attention, qkv)  # compile and load the kernels
        names, kernels = ops_of(lambda: results(scaled_dot_product_attention, qkv))
    assert {
        "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_backward",
        "cute_flash::attention_fwd", "cute_flash::attention_bwd",
    } <= names  # fmt: skip
    assert not [x for x in kernels if "pytorch_flash" in x or "cudnn" in x or "fmha" in x], kernels


def test_nothing_changes_after_the_exit() -> None:
    qkv = [x.detach() for x in small()]

    def attend() -> Tensor:
        return scaled_dot_product_attention(*qkv, is_causal=True)

    attend()  # torch sets its priority order at the first call
    order, before, names = torch._C._get_sdp_priority_order(), attend(), ops_of(attend)
    with sdpa():
        assert is_ours(attend)
        with pytest.raises(KeyError), sdpa():
            raise KeyError
        assert is_ours(attend)
    assert torch._C._get_sdp_priority_order() == order
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert ops_of(attend) == names
    assert torch.equal(attend(), before)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert not is_ours(attend)


def test_activate_needs_the_backend() -> None:
    qkv = [x.detach() for x in small()]
    activate()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            assert is_ours(lambda: scaled_dot_product_attention(*qkv))
        with sdpa_kernel(SDPBackend.MATH):
            assert not is_ours(lambda: scaled_dot_product_attention(*qkv))
    finally:
        restore()


FIRST_CALL = """
import torch
from torch.nn.functional import scaled_dot_product_attention
from cute_flash.integrations.sdpa import sdpa
x = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
with sdpa(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    scaled_dot_product_attention(x, x, x)
print(any(event.key == "cute_flash::attention_fwd" for event in profile.key_averages()))
"""


@pytest.mark.processes
def test_the_first_sdpa_call_of_a_process() -> None:
    """torch sets its order of backends at the first call, which must not put cuDNN before the kernels of cute_flash."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True" and "overrid" not in done.stderr


# ---- dropout


def test_gradients_have_the_dropout_mask_of_the_forward(family: str) -> None:
    """v is the identity, so that out is the matrix of the remaining weights."""
    q, k, _ = tensors(torch.bfloat16, 2, 2, 64, 64)
    v = torch.eye(64, device="cuda", dtype=torch.bfloat16).expand(2, 2, -1, -1).contiguous().requires_grad_()
    qkv = [q, k, v]

    def attend(*qkv: Tensor) -> Tensor:
        return scaled_dot_product_attention(*qkv, dropout_p=0.3)

    with sdpa(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found, again = results(attend, qkv, seed=1), results(attend, qkv, seed=1)
        assert torch.equal(found[0], again[0])
        assert not torch.equal(found[0], results(attend, qkv, seed=2)[0])
    kept = found[0].detach() != 0
    assert 0.65 < kept.float().mean() < 0.75
    exact = [x.detach().float().requires_grad_() for x in qkv]
    weights = torch.softmax(exact[0] @ exact[1].mT / 8, -1) * kept / 0.7
    wanted = results(lambda *_: weights @ exact[2], exact)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.float(), y, rtol=3e-2, atol=2e-2 * float(y.abs().max()))


def test_dropout_needs_one_implementation_for_both_passes() -> None:
    qkv = small()

    def attend() -> Tensor:
        return scaled_dot_product_attention(*qkv, dropout_p=0.3)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        of_torch = attend()
        with sdpa():
            ours = attend()
            with pytest.raises((UnsupportedError, RuntimeError), match=r"rng_state is torch\.uint64"):
                of_torch.sum().backward()
        with pytest.raises(RuntimeError, match="scalar type"):
            ours.sum().backward()


def test_dropout_in_a_cuda_graph() -> None:
    qkv = [x.detach() for x in small()]
    with sdpa():
        captured = Captured.of(lambda: scaled_dot_product_attention(*qkv, dropout_p=0.5))
    first = captured.replay().clone()
    assert not torch.equal(captured.replay(), first)


# ---- inside torch


@pytest.mark.compiles
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_compile(dropout_p: float) -> None:
    """The operators are part of the graph, so that eager and compiled calls have the same dropout masks."""
    qkv = small()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q * 2, k, v, dropout_p=dropout_p, is_causal=True) + 1

    torch.compiler.reset()
    with sdpa():
        compiled = torch.compile(attend, fullgraph=True)
        results(compiled, qkv)
        assert is_ours(lambda: compiled(*qkv))
        found, wanted = (results(function, qkv, seed=3) for function in (compiled, attend))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=1e-2 * float(y.abs().max()))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_repeats_the_dropout_mask(use_reentrant: bool) -> None:
    qkv = small()

    def attend(*qkv: Tensor) -> Tensor:
        return scaled_dot_product_attention(*qkv, dropout_p=0.3)

    with sdpa():
        wanted = results(attend, qkv, seed=4)
        torch.manual_seed(4)
        out = checkpoint(attend, *qkv, use_reentrant=use_reentrant)
        out.backward(direction_of(out))
    for x, y in zip([out, *(x.grad for x in qkv)], wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=1e-2 * float(y.abs().max()))


def test_autocast() -> None:
    qkv = [x.detach().float().requires_grad_() for x in small()]
    with sdpa(), torch.autocast("cuda", dtype=torch.bfloat16):
        found = results(scaled_dot_product_attention, qkv)
        assert is_ours(lambda: scaled_dot_product_attention(*qkv))
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    for x, y in zip(found, of_math(qkv), strict=True):
        torch.testing.assert_close(x.float(), y, rtol=3e-2, atol=2e-2 * float(y.abs().max()))


def test_calls_of_other_backends_still_work() -> None:
    """fp32, masks and a top-left causal mask with Sq ≠ Sk are not for torch's flash attention."""
    q, k, v = (x.detach() for x in small())
    mask = torch.rand(256, 256, device="cuda") < 0.5
    with sdpa():
        for call in (
            lambda: scaled_dot_product_attention(q.float(), k.float(), v.float()),
            lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask),
            lambda: scaled_dot_product_attention(q[:, :, :9], k, v, is_causal=True),
        ):
            assert not is_ours(call)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
            scaled_dot_product_attention(q, k, v, attn_mask=mask)


# ---- varlen


def test_jagged_nested_tensors() -> None:
    lengths = (100, 7, 300)
    parts = [torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in lengths]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    x = nested.transpose(1, 2)
    with sdpa():
        out = scaled_dot_product_attention(x, x, x, is_causal=True)
        assert is_ours(lambda: scaled_dot_product_attention(x, x, x, is_causal=True))
        out.transpose(1, 2).values().float().square().sum().backward()
    leaves = [part.detach().requires_grad_() for part in parts]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = [scaled_dot_product_attention(*[y.transpose(0, 1)[None]] * 3, is_causal=True)[0] for y in leaves]
    sum(y.float().square().sum() for y in wanted).backward()
    for found, gradient, y, leaf in zip(out.unbind(), nested.grad.unbind(), wanted, leaves, strict=True):
        torch.testing.assert_close(found, y, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(gradient, leaf.grad, rtol=3e-2, atol=2e-2 * float(leaf.grad.abs().max()))


def test_varlen_attn() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    cu = torch.tensor([0, 100, 107, 407], device="cuda", dtype=torch.int32)
    qkv = [torch.randn(407, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    with sdpa():
        found = results(lambda *qkv: varlen.varlen_attn(*qkv, cu, cu, 300, 300), qkv)
        assert is_ours(lambda: varlen.varlen_attn(*(x.detach() for x in qkv), cu, cu, 300, 300))

    def one_by_one(*qkv: Tensor) -> Tensor:
        parts = zip(*(x.transpose(0, 1).split([100, 7, 300], 1) for x in qkv))
        return torch.cat([scaled_dot_product_attention(*(x[None] for x in part))[0] for part in parts], 1).transpose(
            0, 1
        )

    with sdpa_kernel(SDPBackend.MATH):
        wanted = results(one_by_one, qkv)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=3e-2, atol=2e-2 * float(y.abs().max()))
