"""Mods under `torch.compile(fullgraph=True)`: captured values, changes between calls, gradients, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.nn.attention.flex_attention import and_masks, or_masks

from cute_flash import BlockMask, attn, attn_varlen, masks
from cute_flash.score_mod.bound import BoundMods

pytestmark = pytest.mark.compiles
B, H, S, D = 2, 3, 11, 8


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def normal(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_(grad)


def qkv(seqlen: int = S, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (normal(B, H, seqlen, D, seed=seed, grad=grad) for seed in (1, 2, 3))
    return q, k, v


def compiled(function: Callable, **options: Any) -> tuple[Callable, CompileCounterWithBackend]:
    backend = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=backend, **options), backend


def check(function: Callable, *args: Any, wrt: tuple[Tensor, ...] = ()) -> None:
    """Compare a compiled function with the function, and their gradients."""
    results = []
    for call in (compiled(function)[0], function):
        out = call(*args)
        results.append((out, *(torch.autograd.grad(out.sum(), wrt) if wrt else ())))
    torch.testing.assert_close(*results)


# Operations of mods

TABLE = normal(H, seed=4)
RELATIVE = normal(H, 2 * S, seed=5)
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0] * 6 + [1] * 5])
TEMPERATURE = torch.tensor(1.5, dtype=torch.float64)

SCORE_MODS = {
    "table": lambda score, b, h, i, j: score * TABLE[h],
    "two indices": lambda score, b, h, i, j: score + RELATIVE[h, i - j + S],
    "one index at a time": lambda score, b, h, i, j: score + RELATIVE[h][i - j + S],
    "tensor first": lambda score, b, h, i, j: TEMPERATURE * score - TEMPERATURE,
    "number first": lambda score, b, h, i, j: 3 - score + 2 / (score * score + 1) + 2 ** (0.1 * score) - 7 // (i + 1),
    "shapes": lambda score, b, h, i, j: score * TABLE.shape[0] + RELATIVE.size(1) + score.dim(),
    "where": lambda score, b, h, i, j: torch.where(i >= j, score, -float("inf")),
    "new numbers": lambda score, b, h, i, j: torch.where(3 > i, score, torch.tensor(2.0)) + torch.full_like(score, 3),
    "tanh": lambda score, b, h, i, j: torch.tanh(score / 20) * 20 + F.silu(score) + score.sigmoid(),
    "absolute": lambda score, b, h, i, j: score - torch.abs(i - j) * 0.1 + score.abs().clamp(min=0.5),
    "built-in absolute": lambda score, b, h, i, j: score - abs(i - j) * 0.1 + F.sigmoid(abs(score - TABLE[h])) + +score,
    "casts": lambda score, b, h, i, j: score * i.float() + (i > j).to(torch.int32) + (j % 3).to(score.dtype),
    "power": lambda score, b, h, i, j: -(score**2) / 4 + score.pow(3),
}
MASK_MODS = {
    "not": lambda b, h, i, j: ~(i < j) | (h == 1),
    "logic": lambda b, h, i, j: ((i >= j) ^ (i - j > 4)) & torch.logical_not(j == 3),
    "document": lambda b, h, i, j: (IDS[b, i] == IDS[b, j]) & (i >= j),
    "ready-made": masks.or_(masks.document(IDS), masks.not_(masks.and_(masks.causal(), masks.sliding_window(4)))),
    "flex and_masks": and_masks(masks.causal(), masks.document(IDS)),
    "flex or_masks": or_masks(masks.sliding_window(3), lambda b, h, i, j: j < 2),
    "shifts": lambda b, h, i, j: (i >> 2) >= (j >> 2),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod(name: str) -> None:
    check(lambda q, k, v: attn(q, k, v, score_mod=SCORE_MODS[name]), *qkv())


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mod(name: str) -> None:
    check(lambda q, k, v: attn(q, k, v, mask_mod=MASK_MODS[name]), *qkv())


def test_assignment_operators() -> None:
    def mod(score, b, h, i, j):
        score += TABLE[h]
        score *= 2
        return score

    check(lambda q, k, v: attn(q, k, v, score_mod=mod), *qkv())


def test_the_graph_is_that_of_an_ordinary_trace() -> None:
    """Then compiled and uncompiled calls share a kernel."""
    texts: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        texts.extend(x for node in module.graph.nodes for x in node.args if isinstance(x, str))
        return module

    def layer(q: Tensor) -> Tensor:
        return attn(q, q, q, score_mod=SCORE_MODS["two indices"], mask_mod=MASK_MODS["document"])

    torch.compile(layer, fullgraph=True, backend=backend)(qkv()[0])
    # Only the masks are compared: the score_mod captures S, a constant in compiled calls and an argument otherwise.
    mask = BoundMods.of(None, MASK_MODS["document"], None).graphs.text
    assert [text for text in texts if text.endswith(mask.removeprefix("[null"))]


def test_arithmetic_of_captured_tensors() -> None:
    """Only compiled calls accept it; it runs outside of the kernel."""
    call, _ = compiled(lambda q, k, v: attn(q, k, v, score_mod=lambda score, b, h, i, j: score + RELATIVE.exp()[h, i]))
    table = RELATIVE.exp()
    torch.testing.assert_close(call(*qkv()), attn(*qkv(), score_mod=lambda score, b, h, i, j: score + table[h, i]))


# Captured values


def test_closures_made_inside_and_gradients() -> None:
    q, k, v = qkv(grad=True)
    table, bias = normal(H, seed=6, grad=True), normal(H, S, S, seed=7, grad=True)

    def layer(q, k, v, table, bias):
        scaled = table.sigmoid()

        def score_mod(score, b, h, i, j):
            return score * scaled[h] + table[h]

        def mask_mod(b, h, i, j):
            return i >= j

        return attn(2 * q, k, v, score_mod=score_mod, mask_mod=mask_mod, bias=bias) * 3

    check(layer, q, k, v, table, bias, wrt=(q, k, v, table, bias))


def test_backward_mod() -> None:
    q, k, v = qkv(grad=True)
    slope = normal(H, seed=8)

    def layer(q, k, v):
        return attn(
            q, k, v,
            score_mod=lambda score, b, h, i, j: score * slope[h],
            score_mod_bwd=lambda grad, score, b, h, i, j: grad * slope[h] * 2,
        )  # fmt: skip

    check(layer, q, k, v, wrt=(q, k, v))


class Layer(nn.Module):
    def __init__(self, window: int, seed: int) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(normal(H, seed=seed).detach())
        self.scale = nn.Parameter(torch.tensor(1.0 + seed, dtype=torch.float64))

    def score(self, score, b, h, i, j):
        return score * self.scale + self.table[h]

    def forward(self, x: Tensor) -> Tensor:
        mask = lambda b, h, i, j: (i >= j) & (i - j < self.window)  # noqa: E731
        return x + attn(x, x, x, score_mod=self.score, mask_mod=mask)


def test_layers_of_a_model() -> None:
    model = nn.Sequential(Layer(3, 0), Layer(5, 1), Layer(3, 2))
    check(model, qkv()[0], wrt=tuple(model.parameters()))


def test_a_captured_tensor_may_change() -> None:
    class Holder:
        table = normal(H, seed=9)

    def layer(q, k, v):
        return attn(q, k, v, score_mod=lambda score, b, h, i, j: score * Holder.table[h])

    call, backend = compiled(layer)
    q, k, v = qkv()
    for seed in (9, 10, 11):
        Holder.table = normal(H, seed=seed)
        torch.testing.assert_close(call(q, k, v), layer(q, k, v))
    Holder.table += 1
    torch.testing.assert_close(call(q, k, v), layer(q, k, v))
    assert backend.frame_count == 1


def scaled(q, k, v, number):
    return attn(
        q, k, v,
        score_mod=lambda score, b, h, i, j: score * number,
        mask_mod=lambda b, h, i, j: i - j < 4 * number,
    )  # fmt: skip


def to_the_power(q, k, v, n):
    return attn(q, k, v, score_mod=lambda score, b, h, i, j: score**n)


def compared(q, k, v, n):
    assert n > 2
    mask = lambda b, h, i, j: i % n != 1 if n == 4 else i % n != 2  # noqa: E731
    return attn(q, k, v, mask_mod=mask)


def shifted(q, k, v, n):
    return attn(q, k, v, mask_mod=lambda b, h, i, j: i - j + n < n + 4)


def with_mask(q, k, v, mask):
    return attn(q, k, v, mask_mod=mask)


# A layer, values of a captured number, and how often the layer is compiled: compiled in, then as a variable.
CHANGES: dict[str, tuple[Callable, tuple, int | None]] = {
    "int": (scaled, (3, 4, 5, 6, 3), 2),
    "float": (scaled, (0.1, 1.3, 2.7, 3.9, 0.1), 2),
    "exponent": (to_the_power, (1, 2, 3), None),
    "beyond 32 bits": (shifted, (3, 4, 1 << 31, -(1 << 41)), None),
    "compared by Python": (compared, (3, 5, 4, 6), None),
    "in a closure made outside": (with_mask, tuple(masks.sliding_window(n) for n in (2, 3, 4, 2)), None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_captured_number_may_change(name: str) -> None:
    layer, values, num_compiled = CHANGES[name]
    call, backend = compiled(layer)
    for value in values:
        torch.testing.assert_close(call(*qkv(), value), layer(*qkv(), value))
    assert num_compiled in (None, backend.frame_count)


def test_dynamic_lengths() -> None:
    def layer(q, k, v, ids):
        seqlen = q.shape[2]
        return attn(
            q, k, v,
            score_mod=lambda score, b, h, i, j: score + (i - j) / seqlen,
            mask_mod=lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i + j < 2 * seqlen - 3),
        )  # fmt: skip

    call, backend = compiled(layer, dynamic=True)
    for seqlen in (7, 9, 11):
        args = *qkv(seqlen), IDS[:, :seqlen].contiguous()
        torch.testing.assert_close(call(*args), layer(*args))
    assert backend.frame_count == 1


def test_compiled_again() -> None:
    q, k, v = qkv()
    for score_mod in SCORE_MODS["table"], SCORE_MODS["tanh"], SCORE_MODS["table"]:
        call, _ = compiled(lambda q, k, v, mod=score_mod: attn(q, k, v, score_mod=mod))
        torch.testing.assert_close(call(q, k, v), attn(q, k, v, score_mod=score_mod))


# With other arguments


def test_block_mask() -> None:
    q, k, v = qkv(grad=True)
    mask = masks.document(IDS)
    block_mask = BlockMask.of(mask, (B, H, S, S), tile=(4, 4))
    check(lambda q, k, v: attn(q, k, v, block_mask=block_mask), q, k, v, wrt=(q, k, v))
    check(lambda q, k, v, m: attn(q, k, v, block_mask=m), q, k, v, block_mask)
    check(
        lambda q, k, v, m: attn(q, k, v, score_mod=lambda s, b, h, i, j: s + TABLE[h], block_mask=m),
        q,
        k,
        v,
        block_mask,
    )
    # A block mask whose mask_mod captures a number, and one with a causal bound and no mask_mod.
    for other in (
        BlockMask.of(masks.causal(3), (B, H, S, S), tile=(4, 4)),
        BlockMask.of(None, (B, H, S, S), causal=True),
    ):
        check(lambda q, k, v, m: attn(q, k, v, block_mask=m), q, k, v, other)


def test_a_mask_mod_beside_a_block_mask_is_refused() -> None:
    q, k, v = qkv()
    mask = masks.document(IDS)
    block_mask = BlockMask.of(mask, (B, H, S, S), tile=(4, 4))
    compiled = torch.compile(
        lambda q, k, v: attn(q, k, v, mask_mod=mask, block_mask=block_mask), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="leave mask_mod out"):
        compiled(q, k, v)


@pytest.mark.parametrize("with_mod", [False, True])
def test_features(with_mod: bool) -> None:
    q, k, v = (x.float() for x in qkv())
    sinks, alibi, bias = normal(H, seed=12).float(), normal(H, seed=13).float().abs(), normal(S, S, seed=14).float()
    table = TABLE.float()
    mod = (lambda score, b, h, i, j: score + table[h]) if with_mod else None

    def layer(q, k, v):
        return attn(
            q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True, softcap=5.0, sinks=sinks, alibi=alibi, bias=bias,
            score_mod=mod, return_lse=True, return_max_logit=True, out_dtype=torch.float32,
        )  # fmt: skip

    torch.testing.assert_close(compiled(layer)[0](q, k, v), layer(q, k, v))


def test_varlen() -> None:
    offsets = torch.tensor([0, 4, 11], dtype=torch.int32)
    q, k, v = (normal(11, H, D, seed=seed) for seed in (1, 2, 3))

    def layer(q, k, v):
        mod = lambda score, b, h, i, j: score * TABLE[h] + b  # noqa: E731
        return attn_varlen(q, k, v, offsets, offsets, score_mod=mod, mask_mod=masks.sliding_window(3))

    check(layer, q, k, v)


# Refusals

REFUSED = {
    "a function without a kernel": lambda score, b, h, i, j: torch.lgamma(score),
    "a branch": lambda score, b, h, i, j: score if i > j else 2 * score,
    "a Python number of a value": lambda score, b, h, i, j: score * int(i),
    "a captured tensor as a value": lambda score, b, h, i, j: score * TABLE,
    "round": lambda score, b, h, i, j: round(score),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, _ = compiled(lambda q, k, v: attn(q, k, v, score_mod=REFUSED[name]))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        call(*qkv())


def test_an_error_names_the_function() -> None:
    call, _ = compiled(lambda q, k, v: attn(q, k, v, score_mod=REFUSED["a function without a kernel"]))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="score_mod: lgamma is not supported in a mod"):
        call(*qkv())


def test_a_mod_that_is_no_function() -> None:
    with pytest.raises(Exception, match="mask_mod is of type int: give a function"):
        compiled(lambda q, k, v: attn(q, k, v, mask_mod=3))[0](*qkv())


def test_gradients_without_a_derivative_are_refused_by_the_forward() -> None:
    call, _ = compiled(lambda q, k, v: attn(q, k, v, score_mod=lambda score, b, h, i, j: score // 0.5))
    call(*qkv())
    with torch.no_grad():
        call(*qkv(grad=True))
    with pytest.raises(RuntimeError, match="floordiv of floats has no derivative"):
        call(*qkv(grad=True))


def test_a_mod_that_dynamo_cannot_run_breaks_the_graph() -> None:
    q, k, v = qkv()

    def mod(score, b, h, i, j):
        torch._dynamo.graph_break()
        return score * TABLE[h]

    def layer(q, k, v):
        return 2 * attn(2 * q, k, v, score_mod=mod)

    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(q, k, v), layer(q, k, v))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(layer)[0](q, k, v)
