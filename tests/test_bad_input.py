"""Wrong arguments: `attn` raises an error that names the argument, before any work, and `supports` gives the reason."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError, attn, attn_nested, attn_varlen, supports
from cute_flash.reference import tiled

S = 16
OFFSETS = torch.tensor([0, 6, S], dtype=torch.int32)
LEARNED = torch.nn.Parameter(torch.tensor(0.5))
Shape = tuple[int, ...]


def qkv() -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, 2, S, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "forward", lambda *_: pytest.fail("computed"))


def assert_refused(message: str, error: type[Exception], *tensors: Any, **keywords: Any) -> str:
    """Assert that `attn` raises this error, and `supports` answers no; return the reason of `supports`."""
    with pytest.raises(error, match=message) as raised:
        attn(*tensors, **keywords)
    assert isinstance(raised.value, UnsupportedError) == (error is UnsupportedError)
    answer = supports(*tensors, **keywords)
    # For 4-D tensors beside 3-D ones, `attn` raises another message than `supports`.
    assert not answer and (answer.reason == str(raised.value) or message.startswith("k (has"))
    return answer.reason


WRONG = [
    (dict(scale="1"), "scale='1' is a str: give a number"),
    (dict(scale=[1.0]), r"scale=\[1.0\] is a list"),
    (dict(scale=True), "scale=True is a bool"),
    (dict(scale=torch.ones(2)), r"scale is a torch.float32 tensor of shape \(2,\)"),
    (dict(scale=math.nan), "scale=nan is not finite"),
    (dict(scale=-math.inf), "scale=-inf is not finite"),
    (dict(softcap="x"), "softcap='x' is a str"),
    (dict(softcap=-1.0), "softcap=-1.0: use a positive number"),
    (dict(softcap=math.nan), "softcap=nan"),
    (dict(softcap=math.inf), "softcap=inf"),
    (dict(window=("a", 0)), "window left='a' is a str: use a whole number of keys"),
    (dict(window=(1.5, 0)), "window left=1.5 is a float: use a whole number of keys"),
    (dict(window=(None, math.inf)), "window right=inf is a float: use a whole number of keys, or None"),
    (dict(window=(-1, 2)), "window left=-1 is negative: use None"),
    (dict(window=(0, -1)), "window right=-1 is negative: use None"),
    (dict(window=(torch.ones(2), 0)), "window left="),
    (dict(window=3), r"window=3: give \(left, right\)"),
    (dict(window=None), r"window=None: give \(left, right\)"),
    (dict(window=(1, 2, 3)), r"window=\(1, 2, 3\): give \(left, right\)"),
    (dict(window=(4,)), r"window=\(4,\): give \(left, right\)"),
    (dict(window={1: 2}), "window="),
    (dict(attention_chunk=-4), "attention_chunk=-4: use a positive number of keys, or None or 0 for no chunks"),
    (dict(attention_chunk=2.5), "attention_chunk=2.5 is a float: use a whole number of keys"),
    (dict(attention_chunk=True), "attention_chunk=True is a bool"),
    (dict(dropout="x"), "dropout='x' is a str"),
    (dict(dropout=1.0), "dropout=1.0: use a probability from 0 up to, not including, 1"),
    (dict(dropout=-0.1), "dropout=-0.1"),
    (dict(dropout=math.nan), "dropout=nan"),
    (dict(causal="no"), "causal='no': give True or False"),
    (dict(deterministic="x"), "deterministic='x'"),
    (dict(deterministic=[]), r"deterministic=\[\]"),
    (dict(batch_invariant=2), "batch_invariant=2"),
    (dict(return_max_logit="y"), "return_max_logit='y'"),
    (dict(layout="sbhd"), "layout='sbhd': use one of bhsd, bshd"),
    (dict(layout=["bhsd"]), "layout="),
    (dict(alibi=[1.0, 2.0]), "alibi is a list: give a tensor"),
    (dict(alibi=torch.ones(3)), r"alibi has shape \(3,\): expected \(2,\) or \(1, 2\)"),
    (dict(alibi=torch.ones(3, 2)), r"alibi has shape \(3, 2\)"),
    (dict(sinks=np.ones(2)), "sinks is a ndarray"),
    (dict(sinks=torch.ones(1, 2)), r"sinks has shape \(1, 2\): expected \(2,\)"),
    (dict(sinks=torch.ones(2, device="meta")), "sinks is on meta and q is on cpu"),
    (
        dict(bias=torch.ones(S, S + 1)),
        r"bias has shape \(16, 17\): it does not broadcast with \(B, H, Sq, Sk\) = \(1, 2, 16, 16\)",
    ),
    (
        dict(bias=torch.ones(1, 3, S, S)),
        r"bias has shape \(1, 3, 16, 16\): it does not broadcast with \(B, H, Sq, Sk\) = \(1, 2, 16, 16\)",
    ),
    (dict(bias=torch.ones(1, 1, 1, S, S)), r"bias has shape \(1, 1, 1, 16, 16\)"),
    (dict(bias=0.5), "bias is a float"),
    (dict(bias=torch.ones(S, S, dtype=torch.bool)), "bias is torch.bool: pass a mask as mask_mod"),
    (dict(score_mod_bwd=lambda g, s, b, h, i, j: g), "score_mod_bwd without score_mod"),
    (dict(block_mask=torch.ones(2, 2)), r"block_mask is a torch.Tensor: make one with cute_flash.BlockMask.of\("),
]
UNSUPPORTED = [
    (dict(scale=LEARNED), r"scale is a tensor that requires grad.*attn\(q \* scale"),
    (dict(softcap=LEARNED), "softcap is a tensor that requires grad.*score_mod"),
    (dict(out_dtype="float32"), "out_dtype=float32"),
    (dict(out_dtype=torch.float16), "out_dtype=torch.float16: use None or torch.float32"),
    (dict(batch_invariant=True), "batch_invariant on cpu: only on cuda"),
    (dict(sinks=torch.ones(2, dtype=torch.int32)), "sinks is torch.int32: use one of float16"),
    (dict(bias=torch.ones(S, S, dtype=torch.int64)), "bias is torch.int64: use one of float16"),
    (dict(score_mod=3), "score_mod is a int: give a function of"),
    (dict(mask_mod="causal"), "mask_mod is a str: give a function of"),
]
KEYWORDS = [(ValueError, *call) for call in WRONG] + [(UnsupportedError, *call) for call in UNSUPPORTED]


@pytest.mark.parametrize(
    ("error", "keywords", "message"), KEYWORDS, ids=[f"{i}-{'-'.join(call[1])}" for i, call in enumerate(KEYWORDS)]
)
def test_keywords(no_work: None, error: type[Exception], keywords: dict, message: str) -> None:
    assert assert_refused(message, error, *qkv(), **keywords)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    "value", [np.ones((1, 2, S, 8)), [[1.0]], (1, 2), {}, None, 3, math.nan, "q", b"", object()], ids=type
)
def test_not_tensors(no_work: None, place: int, value: object) -> None:
    tensors: list = list(qkv())
    tensors[place] = value
    assert_refused(f"{'qkv'[place]} is a .*: give a torch.Tensor", ValueError, *tensors)


# Name -> (q, k, v), of (B, H, S, D) unless the name says otherwise, and the error.
SHAPES: dict[str, tuple[tuple[Shape, Shape, Shape], str]] = {
    "batch": (((2, 4, 7, 8), *2 * [(3, 2, 9, 8)]), r"q has shape \(2, 4, 7, 8\) and k has \(3, 2, 9, 8\)"),
    "head dim": (((2, 4, 7, 8), *2 * [(2, 2, 9, 16)]), "batch and head dim must agree"),
    "v length": (((2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 8, 8)), r"k has shape \(2, 2, 9, 8\) and v has \(2, 2, 8, 8\)"),
    "heads": (((2, 4, 7, 8), *2 * [(2, 3, 9, 8)]), "q has 4 heads and k, v have 3: .* multiple"),
    "more kv heads": (((2, 4, 7, 8), *2 * [(2, 8, 9, 8)]), "q has 4 heads and k, v have 8"),
    "no kv heads": (((2, 4, 7, 8), *2 * [(2, 0, 9, 8)]), "q has 4 heads and k, v have 0"),
    "4-D with 3-D": (((2, 4, 7, 8), *2 * [(2, 9, 8)]), r"k (has shape )?\(2, 9, 8\)"),
    "3-D with 4-D": (((2, 7, 8), *2 * [(2, 2, 9, 8)]), r"q \(2, 7, 8\), k \(2, 2, 9, 8\)"),
    "5-D": (((1, 2, 4, 7, 8), *2 * [(2, 2, 9, 8)]), "must be 4-D"),
    "1-D": (((8,), (8,), (8,)), r"q \(8,\).* must be 4-D .*, 3-D .* or 2-D"),
    "0-D": (((), (), ()), "must be 4-D"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(no_work: None, name: str) -> None:
    shapes, message = SHAPES[name]
    assert_refused(message, ValueError, *map(torch.ones, shapes))


def test_the_layout_of_two_dimensions_is_checked_too(no_work: None) -> None:
    assert_refused("layout=''", ValueError, *(torch.ones(7, 8) for _ in range(3)), layout="")


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes(no_work: None, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    assert_refused(f"dtype {name} on cpu: use one of float16", UnsupportedError, *(x.to(dtype) for x in qkv()))


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [(Tensor.half, "is torch.float16 and q is torch.float32"), (lambda x: x.to("meta"), "is on meta and q is on cpu")],
    ids=["dtype", "device"],
)
def test_tensors_that_do_not_agree(no_work: None, place: int, change: Any, message: str) -> None:
    tensors = list(qkv())
    tensors[place] = change(tensors[place])
    assert_refused(f"{'qkv'[place]} {message}", ValueError, *tensors)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        attn(*qkv(), nonsense=1)  # type: ignore[call-arg]
    assert "nonsense" in supports(*qkv(), nonsense=1).reason


VARLEN = [
    (dict(cu_seqlens_q=torch.tensor([0, 4, 17]).int()), "cu_seqlens_q ends with 17: there are 16 tokens in q"),
    (dict(cu_seqlens_k=torch.tensor([1, 4, S]).int()), "cu_seqlens_k begins with 1: expected 0"),
    (dict(cu_seqlens_k=torch.tensor([0, 17, S]).int()), r"cu_seqlens_k\[2\]=16 is less than cu_seqlens_k\[1\]=17"),
    (dict(cu_seqlens_k=OFFSETS.long()), "cu_seqlens_k is torch.int64: use torch.int32"),
    (dict(cu_seqlens_k=OFFSETS[::2]), "cu_seqlens_q has 3 offsets and cu_seqlens_k has 2"),
    (dict(cu_seqlens_q=OFFSETS[None]), r"cu_seqlens_q has shape \(1, 3\): expected \(B \+ 1\)"),
    (dict(cu_seqlens_q=OFFSETS[:0]), r"cu_seqlens_q has shape \(0,\)"),
    (dict(cu_seqlens_q=OFFSETS.to("meta")), "cu_seqlens_q is on meta and q is on cpu"),
    (dict(cu_seqlens_q=[0, 6, S]), "cu_seqlens_q is a builtins.list: give a torch.Tensor"),
    (dict(seqused_k=torch.tensor([2, 11]).int()), r"seqused_k\[1\]=11: sequence 1 has 10 keys"),
    (dict(seqused_k=torch.tensor([-1, 1]).int()), r"seqused_k\[0\]=-1"),
    (dict(seqused_k=torch.tensor([3]).int()), "seqused_k has 1 lengths: expected 2, one for each sequence"),
    (dict(seqused_k=torch.tensor([3, 3])), "seqused_k is torch.int64: use torch.int32"),
    (dict(seqused_k=[3, 3]), "seqused_k is a builtins.list: give a torch.Tensor"),
    (dict(max_seqlen_q=6.0), "max_seqlen_q=6.0 is a float: give a whole number"),
    (dict(max_seqlen_k="6"), "max_seqlen_k='6'"),
    (dict(max_seqlen_q=-1), "max_seqlen_q=-1 is negative"),
    (dict(max_seqlen_q=9), "max_seqlen_q=9: sequence 1 has 10"),
    (dict(max_seqlen_k=9), "max_seqlen_k=9: sequence 1 has 10"),
    (dict(q=torch.zeros(1, S, 2, 8)), r"q has shape \(1, 16, 2, 8\): expected \(T, H, D\), the concatenated sequences"),
    (dict(q=torch.zeros(S, 3, 8)), "q has 3 heads and k, v have 2"),
    *((dict.fromkeys(name, 3), f"{name} is a builtins.int: give a torch.Tensor") for name in "qkv"),
    (dict(alibi=torch.zeros(3, 2)), r"alibi has shape \(3, 2\): expected \(2,\) or \(2, 2\)"),
    (dict(scale="1"), "scale='1'"),
    (dict(window=("a", 0)), "window left='a'"),
    (dict(attention_chunk=(4, 4)), r"attention_chunk=\(4, 4\)"),
    (dict(dropout=2.0), "dropout=2.0"),
    (dict(out_dtype=torch.float16), "out_dtype=torch.float16: use None or torch.float32"),
]


@pytest.mark.parametrize(("keywords", "message"), VARLEN, ids=[f"{i}-{'-'.join(w[0])}" for i, w in enumerate(VARLEN)])
def test_varlen(no_work: None, keywords: dict, message: str) -> None:
    call = {name: torch.ones(S, 2, 8) for name in "qkv"} | {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
    with pytest.raises(ValueError, match=message):
        attn_varlen(**call | keywords)


# ---- unusual values that are valid


@pytest.mark.parametrize("window", [(np.int64(3), 0), (torch.tensor(3), torch.tensor(0)), [3, 0]], ids=str)
def test_windows_of_integers(window: tuple) -> None:
    found = attn(*qkv(), window=window, attention_chunk=window[0])
    torch.testing.assert_close(found, attn(*qkv(), window=(3, 0), attention_chunk=3), rtol=0, atol=0)


@pytest.mark.parametrize("scale", [np.float32(0.5), torch.tensor(0.5), np.float64(0.5)], ids=type)
def test_numbers(scale: object) -> None:
    expected = attn(*qkv(), scale=0.5, softcap=2.0)
    torch.testing.assert_close(attn(*qkv(), scale=scale, softcap=2), expected, rtol=0, atol=0)  # type: ignore[arg-type]


def test_flags_of_numpy() -> None:
    torch.testing.assert_close(attn(*qkv(), causal=np.bool_(True)), attn(*qkv(), causal=True), rtol=0, atol=0)


def test_learned_numbers_without_gradients() -> None:
    with torch.no_grad():
        torch.testing.assert_close(attn(*qkv(), scale=LEARNED), attn(*qkv(), scale=0.5), rtol=0, atol=0)


def test_the_ways_to_learn_them() -> None:
    """The remedies that the errors name give the gradients."""
    q, k, v = (x.double() for x in qkv())
    scale, cap = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.5, 2.0))
    out = attn(q * scale, k, v, scale=1.0, score_mod=lambda score, b, h, i, j: cap * torch.tanh(score / cap))
    out.square().sum().backward()
    expected = [x.detach().clone().requires_grad_() for x in (scale, cap)]
    scores = q * expected[0] @ k.mT
    dense = torch.softmax(expected[1] * torch.tanh(scores / expected[1]), dim=-1) @ v
    dense.square().sum().backward()
    torch.testing.assert_close(out, dense)
    torch.testing.assert_close(scale.grad, expected[0].grad)
    torch.testing.assert_close(cap.grad, expected[1].grad)


# ---- NestedTensors


def nested(lengths: tuple[int, ...] = (6, 10)) -> tuple[Tensor, ...]:
    values = (torch.randn(sum(lengths), 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return tuple(torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in values)


def test_attn_takes_nested_tensors() -> None:
    q, k, v = nested()
    keywords: dict = dict(
        causal=True, softcap=3.0, mask_mod=lambda b, h, i, j: (i + j) % 3 != 1, return_lse=True, return_max_logit=True
    )
    results = attn(q, k, v, **keywords)
    same = attn_nested(q, k, v, max_seqlen_q=10, max_seqlen_k=10, **keywords)
    for i, (Q, K, V) in enumerate(zip(q.unbind(), k.unbind(), v.unbind())):
        out, lse, _ = attn(Q[None], K[None], V[None], **keywords)
        for each in (results, same):
            torch.testing.assert_close(each[0].unbind()[i], out[0])
            torch.testing.assert_close(each[1].unbind()[i], lse[0])
    torch.testing.assert_close(results[2], same[2])


def test_layouts_of_nested_tensors() -> None:
    q, k, v = nested()
    with pytest.raises(ValueError, match="layout='sbhd': use one of bhsd, bshd"):
        attn(q, k, v, layout="sbhd")
    with pytest.raises(ValueError, match="layout='bshd' with a NestedTensor"):
        attn(q, k, v, layout="bshd")
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attn(*rows, layout="bshd").values(), attn(*rows).values())


def test_nested_seqused() -> None:
    q, k, v = nested()
    seqused = torch.tensor([4, 0], dtype=torch.int32)
    out = attn_nested(q, k, v, seqused_k=seqused, out_dtype=torch.float32)
    Q, K, V = (x.unbind()[0][None] for x in (q, k, v))
    torch.testing.assert_close(out.unbind()[0], attn(Q, K[:, :, :4], V[:, :, :4])[0])
    assert not out.unbind()[1].any()


@pytest.mark.parametrize("place", range(3))
def test_nested_not_tensors(place: int) -> None:
    tensors: list = list(nested())
    tensors[place] = 3
    with pytest.raises(ValueError, match=f"{'qkv'[place]} is a .*: give a torch.Tensor"):
        attn_nested(*tensors)


@pytest.mark.parametrize("name", ["bias", "block_mask"])
def test_nested_refusals(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        attn(*nested(), **{name: torch.ones(1)})
