"""Answers for a GPU that is not there are those that calls on it get: the same result, or the same error message."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_flash import attn, attn_decode, decode_supports, supports, use_kernels
from cute_flash.spec.arch import ARCHS
from tests.fakes.cuda import claiming_cuda
from tests.fakes.gpu import fake_gpu

Shape = tuple[int, ...]
TABLE = torch.nn.Parameter(torch.zeros(64))


class Call(NamedTuple):
    name: str
    q: Shape = (1, 2, 16, 64)
    k: Shape = (1, 2, 16, 64)
    dtype: torch.dtype = torch.bfloat16
    requires_grad: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012
    context: Callable[[], AbstractContextManager] = nullcontext
    head_dim_v: int | None = None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        of_v = (*self.k[:3], self.head_dim_v or self.k[3])
        q, k, v = (torch.ones(shape, dtype=self.dtype) for shape in (self.q, self.k, of_v))
        return q.requires_grad_(self.requires_grad), k, v


def wide(head_dim: int, **fields: Any) -> Call:
    shape = (1, 2, 16, head_dim)
    return Call(" ".join(["head dim", str(head_dim), *map(str, fields.values())]), shape, shape, **fields)


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[(q_idx - kv_idx).clamp(0, 63)]


FP32 = torch.float32
SM80, SM90 = (partial(use_kernels, family) for family in ("sm80", "sm90"))
CALLS = [
    Call("plain"),
    Call("gradients", requires_grad=True),
    Call("no keys", k=(1, 2, 0, 64)),
    Call("no keys by a family", k=(1, 2, 0, 64), context=SM90),
    Call("heads do not divide", k=(1, 3, 16, 64)),
    wide(256, requires_grad=True),
    wide(100),
    wide(512, requires_grad=True),
    wide(520),
    wide(520, dtype=FP32),
    wide(584, head_dim_v=512),
    wide(576, head_dim_v=512),
    wide(576, head_dim_v=512, requires_grad=True),
    wide(128, dtype=FP32, requires_grad=True),
    wide(256, dtype=FP32),
    wide(64, dtype=torch.float64),
    Call("few queries", q=(1, 2, 1, 64), k=(1, 2, 600, 64)),
    Call("batch_invariant", options={"batch_invariant": True}),
    Call("softcap too large", options={"softcap": 2e4}),
    Call("wrong dropout", options={"dropout": 1.5}),
    Call("wrong slopes", options={"alibi": torch.ones(3)}),
    Call("fp32 score_mod", dtype=FP32, options={"score_mod": lambda s, b, h, i, j: s * 0.5}),
    Call("fp32 score_mod, gradients", dtype=FP32, requires_grad=True, options={"score_mod": relative}),
    Call("family sm80", context=SM80, requires_grad=True),
    Call("family sm90", context=SM90),
    Call("family sm90, fp32", context=SM90, dtype=FP32),
    Call(
        "family sm90, deterministic gradients of captured tensors",
        context=SM90,
        options={"deterministic": True, "score_mod": relative},
    ),
]


def result(call: Callable[[], Any]) -> str:
    """The error message of a call; "" if it runs."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_90", "sm_120"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_the_answer_is_that_of_the_gpu(call: Call, name: str) -> None:
    with call.context():
        answers = [supports(*call.tensors(), **call.options, gpu=gpu) for gpu in (name, ARCHS[name].gpu)]
        with fake_gpu(name) as gpu, claiming_cuda():
            answers.append(supports(*call.tensors(), **call.options))
            assert not gpu.launches
            expected = result(lambda: attn(*call.tensors(), **call.options))
            assert expected or gpu.launches or not call.k[2]
    assert [answer.reason for answer in answers] == [expected] * 3
    assert [bool(answer) for answer in answers] == [not expected] * 3


def test_answers_differ_where_gpus_do() -> None:
    x = torch.ones(1, 2, 16, 64, dtype=torch.bfloat16)
    with use_kernels("sm90"):
        answers = {name: bool(supports(x, x, x, gpu=name)) for name in ARCHS}
    assert answers == {name: name == "sm_90" for name in ARCHS}
    assert not supports(x, x, x, batch_invariant=True) and supports(x, x, x, batch_invariant=True, gpu="GB10")


def test_shapes_on_the_meta_device_are_enough() -> None:
    x = torch.empty(8, 64, 1 << 17, 128, dtype=torch.bfloat16, device="meta")
    assert supports(x, x, x, causal=True, gpu="H200")
    wide = torch.empty(8, 64, 1 << 17, 520, dtype=torch.bfloat16, device="meta")
    assert supports(wide, wide, wide) and "head_dim=520" in supports(wide, wide, wide, gpu="H200").reason


def test_autocast_is_that_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 tensors of head dim 256 are supported under autocast, which casts them."""
    x = torch.ones(1, 2, 16, 256)
    enabled = {"cpu": False, "cuda": True}
    monkeypatch.setattr(torch, "is_autocast_enabled", enabled.__getitem__)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)
    assert supports(x, x, x, gpu="A100")
    enabled.update(cpu=True, cuda=False)
    assert "at most 128" in supports(x, x, x, gpu="A100").reason


@pytest.mark.parametrize("ask", [supports, decode_supports])
def test_an_unknown_gpu_is_a_reason(ask: Callable[..., Any]) -> None:
    x = torch.ones(1, 2, 16, 64)
    for gpu, part in (("T4", "architecture 'T4': use one of sm_80"), ("B200", "FlashAttention-4"), (0, "'0': use")):
        assert part in ask(x, x, x, gpu=gpu).reason


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_90", "sm_120"])
@pytest.mark.parametrize("head_dim", [64, 100, 256, 512, 520])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32])
def test_decoding(dtype: torch.dtype, head_dim: int, name: str) -> None:
    q, cache = torch.ones(2, 1, 4, head_dim, dtype=dtype), torch.ones(2, 64, 2, head_dim, dtype=dtype)
    ask = partial(decode_supports, q, cache, cache, cache_seqlens=64)
    answers = [ask(gpu=name), ask(gpu=ARCHS[name].gpu)]
    with fake_gpu(name), claiming_cuda():
        answers.append(ask())
        expected = result(lambda: attn_decode(q, cache, cache, cache_seqlens=64))
    assert [answer.reason for answer in answers] == [expected] * 3
    assert bool(expected) == (dtype == FP32 or head_dim in (100, 520))
