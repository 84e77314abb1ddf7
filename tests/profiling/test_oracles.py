"""The oracles of the gradients: exact on their sample; they accept correct gradients and reject others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.spec.band import Band
from profiling.measure.accuracy import Oracle, random_dout, random_inputs
from profiling.measure.oracles import GRADIENTS, backward_oracles
from profiling.measure.shapes import Shape

CPU = torch.device("cpu")
# One block of rows and several, the last one shorter; grouped heads; one head.
SHAPES = [
    Shape(2, 3, 3, 300, 16, True),
    Shape(1, 1, 1, 40, 8, False),
    Shape(2, 6, 3, 600, 8, True),
    Shape(1, 4, 1, 513, 8, False),
]
GROUPED = SHAPES[2]
ids = [shape.id for shape in SHAPES]


def tensors(shape: Shape, dtype: torch.dtype = torch.bfloat16, distribution: str = "normal") -> list[Tensor]:
    """q, k, v, dout"""
    inputs = random_inputs(shape, dtype, CPU, seed=1, distribution=distribution)
    return [*inputs, random_dout(shape, dtype, CPU, seed=1)]


def exact(inputs: list[Tensor], causal: bool) -> dict[str, Tensor]:
    """dq, dk, dv in fp64 from the tiled formulas, without autograd."""
    q, k, v, dout = (x.double() for x in inputs)
    args = reference.plain_args(q, Band.of(causal, (None, None)))
    out, lse, _ = reference.forward(q, k, v, args)
    *grads, _ = reference.backward(dout, None, q, k, v, out, lse, args)
    return dict(zip(GRADIENTS, grads, strict=True))


def judged(oracles: dict[str, Oracle], grads: dict[str, Tensor], peer: dict[str, Tensor]) -> dict[str, bool]:
    return {name: oracles[name].judge(grads[name], peer[name]).is_wrong for name in GRADIENTS}


@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_the_oracles_are_the_gradients_on_their_sample(shape):
    inputs = tensors(shape)
    grads = exact(inputs, shape.causal)
    oracles = backward_oracles(*inputs, shape.causal)
    assert tuple(oracles) == GRADIENTS
    for name, oracle in oracles.items():
        errors = oracle.errors(grads[name])
        assert errors.relative is not None and errors.relative < 1e-12
        assert errors.max_abs is not None and errors.max_abs < 1e-12
        # Unfused PyTorch in bf16 loses a few bits of the eight, and no more.
        assert oracle.yardstick.relative is not None and 1e-3 < oracle.yardstick.relative < 2e-2


def test_the_sample_is_two_key_heads_of_the_last_batch_with_all_their_query_heads():
    inputs = tensors(GROUPED)
    grads = exact(inputs, GROUPED.causal)
    oracles = backward_oracles(*inputs, GROUPED.causal)
    inside = {"dq": [0, 1, 4, 5], "dk": [0, 2], "dv": [0, 2]}
    for name, grad in grads.items():
        for head in range(grad.shape[1]):
            for row in (0, 599):
                spoilt = grad.clone()
                spoilt[1, head, row, 3] += 1.0
                found = oracles[name].errors(spoilt).max_abs
                assert found == pytest.approx(1.0 if head in inside[name] else 0.0), (name, head, row)


def test_dout_counts():
    inputs = tensors(GROUPED)
    doubled = backward_oracles(*inputs[:3], 2 * inputs[3], GROUPED.causal)
    for name, grad in exact(inputs, GROUPED.causal).items():
        torch.testing.assert_close(doubled[name].exact, 2 * doubled[name].pick(grad), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["normal", "outliers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_gradients_that_are_rounded_once_are_right(shape, dtype, distribution):
    inputs = tensors(shape, dtype, distribution)
    grads = {name: grad.to(dtype) for name, grad in exact(inputs, shape.causal).items()}
    for name, oracle in backward_oracles(*inputs, shape.causal).items():
        accuracy = oracle.judge(grads[name], grads[name])
        assert not accuracy.is_wrong and accuracy.distance == 0.0 and accuracy.non_finite == 0
        assert accuracy.relative is not None and 0 < accuracy.relative < torch.finfo(dtype).eps


@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_the_cpu_path_of_the_operator_is_right(shape):
    *inputs, dout = tensors(shape)
    args = reference.plain_args(inputs[0], Band.of(shape.causal, (None, None)))
    out, lse, _ = reference.forward(*inputs, args)
    # Computed from the rounded output, as in every kernel.
    grads = dict(zip(GRADIENTS, reference.backward(dout, None, *inputs, out, lse, args)[:3], strict=True))
    for name, oracle in backward_oracles(*inputs, dout, shape.causal).items():
        accuracy = oracle.judge(grads[name])
        assert not accuracy.is_wrong and accuracy.distance is None, name


def scale_by_two_percent(grads):
    grads["dq"] *= 1.02
    return {"dq"}


def forget_the_scale_of_dk(grads):
    grads["dk"] *= 8**0.5
    return {"dk"}


def add_no_group(grads):
    grads["dk"] *= 0.5
    grads["dv"] *= 0.5
    return {"dk", "dv"}


def leave_unwritten(grads):
    grads["dv"][0, 1, 7] = torch.nan
    return {"dv"}


def leave_zero_outside_the_sample(grads):
    grads["dk"][0, 1] = 0.0
    return {"dk"}


def lose_the_last_block_of_dq(grads):
    grads["dq"][:, :, -64:] = 0.0
    return {"dq"}


def exchange_dk_and_dv(grads):
    grads["dk"], grads["dv"] = grads["dv"], grads["dk"]
    return {"dk", "dv"}


SPOILS = [
    scale_by_two_percent,
    forget_the_scale_of_dk,
    add_no_group,
    leave_unwritten,
    leave_zero_outside_the_sample,
    lose_the_last_block_of_dq,
    exchange_dk_and_dv,
]


@pytest.mark.slow
@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_a_wrong_gradient_is_found_and_the_others_are_not_blamed(spoil):
    inputs = tensors(GROUPED)
    right = {name: grad.bfloat16() for name, grad in exact(inputs, GROUPED.causal).items()}
    wrong = {name: grad.clone() for name, grad in right.items()}
    expected = spoil(wrong)
    found = judged(backward_oracles(*inputs, GROUPED.causal), wrong, right)
    assert {name for name, is_wrong in found.items() if is_wrong} == expected


def test_gradients_of_the_full_mask_are_wrong_for_the_causal_one():
    inputs = tensors(GROUPED)
    right, full = ({name: grad.bfloat16() for name, grad in exact(inputs, causal).items()} for causal in (True, False))
    assert all(judged(backward_oracles(*inputs, True), full, right).values())
