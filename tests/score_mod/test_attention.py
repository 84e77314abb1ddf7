"""`attn` with a bias and with mods on the CPU, against the same mods called on whole tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cute_flash
from cute_flash import BlockMask, UnsupportedError, attn, attn_varlen, masks, reference, supports
from cute_flash.reference import tiled
from cute_flash.reference.dense import band_mask
from cute_flash.score_mod.bound import mod_arguments
from cute_flash.spec.band import Band
from tests.arguments import call_args
from tests.combinations import normal

H, HKV, D = 4, 2, 8
SLOPES = normal(H, seed=11).abs()
NEAR = normal(H, 12, seed=12)
PAIRS = normal(2, 2, 9, seed=13)
IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 3] * 10)
SCALE, WIDTH = torch.tensor(1.3, dtype=torch.float64), 6


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx - kv_idx).abs()


def relative(score, b, h, q_idx, kv_idx):
    return score + NEAR[h, (q_idx - kv_idx).clamp(0, NEAR.shape[1] - 1)]


def everything(score, b, h, q_idx, kv_idx):
    distance = (q_idx - kv_idx).abs()
    x = torch.tanh(score / 3) * SCALE + torch.sigmoid(score) * NEAR[h, distance % 12]
    x = x + torch.where(score > 0.2, score**2, torch.exp(-score)) / (1 + distance)
    x = torch.maximum(x, torch.minimum(score, PAIRS[b % 2, h // 2, kv_idx // 12])) - torch.log1p(distance)
    return x + torch.sqrt(score.abs() + 1) * torch.rsqrt(torch.square(x) + 1) + torch.sin(score) * (h == 1)


def hides_by_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score * WIDTH, -float("inf"))


def documents(b, h, q_idx, kv_idx):
    return (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx)


def by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < WIDTH + h) & ((kv_idx + b) % 3 != 0)


@dataclass(frozen=True)
class Case:
    name: str
    sq: int = 37
    sk: int = 37
    bias: tuple[int, ...] | None = None
    score_mod: Any = None
    mask_mod: Any = None
    tables: tuple[Tensor, ...] = ()
    band: Band = field(default_factory=Band)
    softcap: float | None = None


CASES = [
    Case("alibi", score_mod=alibi, tables=(SLOPES,)),
    Case("relative", 20, 50, score_mod=relative, tables=(NEAR,), band=Band(None, 0)),
    Case("everything", score_mod=everything, tables=(NEAR, PAIRS, SCALE)),
    Case("hidden by score", score_mod=hides_by_score),
    Case("identity", score_mod=lambda score, b, h, q_idx, kv_idx: score),
    Case("documents", mask_mod=documents),
    Case("rows without keys", 50, 21, mask_mod=by_head),
    Case("bias", 33, 70, bias=(2, H, 33, 70)),
    Case("bias of heads", bias=(H, 1, 1), band=Band(9, 3)),
    Case("bias of keys", bias=(37,)),
    Case("bias of rows", bias=(2, 1, 37, 1)),
    Case("all", 37, 37, (1, H, 37, 37), everything, by_head, (NEAR, PAIRS, SCALE), Band(None, 0), 4.0),
]


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((2, H, case.sq, D), (2, HKV, case.sk, D), (2, HKV, case.sk, D))
    return [normal(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]


def by_torch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    """By definition: mods are called on full tensors, and autograd computes the gradients."""
    S = q @ k.repeat_interleave(H // HKV, 1).mT * D**-0.5
    if case.softcap:
        S = torch.tanh(S / case.softcap) * case.softcap
    S = S if bias is None else S + bias
    sizes = (2, 1, 1, 1), (H, 1, 1), (case.sq, 1), (case.sk,)
    place = [torch.arange(size[0]).view(size) for size in sizes]
    S = S if case.score_mod is None else case.score_mod(S, *place)
    seen = band_mask(case.band, case.sq, case.sk, S.device)
    seen = seen if case.mask_mod is None else seen & case.mask_mod(*place)
    seen = seen.expand_as(S)
    blind = ~seen.any(-1, keepdim=True)
    P = S.masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return P @ v.repeat_interleave(H // HKV, 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(case)
    bias = None if case.bias is None else normal(*case.bias, seed=5).requires_grad_()
    tables = [table.requires_grad_() for table in case.tables]
    wanted = [*tensors, *([] if bias is None else [bias]), *tables]
    for name in ("MAX_ROWS", "MAX_KEYS"):
        monkeypatch.setattr(tiled, name, 16)
    try:
        options = {"bias": bias, "score_mod": case.score_mod, "mask_mod": case.mask_mod, "softcap": case.softcap}
        out = attn(*tensors, window=case.band.bounds, **options)
        expected = by_torch(*tensors, bias, case)
        weights = normal(*out.shape, seed=9)
        torch.testing.assert_close(out, expected)
        found = torch.autograd.grad((out * weights).sum(), wanted, materialize_grads=True)
        torch.testing.assert_close(
            found, torch.autograd.grad((expected * weights).sum(), wanted, materialize_grads=True)
        )
        args = call_args(tensors[0], case.band, **{**options, "softcap": case.softcap or 0.0})
        torch.testing.assert_close(reference.dense(*tensors, args=args)[0], out)
    finally:
        for table in tables:
            table.requires_grad_(False)


def test_dv_other_than_d_and_fp32_outputs() -> None:
    q, k, v = (x.detach().bfloat16() for x in inputs(Case("", 33, 50)))
    v, bias = torch.cat([v, -v, v], dim=3), normal(1, H, 33, 50, seed=5)
    how = {"score_mod": relative, "mask_mod": by_head, "out_dtype": torch.float32}
    given = [x.clone().requires_grad_() for x in (q, k, v, bias.bfloat16())]
    out = attn(*given[:3], bias=given[3], **how)
    exact = [x.detach().double().requires_grad_() for x in given]
    how["out_dtype"] = None
    expected = attn(*exact[:3], bias=exact[3], **how)
    assert out.dtype == torch.float32 and out.shape == (2, H, 33, 3 * D)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    found, expected = (torch.autograd.grad(x.square().sum(), of) for x, of in ((out, given), (expected, exact)))
    assert all(x.dtype == torch.bfloat16 for x in found)
    torch.testing.assert_close([x.double() for x in found], list(expected), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", [case for case in CASES if case.band == Band()], ids=lambda case: case.name)
def test_flex_attention(case: Case, eager_flex: None) -> None:
    """Against uncompiled FlexAttention with the same mods; it has no bias, and no gradients on the CPU."""
    with torch.no_grad():
        q, k, v = (x.detach() for x in inputs(case))
        bias = None if case.bias is None else normal(*case.bias, seed=5)
        block_mask = None
        if case.mask_mod is not None:
            block_mask = create_block_mask(case.mask_mod, 2, H, case.sq, case.sk, device="cpu")

        def score_mod(score, b, h, q_idx, kv_idx):
            if bias is not None:
                own = bias.expand(2, H, case.sq, case.sk)
                score = score + own[b, h, q_idx, kv_idx]
            return score if case.score_mod is None else case.score_mod(score, b, h, q_idx, kv_idx)

        expected = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
        found = attn(q, k, v, bias=bias, score_mod=case.score_mod, mask_mod=case.mask_mod)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    case = CASES[1]
    q, k, v = inputs(case, dtype)
    near = NEAR.to(torch.bfloat16).T.contiguous().T.requires_grad_()
    out = attn(q, k, v, bias=torch.ones(1, dtype=dtype), score_mod=lambda s, b, h, i, j: s + near[h, j % 12])
    assert out.dtype == dtype
    (dnear,) = torch.autograd.grad(out.sum(), near)
    assert (dnear.dtype, dnear.shape, dnear.stride()) == (near.dtype, near.shape, near.stride())


def test_gradcheck() -> None:
    q, k, v = (normal(1, heads, 4, 3, seed=i).requires_grad_() for i, heads in enumerate((2, 1, 1)))
    bias, table = normal(1, 1, 4, 4, seed=4).requires_grad_(), normal(2, 5, seed=5).requires_grad_()
    sinks = normal(2, seed=6).requires_grad_()

    def layer(q, k, v, bias, table, sinks):
        def mod(score, b, h, q_idx, kv_idx):
            return torch.tanh(score) * table[h, q_idx] + torch.exp(table[h, kv_idx] * 0.3)

        mask = masks.sliding_window(2)
        return attn(q, k, v, bias=bias, score_mod=mod, mask_mod=mask, softcap=2.0, sinks=sinks, return_lse=True)

    torch.autograd.gradcheck(layer, (q, k, v, bias, table, sinks))


def test_a_gradient_of_the_users_own() -> None:
    q, k, v = inputs(CASES[0])
    table = normal(H, seed=8).requires_grad_()

    def mod(score, b, h, q_idx, kv_idx):
        return torch.floor(score * 4) / 4 + table[h] * score

    def straight(grad, score, b, h, q_idx, kv_idx):
        return grad * (WIDTH + table[h])

    out = attn(q, k, v, score_mod=mod, score_mod_bwd=straight)
    found = torch.autograd.grad(out.sum(), (q, table))
    plain = torch.autograd.grad(attn(q, k, v, score_mod=mod).sum(), (q, table))
    torch.testing.assert_close(found[1], plain[1])
    # The derived gradient of floor is 0, that of the user's function 6.
    ratio = attn(q, k, v, score_mod=mod, score_mod_bwd=lambda g, s, b, h, i, j: g * (1 + table[h]))
    one = torch.autograd.grad(ratio.sum(), q)[0]
    torch.testing.assert_close(found[0] - plain[0], 6 * (one - plain[0]))


def test_no_derivative_is_an_error_only_if_a_gradient_is_needed() -> None:
    q, k, v = inputs(CASES[0])
    mod = lambda score, b, h, q_idx, kv_idx: score // 0.5  # noqa: E731
    out = attn(q.detach(), k.detach(), v.detach(), score_mod=mod)
    assert out.isfinite().all()
    with torch.no_grad():
        assert torch.equal(attn(q, k, v, score_mod=mod), out)
        assert cute_flash.supports(q, k, v, score_mod=mod)
    message = (
        "floordiv of floats has no derivative: give score_mod_bwd; if you need no gradient, call it under torch.no"
    )
    with pytest.raises(cute_flash.TraceError, match=message):
        attn(q, k, v, score_mod=mod)
    assert cute_flash.supports(q, k, v, score_mod=mod).reason.startswith(message)
    assert attn(q, k, v, score_mod=mod, score_mod_bwd=lambda grad, s, b, h, i, j: grad).requires_grad


def test_values_are_read_at_each_call() -> None:
    q, k, v = inputs(CASES[0])
    table = torch.zeros(H)

    def mod(score, b, h, q_idx, kv_idx):
        return score * table[h]

    first = attn(q, k, v, score_mod=mod)
    table += 2
    torch.testing.assert_close(attn(q, k, v, score_mod=mod), attn(q, k, v, scale=2 * D**-0.5))
    torch.testing.assert_close(first, attn(q, k, v, scale=0.0))


def test_layouts_and_results() -> None:
    q, k, v = (x.detach() for x in inputs(CASES[0]))
    out, lse, most = attn(q, k, v, score_mod=alibi, return_lse=True, return_max_logit=True)
    turned = attn(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=alibi, layout="bshd")
    torch.testing.assert_close(turned.transpose(1, 2), out)
    by_argument = attn(q, k, v, alibi=SLOPES, return_lse=True, return_max_logit=True)
    torch.testing.assert_close((out, lse, most), by_argument)


def test_varlen_batches() -> None:
    lengths = [0, 5, 17, 9]
    offsets = torch.tensor(lengths).cumsum(0).to(torch.int32)
    total = sum(lengths)
    q, k, v = (normal(total, heads, D, seed=i).requires_grad_() for i, heads in enumerate((H, HKV, HKV)))
    table = normal(3, 20, seed=7).requires_grad_()

    def mod(score, b, h, q_idx, kv_idx):
        return score * table[b, q_idx] + table[b, kv_idx]

    out = attn_varlen(q, k, v, offsets, offsets, score_mod=mod, mask_mod=by_head)
    parts = []
    for b, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        one = [x[first:last].transpose(0, 1)[None] for x in (q, k, v)]
        shifted = lambda s, _, h, i, j, b=b: mod(s, b, h, i, j)  # noqa: E731
        mask = lambda _, h, i, j, b=b: by_head(b, h, i, j)  # noqa: E731
        parts.append(attn(*one, score_mod=shifted, mask_mod=mask)[0].transpose(0, 1))
    args = call_args(q, score_mod=mod, mask_mod=by_head, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    outs = out, torch.cat(parts), reference.dense(q, k, v, args=args)[0]
    weights = normal(*out.shape, seed=3)
    grads = [torch.autograd.grad((x * weights).sum(), (q, k, v, table)) for x in outs]
    for i in (1, 2):
        torch.testing.assert_close((out, grads[0]), (outs[i], grads[i]))


@pytest.mark.parametrize("has_sink", [False, True])
def test_gradients_of_rows_without_keys_have_no_effect(has_sink: bool) -> None:
    q, k, v = inputs(CASES[0])
    sinks = torch.zeros(H, dtype=torch.float64) if has_sink else None
    out = attn(q, k, v, mask_mod=lambda b, h, i, j: (i >= j) & (i % 5 != 0), sinks=sinks)
    assert (out[:, :, ::5] == 0).all()
    weights = torch.ones_like(out)
    expected = torch.autograd.grad(out, (q, k, v), weights, retain_graph=True)
    weights[:, :, ::5] = torch.nan
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), weights), expected)
    assert (expected[0][:, :, ::5] == 0).all()


@pytest.mark.compiles
def test_compiled() -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in inputs(CASES[0]))
    table = normal(H, seed=1).requires_grad_()

    def layer(q, k, v):
        mod = lambda score, b, h, i, j: score * table[h]  # noqa: E731
        return attn(2 * q, k, v, score_mod=mod, mask_mod=masks.causal()) * 2

    # Before and after an uncompiled call, which caches a trace of the mods.
    for _ in range(2):
        compiled = torch.compile(layer, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v), layer(q, k, v))
        found = (torch.autograd.grad(f(q, k, v).sum(), table) for f in (compiled, layer))
        torch.testing.assert_close(*found)
        torch._dynamo.reset()


@pytest.mark.compiles
def test_no_mods_are_bound_without_a_graph_break() -> None:
    def double(x: Tensor) -> Tensor:
        return x * (2 + len(mod_arguments(None, None, None, x.device)[0]))

    torch._dynamo.reset()
    x = torch.ones(3)
    assert torch.equal(torch.compile(double, fullgraph=True, backend="eager")(x), 2 * x)


# Block masks


def test_a_block_mask_is_the_mask() -> None:
    q, k, v = (x.detach() for x in inputs(CASES[0]))
    block_mask = BlockMask.of(by_head, (2, H, 37, 37), tile=(8, 4))
    expected = attn(q, k, v, mask_mod=by_head)
    torch.testing.assert_close(attn(q, k, v, mask_mod=by_head, block_mask=block_mask), expected)


def test_a_block_mask_of_the_users_own() -> None:
    q, k, v = (x.detach() for x in inputs(CASES[0]))
    status = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    status[..., 0], status[..., 4] = 2, 1
    block_mask = BlockMask.of_status(status, 8, 8, 37, 37)
    found = attn(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(found, attn(q, k, v, mask_mod=lambda b, h, i, j: (j < 8) | (j >= 32)))
    found = attn(q, k, v, block_mask=block_mask, mask_mod=lambda b, h, i, j: j % 2 == 0)
    torch.testing.assert_close(found, attn(q, k, v, mask_mod=lambda b, h, i, j: (j < 8) | ((j >= 32) & (j % 2 == 0))))


@pytest.mark.parametrize(("name", "sizes"), [("batch", (1, H)), ("heads", (2, 1))])
def test_a_block_mask_of_one_head_or_batch_element_cannot_depend_on_it(name: str, sizes: tuple[int, int]) -> None:
    q, k, v = (x.detach() for x in inputs(CASES[0]))
    first = (lambda b, h, i, j: (i >= j) | (b == 1)) if name == "batch" else (lambda b, h, i, j: (i >= j) | (h == 1))
    block_mask = BlockMask.of(first, (*sizes, 37, 37), tile=(8, 8))
    with pytest.raises(ValueError, match=f"block_mask was built for {name}=1, and its mask_mod depends on {name[0]}"):
        attn(q, k, v, block_mask=block_mask)
    # A status of the user's own may be that of all heads.
    own = BlockMask.of_status(torch.ones(1, 1, 5, 5, dtype=torch.uint8), 8, 8, 37, 37)
    torch.testing.assert_close(attn(q, k, v, block_mask=own, mask_mod=first), attn(q, k, v, mask_mod=first))


# Refusals


def test_refusals() -> None:
    q, k, v = (x.detach() for x in inputs(CASES[0]))
    bad: list[tuple[dict[str, Any], str]] = [
        ({"bias": torch.ones(3, 37, 37)}, "bias has shape .3, 37, 37.: it does not broadcast with"),
        ({"bias": 3.0}, "bias is a float: give a tensor"),
        ({"bias": torch.ones(1, dtype=torch.int64)}, "bias is torch.int64: use one of"),
        ({"bias": torch.ones(1, device="meta")}, "bias is on meta"),
        ({"bias": torch.ones(1, 1, 1, 1, 1)}, "bias has shape .1, 1, 1, 1, 1."),
        ({"mask_mod": lambda b, h, i, j: torch.ones(3, device="meta")[i] > 0}, "created inside|torch"),
        ({"block_mask": 3}, "block_mask is a builtins.int"),
        ({"block_mask": BlockMask.of(None, (1, 1, 8, 8))}, "block_mask has 8 queries and 8 keys"),
        ({"block_mask": BlockMask.of(by_head, (3, H, 37, 37))}, "block_mask has batch=3: expected 1 or 2"),
        ({"score_mod_bwd": alibi}, "score_mod_bwd without score_mod"),
    ]
    for given, message in bad:
        with pytest.raises(ValueError, match=message):
            attn(q, k, v, **given)
        assert not supports(q, k, v, **given)
    assert supports(q, k, v, score_mod=alibi)
    far = torch.ones(H, device="meta")
    with pytest.raises(ValueError, match="a captured tensor is on meta"):
        attn(q, k, v, score_mod=lambda s, b, h, i, j: s + far[h])


LATER, EARLIER = (torch.tensor(x, dtype=torch.float64) for x in (1.7e9 + 0.25, 1.7e9))
TIMES = 1.7e9 + torch.arange(37, dtype=torch.float64)  # neighbours are equal in fp32
ROUNDED: list[tuple[dict[str, Any], str]] = [
    ({"mask_mod": lambda b, h, i, j: TIMES[i] - TIMES[j] < 9.0}, "sub of elements of a captured float64 tensor with"),
    ({"mask_mod": lambda b, h, i, j: TIMES[i] * 2 >= TIMES[j]}, "ge of elements of a captured float64 tensor with"),
    ({"score_mod": lambda s, b, h, i, j: s + (TIMES[i] * 0.1).int()}, r"to_int .*capture x.float\(\), or x as int64"),
    ({"score_mod": lambda s, b, h, i, j: s + (LATER - EARLIER) * j}, "sub of elements of a captured float64 tensor"),
]


@pytest.mark.parametrize(("given", "message"), ROUNDED, ids=["difference", "comparison", "to_int", "numbers"])
def test_float64_tensors_that_fp32_would_change(given: dict[str, Any], message: str) -> None:
    """fp32 calls refuse what fp64 calls compute."""
    q, k, v = (x.detach() for x in inputs(CASES[0]))
    for dtype in (torch.float32, torch.bfloat16):
        low = [x.to(dtype) for x in (q, k, v)]
        with pytest.raises(UnsupportedError, match=message):
            attn(*low, **given)
        assert not supports(*low, **given)
    assert attn(q, k, v, **given).isfinite().all()


def test_float64_tensors_that_fp32_may_round() -> None:
    q, k, v = (x.detach().float() for x in inputs(CASES[0]))
    near = BlockMask.of(ROUNDED[0][0]["mask_mod"], (2, H, 37, 37), tile=(8, 8))
    expected = BlockMask.of(lambda b, h, i, j: i - j < 9, (2, H, 37, 37), tile=(8, 8))
    assert torch.equal(near.status, expected.status)
    table = torch.linspace(-1, 1, 37, dtype=torch.float64)
    gated = {"score_mod": lambda s, b, h, i, j: (s - 0.1 * table[i]).floor() * torch.sigmoid(table[j])}
    expected_out = attn(q.double(), k.double(), v.double(), **gated)
    torch.testing.assert_close(attn(q, k, v, **gated).double(), expected_out, rtol=1e-4, atol=1e-4)
    # A tensor without dimensions is a number, which torch rounds to fp32 too.
    assert supports(q, k, v, mask_mod=lambda b, h, i, j: i * SCALE > j)


def test_shapes_on_cuda() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(1, 4, 8, 64, dtype=torch.float16, device="cuda:0")
        for name, value in (
            ("score_mod", lambda s, b, h, i, j: s * 2),
            ("mask_mod", lambda b, h, i, j: i >= j),
            ("bias", torch.empty(1, device="cuda:0")),
        ):
            out, lse = attn(x, x, x, return_lse=True, **{name: value})
            assert out.shape == x.shape and lse.shape == (1, 4, 8)
