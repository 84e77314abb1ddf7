"""`attn` and `supports` on the CPU: values, layouts, masks, empty inputs, autocast, and errors before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import cute_flash
from cute_flash import UnsupportedError, attn, reference, supports
from cute_flash.spec.band import Band
from tests.combinations import normal
from tests.definition import attention

CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 2e-6}, torch.float64: {"rtol": 1e-12, "atol": 1e-13}}


def qkv(
    heads: int = 4, heads_kv: int = 4, sq: int = 7, sk: int = 7, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, heads, sq, 8), (2, heads_kv, sk, 8), (2, heads_kv, sk, 8))
    return tuple(normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))  # type: ignore[return-value]


# ---- values and layouts


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_is_sdpa_in_every_layout(dtype: torch.dtype, causal: bool, scale: float | None) -> None:
    q, k, v = qkv(dtype=dtype, sq=33, sk=33)
    expected = sdpa(q, k, v, is_causal=causal, scale=scale)
    options: dict[str, Any] = {"causal": causal, "scale": scale}

    def check(found: Tensor, part: Tensor) -> None:
        assert found.dtype == dtype
        torch.testing.assert_close(found, part, **CLOSE[dtype])

    check(attn(q, k, v, **options), expected)
    bshd = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    check(attn(*bshd, layout="bshd", **options), expected.transpose(1, 2))
    check(attn(q[:, 1], k[:, 1], v[:, 1], **options), expected[:, 1])
    check(attn(q[1, 2], k[1, 2], v[1, 2], **options), expected[1, 2])
    # `layout` has no effect on tensors of fewer than four dimensions.
    check(attn(q[:, 1], k[:, 1], v[:, 1], layout="bshd", **options), expected[:, 1])


@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 4), (4, 2), (6, 3), (5, 1)])
def test_grouped_heads_are_sdpa_with_enable_gqa(heads: int, heads_kv: int) -> None:
    q, k, v = qkv(heads=heads, heads_kv=heads_kv, sq=9, sk=13)
    torch.testing.assert_close(attn(q, k, v), sdpa(q, k, v, enable_gqa=True), **CLOSE[q.dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_dtype_and_an_fp32_lse(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype, sq=20, sk=30)
    out, lse = attn(q, k, v, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    expected = sdpa(q.double(), k.double(), v.double())
    # The error of one rounding, for values below 4.
    assert (out.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps / 2


def test_lse_follows_the_dimensions() -> None:
    q, k, v = qkv(sq=5, sk=6)
    _, lse = attn(q, k, v, return_lse=True)
    assert lse.dtype == torch.float64
    torch.testing.assert_close(lse, (q @ k.mT / math.sqrt(8)).logsumexp(-1), **CLOSE[q.dtype])
    bshd = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attn(*bshd, layout="bshd", return_lse=True)[1], lse)
    for part in ((slice(None), 1), (0, 1)):
        one_head = attn(q[part], k[part], v[part], return_lse=True)[1]
        torch.testing.assert_close(one_head, lse[part], **CLOSE[q.dtype])


STRIDED = {
    "contiguous": lambda: normal(2, 4, 7, 8),
    "transposed heads": lambda: normal(2, 7, 4, 8).transpose(1, 2),
    "one of qkv": lambda: normal(2, 7, 3, 4, 8).permute(2, 0, 3, 1, 4)[1],
    "every second row": lambda: normal(2, 4, 14, 8)[:, :, ::2],
    "columns of a wider row": lambda: normal(2, 4, 7, 24)[..., 3:11],
    "last dim not contiguous": lambda: normal(2, 4, 8, 7).mT,
    "sequence outermost": lambda: normal(7, 2, 4, 8).permute(1, 2, 0, 3),
    "expanded heads": lambda: normal(2, 1, 7, 8).expand(2, 4, 7, 8),
    "expanded batch": lambda: normal(1, 4, 7, 8).expand(2, 4, 7, 8),
    "expanded rows": lambda: normal(2, 4, 1, 8).expand(2, 4, 7, 8),
    "odd storage offset": lambda: normal(2 * 4 * 7 * 8 + 3)[3:].view(2, 4, 7, 8),
}


@pytest.mark.parametrize("q_name", STRIDED)
@pytest.mark.parametrize("k_name", ["contiguous", "last dim not contiguous", "expanded heads", "every second row"])
def test_any_strides(q_name: str, k_name: str) -> None:
    q, k, v = STRIDED[q_name](), STRIDED[k_name]() + 0.25, STRIDED[k_name]() - 0.5
    before = [x.clone() for x in (q, k, v)]
    out, lse = attn(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = attn(*before, causal=True, return_lse=True)
    # Strides do not change the order of sums, so results are equal bit by bit.
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    # out is dense, in the stride order of q.
    assert out.stride() == torch.empty_like(q).stride()
    assert lse.is_contiguous()
    for x, old in zip((q, k, v), before, strict=True):
        assert torch.equal(x, old)


def test_output_layout_follows_q_in_bshd() -> None:
    packed = normal(2, 7, 3, 4, 8)
    q, k, v = packed.unbind(2)
    out = attn(q, k, v, layout="bshd")
    assert out.shape == (2, 7, 4, 8)
    assert out.is_contiguous()
    assert torch.equal(out, attn(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2))
    bhsd_in_bshd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert attn(*bhsd_in_bshd, layout="bshd").stride() == bhsd_in_bshd[0].stride()


# ---- masks


@pytest.mark.slow
@pytest.mark.parametrize(("sq", "sk"), [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("left", [None, 0, 2, 100])
@pytest.mark.parametrize("right", [None, 0, 3, 100])
def test_mask_is_the_documented_inequality(sq: int, sk: int, causal: bool, left: int | None, right: int | None) -> None:
    for chunk in (None, 0, 1, 3, 4, 1 << 40):
        q, k, v = (x.requires_grad_() for x in qkv(heads=2, heads_kv=1, sq=sq, sk=sk))
        options = {"causal": causal, "window": (left, right), "attention_chunk": chunk}
        out, lse = attn(q, k, v, **options, return_lse=True)
        expected = attention(q, k, v, options)
        torch.testing.assert_close((out, lse), expected, **CLOSE[q.dtype])
        empty = lse == -torch.inf
        assert torch.all(out[empty] == 0) and torch.isfinite(lse[~empty]).all()
        for x, y in zip(*(torch.autograd.grad(one.square().sum(), (q, k, v)) for one in (out, expected[0]))):
            torch.testing.assert_close(x, y, **CLOSE[q.dtype])


def test_a_window_may_be_wider_than_any_tensor() -> None:
    q, k, v = qkv(sq=5, sk=9)
    assert torch.equal(attn(q, k, v, window=((1 << 62), (1 << 62))), attn(q, k, v))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((0, 2, 3, 8), (0, 2, 5, 8)),
        ((2, 0, 3, 8), (2, 0, 5, 8)),
        ((2, 2, 0, 8), (2, 2, 5, 8)),
        ((2, 2, 3, 8), (2, 2, 0, 8)),
        ((2, 2, 0, 8), (2, 2, 0, 8)),
        ((2, 4, 3, 8), (2, 2, 0, 8)),
    ],
)
def test_empty(q_shape: tuple[int, ...], k_shape: tuple[int, ...], return_lse: bool) -> None:
    q, k, v = (normal(*shape).requires_grad_() for shape in (q_shape, k_shape, k_shape))
    out, lse = attn(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, torch.zeros(q_shape, dtype=torch.float64))
    assert torch.equal(lse, torch.full(q_shape[:3], -torch.inf, dtype=torch.float64))
    (lse if return_lse else out).sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("scale", [-0.7, -1.0, 0.0, 0, 1e-40, 3])
def test_any_finite_scale(scale: float) -> None:
    q, k, v = qkv(sq=5, sk=9)
    found = attn(q, k, v, scale=scale, causal=True, return_lse=True)
    torch.testing.assert_close(found, attention(q, k, v, {"scale": scale, "causal": True}), **CLOSE[q.dtype])


# ---- calls that `supports` answers yes to; `test_bad_input` has the others


@dataclass(frozen=True)
class Call:
    """The shapes and options of a call."""

    name: str
    q: tuple[int, ...] = (2, 4, 7, 8)
    k: tuple[int, ...] = (2, 2, 9, 8)
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)


SUPPORTED = [
    Call("gqa"),
    Call("mqa", k=(2, 1, 9, 8)),
    Call("fp16", dtype=torch.float16),
    Call("fp64", dtype=torch.float64),
    Call("bshd", q=(2, 7, 4, 8), k=(2, 9, 2, 8), options={"layout": "bshd"}),
    Call("3-D", q=(2, 7, 8), k=(2, 9, 8)),
    Call("2-D", q=(7, 8), k=(9, 8)),
    Call("odd head dim", q=(2, 4, 7, 5), k=(2, 2, 9, 5)),
    Call("wide head dim", q=(1, 1, 3, 300), k=(1, 1, 3, 300)),
    Call("head dim 0", q=(1, 1, 3, 0), k=(1, 1, 3, 0)),
    Call("no batch", q=(0, 4, 7, 8), k=(0, 2, 9, 8)),
    Call("no keys", k=(2, 2, 0, 8)),
    Call("no heads", q=(2, 0, 7, 8), k=(2, 0, 9, 8)),
    Call("half window", options={"window": [None, 4], "causal": True}),
    Call("scale negative", options={"scale": -2.5}),
    Call("chunk", options={"attention_chunk": 4, "window": (2, None)}),
    Call("no chunk", options={"attention_chunk": 0}),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("call", SUPPORTED, ids=lambda call: call.name)
def test_supported_calls_work(call: Call, device: str) -> None:
    q, k, v = (torch.ones(shape, dtype=call.dtype, device=device) for shape in (call.q, call.k, call.k))
    assert supports(q, k, v, **call.options) == cute_flash.Support(True)
    out = attn(q, k, v, **call.options)
    assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)


def test_forward_mode_is_refused_and_not_silently_zero() -> None:
    q, k, v = qkv()
    for position in range(3):
        with pytest.raises(UnsupportedError, match="forward-mode differentiation of attn: use reverse mode"):
            torch.func.jvp(
                lambda x, position=position: attn(*(q, k, v)[:position], x, *(q, k, v)[position + 1 :]),
                ((q, k, v)[position],),
                (torch.ones_like(q),),
            )
    with torch.autograd.forward_ad.dual_level():
        # No tensor has a tangent.
        torch.testing.assert_close(attn(q, k, v), sdpa(q, k, v), **CLOSE[q.dtype])


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_sdpa_does(dtype: torch.dtype) -> None:
    """q, k and v are cast to the autocast dtype; other tensors are not."""
    q, k, v = (x.requires_grad_() for x in qkv(dtype=torch.float32, sq=20, sk=30))
    with torch.autocast("cpu", dtype=dtype):
        out, lse = attn(q, k, v, return_lse=True)
        assert out.dtype == sdpa(q, k, v).dtype == dtype and lse.dtype == torch.float32
        sinks, slopes = (normal(4, dtype=torch.float32, seed=i).requires_grad_() for i in (5, 6))
        others = attn(q, k, v, sinks=sinks, alibi=slopes)
    expected, expected_lse = attn(*(x.to(dtype) for x in (q, k, v)), return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert torch.equal(others, attn(*(x.to(dtype) for x in (q, k, v)), sinks=sinks, alibi=slopes))
    grads = torch.autograd.grad(others.sum(), (q, k, v, sinks, slopes), retain_graph=True)
    assert all(grad.dtype == torch.float32 for grad in grads)
    with torch.autocast("cpu", dtype=dtype):
        assert all(map(torch.equal, torch.autograd.grad(others.sum(), (q, k, v, sinks, slopes)), grads))


def test_out_dtype_is_compared_with_the_autocast_dtype() -> None:
    """An fp32 output is not dropped because q was fp32 before the cast."""
    q, k, v = qkv(dtype=torch.float32, sq=20, sk=30)
    rounded = [x.bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attn(q, k, v, out_dtype=torch.float32)
        assert torch.equal(attn(q, k, v, out_dtype=torch.bfloat16), attn(q, k, v))
        with pytest.raises(UnsupportedError, match=r"use None, torch\.float32, or torch\.bfloat16, the dtype of q"):
            attn(q, k, v, out_dtype=torch.float16)
    assert out.dtype == torch.float32 and torch.equal(out, attn(*rounded, out_dtype=torch.float32))
    with pytest.raises(UnsupportedError, match=r"out_dtype=torch\.float16: use None or torch\.float32$"):
        attn(q, k, v, out_dtype=torch.float16)


def test_autocast_leaves_doubles_and_other_devices_alone() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attn(q, k, v).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert attn(*(x.float() for x in (q, k, v))).dtype == torch.float32
        meta = torch.empty(1, 2, 3, 8, device="meta")
        assert attn(meta, meta, meta).dtype == torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert attn(*(x.float() for x in (q, k, v))).dtype == torch.float32


def test_autocast_makes_unequal_dtypes_agree() -> None:
    q, k, v = qkv(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"k is torch\.bfloat16 and q is torch\.float32"):
        attn(q, k.bfloat16(), v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert supports(q, k.bfloat16(), v)
        assert torch.equal(attn(q, k.bfloat16(), v), attn(*(x.bfloat16() for x in (q, k, v))))


# ---- fp32 outputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_outputs_are_not_rounded(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype, sk=9)
    rounded, lse = attn(q, k, v, causal=True, return_lse=True)
    out, same_lse = attn(q, k, v, causal=True, return_lse=True, out_dtype=torch.float32)
    assert out.dtype == torch.float32 and torch.equal(lse, same_lse)
    assert torch.equal(out.to(dtype), rounded) and not torch.equal(out, rounded.float())
    oracle, _ = reference.dense(q.double(), k.double(), v.double(), Band(None, 0))
    torch.testing.assert_close(out.double(), oracle, rtol=1e-5, atol=1e-6)


def test_fp32_outputs_in_other_layouts_and_widths() -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in qkv(dtype=torch.bfloat16))
    out = attn(q, k, v[..., :4], layout="bshd", out_dtype=torch.float32)
    assert isinstance(out, Tensor)
    assert (out.shape, out.dtype) == ((*q.shape[:3], 4), torch.float32) and out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_of_q_is_the_default_of_the_output(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    assert torch.equal(attn(q, k, v, out_dtype=dtype), attn(q, k, v))
    assert torch.equal(attn(q, k, v, out_dtype=None), attn(q, k, v))


def test_gradients_of_fp32_outputs() -> None:
    """The backward uses the unrounded output and its unrounded gradient."""
    leaves = [x.requires_grad_() for x in qkv(dtype=torch.float32)]
    dout = normal(2, 4, 7, 8, dtype=torch.float32)
    exact = torch.autograd.grad(attn(*leaves, causal=True), leaves, dout)
    rounded = [x.detach().bfloat16().requires_grad_() for x in leaves]
    out = attn(*rounded, causal=True, out_dtype=torch.float32)
    for grad, expected in zip(torch.autograd.grad(out, rounded, dout), exact, strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.float(), expected, rtol=0.02, atol=0.02)
