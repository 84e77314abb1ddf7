"""The torch operators: registration, torch.compile, gradients, functorch and fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_flash import BlockMask, UnsupportedError, attn, attn_varlen, masks, ops, reference, supports, use_kernels
from cute_flash.spec import arch
from cute_flash.spec.args import AttentionArgs, to_schema
from cute_flash.spec.band import Band
from tests.arguments import call_args
from tests.combinations import Combination, VarlenCombination, gradients, normal
from tests.fakes.cuda import launching_operators
from tests.fakes.gpu import fake_gpu
from tests.lengths import Lengths
from tests.opchecks import assert_opcheck, each_part


def inputs(sq: int, sk: int, dtype: torch.dtype = torch.float64, heads: int = 4, heads_kv: int = 2) -> list[Tensor]:
    """q, k, v that require gradients."""
    shapes = ((2, heads, sq, 8), (2, heads_kv, sk, 8), (2, heads_kv, sk, 8))
    return [normal(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def plain(left: int | None = None, right: int | None = None, **fields: Any) -> AttentionArgs:
    return AttentionArgs(scale=0.3, window_left=left, window_right=right, **fields)


# ---- registration


def transposed_heads() -> list[Tensor]:
    return [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs(5, 6)]


def transposed_columns() -> list[Tensor]:
    return [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs(5, 6)]


def expanded() -> list[Tensor]:
    return [x.detach()[:, :1].expand(-1, 4, -1, -1) for x in inputs(5, 6)]


def one_column() -> list[Tensor]:
    """q and k of head dim 1, whose stride is that of a matrix of columns, and wider values."""
    q, k, v = (x.detach() for x in inputs(5, 6))
    return [q[..., :1].mT.contiguous().mT.requires_grad_(), k[..., :1].clone().requires_grad_(), v.requires_grad_()]


PLAIN = {
    "full": (lambda: inputs(5, 6), plain()),
    "causal, longer q": (lambda: inputs(9, 4), plain(right=0)),
    "window": (lambda: inputs(7, 7), plain(2, 1)),
    "fp32": (lambda: inputs(5, 6, torch.float32), plain(left=3)),
    "bf16": (lambda: [x.detach() for x in inputs(5, 6, torch.bfloat16)], plain()),
    "fp32 output": (lambda: inputs(5, 6, torch.bfloat16), plain(right=0, out_fp32=True)),
    "no keys": (lambda: inputs(5, 0), plain()),
    "heads transposed": (transposed_heads, plain(right=0)),
    "columns transposed": (transposed_columns, plain(right=0)),
    "heads expanded": (expanded, plain()),
    "one column": (one_column, plain()),
}


def check_bwd(part: tuple[str, ...], qkv: list[Tensor], args: AttentionArgs, has_dlse: bool = False) -> None:
    out, lse, _ = ops.attention_fwd(*qkv, *to_schema(args))
    dlse = torch.ones_like(lse) if has_dlse else None
    assert_opcheck(part, ops.attention_bwd, torch.ones_like(out), dlse, *qkv, out, lse, *to_schema(args))


@each_part
@pytest.mark.parametrize("name", PLAIN)
def test_opcheck(name: str, part: tuple[str, ...]) -> None:
    make, args = PLAIN[name]
    assert_opcheck(part, ops.attention_fwd, *make(), *to_schema(args))
    check_bwd(part, [x.detach() for x in make()], args, has_dlse=list(PLAIN).index(name) % 2 == 1)


TOGETHER = {"softcap": 2.0, "alibi": 2, "sinks": True, "dropout": 0.3}
# (features, requires_grad, varlen): all features together in all four ways, and each feature alone.
FEATURES: list[tuple[dict[str, Any], bool, bool]] = [
    *((TOGETHER, requires_grad, varlen) for requires_grad in (False, True) for varlen in (False, True)),
    *(({name: x}, i % 2 == 1, i % 2 == 0) for i, (name, x) in enumerate(TOGETHER.items())),
    ({"alibi": 1}, False, True),
    ({"alibi": 1}, True, False),
]


@each_part
@pytest.mark.parametrize(
    ("features", "requires_grad", "varlen"), FEATURES, ids=lambda x: "-".join(x) if isinstance(x, dict) else str(x)
)
def test_opcheck_features(features: dict[str, Any], requires_grad: bool, varlen: bool, part: tuple[str, ...]) -> None:
    lengths = Lengths([4, 5], [2, 9], [1, 7], (2, 1)) if varlen else None
    one = Combination(2, 2, 2, 5, 6, 3, 3, torch.float64, 3, 1, features)
    case = one if lengths is None else VarlenCombination(one, lengths)
    tensors = {name: x.nan_to_num().requires_grad_(requires_grad) for name, x in case.tensors().items()}
    qkv, args = [tensors[name] for name in "qkv"], case.args(tensors, 0.3)._replace(return_max_logit=True)
    assert_opcheck(part, ops.attention_fwd, *qkv, *to_schema(args))
    if not requires_grad:
        check_bwd(part, qkv, args, has_dlse=lengths is not None)


@each_part
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_mods(requires_grad: bool, part: tuple[str, ...]) -> None:
    tensors = [x.detach().requires_grad_(requires_grad) for x in inputs(5, 6)]
    bias, table = (normal(*shape, seed=9).requires_grad_(requires_grad) for shape in ((1, 4, 5, 1), (4, 6)))
    shift = 2.5
    calls: list[dict[str, Any]] = [
        {"bias": bias},
        {"score_mod": lambda score, b, h, q, kv: score * shift + table[h, kv]},
        {"mask_mod": masks.causal(1)},
        {"mask_mod": masks.causal(1), "block_mask": BlockMask.of(masks.causal(1), (2, 4, 5, 6), tile=(2, 2))},
    ]
    calls.append({name: value for options in calls for name, value in options.items()})
    for options in calls:
        args = call_args(tensors[0], **options)
        assert_opcheck(part, ops.attention_fwd, *tensors, *to_schema(args))
        if not requires_grad:
            check_bwd(part, tensors, args)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"softcap": 2.0}, {"mask_mod": masks.causal()}], ids=["causal", "softcap", "mask_mod"]
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_dispatcher_sees_one_operator_each_way(requires_grad: bool, options: dict[str, Any]) -> None:
    q, k, v = (x.detach().requires_grad_(requires_grad) for x in inputs(5, 6))
    with Seen() as seen:
        out = attn(q, k, v, **options)
        if requires_grad:
            out.sum().backward()  # type: ignore[union-attr]
    ours = [name for name in seen.names if name.startswith("cute_flash")]
    assert ours == ["cute_flash.attention_fwd.default", "cute_flash.attention_bwd.default"][: 1 + requires_grad]


def test_only_what_the_backward_needs_is_saved() -> None:
    q, k, v = inputs(50, 60)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, lse = attn(q, k, v, return_lse=True)
    # Nothing of size Sq x Sk is saved. The Autograd kernel also saves None for the tensors of absent features.
    assert [x.data_ptr() for x in saved if x is not None] == [x.data_ptr() for x in (q, k, v, out, lse)]


# ---- torch.compile and torch.export


def attention(q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None]) -> tuple[Tensor, Tensor]:
    out, lse = attn(q, k, v, window=window, return_lse=True)
    return 2 * out, lse


def with_gradients(function: Any, tensors: list[Tensor], *args: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*leaves, *args)
    finite = torch.where(lse == -torch.inf, 0, lse)
    grads = torch.autograd.grad((out.sin().sum() + finite.cos().sum()), leaves)
    return [out, lse, *grads]


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.compiles
def test_compiled_once_for_all_lengths_and_windows() -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=backend)
    closed = ((7, 12, (3, 2)), (12, 7, (4, 5)), (31, 33, (6, 7)), (100, 5, (2, 3)))
    opened = [(sq, sk, window) for window in ((None, None), (None, 0), (0, None)) for sq, sk in ((7, 12), (12, 7))]
    for sq, sk, window in (*closed, *opened):
        tensors = inputs(sq, sk)
        found = with_gradients(compiled, tensors, window)
        assert_all_close(found, with_gradients(attention, tensors, window))
        assert backend.frame_count == 1 or window in ((None, None), (None, 0), (0, None))


@pytest.mark.compiles
def test_compiled_by_inductor_and_without_gradients() -> None:
    torch._dynamo.reset()

    def layer(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, 4, 8)).unbind(-3)
        # Only views around the call, because for arithmetic Inductor would run a C++ compiler for many seconds.
        return attn(q, k, v, causal=True, layout="bshd").flatten(-2)  # type: ignore[union-attr]

    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        for length in (9, 17, 23):
            x = normal(2, length, 96, dtype=torch.float32)
            torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.compiles
def test_compiled_with_features() -> None:
    torch._dynamo.reset()
    case = Combination(2, 2, 2, 5, 6, 3, 3, torch.float64, 3, 1, TOGETHER)
    tensors = {name: x.requires_grad_() for name, x in case.tensors().items()}

    def layer(x: dict[str, Tensor]) -> Any:
        x = {name: 1 * value for name, value in x.items()}
        return attn(x["q"], x["k"], x["v"], softcap=2.0, alibi=x["alibi"], sinks=x["sinks"], return_lse=True)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    weights = normal(2, 4, 5, 3, seed=3), normal(2, 4, 5, seed=4)
    torch.testing.assert_close(compiled(tensors), layer(tensors))
    torch.testing.assert_close(gradients(compiled, tensors, weights), gradients(layer, tensors, weights))


@pytest.mark.compiles
def test_compiled_dropout_has_one_mask_both_ways() -> None:
    torch._dynamo.reset()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attn(q, k, v, dropout=0.5)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, v = inputs(20, 30)
    out = compiled(q, k, v)
    # out is linear in v, so dv times v sums up to the sum of out.
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((dv * v).sum(), out.sum())
    assert not torch.equal(compiled(q, k, v), out)


@pytest.mark.compiles
def test_compiled_varlen_for_all_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attn_varlen, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries in ([4, 5], [1, 8], [0, 7]):
        lengths = Lengths(queries, queries)
        q, k, v = (normal(sum(queries), heads, 4, seed=i) for i, heads in enumerate((4, 2, 2)))
        offsets = lengths.cu_q
        torch.testing.assert_close(compiled(q, k, v, offsets, offsets), attn_varlen(q, k, v, offsets, offsets))


@pytest.mark.compiles
def test_a_compiled_function_keeps_the_family_of_its_first_call() -> None:
    """The same family computes its gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attn(q, k, v), fullgraph=True, backend="aot_eager")
    leaves = [x.detach().requires_grad_() for x in inputs(5, 6, torch.bfloat16)]
    with fake_gpu("sm_90") as gpu, launching_operators():
        with use_kernels("sm80"):
            out = compiled(*leaves)
        out.sum().backward()
    assert gpu.kernels == ["fwd_sm80", "bwd_preprocess", "bwd_sm80", "bwd_postprocess_sm80"]


@pytest.mark.compiles
def test_compiled_fp32_launches_the_kernels_of_fp32() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attn(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    leaves = inputs(5, 6, torch.float32)
    with fake_gpu("sm_90") as gpu, launching_operators():
        out = compiled(*leaves)
        grads = torch.autograd.grad(out.sum(), leaves)
    assert [name for name in gpu.kernels if "sm80" in name] == [
        "fwd_sm80_fp32",
        "bwd_sm80_fp32",
        "bwd_postprocess_sm80",
    ]
    expected = attn(*leaves, causal=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), leaves), rtol=1e-4, atol=1e-5)


def test_functorch_with_fp32_launches_the_kernels_of_fp32() -> None:
    q, k, v = (x.detach() for x in inputs(5, 6, torch.float32))
    with fake_gpu("sm_80") as gpu, launching_operators():
        grad = torch.func.grad(lambda x: attn(x, k, v).sum())(q)
        mapped = torch.func.vmap(lambda x: attn(x, k, v))(torch.stack([q, 2 * q]))
    assert {"fwd_sm80_fp32", "bwd_sm80_fp32"} < set(gpu.kernels)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(attn(leaf, k, v).sum(), leaf)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mapped, torch.stack([attn(q, k, v), attn(2 * q, k, v)]))


def test_fp32_without_the_gradient_of_a_score_mod() -> None:
    def penalty(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - 0.1 * (q_idx - kv_idx).abs()

    leaves = inputs(5, 6, torch.float32)
    message = r"the gradient of a score_mod, .* in float32 on cuda"
    with fake_gpu("sm_90"), launching_operators():
        grad = torch.func.grad(lambda q: attn(q, *leaves[1:], score_mod=penalty).sum())
        for function in (
            lambda q: attn(q, *leaves[1:], score_mod=penalty),
            grad,
            lambda q: torch.func.vmap(grad)(q[None]),
        ):
            with pytest.raises(UnsupportedError, match=message):
                function(leaves[0])
        with torch.no_grad():
            out = attn(*leaves, score_mod=penalty)
    torch.testing.assert_close(out, attn(*leaves, score_mod=penalty))


def test_export_keeps_the_operator() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return attn(q, k, v, causal=True)

    q, k, v = (x.detach() for x in inputs(5, 6))
    exported = torch.export.export(Layer(), (q, k, v))
    assert torch.ops.cute_flash.attention_fwd.default in [node.target for node in exported.graph.nodes]
    torch.testing.assert_close(exported.module()(q, k, v), attn(q, k, v, causal=True))


# ---- gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sq", "sk", "heads_kv", "window", "scale"),
    [
        (3, 3, 4, (None, None), None),
        (3, 5, 2, (None, 0), None),
        (5, 3, 1, (None, 0), 0.9),  # two rows see no key
        (4, 4, 2, (1, 1), -0.4),
        (2, 6, 4, (0, 3), 0.0),
    ],
)
def test_gradcheck(sq: int, sk: int, heads_kv: int, window: Any, scale: float | None) -> None:
    tensors = [x[:1, :, :, :3].detach().requires_grad_() for x in inputs(sq, sk, heads_kv=heads_kv)]

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attn(q, k, v, window=window, scale=scale, return_lse=True)
        # Finite differences of -inf are NaN.
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(both, tensors)


@pytest.mark.slow
def test_gradcheck_of_features() -> None:
    q, k, v = (x[:1, :, :, :3].detach().requires_grad_() for x in inputs(3, 4))
    slopes, sinks, bias, table = (normal(*shape, seed=5).requires_grad_() for shape in ((4,), (4,), (4, 1, 4), (4,)))

    def both(q, k, v, slopes, sinks, bias, table):
        return attn(
            q, k, v, alibi=slopes, sinks=sinks, bias=bias, score_mod=lambda score, b, h, i, j: score * table[h],
            softcap=2.0, return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(both, (q, k, v, slopes, sinks, bias, table))


def test_rows_and_keys_outside_the_band_have_zero_gradients() -> None:
    q, k, v = inputs(9, 4)
    out = attn(q, k, v, causal=True)
    # The first 5 rows see no key: a NaN there must not flow back.
    weights = normal(*out.shape, seed=5)  # type: ignore[union-attr]
    weights[:, :, :5] = torch.nan
    (out * weights).sum().backward()  # type: ignore[operator]
    assert torch.equal(q.grad[:, :, :5], torch.zeros(2, 4, 5, 8, dtype=torch.float64))
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert q.grad[:, :, 6:].abs().min() > 0

    q, k, v = inputs(3, 8)
    attn(q, k, v, window=(1, 0)).sum().backward()  # type: ignore[union-attr]
    # Queries 0, 1, 2 are aligned with keys 5, 6, 7 and see one key before, so no query sees keys 0 to 3.
    assert torch.equal(v.grad[:, :, :4], torch.zeros(2, 2, 4, 8, dtype=torch.float64))
    assert v.grad[:, :, 4:].abs().min() > 0


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_some_inputs(wanted: tuple[int, ...]) -> None:
    tensors = inputs(5, 6)
    expected = torch.autograd.grad(attn(*tensors).sin().sum(), tensors)
    some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    attn(*some).sin().sum().backward()
    for i, x in enumerate(some):
        assert (x.grad is not None) == (i in wanted)
        assert x.grad is None or torch.equal(x.grad, expected[i])


def test_inference_mode_and_no_grad() -> None:
    q, k, v = inputs(5, 6)
    expected = attn(q, k, v).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = attn(q, k, v)
        assert not out.requires_grad
        assert torch.equal(out, expected)


# ---- functorch


def test_func_grad_and_vmap() -> None:
    q, k, v = (x.detach() for x in inputs(5, 6))
    expected = torch.autograd.grad(attn(*(leaf := inputs(5, 6)), causal=True).sin().sum(), leaf)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn(q, k, v, causal=True).sin().sum()  # type: ignore[union-attr]

    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), expected)
    many = [torch.stack([x, x + 0.1, x * 2]) for x in (q, k, v)]
    each = [attn(*(x[i] for x in many), causal=True, return_lse=True) for i in range(3)]
    out, lse = torch.func.vmap(lambda *x: attn(*x, causal=True, return_lse=True))(*many)
    torch.testing.assert_close((out, lse), tuple(torch.stack(x) for x in zip(*each)))
    by_element = [torch.func.grad(loss)(*(x[i] for x in many)) for i in range(3)]
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(*many), torch.stack(by_element))


def test_vmap_over_one_argument_and_features() -> None:
    q, k, v = (x.detach() for x in inputs(5, 6))
    slopes = normal(3, 4, seed=7)
    found = torch.func.vmap(lambda s: attn(q, k, v, alibi=s))(slopes)
    torch.testing.assert_close(found, torch.stack([attn(q, k, v, alibi=s) for s in slopes]))
    found = torch.func.vmap(lambda x: attn(x, k, v), in_dims=1)(torch.stack([q, -q], dim=1))
    torch.testing.assert_close(found, torch.stack([attn(q, k, v), attn(-q, k, v)]))


def test_jacobians() -> None:
    q, k, v = (x[:1, :, :2, :3].detach() for x in inputs(3, 4))

    def rows(q: Tensor) -> Tensor:
        return attn(q, k, v).sum(dim=(1, 3))  # type: ignore[union-attr]

    expected = torch.autograd.functional.jacobian(rows, q)
    torch.testing.assert_close(torch.func.jacrev(rows)(q), expected)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0}, {"score_mod": lambda s, b, h, i, j: s * 2}], ids=["plain", "softcap", "score_mod"]
)
def test_gradients_of_gradients_are_refused(options: dict[str, Any]) -> None:
    q, k, v = inputs(5, 6)
    (dq,) = torch.autograd.grad(attn(q, k, v, **options).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivatives of attn"):
        torch.autograd.grad(dq.square().sum(), k)
    q, k, v = (x.detach() for x in (q, k, v))

    def loss(x: Tensor) -> Tensor:
        return attn(x, k, v, **options).square().sum()  # type: ignore[union-attr]

    grad = torch.func.grad(loss)
    for transform in (torch.func.hessian, torch.func.jacfwd):
        with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
            transform(loss)(q)
    with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
        torch.func.jvp(grad, (q,), (q,))
    for function in (lambda x: grad(x).sum(), lambda x: loss(x - 0.1 * grad(x))):  # the second: a step of MAML
        with pytest.raises(UnsupportedError, match="second derivatives of attn"):
            torch.func.grad(function)(q)


def featured_loss(x: dict[str, Tensor]) -> Tensor:
    options = {name: x[name] for name in ("alibi", "sinks", "bias")}
    out, lse = attn(
        x["q"], x["k"], x["v"], **options, score_mod=lambda s, b, h, i, j: s * x["table"][h], return_lse=True
    )
    return out.sin().sum() + lse.cos().sum()


def varlen_loss(x: dict[str, Tensor]) -> Tensor:
    offsets = torch.tensor([0, 2, 8], dtype=torch.int32)
    q, k, v = (y[0].transpose(0, 1) for y in (x["q"], x["k"], x["v"]))
    options: dict[str, Any] = {name: x[name] for name in ("alibi", "sinks", "bias")}
    options["score_mod"] = lambda s, b, h, i, j: s * x["table"][h]
    out = attn_varlen(q, k, v, offsets, offsets, max_seqlen_q=8, max_seqlen_k=8, causal=True, **options)
    return out.sin().sum()  # type: ignore[union-attr]


LOSSES = {"attn": featured_loss, "attn_varlen": varlen_loss}


def differentiable(sq: int, sk: int) -> dict[str, Tensor]:
    """A tensor for each differentiable argument, and one that a score_mod captures."""
    shapes = {"alibi": (4,), "sinks": (4,), "bias": (4, 1, sk), "table": (4,)}
    others = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return {**dict(zip("qkv", [x.detach() for x in inputs(sq, sk)])), **others}


@pytest.mark.parametrize("outer", ["q", "k", "v", "alibi", "sinks", "bias", "table"])
@pytest.mark.parametrize("entry", LOSSES)
def test_outer_transforms_see_calls_inside_of_inner_ones(entry: str, outer: str) -> None:
    loss, tensors = LOSSES[entry], differentiable(8, 8)
    x, y = tensors[outer], tensors["q" if outer == "k" else "k"]
    leaf = x.clone().requires_grad_()

    def partial(x: Tensor, y: Tensor) -> Tensor:
        # The product is a tensor of the inner transform, which does not differentiate it.
        return loss({**tensors, "q" if outer == "k" else "k": y, outer: 1 * x})

    def value(x: Tensor) -> Tensor:
        return torch.func.grad_and_value(lambda y: partial(x, y))(y)[1]

    (expected,) = torch.autograd.grad(partial(leaf, y), leaf)
    torch.testing.assert_close(torch.func.grad(value)(x), expected)
    out, _ = torch.func.vjp(lambda y: partial(leaf, y), y)
    torch.testing.assert_close(torch.autograd.grad(out, leaf)[0], expected)
    with torch.no_grad():  # as in the outer function, and not in the inner one
        assert not torch.func.vjp(lambda y: partial(leaf, y), y)[0].requires_grad
    hidden = torch.func.grad(lambda x: torch.no_grad()(value)(x) + x.sum())(x)
    assert torch.equal(hidden, torch.ones_like(x))


@pytest.mark.parametrize("name", ["q", "k", "v", "alibi", "sinks", "bias"])
def test_gradients_of_mapped_arguments(name: str) -> None:
    tensors = differentiable(5, 6)
    many = torch.stack([tensors[name], 0.5 * tensors[name], -tensors[name]])

    def total(many: Tensor, tensors: dict[str, Tensor] = tensors) -> Tensor:
        return torch.func.vmap(lambda x: featured_loss({**tensors, name: x}))(many).sum()

    leaf = many.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sum(featured_loss({**tensors, name: x}) for x in leaf), leaf)  # type: ignore
    torch.testing.assert_close(torch.autograd.grad(total(leaf), leaf)[0], expected)
    torch.testing.assert_close(torch.func.grad(total)(many), expected)
    for other in tensors.keys() - {name}:
        leaf = tensors[other].clone().requires_grad_()
        each = [featured_loss({**tensors, other: leaf, name: x}) for x in many]
        (expected,) = torch.autograd.grad(sum(each), leaf)  # type: ignore
        torch.testing.assert_close(torch.autograd.grad(total(many, {**tensors, other: leaf}), leaf)[0], expected)


def test_functorch_of_mods() -> None:
    """Gradients of captured tensors are right; vmap over them is refused."""
    q, k, v = (x.detach() for x in inputs(5, 6))
    table = normal(3, 4, 6, seed=8)

    def loss(table: Tensor) -> Tensor:
        return attn(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, j]).sin().sum()  # type: ignore[union-attr]

    leaf = table[0].clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(table[0]), torch.autograd.grad(loss(leaf), leaf)[0])
    with pytest.raises(UnsupportedError, match="vmap over a tensor that score_mod"):
        torch.func.vmap(loss)(table)
    with pytest.raises(UnsupportedError, match="vmap over a tensor that score_mod"):
        torch.func.vmap(torch.func.grad(loss))(table)
    bias = normal(3, 5, 6, seed=9)
    rows, offsets = q[0].transpose(0, 1), torch.tensor([0, q.shape[2]], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="or over the bias of attn_varlen: call the function in a loop"):
        lengths = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), q.shape[2])
        torch.func.vmap(lambda x: attn_varlen(rows, rows, rows, offsets, offsets, bias=x, **lengths))(bias)
    found = torch.func.vmap(lambda x: attn(q, k, v, bias=x))(bias)
    torch.testing.assert_close(found, torch.stack([attn(q, k, v, bias=x) for x in bias]))


# ---- fake tensors


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
def test_fake_results_are_like_real_ones(device: str, dtype: torch.dtype, order: tuple[int, ...]) -> None:
    def made(heads: int, length: int, where: str) -> Tensor:
        shape = (2, heads, length, 16)
        back = [order.index(i) for i in range(4)]
        return torch.zeros([shape[i] for i in order], dtype=dtype, device=where).permute(back)

    real, real_lse = attn(made(4, 5, "cpu"), made(2, 7, "cpu"), made(2, 7, "cpu"), return_lse=True)
    with FakeTensorMode():
        q, k, v = made(4, 5, device), made(2, 7, device), made(2, 7, device)
        out, lse = attn(q, k, v, return_lse=True)
        dq, dk, dv, _ = ops.attention_bwd(out, None, q, k, v, out, lse, *to_schema(plain()))
    for fake, like in ((out, real), (lse, real_lse)):
        assert (fake.shape, fake.stride(), fake.dtype) == (like.shape, like.stride(), like.dtype)
        assert fake.device.type == device
    for grad, like in ((dq, q), (dk, k), (dv, v)):
        assert (grad.shape, grad.stride(), grad.dtype) == (like.shape, like.stride(), like.dtype)
        assert grad.device.type == device


def test_fake_varlen_results() -> None:
    with FakeTensorMode():
        x = torch.empty(8, 4, 64, dtype=torch.float16, device="cuda:0")
        offsets = torch.empty(3, dtype=torch.int32, device="cuda:0")
        v = torch.empty(8, 4, 32, dtype=torch.float16, device="cuda:0")
        out, lse = attn_varlen(x, x, v, offsets, offsets, return_lse=True)
        assert (out.shape, out.dtype, out.device) == ((8, 4, 32), torch.float16, x.device)
        assert (lse.shape, lse.dtype, lse.device) == ((4, 8), torch.float32, x.device)
        _, max_logit = attn_varlen(x, x, x, offsets, offsets, softcap=3.0, dropout=0.1, return_max_logit=True)
        assert (max_logit.shape, max_logit.dtype, max_logit.device) == ((4,), torch.float32, x.device)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "message"),
    [
        (520, torch.float16, "head_dim=520"),
        (64, torch.float64, "dtype float64 on cuda: use one of float16, bfloat16, float32"),
        (136, torch.float32, "head_dim=136 of float32 on cuda: at most 128"),
    ],
)
def test_fake_cuda_tensors_meet_the_limits_of_the_kernels(head_dim: int, dtype: torch.dtype, message: str) -> None:
    with FakeTensorMode():
        x = torch.empty(1, 1, 4, head_dim, dtype=dtype, device="cuda")
        with pytest.raises(UnsupportedError, match=message):
            attn(x, x, x)


def test_supports_asks_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = []

    def detect(index: int) -> arch.ArchSpec:
        indices.append(index)
        if index == 1:
            raise UnsupportedError("GPU 1 (NVIDIA B200) is sm_100")
        return arch.ARCHS["sm_80"]

    monkeypatch.setattr("cute_flash.runtime.gpu.detect", detect)
    with FakeTensorMode():
        fine = torch.empty(1, 2, 4, 64, dtype=torch.float16, device="cuda:0")
        assert supports(fine, fine, fine, causal=True)
        elsewhere = torch.empty(1, 2, 4, 64, dtype=torch.float16, device="cuda:1")
        assert supports(elsewhere, elsewhere, elsewhere).reason == "GPU 1 (NVIDIA B200) is sm_100"
        assert set(indices) == {0, 1}
        odd = torch.empty(1, 2, 4, 60, dtype=torch.float16, device="cuda:0")
        assert "the nearest is 64" in supports(odd, odd, odd).reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["softcap", "alibi", "sinks", "dropout", "return_max_logit"])
def test_features_on_cuda(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_flash.runtime.gpu.detect", lambda index: arch.ARCHS["sm_90"])
    with FakeTensorMode():
        x = torch.empty(1, 4, 8, 64, dtype=dtype, device="cuda:0")
        slopes = torch.empty(4, device="cuda:0")
        value = slopes if name in ("alibi", "sinks") else 0.5 if name != "return_max_logit" else True
        options: dict[str, Any] = {name: value}
        found = attn(x, x, x, return_lse=True, **options)
        assert [t.shape for t in found[:2]] == [x.shape, x.shape[:3]]
        assert supports(x, x, x, **options) and supports(x, x, x, **options, deterministic=True)


def test_supports_fp32_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_flash.runtime.gpu.detect", lambda index: arch.ARCHS["sm_90"])

    def scaled(score: Any, *_: Any) -> Any:
        return score * 2

    with FakeTensorMode():
        x = torch.empty(1, 4, 8, 128, device="cuda:0")
        assert supports(x, x, x, score_mod=scaled)
        assert "call it under torch.no_grad()" in supports(x.requires_grad_(), x, x, score_mod=scaled).reason
        assert "the gradient of a score_mod" in supports(x, x, x, score_mod=scaled, deterministic=True).reason
        with use_kernels("sm90"):
            assert "float32 by kernel family 'sm90'" in supports(x, x, x).reason


# ---- CPU kernels


def test_cpu_kernels_are_the_reference() -> None:
    q, k, v = (x.detach() for x in inputs(9, 11))
    out, lse, max_logit = ops.attention_fwd(q, k, v, *to_schema(plain(4, 1)))
    expected = reference.dense(q, k, v, Band(4, 1), 0.3)
    torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-13)
    assert max_logit.shape == (0,)
