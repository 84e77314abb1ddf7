"""`out_dtype=torch.float32` on a GPU, by every family: outputs, gradients, and parts that are merged."""

import functools

import pytest
import torch

import cute_flash
from cute_flash import reference
from tests import cases
from tests.gpu import float_cases, varlen_cases
from tests.gradients import assert_gradients, gradients, weighted

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]

attend = functools.partial(cute_flash.attn, return_lse=True, out_dtype=torch.float32)


@pytest.mark.parametrize("case", float_cases.CASES, ids=lambda case: case.id)
def test_outputs_are_not_rounded(case):
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
    out, lse = attend(q, k, v, window=case.band.bounds)
    assert out.dtype == torch.float32
    cases.assert_is_attention(out, lse, q, k, v, case.band)
    rounded = cute_flash.attn(q, k, v, window=case.band.bounds)
    torch.testing.assert_close(out.bfloat16(), rounded, rtol=2**-7, atol=1e-5)
    oracle, _ = reference.dense(q, k, v, case.band)
    error, error_of_rounded = ((x.double() - oracle).abs().mean() for x in (out, rounded))
    assert error < error_of_rounded


@pytest.mark.parametrize("case", float_cases.GRADIENTS, ids=lambda case: case.id)
def test_gradients(case):
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
    generator = torch.Generator("cuda").manual_seed(7)
    dout = torch.randn(inputs[0].shape, generator=generator, device="cuda")
    dlse = torch.randn(inputs[0].shape[:3], generator=generator, device="cuda")
    for loss in (weighted(dout), weighted(dout, dlse)):
        assert_gradients(functools.partial(attend, window=case.band.bounds), inputs, case.band, loss)


def test_strides_and_widths():
    q, k, _ = cases.make_inputs(cases.Case(2, 8, 2, 200, 333, 192), torch.bfloat16, "cuda")
    v = cases.make_inputs(cases.Case(2, 8, 2, 200, 333, 128), torch.bfloat16, "cuda")[2]
    inputs = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out, lse = attend(*inputs, causal=True)
    assert out.transpose(1, 2).is_contiguous()
    cases.assert_is_attention(out, lse, q, k, v, cases.CAUSAL)
    loss = weighted(torch.randn(out.shape, device="cuda"))
    assert_gradients(functools.partial(attend, causal=True), inputs, cases.CAUSAL, loss)


@pytest.mark.parametrize("head_dim", (64, 128))
def test_merged_parts_have_the_gradients_of_the_whole(head_dim):
    case = cases.Case(2, 4, 2, 400, 400, head_dim, cases.CAUSAL)
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")

    def ring(q, k, v):
        """Keys in three parts. A query sees its own part and earlier ones."""
        found = []
        for a, b in ((0, 100), (100, 300), (300, 400)):
            found.append(attend(q, k[:, :, a:b], v[:, :, a:b], window=(None, 400 - b)))
        return cute_flash.merge([out for out, _ in found], [lse for _, lse in found])

    whole, lse = attend(*inputs, causal=True)
    merged, merged_lse = ring(*inputs)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged, whole, rtol=0.01, atol=2e-3)
    loss = weighted(torch.randn(whole.shape, device="cuda"))
    expected = gradients(functools.partial(attend, causal=True), inputs, loss)
    for found, x in zip(gradients(ring, inputs, loss), expected, strict=True):
        torch.testing.assert_close(found, x, rtol=0.03, atol=0.02 * x.abs().max().item())


@pytest.mark.parametrize("case", float_cases.VARLEN, ids=lambda case: case.id)
def test_varlen(case):
    inputs = case.inputs()
    out, lse = case.attend(out_dtype=torch.float32)(*inputs)
    assert out.dtype == torch.float32
    clean = tuple(x.nan_to_num() for x in inputs)
    oracle, oracle_lse = varlen_cases.exact(case, *(x.double() for x in clean))
    low, _ = varlen_cases.rough(case, *clean)
    cases.assert_lse_close(lse, oracle_lse)
    cases.assert_error_within("out", out, oracle, low)
    dout = torch.randn(out.shape, device="cuda")
    dout[sum(case.lengths.queries) :] = 0
    douts = {"floats": dout, "rounded": dout.bfloat16()}
    found = {}
    for name, dout in douts.items():
        leaves = [x.clone().requires_grad_() for x in clean]
        out, _ = case.attend(**({"out_dtype": torch.float32} if name == "floats" else {}))(*leaves)
        found[name] = torch.autograd.grad(out, leaves, dout)
    for a, b in zip(*found.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * b.abs().max().item())
