from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.spec.band import Band
from profiling.measure.accuracy import OUTLIER_RATE, random_dout, random_inputs, relative_distance
from profiling.measure.oracles import forward_oracle
from profiling.measure.shapes import Shape

CPU = torch.device("cpu")
SHAPES = [
    Shape(2, 3, 3, 300, 16, True),
    Shape(1, 1, 1, 40, 8, False),
    Shape(2, 4, 2, 1100, 8, True),
    Shape(1, 4, 1, 1100, 8, False),
]
ids = [shape.id for shape in SHAPES]


def exact(
    shape: Shape, dtype: torch.dtype = torch.bfloat16, distribution: str = "normal"
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    inputs = random_inputs(shape, dtype, CPU, seed=1, distribution=distribution)
    out, _ = reference.dense(*inputs, Band.of(shape.causal, (None, None)))
    return inputs, out


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_oracle_is_attention_on_its_sample(shape):
    inputs, out = exact(shape)
    errors = forward_oracle(*inputs, shape.causal).errors(out)
    assert errors.relative is not None and errors.relative < 1e-12
    assert errors.max_abs is not None and errors.max_abs < 1e-12


@pytest.mark.slow
def test_the_sample_reaches_both_ends_and_the_last_batch_and_head():
    inputs, out = exact(SHAPES[2])
    oracle = forward_oracle(*inputs, causal=True)
    for index in [(1, 0, 0, 0), (1, 3, 1099, 7), (1, 0, 1099, 0), (1, 3, 0, 0)]:
        spoilt = out.clone()
        spoilt[index] += 1.0
        found = oracle.errors(spoilt).max_abs
        assert found == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["normal", "outliers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_the_rounded_exact_output_is_right(shape, dtype, distribution):
    inputs, out = exact(shape, dtype, distribution)
    oracle, out = forward_oracle(*inputs, shape.causal), out.to(dtype)
    accuracy = oracle.judge(out, out)
    assert not accuracy.is_wrong
    assert accuracy.relative is not None and 0 < accuracy.relative < torch.finfo(dtype).eps
    assert accuracy.distance == 0.0 and accuracy.non_finite == 0


def scale_by_half_a_percent(out):
    out *= 1.005


def lose_the_causal_mask_of_the_last_row(out):
    out[:, :, -1] = out[:, :, 0]


def leave_unwritten(out):
    out[0, 1, 7] = torch.nan


def leave_zero_outside_the_sample(out):
    out[0, 1] = 0.0


def one_large_entry(out):
    out[-1, 0, 5, 0] += 0.1


SPOILS = [
    scale_by_half_a_percent,
    lose_the_causal_mask_of_the_last_row,
    leave_unwritten,
    leave_zero_outside_the_sample,
    one_large_entry,
]


@pytest.mark.slow
@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_a_wrong_output_is_found(spoil):
    inputs, out = exact(SHAPES[2])
    right = out.to(torch.bfloat16)
    wrong = right.clone()
    spoil(wrong)
    oracle = forward_oracle(*inputs, causal=True)
    assert oracle.judge(wrong, right).is_wrong


def test_without_the_reference_peer_the_sample_still_judges():
    inputs, out = exact(SHAPES[0])
    oracle = forward_oracle(*inputs, causal=True)
    right = oracle.judge(out.bfloat16())
    assert right.distance is None and not right.is_wrong
    assert oracle.judge((1.02 * out).bfloat16()).is_wrong


def test_a_broken_reference_peer_does_not_make_others_wrong():
    inputs, out = exact(SHAPES[2])
    oracle, right = forward_oracle(*inputs, causal=True), out.bfloat16()
    for index in [(0, 1, 7), (-1, 0, 0)]:
        broken = right.clone()
        # Outside the sample, and in it.
        broken[index] = torch.nan
        assert oracle.judge(broken, broken).is_wrong and not oracle.judge(right, broken).is_wrong


def test_not_a_number_is_none_and_wrong():
    inputs, out = exact(SHAPES[1])
    accuracy = forward_oracle(*inputs, causal=False).judge(torch.full_like(out, torch.nan).bfloat16())
    assert (accuracy.relative, accuracy.max_abs) == (None, None)
    assert accuracy.is_wrong and accuracy.non_finite == out.numel()


def test_relative_distance():
    x = torch.tensor([3.0, 4.0])
    assert relative_distance(x, x) == 0.0
    assert relative_distance(2 * x, x) == pytest.approx(1.0)


def test_inputs_depend_on_the_seed_and_outliers_are_as_rare_and_as_large_as_said():
    shape = Shape(1, 4, 4, 2000, 64, False)
    q, k, _ = random_inputs(shape, torch.float16, CPU, seed=3)
    assert torch.equal(q, random_inputs(shape, torch.float16, CPU, seed=3)[0])
    assert not torch.equal(q, k) and not torch.equal(q, random_inputs(shape, torch.float16, CPU, seed=4)[0])
    dout = random_dout(shape, torch.float16, CPU, seed=3)
    assert dout.shape == q.shape and not torch.equal(dout, q)
    assert torch.equal(dout, random_dout(shape, torch.float16, CPU, seed=3))
    assert float(dout.float().std()) == pytest.approx(1.0, rel=0.01)
    with_outliers = random_inputs(shape, torch.float16, CPU, seed=3, distribution="outliers")[1].float()
    # Of N(0, 101) 62 % lie beyond 5, of N(0, 1) almost none.
    rate = float((with_outliers.abs() > 5).float().mean())
    assert rate == pytest.approx(0.62 * OUTLIER_RATE, rel=0.2)
