"""Wrong arguments: `attn` raises a ValueError that names the argument, and `supports` returns false."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_flash import UnsupportedError, attn, attn_nested, attn_varlen, supports

S = 16
OFFSETS = torch.tensor([0, 6, S], dtype=torch.int32)
LEARNED = torch.nn.Parameter(torch.tensor(0.5))


def qkv() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, S, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))


WRONG = [
    (dict(scale="1"), "scale='1' is a str: give a number"),
    (dict(scale=[1.0]), r"scale=\[1.0\] is a list"),
    (dict(scale=True), "scale=True is a bool"),
    (dict(scale=torch.ones(2)), r"scale is a torch.float32 tensor of shape \(2,\)"),
    (dict(scale=float("nan")), "scale=nan is not finite"),
    (dict(scale=LEARNED), r"scale is a tensor that requires grad.*attn\(q \* scale"),
    (dict(softcap=LEARNED), "softcap is a tensor that requires grad.*score_mod"),
    (dict(softcap="x"), "softcap='x' is a str"),
    (dict(softcap=-1.0), "softcap=-1.0"),
    (dict(window=("a", 0)), "window left='a' is a str: use a whole number of keys"),
    (dict(window=(1.5, 0)), "window left=1.5 is a float: use a whole number of keys"),
    (dict(window=(0, -1)), "window right=-1 is negative"),
    (dict(window=(torch.ones(2), 0)), "window left="),
    (dict(window=3), "window=3: give"),
    (dict(window=(1, 2, 3)), "window="),
    (dict(window={1: 2}), "window="),
    (dict(dropout="x"), "dropout='x' is a str"),
    (dict(dropout=1.0), "dropout=1.0: use a probability"),
    (dict(dropout=-0.1), "dropout=-0.1"),
    (dict(causal="no"), "causal='no': give True or False"),
    (dict(deterministic="x"), "deterministic='x'"),
    (dict(deterministic=[]), r"deterministic=\[\]"),
    (dict(batch_invariant=2), "batch_invariant=2"),
    (dict(return_max_logit="y"), "return_max_logit='y'"),
    (dict(layout="sbhd"), "layout='sbhd'"),
    (dict(layout=["bhsd"]), "layout="),
    (dict(out_dtype="float32"), "out_dtype=float32"),
    (dict(out_dtype=torch.float16), "out_dtype=torch.float16"),
    (dict(alibi=[1.0, 2.0]), "alibi is a list"),
    (dict(alibi=torch.ones(3)), r"alibi has shape \(3,\)"),
    (dict(sinks=np.ones(2)), "sinks is a ndarray"),
    (dict(sinks=torch.ones(2, dtype=torch.int32)), "sinks is torch.int32"),
    (dict(bias=torch.ones(S, S, dtype=torch.bool)), "bias is torch.bool: pass a mask as mask_mod"),
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
    (dict(bias=torch.ones(S, S, dtype=torch.int64)), "bias is torch.int64"),
    (dict(score_mod=3), "score_mod"),
    (dict(mask_mod="causal"), "mask_mod"),
    (dict(score_mod_bwd=lambda g, s, b, h, i, j: g), "score_mod_bwd without score_mod"),
    (dict(block_mask=torch.ones(2, 2)), r"block_mask is a torch.Tensor: make one with cute_flash.BlockMask.of\("),
]


@pytest.mark.parametrize(("keywords", "message"), WRONG, ids=[f"{i}-{'-'.join(w[0])}" for i, w in enumerate(WRONG)])
def test_keywords(keywords: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attn(*qkv(), **keywords)
    support = supports(*qkv(), **keywords)
    assert not support and support.reason


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [np.ones((1, 2, S, 8)), [[1.0]], None, 3, "q"], ids=type)
def test_not_tensors(place: int, value: object) -> None:
    tensors: list = list(qkv())
    tensors[place] = value
    with pytest.raises(ValueError, match=f"{'qkv'[place]} is a .*: give a torch.Tensor"):
        attn(*tensors)
    assert not supports(*tensors)


@pytest.mark.parametrize(
    "shapes",
    [
        [(), (), ()],
        [(8,), (8,), (8,)],
        [(1, 2, S, 8), (1, 2, S, 8), (1, 2, S + 1, 8)],
        [(1, 2, S, 8), (1, 2, S, 4), (1, 2, S, 8)],
        [(1, 2, S, 8), (2, 2, S, 8), (2, 2, S, 8)],
        [(1, 3, S, 8), (1, 2, S, 8), (1, 2, S, 8)],
        [(1, 2, S, 8), (2, S, 8), (2, S, 8)],
        [(1, 1, 1, 2, S, 8)] * 3,
    ],
)
def test_shapes(shapes: list) -> None:
    tensors = [torch.ones(shape) for shape in shapes]
    with pytest.raises(ValueError, match=r"shape|must be|heads"):
        attn(*tensors)
    assert not supports(*tensors)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes(dtype: torch.dtype) -> None:
    tensors = [x.to(dtype) for x in qkv()]
    with pytest.raises(UnsupportedError, match="dtype"):
        attn(*tensors)
    assert not supports(*tensors)


def test_mixed_dtypes() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"k is torch.float16 and q is torch.float32"):
        attn(q, k.half(), v)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        attn(*qkv(), nonsense=1)  # type: ignore[call-arg]
    assert "nonsense" in supports(*qkv(), nonsense=1).reason


VARLEN = [
    (dict(max_seqlen_q=6.0), "max_seqlen_q=6.0 is a float: give a whole number"),
    (dict(max_seqlen_k="6"), "max_seqlen_k='6'"),
    (dict(max_seqlen_q=-1), "max_seqlen_q=-1 is negative"),
    (dict(seqused_k=[3, 3]), "seqused_k is a builtins.list: give a torch.Tensor"),
    (dict(seqused_k=torch.tensor([3, 3])), "seqused_k is torch.int64: use torch.int32"),
    (
        dict(seqused_k=torch.tensor([3], dtype=torch.int32)),
        "seqused_k has 1 lengths: expected 2, one for each sequence",
    ),
    (dict(cu_seqlens_q=[0, 6, S]), "cu_seqlens_q is a builtins.list"),
    (dict(cu_seqlens_k=OFFSETS.long()), "cu_seqlens_k is torch.int64"),
    (dict(cu_seqlens_k=OFFSETS[:2]), "cu_seqlens_q has 3 offsets and cu_seqlens_k has 2"),
    (dict(cu_seqlens_q=OFFSETS.flip(0)), "cu_seqlens_q"),
    (dict(scale="1"), "scale='1'"),
    (dict(window=("a", 0)), "window left='a'"),
    (dict(dropout="x"), "dropout='x'"),
]


@pytest.mark.parametrize(("keywords", "message"), VARLEN, ids=[f"{i}-{'-'.join(w[0])}" for i, w in enumerate(VARLEN)])
def test_varlen(keywords: dict, message: str) -> None:
    q, k, v = (torch.ones(S, 2, 8) for _ in range(3))
    with pytest.raises(ValueError, match=message):
        attn_varlen(q, k, v, **{"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, **keywords})


# ---- unusual values that are valid


@pytest.mark.parametrize("window", [(np.int64(3), 0), (torch.tensor(3), torch.tensor(0)), [3, 0]], ids=str)
def test_windows_of_integers(window: tuple) -> None:
    torch.testing.assert_close(attn(*qkv(), window=window), attn(*qkv(), window=(3, 0)), rtol=0, atol=0)


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


def nested(lengths: tuple[int, ...] = (6, 10)) -> tuple[torch.Tensor, ...]:
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


@pytest.mark.parametrize("name", ["bias", "block_mask"])
def test_nested_refusals(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        attn(*nested(), **{name: torch.ones(1)})
