"""Softcap, ALiBi, sinks and dropout on a GPU, by every family: dropout masks, rows without keys, slopes of any size."""

import math

import pytest
import torch

import cute_flash
from cute_flash import reference
from cute_flash.reference.dropout import Dropout
from cute_flash.spec.band import Band
from tests import cases
from tests.cases import CAUSAL, FULL
from tests.combinations import RNG, gradients
from tests.covering import covering
from tests.feature_gradients import weights
from tests.gpu.calls import ALL, DROPOUT, DTYPES, FP16, dense

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]


def on_gpu(case):
    return {name: x.cuda() for name, x in case.tensors().items()}


# Dropout


@pytest.mark.usefixtures("known_rng")
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (64, True), (128, True), (256, False)])
def test_the_dropout_mask_is_that_of_the_cpu(head_dim, causal):
    """With equal weights and one key in each column of V, the output is 0 where a weight was dropped."""
    batch, heads, sq, sk = 2, 3, 300, 333
    q, k = (torch.zeros(batch, heads, s, head_dim, device="cuda").bfloat16() for s in (sq, sk))
    dropout = Dropout(0.4, torch.tensor(RNG), heads)
    expected = dropout.keep_mask(range(batch), range(heads), range(sq), range(sk))
    if causal:
        expected &= torch.arange(sk) <= torch.arange(sq)[:, None] + sk - sq
    for first in range(0, sk, head_dim):
        shown = min(head_dim, sk - first)
        v = torch.zeros(batch, heads, sk, head_dim, device="cuda").bfloat16()
        v[:, :, first : first + shown, :shown] = torch.eye(shown, device="cuda")
        out = cute_flash.attn(q, k, v, dropout=0.4, causal=causal)[..., :shown].cpu()
        assert torch.equal(out != 0, expected[..., first : first + shown])
    if not causal:
        torch.testing.assert_close(out[out != 0].max().item(), 1 / sk / 0.6, rtol=0.01, atol=0)


def test_dropout_follows_the_generator():
    q, k, v = cases.make_inputs(cases.Case(1, 2, 2, 200, 300, 64), torch.bfloat16, "cuda")
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs += [cute_flash.attn(q, k, v, dropout=0.5), cute_flash.attn(q, k, v, dropout=0.5)]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[4])


@pytest.mark.usefixtures("known_rng")
def test_dropout_and_weights_agree_between_the_directions():
    """With v = 1, and dout = 1 in column 0 and 0 elsewhere, column 0 of out and column 0 of dv have the same sum.

    Both sums are that of all weights after dropout.
    """
    case = dense(1, 4, 1, 300, 200, 64, FP16, FULL, DROPOUT)
    tensors = on_gpu(case)
    tensors["v"] = torch.ones_like(tensors["v"])
    dout, dlse = (torch.zeros_like(x) for x in weights(case, "cuda", False))
    dout[..., 0] = 1.0
    out = case.attend(tensors)[0]
    dv = gradients(case.attend, tensors, (dout, dlse))["v"]
    torch.testing.assert_close(dv[..., 0].double().sum(), out[..., 0].double().sum(), rtol=2e-3, atol=0.1)


# Rows without keys, slopes of any size, NaN


@pytest.mark.usefixtures("known_rng")
def test_gradients_of_rows_without_keys():
    """dq is exactly 0. A sink of such a row gets the gradient of the LSE, for any gradient of the output."""
    case = dense(2, 3, 2, 333, 129, 72, FP16, CAUSAL, ALL)
    tensors, (dout, dlse) = on_gpu(case), weights(case, "cuda", True)
    for part in (0.0, 1.0):
        found = gradients(case.attend, tensors, (dout, dlse * part))
        assert not found["q"][:, :, : 333 - 129].any()
    tensors["sinks"][0] = -math.inf
    found = gradients(case.attend, tensors, (dout, dlse))
    assert found["sinks"][0] == 0 and found["sinks"].isfinite().all()


def test_sinks_alone_for_rows_without_keys():
    q, k, v = cases.make_inputs(cases.Case(2, 4, 2, 300, 60, 64, CAUSAL), torch.bfloat16, "cuda")
    sinks = torch.tensor([0.7, -math.inf, -30.0, 200.0], device="cuda")
    out, lse = cute_flash.attn(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert (out[:, :, :240] == 0).all()
    assert torch.equal(lse[:, :, :240], sinks[:, None].expand(2, 4, 240))
    plain, plain_lse = cute_flash.attn(q, k, v, causal=True, return_lse=True)
    # A sink of -inf, one with almost no weight, and one with almost all the weight.
    torch.testing.assert_close((out[:, 1], lse[:, 1]), (plain[:, 1], plain_lse[:, 1]))
    torch.testing.assert_close(out[:, 2], plain[:, 2])
    assert (out[:, 3] == 0).all() and torch.equal(lse[:, 3], torch.full_like(lse[:, 3], 200.0))


SLOPES = [
    (scale, band, dtype) for scale in (0.0, 1e-5, 0.1) for band in (FULL, CAUSAL, Band(200, 0)) for dtype in DTYPES
]


@pytest.mark.parametrize(("scale", "band", "dtype"), covering(SLOPES, tuple), ids=str)
def test_slopes_of_any_size(scale, band, dtype):
    """Slopes whose terms the tensor cores add, up to nearly the largest, and others."""
    q, k, v = cases.make_inputs(cases.Case(1, 8, 4, 400, 700, 128, band), dtype, "cuda")
    slopes = torch.tensor([[0.0, 1e-7, 0.3, -0.3, 1.5, -40.0, 3e4, -1e5]], device="cuda")
    out, lse = cute_flash.attn(q, k, v, window=band.bounds, scale=scale, alibi=slopes, return_lse=True)
    args = reference.plain_args(q, band, scale)._replace(alibi=slopes)
    exact = reference.dense(q, k, v, args=args)
    low, _ = reference.dense_low_precision(q, k, v, args=args)
    cases.assert_close(out, lse, *exact, low)


def test_nan_stays_in_the_rows_that_see_it():
    q, k, v = cases.make_inputs(cases.Case(1, 2, 2, 200, 200, 128, CAUSAL), torch.bfloat16, "cuda")
    k[:, 0, -1], q[:, 1, 77] = torch.nan, torch.nan
    out = cute_flash.attn(q, k, v, causal=True, softcap=3.0, alibi=torch.ones(2, device="cuda"))
    assert out[:, 0, :-1].isfinite().all() and out[:, 0, -1].isnan().all()
    assert out[:, 1, 77].isnan().all() and out[:, 1, :77].isfinite().all() and out[:, 1, 78:].isfinite().all()
