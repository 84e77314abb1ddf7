"""`cute_flash.flex_attention` against torch's eager `flex_attention`, and its gradients against a dense computation."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

import cute_flash
from cute_flash import UnsupportedError, flex_attention
from tests.covering import covering

S = 150
DOCUMENTS = torch.tensor([0] * 40 + [1] * 71 + [2] * 39)
PREFIXES = torch.tensor([10, 77])
WINDOW = 19


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() <= WINDOW


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < PREFIXES[b]


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx >= h * 30


def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 5 * torch.tanh(score / 5)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + torch.exp2(-((h + 1) * 8.0 / 4)) * (kv_idx - q_idx)


def mixed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where((q_idx // 7) % 2 == 0, score * 0.5, score - 0.01 * kv_idx)


class Case(NamedTuple):
    mask_mod: Callable | None = None
    score_mod: Callable | None = None
    batch: int | None = None  # of the block mask; None: broadcasts
    heads: int | None = None


CASES = {
    "full": Case(),
    "causal": Case(causal),
    "window": Case(and_masks(causal, window)),
    "document": Case(document),
    "causal document": Case(and_masks(causal, document), batch=2),
    "prefix": Case(or_masks(prefix, causal), batch=2),
    "nested": Case(or_masks(and_masks(causal, window), and_masks(document, prefix)), batch=2, heads=4),
    "heads": Case(by_head, heads=4),  # the first queries of the last heads see no key
    "noop": Case(torch_flex.noop_mask),
    "softcap": Case(score_mod=softcap),
    "softcap causal": Case(causal, softcap),
    "alibi window": Case(window, alibi),
    "mixed document": Case(document, mixed),
}


def dense(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64, with mods evaluated on all positions at once."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    sizes = scores.shape
    positions = [
        torch.arange(size).reshape([-1 if i == dim else 1 for i in range(4)]) for dim, size in enumerate(sizes)
    ]
    scores = scores if score_mod is None else score_mod(scores, *positions)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*positions).expand(sizes), -math.inf)
    is_empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(is_empty, 0).softmax(-1).masked_fill(is_empty, 0)
    lse = scores.masked_fill(is_empty, 0).logsumexp(-1).masked_fill(is_empty[..., 0], -math.inf)
    return weights @ v, lse


def tensors(
    dtype: torch.dtype, heads_kv: int = 4, sq: int = S, sk: int = S, batch: int = 2, d: int = 16, dv: int = 24
) -> list[Tensor]:
    shapes = (batch, 4, sq, d), (batch, heads_kv, sk, d), (batch, heads_kv, sk, dv)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def block_mask_of(case: Case, sq: int = S, sk: int = S, block_size: Any = 32) -> Any:
    if case.mask_mod is None:
        return None
    return create_block_mask(case.mask_mod, case.batch, case.heads, sq, sk, device="cpu", BLOCK_SIZE=block_size)


def gradients(out: Tensor, lse: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Of a loss of out and of the finite elements of lse."""
    generator = torch.Generator().manual_seed(1)
    loss = (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
    weights = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    finite = lse.detach() > -math.inf
    return list(torch.autograd.grad(loss + (lse[finite] * weights[finite]).sum(), inputs))


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


# ---- results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_those_of_torch(case: Case, dtype: torch.dtype, eager_flex: None) -> None:
    q, k, v = (x.detach() for x in tensors(dtype))
    arguments: dict[str, Any] = dict(score_mod=case.score_mod, block_mask=block_mask_of(case), scale=0.3)
    out, lse = flex_attention(q, k, v, return_lse=True, **arguments)
    with torch.no_grad():
        expected, expected_lse = torch_flex.flex_attention(q, k, v, return_lse=True, **arguments)
    assert out.dtype == expected.dtype and out.shape == expected.shape and out.stride() == expected.stride()
    assert lse.dtype == expected_lse.dtype == torch.float32
    assert_near(out, expected, dtype)
    assert_near(lse, expected_lse, dtype)


CALLS = covering(list(itertools.product(CASES, [4, 2, 1], [torch.float32, torch.bfloat16])), tuple)


@pytest.mark.parametrize(("name", "heads_kv", "dtype"), CALLS, ids=str)
def test_gradients(name: str, heads_kv: int, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs = tensors(dtype, heads_kv)
    q, k, v = inputs
    out, lse = flex_attention(
        q, k, v, case.score_mod, block_mask_of(case), scale=0.3, enable_gqa=heads_kv != 4, return_lse=True
    )
    expected, expected_lse = dense(q, k, v, case.score_mod, case.mask_mod, 0.3)
    assert_near(out, expected, dtype)
    assert_near(lse, expected_lse, dtype)
    for dx, expected_dx in zip(gradients(out, lse, inputs), gradients(expected, expected_lse, inputs)):
        assert dx.dtype == dtype
        assert_near(dx, expected_dx, dtype)


@pytest.mark.parametrize("sizes", [(1, 1), (37, 101), (101, 37), (128, 150), (150, 128)], ids=str)
@pytest.mark.parametrize("block_size", [128, 32, (64, 16)], ids=str)
def test_lengths_and_block_sizes(sizes: tuple[int, int], block_size: Any) -> None:
    mask_mod = or_masks(causal, document)
    inputs = tensors(torch.float32, 2, *sizes)
    block_mask = block_mask_of(Case(mask_mod), *sizes, block_size)
    out, lse = flex_attention(*inputs, alibi, block_mask, enable_gqa=True, return_lse=True)
    expected, expected_lse = dense(*inputs, alibi, mask_mod, 16**-0.5)
    assert_near(out, expected, torch.float32)
    for dx, expected_dx in zip(gradients(out, lse, inputs), gradients(expected, expected_lse, inputs)):
        assert_near(dx, expected_dx, torch.float32)


def test_captured_bias_has_a_gradient() -> None:
    bias = torch.randn(4, 2 * S - 1, generator=torch.Generator().manual_seed(2)).requires_grad_()

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, q_idx - kv_idx + (S - 1)]

    inputs = tensors(torch.float32, 2)
    out, lse = flex_attention(*inputs, relative, block_mask_of(Case(causal)), enable_gqa=True, return_lse=True)
    expected = dense(*inputs, relative, causal, 16**-0.5)
    grads, expected_grads = gradients(out, lse, [*inputs, bias]), gradients(*expected, [*inputs, bias])
    assert grads[3].abs().max() > 0.1
    for dx, expected_dx in zip(grads, expected_grads):
        torch.testing.assert_close(dx, expected_dx, atol=1e-4, rtol=1e-4)


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["causal document", "prefix", "alibi window", "bias"])
def test_gradients_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has gradients on the CPU, and refuses them by a check of the device."""
    if not hasattr(torch_flex, "_validate_device"):
        pytest.skip("this torch has no check of the device")
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    bias = torch.randn(S, generator=torch.Generator().manual_seed(2)).requires_grad_()

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return softcap(score, b, h, q_idx, kv_idx) + bias[q_idx - kv_idx]

    case = Case(causal, capped) if name == "bias" else CASES[name]
    inputs = tensors(torch.float32, 2)
    arguments: dict[str, Any] = dict(score_mod=case.score_mod, block_mask=block_mask_of(case), enable_gqa=True)
    leaves = [*inputs, bias] if name == "bias" else inputs
    expected = torch_flex.flex_attention(*inputs, return_lse=True, **arguments)
    grads = gradients(*flex_attention(*inputs, return_lse=True, **arguments), leaves)
    for dx, expected_dx in zip(grads, gradients(*expected, leaves)):
        torch.testing.assert_close(dx, expected_dx, atol=1e-4, rtol=1e-4)


def test_keys_and_values_may_be_shared_by_the_batch() -> None:
    q = tensors(torch.float32)[0]
    _, k, v = tensors(torch.float32, batch=1)
    mask_mod = or_masks(prefix, causal)
    block_mask = block_mask_of(Case(mask_mod, batch=2))
    out, lse = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    expected = dense(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), None, mask_mod, 16**-0.5)
    for dx, expected_dx in zip(gradients(out, lse, [q, k, v]), gradients(*expected, [q, k, v])):
        assert_near(dx, expected_dx, torch.float32)
    with pytest.raises(ValueError, match="query has batch=2 and key has batch=1: they must be equal"):
        flex_attention(q, k, v)


@pytest.mark.skipif(not hasattr(torch_flex, "AuxRequest"), reason="torch has no AuxRequest")
def test_return_aux(eager_flex: None) -> None:
    q, k, v = (x.detach() for x in tensors(torch.float32))
    for request in (torch_flex.AuxRequest(lse=True), torch_flex.AuxRequest()):
        out, aux = flex_attention(q, k, v, return_aux=request)
        expected, expected_aux = torch_flex.flex_attention(q, k, v, return_aux=request)
        assert type(aux) is type(expected_aux) and aux.max_scores is None
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(aux.lse, expected_aux.lse)


def test_a_block_mask_of_cute_flash_is_taken() -> None:
    q, k, v = tensors(torch.float32)
    ours = cute_flash.BlockMask.of(causal, (2, 4, S, S), tile=(32, 32))
    assert torch.equal(
        flex_attention(q, k, v, block_mask=ours), flex_attention(q, k, v, block_mask=block_mask_of(Case(causal)))
    )


@pytest.mark.compiles
def test_compiled_function() -> None:
    block_mask = block_mask_of(CASES["causal document"])
    inputs = tensors(torch.float32)
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    expected = flex_attention(*inputs, alibi, block_mask)
    out = compiled(*inputs, alibi, block_mask)
    torch.testing.assert_close(out, expected)
    for dx, expected_dx in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
        torch.testing.assert_close(dx, expected_dx)


# ---- the signature


def test_parameters_are_those_of_torch() -> None:
    ours, theirs = (inspect.signature(x).parameters for x in (flex_attention, torch_flex.flex_attention))
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind and ours[name].default == parameter.default
    assert [name for name in ours if name in theirs] == list(theirs)


def test_tuning_hints_have_no_effect() -> None:
    q, k, v = tensors(torch.float32)
    options = {"BLOCK_M": 64, "fwd_BLOCK_N": 32, "bwd_BLOCK_M1": 32, "PRESCALE_QK": True, "BACKEND": "AUTO"}
    assert torch.equal(flex_attention(q, k, v, kernel_options=options), flex_attention(q, k, v))
    if hasattr(torch_flex, "FlexKernelOptions"):
        from cute_flash.integrations.flex_attention import TUNING_HINTS

        # A new option of torch is refused until it is known to be a hint.
        assert TUNING_HINTS | {"BACKEND"} >= set(torch_flex.FlexKernelOptions.__annotations__)


class Aux(NamedTuple):
    lse: bool = False
    max_scores: bool = False


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(kernel_options={"BACKEND": "FLASH"}), UnsupportedError, "'BACKEND': 'FLASH'"),
        (dict(kernel_options={"OUTPUT_MAX": True}), UnsupportedError, "kernel_options has 'OUTPUT_MAX'"),
        (dict(return_aux=Aux(max_scores=True)), UnsupportedError, "max_scores.*return_max_logit=True"),
        (dict(return_aux=Aux(lse=True), return_lse=True), ValueError, "return_lse and return_aux"),
        (dict(return_aux=True), ValueError, "return_aux is a bool"),
        (dict(block_mask=torch.ones(S, S)), ValueError, "block_mask is a torch.Tensor: .* create_block_mask"),
        (dict(query=torch.zeros(S, 16)), ValueError, r"query has shape \(150, 16\)"),
        (dict(query=[1]), ValueError, "query is a builtins.list"),
        (dict(key=torch.zeros(2, 2, S, 16)), ValueError, "query has 4 heads and key has 2: set enable_gqa=True"),
        (dict(key=torch.zeros(2, 3, S, 16), value=torch.zeros(2, 3, S, 16), enable_gqa=True), ValueError, "heads"),
        (dict(block_mask=lambda: block_mask_of(Case(causal), 128, S)), ValueError, "block_mask has 128 queries"),
        (dict(block_mask=lambda: block_mask_of(Case(causal, batch=3))), ValueError, "block_mask has batch=3"),
        (dict(block_mask=lambda: block_mask_of(Case(causal))[:, :, :5]), cute_flash.TraceError, "sliced BlockMask"),
    ],
)  # fmt: skip
def test_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = tensors(torch.float32)
    made = {name: x() if callable(x) else x for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        flex_attention(**{"query": q, "key": k, "value": v, **made})


def test_nested_tensors_are_refused() -> None:
    x = torch.nested.nested_tensor([torch.zeros(3, 2, 8), torch.zeros(5, 2, 8)], layout=torch.jagged)
    with pytest.raises(UnsupportedError, match="query is a NestedTensor: use cute_flash"):
        flex_attention(x, x, x)
