"""The gradients of `attn` on a GPU against those of the fp64 oracle."""

import pytest
import torch

import cute_flash
from cute_flash import reference
from cute_flash.band import Band
from tests import cases

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
CAUSAL = Band(None, 0)
# What there is a kernel for.
CASES = [case for case in cases.GPU if case.head_dim <= 128 and case.seqlen_q and case.seqlen_k]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """In deterministic mode torch fills fresh memory with NaN: what a kernel does not write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(attend, inputs, dout, dlse):
    """Of `attend(q, k, v) -> (out, lse)`; rows without keys have no LSE to speak of."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = attend(*leaves)
    total = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        visible = torch.isfinite(lse)
        total = total + (lse.masked_fill(~visible, 0.0) * dlse.to(lse.dtype) * visible).sum()
    total.backward()
    return [x.grad for x in leaves]


def check(case, dtype, with_lse=False, turn=lambda x: x):
    q, k, v = (turn(x) for x in cases.make_inputs(case, dtype, "cuda"))
    generator = torch.Generator("cuda").manual_seed(7)
    dout = torch.randn(q.shape, generator=generator, device="cuda").to(dtype)
    dlse = torch.randn(q.shape[:3], generator=generator, device="cuda") if with_lse else None
    window = (case.band.left, case.band.right)
    mine = gradients(lambda *x: cute_flash.attn(*x, window=window, return_lse=True), (q, k, v), dout, dlse)
    wide = (x.double() for x in (q, k, v))
    exact = gradients(lambda *x: reference.dense(*x, case.band), wide, dout, dlse)
    rough = gradients(lambda *x: reference.dense_low_precision(*x, case.band), (q, k, v), dout, None)
    for name, value, oracle, low in zip("qkv", mine, exact, rough, strict=True):
        assert torch.isfinite(value).all()
        cases.assert_error_within(f"d{name}", value, oracle, torch.nan_to_num(low))


@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_the_oracle(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("band", (Band(), CAUSAL, Band(100, 30)), ids=str)
def test_through_the_lse(band):
    check(cases.Case(2, 4, 2, 200, 333, 64, band), torch.bfloat16, with_lse=True)


def test_memory_as_bshd():
    case = cases.Case(2, 4, 2, 300, 200, 128, CAUSAL)
    check(case, torch.bfloat16, turn=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.parametrize("scale", (-0.3, 0.05))
def test_scale(scale):
    q, k, v = cases.make_inputs(cases.Case(1, 2, 1, 150, 200, 64, Band()), torch.bfloat16, "cuda")
    dout = torch.randn_like(q)
    mine = gradients(lambda *x: cute_flash.attn(*x, scale=scale, return_lse=True), (q, k, v), dout, None)
    wide = (x.double() for x in (q, k, v))
    exact = gradients(lambda *x: reference.dense(*x, Band(), scale), wide, dout, None)
    for value, oracle in zip(mine, exact, strict=True):
        torch.testing.assert_close(value.double(), oracle, rtol=0.05, atol=0.02 * oracle.abs().max().item())
