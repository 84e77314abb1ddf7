"""torch's flash attention operators with the kernels of cute_flash, registered for CPU tensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.nn.functional import scaled_dot_product_attention

import cute_flash
from cute_flash import UnsupportedError, ops
from cute_flash.integrations import sdpa as adapter
from cute_flash.integrations.sdpa import NAME, activate, register, restore, sdpa
from cute_flash.integrations.sdpa_kernels import KERNELS
from tests.integrations.plain import plain

attention = pytest.importorskip("torch.nn.attention")
if not hasattr(attention, "register_flash_attention_impl"):
    pytest.skip("needs torch 2.10", allow_module_level=True)

aten = torch.ops.aten
OPS = [name for name in KERNELS if hasattr(aten, name)]
ARGUMENTS = [x.name for x in aten._flash_attention_forward.default._schema.arguments]
has_pages = pytest.mark.skipif("block_table" not in ARGUMENTS, reason="this torch has no block_table")
FLASH = int(attention.SDPBackend.FLASH_ATTENTION)
# Dense calls: query heads, K/V heads, Sq, Sk, D, keywords.
DENSE = [
    pytest.param(4, 4, 33, 33, 16, {}, id="plain"),
    pytest.param(4, 4, 33, 33, 16, {"is_causal": True}, id="causal"),
    pytest.param(6, 2, 20, 37, 24, {"is_causal": True, "scale": 0.3}, id="gqa"),
    pytest.param(2, 2, 17, 17, 30, {"is_causal": True}, id="D not a multiple of 8"),
    pytest.param(2, 2, 40, 9, 8, {"is_causal": True}, id="queries without keys"),
    pytest.param(2, 1, 5, 0, 8, {}, id="no keys"),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The operators run the kernels of cute_flash on CPU tensors."""
    library = Library("aten", "IMPL", "CPU")
    for name in OPS:
        library.impl(name, KERNELS[name])
    yield
    library._destroy()


def tensors(heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int, head_dim: int, **keywords: Any) -> list[Tensor]:
    """q, k and v, (2, H, S, D), as views of (2, S, H, D)."""
    sizes = (seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    return [torch.randn(2, s, h, head_dim, **keywords).transpose(1, 2).requires_grad_() for s, h in sizes]


def expected(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **keywords: Any) -> tuple[Tensor, Tensor]:
    """out (B, H, S, D) and lse (B, H, S), differentiable."""
    rows = [plain(*(x[b].transpose(0, 1) for x in (q, k, v)), causal=is_causal, **keywords) for b in range(len(q))]
    return torch.stack([out.transpose(0, 1) for out, _ in rows]).to(q.dtype), torch.stack([lse for _, lse in rows])


def assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, check_dtype=False)


def grads(out: Tensor, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True))


# ---- dense


@pytest.mark.parametrize("window", [None, (5, 3)])
@pytest.mark.parametrize(("heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "keywords"), DENSE)
def test_dense_operators(on_cpu, heads, heads_kv, seqlen_q, seqlen_k, head_dim, keywords, window) -> None:  # type: ignore[no-untyped-def]
    """SDPA's operator, and with a window the operator of flash attention."""
    qkv = tensors(heads, heads_kv, seqlen_q, seqlen_k, head_dim)
    if window is None:
        out, lse, *sizes, _, _, _ = aten._scaled_dot_product_flash_attention(*qkv, **keywords)
        assert sizes == [None, None, seqlen_q, seqlen_k]
        wanted, wanted_lse = expected(*qkv, **keywords)
    else:
        arguments = *(x.transpose(1, 2) for x in qkv), None, None, seqlen_q, seqlen_k, 0.0
        sides = dict(zip(("window_size_left", "window_size_right"), window), scale=keywords.get("scale"))
        is_causal = keywords.get("is_causal", False)
        out, lse, *_ = aten._flash_attention_forward(*arguments, is_causal, False, **sides)
        out = out.transpose(1, 2)
        wanted, wanted_lse = expected(*qkv, **keywords, window=window)
    assert_close(out, wanted)
    assert_close(lse, wanted_lse)
    weights = torch.randn_like(out)
    assert_close(grads(out, qkv, weights), grads(wanted, qkv, weights))


@pytest.mark.parametrize("head_dim", [16, 30])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sizes_strides_and_dtypes_are_those_that_torch_predicts(on_cpu, dtype, dropout_p, head_dim) -> None:  # type: ignore[no-untyped-def]
    def meta(x: Any) -> Any:
        return x.detach().to("meta") if isinstance(x, Tensor) else x

    def check(op: Any, *arguments: Any, seed: int | None = None) -> Any:
        found, wanted = op(*arguments), op(*map(meta, arguments))
        for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
            if isinstance(x, Tensor):
                # `rng_state` has another dtype with dropout, so that no other implementation uses it.
                dtype = torch.int64 if dropout_p and i == seed else y.dtype
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), dtype), i
            else:
                assert x == y
        return found

    q, k, v = (x.detach() for x in tensors(4, 2, 20, 12, head_dim, dtype=dtype))
    out, lse, *rest = check(aten._scaled_dot_product_flash_attention, q, k, v, dropout_p, seed=6)
    backward = aten._scaled_dot_product_flash_attention_backward
    check(
        backward, torch.ones(1, dtype=dtype).expand_as(out), q, k, v, out, lse, *rest[:4], dropout_p, False, *rest[4:6]
    )

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    dense = None, None, 20, 12, dropout_p, False
    out, lse, *rest = check(aten._flash_attention_forward, q, k, v, *dense, False, seed=2)
    check(aten._flash_attention_backward, torch.ones_like(out), q, k, v, out, lse, *dense, *rest[:2])

    # q has the strides of (H, T, D).
    q = torch.randn(4, 20, head_dim, dtype=dtype).transpose(0, 1)
    k, v = (torch.randn(9, 2, head_dim, dtype=dtype) for _ in range(2))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 20], [0, 5, 9]))
    varlen = cu_q, cu_k, 17, 5, dropout_p, False
    out, lse, *rest = check(aten._flash_attention_forward, q, k, v, *varlen, False, seed=2)
    check(aten._flash_attention_backward, torch.ones_like(out), q, k, v, out, lse, *varlen, *rest[:2])


# ---- dropout


@pytest.mark.parametrize("head_dim", [16, 12])
def test_gradients_have_the_dropout_mask_of_the_forward(on_cpu: None, head_dim: int) -> None:
    """v is the identity, so that out is the matrix of the remaining weights."""
    q, k, _ = tensors(2, 2, 24, head_dim, head_dim)
    v = torch.eye(head_dim).expand(2, 2, -1, -1).clone().requires_grad_()
    torch.manual_seed(1)
    out = aten._scaled_dot_product_flash_attention(q, k, v, 0.4, False)[0]
    kept = out.detach() != 0  # (B, H, Sq, Sk), because v is the identity
    assert 0.5 < kept.float().mean() < 0.7
    weights = torch.softmax(q @ k.mT * head_dim**-0.5, -1) * kept / 0.6
    wanted = weights @ v
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-3)  # the probability is a multiple of 2 ** -15
    direction = torch.randn_like(out)
    for x, y in zip(grads(out, [q, k, v], direction), grads(wanted, [q, k, v], direction), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


def test_dropout_masks_come_from_torchs_generator(on_cpu: None) -> None:
    qkv = tensors(2, 2, 30, 30, 16)

    def out(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return aten._scaled_dot_product_flash_attention(*qkv, 0.5, False)[0]

    assert torch.equal(out(3), out(3))
    assert not torch.equal(out(3), out(4))
    torch.manual_seed(3)
    assert torch.equal(cute_flash.attn(*qkv, dropout=0.5), out(3))


def test_a_seed_of_another_implementation_is_refused(on_cpu: None) -> None:
    q, k, v = (x.detach() for x in tensors(2, 2, 8, 8, 16))
    out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.5, False)
    foreign = torch.zeros(2, dtype=torch.uint64)
    with pytest.raises(UnsupportedError, match=r"rng_state is torch\.uint64"):
        aten._scaled_dot_product_flash_attention_backward(
            out, q, k, v, out, lse, *rest[:4], 0.5, False, foreign, rest[5]
        )


# ---- varlen


def sequences(cu_q: list[int], cu_k: list[int], *qkv: Tensor) -> Iterator[list[Tensor]]:
    for b in range(len(cu_q) - 1):
        yield [x[cu[b] : cu[b + 1]] for x, cu in zip(qkv, (cu_q, cu_k, cu_k))]


CU_Q, CU_K = [0, 5, 5, 19], [0, 8, 11, 25]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 2)])
def test_varlen_attn(on_cpu: None, window: tuple[int, int]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (torch.randn(cu[-1], h, 16, requires_grad=True) for cu, h in ((CU_Q, 4), (CU_K, 2), (CU_K, 2)))
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in (CU_Q, CU_K))
    out, lse = varlen.varlen_attn(
        q, k, v, cu_q, cu_k, 14, 14, window_size=window, enable_gqa=True, return_aux=varlen.AuxRequest(lse=True)
    )
    parts = [plain(*x, window=window) for x in sequences(CU_Q, CU_K, q, k, v)]
    wanted = torch.cat([part for part, _ in parts]).float()
    assert_close(out, wanted)
    assert_close(lse, torch.cat([part for _, part in parts], 1))
    weights = torch.randn_like(out)
    assert_close(grads(out, [q, k, v], weights), grads(wanted, [q, k, v], weights))


def test_varlen_dropout_and_padding_of_head_dims(on_cpu: None) -> None:
    q, k, v = (torch.randn(cu[-1], 2, 20, requires_grad=True) for cu in (CU_Q, CU_K, CU_K))
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in (CU_Q, CU_K))
    torch.manual_seed(2)
    out = aten._flash_attention_forward(q, k, v, cu_q, cu_k, 14, 14, 0.3, True, False)[0]
    torch.manual_seed(2)
    wanted = cute_flash.attn_varlen(q, k, v, cu_q, cu_k, dropout=0.3, causal=True)
    assert_close(out, wanted)
    weights = torch.randn_like(out)
    assert_close(grads(out, [q, k, v], weights), grads(wanted, [q, k, v], weights))


@has_pages
@pytest.mark.parametrize("num_splits", [None, 1])
def test_paged_cache(on_cpu: None, num_splits: int | None) -> None:
    """The pages of each sequence, in any order. The result is also written in place."""
    q = torch.randn(CU_Q[-1], 4, 16)
    pages = torch.randn(2, 12, 4, 2, 16)  # k and v
    table = torch.randperm(12)[:12].reshape(3, 4).int()
    used = torch.tensor([9, 5, 16], dtype=torch.int32)
    cu_q = torch.tensor(CU_Q, dtype=torch.int32)
    keywords = dict(window_size_left=6, seqused_k=used, block_table=table, num_splits=num_splits)
    arguments = q, *pages, cu_q, None, 14, 16, 0.0, True, False
    out, lse, *_ = aten._flash_attention_forward(*arguments, **keywords)
    for b in range(3):
        k, v = (x[table[b]].flatten(0, 1)[: used[b]] for x in pages)
        rows = slice(CU_Q[b], CU_Q[b + 1])
        wanted, wanted_lse = plain(q[rows], k, v, causal=True, window=(6, -1))
        assert_close(out[rows], wanted)
        assert_close(lse[:, rows], wanted_lse)
    target = torch.zeros_like(out)
    assert_close(aten._flash_attention_forward_no_dropout_inplace(target, *arguments, **keywords), lse)
    assert torch.equal(target, out)


def test_used_keys(on_cpu: None) -> None:
    q, k, v = (torch.randn(cu[-1], 2, 16) for cu in (CU_Q, CU_K, CU_K))
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in (CU_Q, CU_K))
    used = torch.tensor([3, 0, 14], dtype=torch.int32)
    arguments = q, k, v, cu_q, cu_k, 14, 14, 0.0, False, False
    out = aten._flash_attention_forward(*arguments, seqused_k=used)[0]
    for b, (x, y, z) in enumerate(sequences(CU_Q, CU_K, q, k, v)):
        assert_close(out[CU_Q[b] : CU_Q[b + 1]], plain(x, y[: used[b]], z[: used[b]])[0])


@has_pages
def test_one_split_is_batch_invariant(on_cpu: None) -> None:
    """The kernels of cute_flash have this on CUDA only."""
    with pytest.raises(UnsupportedError, match="batch_invariant on cpu"):
        aten._flash_attention_forward(X, X, X, None, None, 8, 8, 0.0, False, False, num_splits=1)


# ---- refused


X = torch.ones(1, 8, 2, 16)
T = torch.ones(8, 2, 16)
CU = torch.tensor([0, 8], dtype=torch.int32)
REFUSED = [
    (dict(return_debug_mask=True), "return_debug_mask=True"),
    (dict(dropout_p=1.0), "dropout_p=1.0"),
    (dict(value=X[..., :8]), "value has head dim 8 and query has 16"),
    (dict(alibi_slopes=torch.ones(2)), "alibi_slopes"),
    (dict(seqused_k=torch.ones(1).int()), "seqused_k without cum_seq_q"),
    (dict(num_splits=4), "num_splits=4 without block_table"),
    (dict(block_table=CU[None]), "block_table needs cum_seq_q"),
    (dict(query=T, cum_seq_q=CU, cum_seq_k=CU, block_table=CU[None], dropout_p=0.1), "dropout_p=0.1 with block_table"),
    (dict(query=T.clone().requires_grad_(), cum_seq_q=CU, cum_seq_k=CU, seqused_k=CU[1:]), "seqused_k with tensors"),
    (dict(query=T.clone().requires_grad_(), cum_seq_q=CU, cum_seq_k=CU, block_table=CU[None]), "block_table with tens"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_arguments_are_named(on_cpu: None, arguments: dict[str, Any], message: str) -> None:
    defaults = dict(
        query=X, key=X, value=X, cum_seq_q=None, cum_seq_k=None, max_q=8, max_k=8, dropout_p=0.0, is_causal=False,
        return_debug_mask=False,
    )  # fmt: skip
    if not {**defaults, **arguments}.keys() <= set(ARGUMENTS):
        pytest.skip("this torch does not have the argument")
    with pytest.raises(ValueError, match=message):
        aten._flash_attention_forward(**defaults | arguments)


@pytest.mark.skipif(len(OPS) < len(KERNELS), reason="this torch has no operator for it")
def test_dropout_in_place_is_refused(on_cpu: None) -> None:
    with pytest.raises(UnsupportedError, match=r"dropout_p=0\.1 with out"):
        aten._flash_attention_forward_no_dropout_inplace(X, X, X, X, None, None, 8, 8, 0.1, False, False)


# ---- inside torch


def test_autocast_leaves_operands_as_they_are(on_cpu: None) -> None:
    """SDPA casts before it calls the operator, which then gets one dtype in the forward and the backward."""
    qkv = tensors(2, 2, 8, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = aten._scaled_dot_product_flash_attention(*qkv)[0]
    assert out.dtype == torch.float32
    assert_close(out, expected(*qkv)[0])


def test_calls_that_nothing_observes_bypass_the_dispatcher(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_flash.reference import cpu

    monkeypatch.setattr(ops, "is_direct", lambda q, k, v, args: True)
    monkeypatch.setattr(ops._cuda, "forward", cpu.forward)
    monkeypatch.setattr(ops._cuda, "backward", cpu.backward)
    qkv = tensors(2, 2, 8, 8, 16)
    out = aten._scaled_dot_product_flash_attention(*qkv, 0.0, True)[0]
    wanted = expected(*qkv, is_causal=True)[0]
    assert_close(out, wanted)
    assert_close(grads(out, qkv, wanted), grads(wanted, qkv, wanted))


def test_nothing_is_recorded_below_autograd(on_cpu: None) -> None:
    out = aten._scaled_dot_product_flash_attention(*tensors(2, 2, 8, 8, 16))[0]
    assert out.grad_fn.name() == "ScaledDotProductFlashAttentionBackward0"
    assert {type(x).__name__ for x, _ in out.grad_fn.next_functions} == {"AccumulateGrad"}


@pytest.mark.compiles
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_compile_and_checkpoint(on_cpu: None, dropout_p: float) -> None:
    from torch.utils.checkpoint import checkpoint

    qkv = [x.detach().requires_grad_() for x in tensors(2, 1, 8, 8, 16)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention(q * 2, k, v, dropout_p, True)[0] + 1

    def recomputed(*qkv: Tensor) -> Any:
        return checkpoint(attend, *qkv, use_reentrant=False)

    results = []
    for function in (attend, recomputed, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(5)
        out = function(*qkv)
        results.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
    for result in results[1:]:
        assert_close(result, results[0])


# ---- registration


@pytest.fixture
def clean() -> Iterator[None]:
    """No implementation is active before the test, and none is left after it."""
    before = torch._C._get_sdp_priority_order(), torch.backends.cuda.flash_sdp_enabled()
    assert attention.current_flash_attention_impl() is None
    yield
    restore()
    assert attention.current_flash_attention_impl() is None
    assert (torch._C._get_sdp_priority_order(), torch.backends.cuda.flash_sdp_enabled()) == before


def overridden() -> list[str]:
    return [name for name in KERNELS if f"aten/{name}/CUDA" in torch.library._impls]


@pytest.mark.parametrize("name", OPS)
def test_parameters_are_those_of_the_schema(name: str) -> None:
    arguments = getattr(aten, name).default._schema.arguments
    parameters = inspect.signature(KERNELS[name]).parameters
    if "keywords" in parameters:  # those of `flash_forward`
        parameters = {**parameters, **inspect.signature(KERNELS["_flash_attention_forward"]).parameters}
        parameters = {x: parameters[x] for x in [a.name for a in arguments]}
    known = {"block_table", "num_splits"}  # not in torch 2.10
    assert [x for x in parameters if x not in known] == [a.name for a in arguments if a.name not in known]
    for argument in arguments:
        parameter = parameters[argument.name]
        assert (parameter.kind == parameter.KEYWORD_ONLY) == argument.kwarg_only
        assert (parameter.default is not parameter.empty) == argument.has_default_value()
        if argument.has_default_value():
            assert parameter.default == argument.default_value


def test_activate_and_restore(clean: None) -> None:
    assert register() == register() == NAME
    assert NAME in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None and overridden() == []
    for _ in range(2):
        activate()
        activate()
        assert attention.current_flash_attention_impl() == NAME
        assert overridden() == OPS
        for name in OPS:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")
        restore()
        restore()
        assert attention.current_flash_attention_impl() is None and overridden() == []


def test_context_manager(clean: None) -> None:
    cudnn_first = [3, 1, 2, 0, 4]
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(cudnn_first)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        for is_nested in (False, True, False):
            with pytest.raises(KeyError), sdpa():
                assert torch._C._get_sdp_priority_order() == [FLASH, 3, 2, 0, 4]
                assert torch.backends.cuda.flash_sdp_enabled()
                if is_nested:
                    with sdpa():
                        assert overridden() == OPS
                    restore()  # the outer context must still exit without an error
                    activate()
                assert attention.current_flash_attention_impl() == NAME
                raise KeyError
            assert torch._C._get_sdp_priority_order() == cudnn_first
            assert not torch.backends.cuda.flash_sdp_enabled()
            assert attention.current_flash_attention_impl() is None and overridden() == []
    finally:
        torch._C._set_sdp_priority_order(before)
        torch.backends.cuda.enable_flash_sdp(True)


def test_the_previous_implementation_is_activated_again(clean: None) -> None:
    class Other:
        def remove(self) -> None:
            pass

    attention.register_flash_attention_impl("OTHER", register_fn=Other)
    try:
        attention.activate_flash_attention_impl("OTHER")
        restore()
        assert attention.current_flash_attention_impl() == "OTHER"
        with sdpa():
            assert attention.current_flash_attention_impl() == NAME
        assert attention.current_flash_attention_impl() == "OTHER" and overridden() == []
        attention.restore_flash_attention_impl()
        with sdpa():
            attention.activate_flash_attention_impl("OTHER")
        assert attention.current_flash_attention_impl() is None
        activate()
        with sdpa():
            restore()
        assert attention.current_flash_attention_impl() == NAME
    finally:
        attention._registry._FLASH_ATTENTION_IMPLS.pop("OTHER")


def test_torch_without_restore(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10 has no `restore_flash_attention_impl`."""
    monkeypatch.delattr(attention, "restore_flash_attention_impl")
    with sdpa():
        assert overridden() == OPS
    assert attention.current_flash_attention_impl() is None and overridden() == []


def test_older_torch_is_refused(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    for function in (register, activate, restore, lambda: sdpa().__enter__()):
        with pytest.raises(ImportError, match=r"needs torch 2\.10 or later, and 2\.9\.1 is installed"):
            function()


def test_torch_sets_its_order_before_ours(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch moves cuDNN to the front at its first choice of a backend, which must not happen inside the context."""
    before, is_first = torch._C._get_sdp_priority_order(), [True]

    def choose(*qkv: Tensor) -> int:
        if is_first.pop():
            torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])
        return FLASH

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, **keywords: empty(*sizes, **keywords))
    adapter._initialize_priority_order.cache_clear()
    try:
        for _ in range(2):
            with sdpa():
                assert torch._C._get_sdp_priority_order() == [FLASH, 3, 2, 0, 4]
            assert torch._C._get_sdp_priority_order() == [3, 1, 2, 0, 4]
    finally:
        torch._C._set_sdp_priority_order(before)
        adapter._initialize_priority_order.cache_clear()


def test_calls_on_the_cpu_do_not_change(clean: None) -> None:
    qkv = tensors(2, 2, 8, 8, 16)
    wanted = scaled_dot_product_attention(*qkv)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sdpa():
            assert torch.equal(scaled_dot_product_attention(*qkv), wanted)
