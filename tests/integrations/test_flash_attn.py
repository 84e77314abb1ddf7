"""The functions of flash-attn 2.8 on the CPU, against plain torch: results, gradients, signatures and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_flash import UnsupportedError
from cute_flash.integrations import flash_attn as fa
from tests.integrations.plain import assert_signature, plain, plain_batch

TOLERANCE = {torch.float32: {"rtol": 2e-4, "atol": 2e-5}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}
DTYPES = list(TOLERANCE)
CU_Q, CU_K = torch.tensor([0, 5, 5, 18], dtype=torch.int32), torch.tensor([0, 9, 12, 29], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.02])
# Keywords of flash-attn and those of `plain`.
FEATURES = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"causal": True, "softcap": 5.0, "softmax_scale": 0.3}, {"causal": True, "softcap": 5.0, "scale": 0.3}),
    ({"window_size": (4, -1)}, {"window": (4, -1)}),
    ({"window_size": (3, 2), "alibi_slopes": SLOPES}, {"window": (3, 2), "slopes": SLOPES}),
    ({"s_aux": SLOPES, "deterministic": True}, {"sinks": SLOPES}),
    ({"attention_chunk": 6, "causal": True}, {"chunk": 6, "causal": True}),
    ({"attention_chunk": 5, "window_size": (-1, 2)}, {"chunk": 5, "window": (-1, 2)}),
]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def qkv(dtype: torch.dtype = torch.float32, head_dim: int = 20, head_dim_v: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """GQA with odd lengths, and a head dim that is padded to 24."""
    shapes = ((2, 13, 4, head_dim), (2, 17, 2, head_dim), (2, 17, 2, head_dim_v))
    return tuple(normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))  # type: ignore[return-value]


def varlen_qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((18, 4, 20), (29, 2, 20), (29, 2, 20))
    return tuple(normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))  # type: ignore[return-value]


def plain_varlen(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    rows = [
        plain(q[CU_Q[b] : CU_Q[b + 1]], *(x[CU_K[b] : CU_K[b + 1]] for x in (k, v)), **keywords)
        for b in range(len(CU_Q) - 1)
    ]
    return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows], -1)


def check(found: Any, expected: Any, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Compare out, lse and the gradients of out."""
    torch.testing.assert_close(found[0].double(), expected[0], **TOLERANCE[dtype])
    torch.testing.assert_close(found[1].double(), expected[1], **TOLERANCE[dtype])
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    grad = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    gradients = torch.autograd.grad(found[0], inputs, grad)
    for x, y in zip(gradients, torch.autograd.grad(expected[0], inputs, grad.double())):
        torch.testing.assert_close(x.double(), y.double(), **TOLERANCE[dtype])


# ---- results and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keywords, plain_keywords", FEATURES)
def test_dense(keywords: dict, plain_keywords: dict, dtype: torch.dtype) -> None:
    inputs = qkv(dtype)
    out, lse, probs = fa.flash_attn_func(*inputs, **keywords, return_attn_probs=True)
    assert probs is None
    check((out, lse), plain_batch(*inputs, **plain_keywords), inputs, dtype)
    assert torch.equal(fa.flash_attn_func(*inputs, **keywords), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keywords, plain_keywords", FEATURES)
def test_varlen(keywords: dict, plain_keywords: dict, dtype: torch.dtype) -> None:
    inputs = varlen_qkv(dtype)
    found = fa.flash_attn_varlen_func(*inputs, CU_Q, CU_K, 13, 17, **keywords, return_softmax_lse=True)
    assert len(found) == 2
    check(found, plain_varlen(*inputs, **plain_keywords), inputs, dtype)


@pytest.mark.parametrize("head_dim, head_dim_v", [(20, 20), (16, 16), (7, 13), (24, 9)])
def test_head_dims_are_padded(head_dim: int, head_dim_v: int) -> None:
    inputs = qkv(torch.float32, head_dim, head_dim_v)
    out, lse = fa.flash_attn_func(*inputs, causal=True, return_softmax_lse=True)
    assert out.shape == (2, 13, 4, head_dim_v)
    check((out, lse), plain_batch(*inputs, causal=True), inputs, torch.float32)


def test_slopes_of_each_sequence() -> None:
    slopes, inputs = torch.rand(2, 4), qkv()
    found = fa.flash_attn_func(*inputs, alibi_slopes=slopes, return_softmax_lse=True)
    check(found, plain_batch(*inputs, slopes=slopes), inputs, torch.float32)


def test_a_query_without_keys() -> None:
    q, k, v = qkv()
    out, lse = fa.flash_attn_func(q, k[:, :6], v[:, :6], causal=True, return_softmax_lse=True)
    assert (out[:, :7] == 0).all() and (lse[:, :, :7] == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_stacked_tensors(dtype: torch.dtype) -> None:
    x = normal(2, 11, 3, 4, 20, dtype=dtype)
    found = fa.flash_attn_qkvpacked_func(x, causal=True, return_softmax_lse=True)
    check(found, plain_batch(*x.unbind(2), causal=True), (x,), dtype)
    q, kv = normal(2, 13, 4, 20, dtype=dtype), normal(2, 17, 2, 2, 20, seed=1, dtype=dtype)
    found = fa.flash_attn_kvpacked_func(q, kv, window_size=(3, 0), return_softmax_lse=True)
    check(found, plain_batch(q, *kv.unbind(2), window=(3, 0)), (q, kv), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stacked_tensors_of_varlen_batches(dtype: torch.dtype) -> None:
    x = normal(18, 3, 4, 20, dtype=dtype)
    found = fa.flash_attn_varlen_qkvpacked_func(x, CU_Q, 13, softcap=3.0, return_softmax_lse=True)
    rows = [plain(*(y[CU_Q[b] : CU_Q[b + 1]] for y in x.unbind(1)), softcap=3.0) for b in range(3)]
    expected = torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows], -1)
    check(found, expected, (x,), dtype)
    q, kv = normal(18, 4, 20, dtype=dtype), normal(29, 2, 2, 20, seed=1, dtype=dtype)
    out, lse, _ = fa.flash_attn_varlen_kvpacked_func(q, kv, CU_Q, CU_K, 13, 17, causal=True, return_attn_probs=True)
    check((out, lse), plain_varlen(q, *kv.unbind(1), causal=True), (q, kv), dtype)


def test_dropout() -> None:
    q, k, _ = qkv()
    v = torch.ones(2, 17, 2, 20)
    torch.manual_seed(3)
    out, lse = fa.flash_attn_func(q, k, v, 0.5, return_softmax_lse=True)
    torch.manual_seed(3)
    assert torch.equal(out, fa.flash_attn_func(q, k, v, dropout_p=0.5))
    torch.testing.assert_close(lse.double(), plain_batch(q, k, v)[1], rtol=2e-4, atol=2e-5)
    assert out.detach().std() > 0.01 and abs(float(out.detach().mean()) - 1) < 0.2
    assert torch.equal(fa.flash_attn_func(q, k, v, dropout_p=0), fa.flash_attn_func(q, k, v))


def test_pages() -> None:
    q, k, v = (x.detach() for x in varlen_qkv())
    pages = torch.zeros(2, 12, 4, 2, 20)
    table = torch.full((3, 5), 11, dtype=torch.int32)
    order = iter(torch.randperm(11).tolist())
    for b, (start, end) in enumerate(zip(CU_K[:-1].tolist(), CU_K[1:].tolist())):
        for page in range(-(-(end - start) // 4)):
            table[b, page] = next(order)
            rows = slice(start + 4 * page, min(start + 4 * page + 4, end))
            pages[0, table[b, page], : rows.stop - rows.start] = k[rows]
            pages[1, table[b, page], : rows.stop - rows.start] = v[rows]
    expected, expected_lse = plain_varlen(q, k, v, causal=True, slopes=SLOPES)
    calls = [
        {"cu_seqlens_k": CU_K, "block_table": table},
        {"cu_seqlens_k": None, "page_table": table, "seqused_k": CU_K.diff()},
    ]
    for keywords in calls:
        out, lse, _ = fa.flash_attn_varlen_func(
            q, *pages, CU_Q, max_seqlen_q=13, max_seqlen_k=17, causal=True, alibi_slopes=SLOPES,
            return_attn_probs=True, **keywords,
        )  # fmt: skip
        torch.testing.assert_close(out.double(), expected, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-4, atol=2e-5)
    out = fa.flash_attn_varlen_func(q.requires_grad_(), *pages, CU_Q, CU_K, 13, 17, block_table=table)
    with pytest.raises(UnsupportedError, match="no gradients with a K/V cache or block_table"):
        out.sum().backward()
    with pytest.raises(UnsupportedError, match=r"dropout_p=0.1 with block_table"):
        fa.flash_attn_varlen_func(q, *pages, CU_Q, CU_K, 13, 17, 0.1, block_table=table)
    with pytest.raises(ValueError, match="block_table and page_table"):
        fa.flash_attn_varlen_func(q, *pages, CU_Q, CU_K, 13, 17, block_table=table, page_table=table)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        fa.flash_attn_varlen_func(q, *pages, CU_Q, None, 13, 17, block_table=table)


def test_seqused_k() -> None:
    q, k, v = varlen_qkv()
    used = torch.tensor([4, 0, 17], dtype=torch.int32)
    found = fa.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 13, 17, causal=True, seqused_k=used)
    expected = plain(q[:5], k[:4], v[:4], causal=True)[0]
    torch.testing.assert_close(found[:5].double(), expected, rtol=2e-4, atol=2e-5)


# ---- values of arguments


@pytest.mark.parametrize(
    "window_size",
    [[4, 1], (np.int64(4), np.int32(1)), (torch.tensor(4), torch.tensor(1)), torch.tensor([4, 1]), np.array([4, 1])],
)
def test_windows_are_integers_of_any_type(window_size: Any) -> None:
    inputs = qkv()
    assert torch.equal(
        fa.flash_attn_func(*inputs, window_size=window_size), fa.flash_attn_func(*inputs, window_size=(4, 1))
    )


@pytest.mark.parametrize("window_size", [(-1, -1), [-1, None], None, (-7, -1), torch.tensor([-1, -1]), (30, 30)])
def test_unbounded_windows(window_size: Any) -> None:
    inputs = qkv()
    assert torch.equal(fa.flash_attn_func(*inputs, window_size=window_size), fa.flash_attn_func(*inputs))


@pytest.mark.parametrize("window_size", [4, (1,), (1, 2, 3), ("a", 1), (1.5, 0)])
def test_wrong_windows(window_size: Any) -> None:
    with pytest.raises(ValueError, match="window_size"):
        fa.flash_attn_func(*qkv(), window_size=window_size)


OFF = [
    {"qv": None}, {"q_descale": None, "k_descale": None, "v_descale": None}, {"attention_chunk": 0}, {"num_splits": 1},
    {"num_splits": 0}, {"pack_gqa": None}, {"pack_gqa": False}, {"pack_gqa": True}, {"sm_margin": 0}, {"ver": 3},
    {"softcap": -1.0}, {"softcap": None}, {"s_aux": None}, {"dropout_p": 0}, {"seqused_q": None}, {"num_splits": 3},
    {"num_splits": 100}, {"num_splits": -7}, {"scheduler_metadata": torch.ones(1)},
]  # fmt: skip


@pytest.mark.parametrize("keywords", OFF, ids=str)
def test_keywords_that_do_not_change_the_result(keywords: dict) -> None:
    inputs = qkv()
    assert torch.equal(fa.flash_attn_func(*inputs, **keywords), fa.flash_attn_func(*inputs))


REFUSED = {
    "qv": torch.ones(1), "q_descale": torch.ones(1), "k_descale": torch.ones(1), "v_descale": torch.ones(1),
    "pack_gqa": 7, "sm_margin": 8, "ver": 7, "rotary_seqlens": torch.ones(1),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_keywords(name: str) -> None:
    message = rf"^{name}=.* in flash_attn_(varlen_)?func: "
    with pytest.raises(UnsupportedError, match=message):
        fa.flash_attn_func(*qkv(), **{name: REFUSED[name]})
    with pytest.raises(UnsupportedError, match=message):
        fa.flash_attn_varlen_func(*varlen_qkv(), CU_Q, CU_K, 13, 17, **{name: REFUSED[name]})


def test_hints_have_a_type() -> None:
    for num_splits in (1.5, True, "auto"):
        with pytest.raises(ValueError, match=f"num_splits={num_splits!r} is a"):
            fa.flash_attn_func(*qkv(), num_splits=num_splits)
    with pytest.raises(UnsupportedError, match="seqused_q=a tensor in flash_attn_func: use flash_attn_varlen_func"):
        fa.flash_attn_func(*qkv(), seqused_q=CU_Q)


def test_wrong_arguments() -> None:
    q, k, v = qkv()
    with pytest.raises(UnsupportedError, match=r"scale=1\.0 in flash_attn_func: write softmax_scale"):
        fa.flash_attn_func(q, k, v, scale=1.0)
    with pytest.raises(TypeError, match=r"flash_attn_func.* 'scales'"):
        fa.flash_attn_func(q, k, v, scales=1.0)
    with pytest.raises(UnsupportedError, match=r"return_attn_probs=True with dropout_p=0.1.*return_softmax_lse"):
        fa.flash_attn_func(q, k, v, 0.1, return_attn_probs=True)
    with pytest.raises(ValueError, match="return_attn_probs=True with return_softmax_lse=True"):
        fa.flash_attn_func(q, k, v, return_attn_probs=True, return_softmax_lse=True)
    with pytest.raises(ValueError, match="s_aux and learnable_sink"):
        fa.flash_attn_func(q, k, v, s_aux=SLOPES, learnable_sink=SLOPES)
    with pytest.raises(ValueError, match="q has head dim 20 and k has 23"):  # both would be padded to 24
        fa.flash_attn_func(q, torch.ones(2, 17, 2, 23), v)
    with pytest.raises(ValueError, match=r"q has shape .*: expected 4 dimensions"):
        fa.flash_attn_func(q[0], k[0], v[0])
    with pytest.raises(ValueError, match=r"qkv has shape .*: expected \(B, S, 3, H, D\)"):
        fa.flash_attn_qkvpacked_func(torch.ones(2, 5, 4, 4, 16))
    with pytest.raises(ValueError, match=r"kv has shape .*: expected \(T, 2, H, D\)"):
        fa.flash_attn_varlen_kvpacked_func(q[0], torch.ones(5, 3, 4, 20), CU_Q, CU_K, 5, 5)
    with pytest.raises(ValueError, match="causal='no'"):
        fa.flash_attn_func(q, k, v, causal="no")


# ---- signatures

COMMON = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
VARLEN = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
KV_CACHE = {
    "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None, "cache_batch_idx": None,
    "cache_leftpad": None, "block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip
# Required parameters and defaults of flash-attn 2.8, in its order.
SIGNATURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "flash_attn_func": (["q", "k", "v"], COMMON),
    "flash_attn_qkvpacked_func": (["qkv"], COMMON),
    "flash_attn_kvpacked_func": (["q", "kv"], COMMON),
    "flash_attn_varlen_func": (["q", "k", "v", *VARLEN], {**COMMON, "block_table": None}),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], COMMON),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *VARLEN], COMMON),
    "flash_attn_with_kvcache": (["q", "k_cache", "v_cache"], KV_CACHE),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert_signature(getattr(fa, name), *SIGNATURES[name])


@pytest.mark.compiles
def test_compile() -> None:
    inputs = qkv()

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa.flash_attn_func(q, k, v, causal=True, window_size=(5, -1))

    found = torch.compile(f, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(found, f(*inputs))


@pytest.mark.parametrize(("head_dim", "padded"), [(20, 24), (64, 64)])
def test_attn_gets_a_head_dim_that_its_kernels_have(
    head_dim: int, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels need multiples of 8, with zeros in the columns after the original ones."""
    taken, attn = [], fa.attn

    def spy(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        taken.append(q.shape[-1])
        assert not any(x[..., head_dim:].any() for x in (q, k, v))
        return attn(q, k, v, **keywords)

    monkeypatch.setattr(fa, "attn", spy)
    x = torch.randn(2, 9, 4, head_dim)
    assert fa.flash_attn_func(x, x, x).shape == x.shape and taken == [padded]
