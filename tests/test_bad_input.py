"""Wrong arguments: `attn` raises an error that names the argument, before any work, and `supports` gives the reason."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_flash import (
    LayoutWarning,
    UnsupportedError,
    attn,
    attn_decode,
    attn_nested,
    attn_varlen,
    decode_supports,
    supports,
)
from cute_flash.reference import tiled
from cute_flash.spec.foreign import FOREIGN
from cute_flash.spec.refusals import refuse

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
    (dict(scale=10**400), "scale exceeds the range of floats"),
    (dict(softcap="x"), "softcap='x' is a str"),
    (dict(softcap=-1.0), "softcap=-1.0: use a positive number"),
    (dict(softcap=math.nan), "softcap=nan"),
    (dict(softcap=math.inf), "softcap=inf"),
    (dict(softcap=1e39), r"softcap=1e\+39 exceeds 3.4e\+38, the largest float32, the dtype of the scores"),
    (dict(scale=-1e39), r"scale=-1e\+39 exceeds 3.4e\+38"),
    (dict(window=("a", 0)), "window left='a' is a str: use a whole number of keys"),
    (dict(window=(1.5, 0)), "window left=1.5 is a float: use a whole number of keys"),
    (dict(window=(None, math.inf)), "window right=inf is a float: use a whole number of keys, or None"),
    (dict(window=(-1, 2)), "window left=-1 is negative: use None"),
    (dict(window=(0, -1)), "window right=-1 is negative: use None"),
    (dict(window=(torch.ones(2), 0)), "window left="),
    (dict(window=(2**63, 0)), "window left=9223372036854775808 exceeds 64 bits: use a whole number of keys, or None"),
    (dict(window=(None, 2**70)), "window right=1180591620717411303424 exceeds 64 bits"),
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
    (dict(score_mod=3), "score_mod is of type int: give a function of"),
    (dict(mask_mod="causal"), "mask_mod is of type str: give a function of"),
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


# ---- (B, S, H, D) without layout="bshd"

# Shapes of q and k, read as (B, H, S, D): those of (B, S, H, D) tensors, and those of usual calls.
SWAPPED = [
    ((1, 128, 8, 32), (1, 128, 2, 32)),  # GQA
    ((2, 16, 8, 8), (2, 16, 1, 8)),  # MQA
    ((1, 512, 8, 8), (1, 512, 8, 8)),
    ((1, 192, 4, 8), (1, 64, 4, 8)),  # cross-attention
    ((1, 128, 8, 32), (1, 32, 2, 32)),  # cross-attention, GQA
    ((1, 128, 8, 32), (1, 64, 8, 32)),  # cross-attention, MHA: 64 K/V heads would be unusual for 128 heads
    ((1, 16, 8, 32), (1, 16, 4, 32)),  # GQA; a decoding step has at least as many keys as queries
]
USUAL = [
    ((1, 128, 1, 8), (1, 128, 300, 8)),  # decoding
    ((1, 32, 1, 8), (1, 32, 1, 8)),  # the first token
    ((1, 64, 5, 8), (1, 8, 5, 8)),  # a short prompt
    ((1, 128, 5, 8), (1, 128, 5, 8)),  # a short prompt, MHA or repeated K/V heads
    ((1, 64, 4, 8), (1, 8, 33, 8)),  # draft tokens
    ((1, 8, 64, 8), (1, 8, 16, 8)),  # cross-attention
    ((1, 32, 7, 8), (1, 32, 2, 8)),  # the lengths do not divide as heads must
    ((1, 32, 8, 8), (1, 8, 2, 8)),  # GQA in both layouts
    ((1, 200, 8, 8), (1, 200, 0, 8)),
    ((1, 128, 16, 8), (1, 8, 16, 8)),  # a short prompt, GQA
    *[((1, 128, s, 8), (1, h, 64, 8)) for s in (1, 4, 16) for h in (1, 8, 32, 128)],  # decoding
]


@pytest.mark.parametrize("shapes", SWAPPED, ids=str)
def test_swapped_dimensions_are_reported_at_the_call(shapes: tuple[Shape, Shape]) -> None:
    q, k = map(torch.ones, shapes)
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    message = rf'{heads} heads, with {queries} queries and {keys} keys each; .* \(B, S, H, D\), pass layout="bshd"'
    with pytest.warns(LayoutWarning, match=message) as caught:
        attn(q, k, k)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attn(q, k, k, layout="bshd")
        # Transposed views of (B, S, H, D) memory, as models pass them: few queries and keys are a usual call.
        attn(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, k)))
        assert supports(q, k, k)


@pytest.mark.parametrize("shapes", USUAL, ids=str)
def test_usual_dimensions_are_not_reported(shapes: tuple[Shape, Shape]) -> None:
    q, k = map(torch.ones, shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attn(q, k, k)


REMEDY = r'; for tensors of shape \(B, S, H, D\), pass layout="bshd"$'
SWAPPED_ERRORS: list[tuple[list[Shape], str, str]] = [
    ([(1, 96, 8, 8), *2 * [(1, 128, 2, 8)]], "bhsd", f"q has 96 heads and k, v have 128: .* second{REMEDY}"),
    ([(1, 9, 8, 8), (1, 9, 2, 8), (1, 2, 9, 8)], "bhsd", rf"must agree; .* transpose\(1, 2\) one of them{REMEDY}"),
    # (B, S, H, D) is not valid either, or is the layout of the call.
    ([(1, 96, 8, 8), *2 * [(1, 128, 3, 8)]], "bhsd", "q has 96 heads and k, v have 128: .* second$"),
    ([(1, 8, 2, 8), *2 * [(1, 8, 3, 8)]], "bshd", "q has 2 heads and k, v have 3: .* second$"),
]


@pytest.mark.parametrize(("shapes", "layout", "message"), SWAPPED_ERRORS, ids=str)
def test_errors_of_swapped_dimensions(shapes: list[Shape], layout: str, message: str) -> None:
    assert_refused(message, ValueError, *map(torch.ones, shapes), layout=layout)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes(no_work: None, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    assert_refused(f"dtype {name} on cpu: use one of float16", UnsupportedError, *(x.to(dtype) for x in qkv()))


@pytest.mark.parametrize("place", range(3))
def test_sparse_tensors(no_work: None, place: int) -> None:
    tensors = list(qkv())
    tensors[place] = tensors[place].to_sparse()
    with pytest.raises(UnsupportedError, match=r"a tensor of the call is sparse: call to_dense\(\)"):
        attn(*tensors)


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


CALLS: dict[str, tuple[Any, Any]] = {
    "attn": (lambda **kw: attn(*qkv(), **kw), lambda **kw: supports(*qkv(), **kw)),
    "attn_varlen": (lambda **kw: attn_varlen(*rows(), OFFSETS, OFFSETS, **kw), None),
    "attn_decode": (
        lambda **kw: attn_decode(*caches(), cache_seqlens=S, **kw),
        lambda **kw: decode_supports(*caches(), cache_seqlens=S, **kw),
    ),
}
# Keywords of other libraries, the entries that get them, and the remedy. None: all entries.
FOREIGN_CALLS: list[tuple[str, tuple[str, ...] | None, str]] = [
    ("is_causal", None, "write causal=; if Sq != Sk, it aligns the mask at the bottom right"),
    ("softmax_scale", None, "write scale="),
    ("sm_scale", None, "write scale="),
    ("window_size", None, "write window=.*None instead of -1"),
    ("enable_gqa", None, "leave it out"),
    ("alibi_slopes", None, "write alibi="),
    ("attn_mask", ("attn", "attn_varlen"), r"write mask_mod=lambda b, h, i, j: mask\[i, j\] .* or bias="),
    ("dropout_p", ("attn", "attn_varlen"), "write dropout="),
    ("cu_seqlens_q", ("attn",), "call attn_varlen"),
    ("layout", ("attn_varlen",), r"leave it out, because q, k and v are \(T, H, D\)"),
    ("block_table", ("attn_decode",), "write page_table="),
    ("k", ("attn_decode",), "write k_new="),
    ("dropout", ("attn_decode",), "leave it out, because decoding has no dropout$"),
    ("mask_mod", ("attn_decode",), "call attn or attn_varlen"),
    ("q_descale", None, "(use|give q in) fp16 or bf16; "),
    ("k_descale", ("attn", "attn_varlen"), "use fp16 or bf16; attn_decode reads FP8 caches$"),
    ("key_padding_mask", ("attn", "attn_varlen"), r"write mask_mod=lambda b, h, i, j: ~mask\[b, j\]"),
    ("num_splits", ("attn", "attn_varlen"), "leave it out, because tiles and schedules"),
    ("page_table", ("attn", "attn_varlen"), "call attn_decode with page_table=$"),
    ("qv", ("attn", "attn_varlen"), "concatenate q with qv, and k with v$"),
    ("qv", ("attn_decode",), "concatenate qv with q, and v with k in one cache, and write value_dim=$"),
    ("head_dim_v", ("attn_decode",), "write value_dim=$"),
    ("indices", ("attn_decode",), r"write page_table= with a table for each query, \(B, T, max_pages\)$"),
    ("max_seqlen", ("attn",), "call attn_varlen"),
    ("max_seqlen", ("attn_varlen",), "write max_seqlen_q= and max_seqlen_k=, or leave it out$"),
    ("training", ("attn", "attn_varlen"), "write dropout= only while training$"),
    ("need_weights", None, "call attention_probs, which"),
    ("casual", None, "did you mean 'causal'"),
    ("nonsense", None, "$"),
]


def rows() -> list[Tensor]:
    return [x[0].transpose(0, 1) for x in qkv()]


def caches() -> list[Tensor]:
    return [x.transpose(1, 2) for x in qkv()]


@pytest.mark.parametrize(
    ("entry", "name", "remedy"),
    [(entry, name, remedy) for name, entries, remedy in FOREIGN_CALLS for entry in entries or CALLS],
)
def test_keywords_of_other_libraries(no_work: None, entry: str, name: str, remedy: str) -> None:
    call, answer = CALLS[entry]
    with pytest.raises(
        TypeError, match=rf"^{entry}\(\) got an unexpected keyword argument '{name}'(: |; )?{remedy}"
    ) as e:
        call(**{name: None})
    assert answer is None or answer(**{name: None}).reason == str(e.value)


@pytest.mark.parametrize("values", [(torch.ones(S, S) > 0,), (0.0, None, True)], ids=["mask", "flash-attn"])
def test_positional_arguments_of_other_libraries(no_work: None, values: tuple) -> None:
    for count, message, call in (
        (3, "such as causal=True; for a mask, write mask_mod=", lambda: attn(*qkv(), *values)),
        (5, "max_seqlen_q and max_seqlen_k, or name them", lambda: attn_varlen(*rows(), OFFSETS, OFFSETS, *values)),
        (3, "such as k_new= and v_new=", lambda: attn_decode(*caches(), *values, cache_seqlens=S)),
    ):
        given = f"takes {count} positional arguments but {count + len(values)} were given: all others are keywords"
        with pytest.raises(TypeError, match=f"{given}.*{message}"):
            call()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("is_causal", "write causal="),
        ("layout", "leave it out, because it follows"),
        ("casual", "did you mean 'causal'"),
    ],
)
def test_keywords_of_attn_nested(no_work: None, name: str, remedy: str) -> None:
    message = rf"^attn_nested\(\) got an unexpected keyword argument '{name}'[:;] {remedy}"
    with pytest.raises(TypeError, match=message):
        attn_nested(*nested(), **{name: None})


def test_remedies_name_keywords() -> None:
    for function in (attn, attn_varlen, attn_decode):
        parameters = inspect.signature(function).parameters
        assert not {"extra", "foreign"} & set(parameters) and not FOREIGN[function.__name__].keys() & set(parameters)
        for remedy in FOREIGN[function.__name__].values():
            assert set(re.findall(r"\b(\w+)=", remedy)) - {"page_table"} <= set(parameters), remedy


def test_context_parallel_calls_name_the_keyword_too() -> None:
    with pytest.raises(TypeError, match=r"distributed.attn\(\) got an .* 'softmax_scale': write scale="):
        refuse("cute_flash.distributed.attn", {"softmax_scale": 1.0})


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
    (dict(max_seqlen_q=2**70), "max_seqlen_q=1180591620717411303424 exceeds 64 bits"),
    (dict(window=(2**70, 0)), "window left=1180591620717411303424 exceeds 64 bits"),
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
