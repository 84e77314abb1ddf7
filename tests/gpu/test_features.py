"""Softcap, ALiBi, sinks, dropout and the largest logit on a GPU, by every family, against the fp64 oracle."""

import math

import pytest
import torch

import cute_flash
from cute_flash import reference
from cute_flash.reference.dropout import Dropout
from cute_flash.spec.band import Band
from tests import cases
from tests.cases import CAUSAL, FULL
from tests.combinations import RNG
from tests.gpu import feature_cases
from tests.gpu.captured import Captured
from tests.gpu.feature_cases import FeatureCase

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]


@pytest.mark.usefixtures("known_rng")
@pytest.mark.parametrize("case", feature_cases.CASES, ids=lambda case: case.id)
def test_against_the_oracle(case):
    q, k, v, options = case.tensors()
    out, lse, *most = cute_flash.attn(q, k, v, return_lse=True, **options)
    band, args = case.case.band, case.args(q, options)
    oracle, oracle_lse = reference.dense(q, k, v, args=args)
    low, _ = reference.dense_low_precision(q, k, v, args=args)
    cases.assert_lse_close(lse, oracle_lse)
    cases.assert_error_within("out", out, oracle, low)
    empty = torch.tensor([band.hi(i, *shape) <= band.lo(i, *shape) for shape in [(q.shape[2], k.shape[2])]
                          for i in range(q.shape[2])])  # fmt: skip
    assert (out[:, :, empty.cuda()] == 0).all()
    if most:
        expected = feature_cases.max_logit(q, k, args)
        torch.testing.assert_close(most[0].double().cpu(), expected, rtol=1e-5, atol=1e-5 + 1e-6 * case.softcap)


# Dropout


@pytest.mark.usefixtures("known_rng")
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
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


def test_every_replay_of_a_captured_call_has_a_new_dropout_mask():
    q, k, v = cases.make_inputs(cases.Case(1, 2, 2, 200, 300, 128, CAUSAL), torch.bfloat16, "cuda")
    options = {"causal": True, "dropout": 0.5, "return_max_logit": True}
    expected = cute_flash.attn(q, k, v, causal=True, return_max_logit=True)[1]
    captured, replayed = Captured.of(lambda: cute_flash.attn(q, k, v, **options)), []
    for _ in range(3):
        out, most = captured.replay()
        replayed.append(out.clone())
        torch.testing.assert_close(most, expected)
    assert all(x.isfinite().all() for x in replayed)
    assert not torch.equal(replayed[0], replayed[1]) and not torch.equal(replayed[1], replayed[2])


def test_compiled_equals_eager():
    q, k, v = cases.make_inputs(cases.Case(2, 4, 2, 256, 256, 64, CAUSAL), torch.bfloat16, "cuda")
    slopes, sinks = torch.rand(4, device="cuda"), torch.randn(4, device="cuda")

    def layer(q, k, v):
        return cute_flash.attn(q, k, v, causal=True, softcap=5.0, alibi=slopes, sinks=sinks, return_lse=True)

    for eager, compiled in zip(layer(q, k, v), torch.compile(layer, fullgraph=True)(q, k, v), strict=True):
        assert torch.equal(eager, compiled)


def test_same_input_same_bits():
    torch.manual_seed(3)
    case = FeatureCase(cases.Case(4, 16, 4, 700, 500, 128, CAUSAL), torch.bfloat16, feature_cases.ALL)
    q, k, v, options = case.tensors()
    options.pop("dropout")
    first = cute_flash.attn(q, k, v, return_lse=True, **options)
    for _ in range(10):
        again = cute_flash.attn(q, k, v, return_lse=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


# Edges


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


@pytest.mark.parametrize("scale", (-0.3, 0.0, 2.5, 1e6))
def test_any_finite_scale(scale):
    case = cases.Case(1, 2, 1, 130, 200, 128, CAUSAL)
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
    alibi = torch.full((1, 2), 0.1, device="cuda")
    out, lse = cute_flash.attn(q, k, v, causal=True, scale=scale, softcap=4.0, alibi=alibi, return_lse=True)
    args = reference.plain_args(q, CAUSAL, scale)._replace(softcap=4.0, alibi=alibi)
    exact = reference.dense(q, k, v, args=args)
    low, _ = reference.dense_low_precision(q, k, v, args=args)
    cases.assert_close(out, lse, *exact, low)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("band", (FULL, CAUSAL, Band(200, 0)), ids=str)
@pytest.mark.parametrize("scale", (0.0, 1e-5, 0.1))
def test_slopes_of_any_size(scale, band, dtype):
    """Slopes whose terms the tensor cores add, up to nearly the largest, and others."""
    q, k, v = cases.make_inputs(cases.Case(1, 8, 4, 400, 700, 128, band), dtype, "cuda")
    slopes = torch.tensor([[0.0, 1e-7, 0.3, -0.3, 1.5, -40.0, 3e4, -1e5]], device="cuda")
    window = (band.left, band.right)
    out, lse = cute_flash.attn(q, k, v, window=window, scale=scale, alibi=slopes, return_lse=True)
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


@pytest.mark.parametrize("band", (FULL, CAUSAL, Band(20, 0)), ids=str)
def test_max_logit_of_falling_and_rising_scores(band):
    """Negative scores that rise and fall along the keys. Rows past the end do not count."""
    case = cases.Case(2, 4, 2, 257, 700, 128, band)
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
    q, k = q.abs(), -k.abs() * torch.linspace(2, 1, 700, device="cuda").bfloat16()[:, None]
    most = cute_flash.attn(q, k, v, window=band.bounds, return_max_logit=True)[1]
    expected = feature_cases.max_logit(q, k, reference.plain_args(q, band))
    torch.testing.assert_close(most.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    assert (most < 0).all()
