"""Oracles of the output and of gradients: exact on their sample; they accept correct results and reject others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.spec.band import Band
from profiling.measure.accuracy import OUTLIER_RATE, Oracle, random_dout, random_inputs, relative_distance
from profiling.measure.oracles import GRADIENTS
from profiling.measure.shapes import Shape
from profiling.peers.directions import DIRECTIONS

CPU = torch.device("cpu")
# One block of rows and several, the last one shorter; grouped heads; one head.
SHAPES = {
    "fwd": [
        Shape(2, 3, 3, 300, 16, True),
        Shape(1, 1, 1, 40, 8, False),
        Shape(2, 4, 2, 1100, 8, True),
        Shape(1, 4, 1, 1100, 8, False),
    ],
    "bwd": [
        Shape(2, 3, 3, 300, 16, True),
        Shape(1, 1, 1, 40, 8, False),
        Shape(2, 6, 3, 600, 8, True),
        Shape(1, 4, 1, 513, 8, False),
    ],
}
GROUPED = {direction: shapes[2] for direction, shapes in SHAPES.items()}
CASES = [(direction, shape) for direction, shapes in SHAPES.items() for shape in shapes]
cases = pytest.mark.parametrize(("direction", "shape"), CASES, ids=[f"{d}-{shape.id}" for d, shape in CASES])
Results = dict[str, Tensor]


def tensors(direction: str, shape: Shape, dtype: torch.dtype = torch.bfloat16, distribution: str = "normal"):
    """q, k and v; for the backward dout too."""
    return DIRECTIONS[direction].inputs(shape, dtype, CPU, 1, distribution)


def exact(inputs: tuple[Tensor, ...], causal: bool) -> Results:
    """The output in fp64, or the gradients from the tiled formulas, without autograd."""
    band = Band.of(causal, (None, None))
    if len(inputs) == 3:
        return {"out": reference.dense(*inputs, band)[0]}
    q, k, v, dout = (x.double() for x in inputs)
    args = reference.plain_args(q, band)
    out, lse, _ = reference.forward(q, k, v, args)
    return dict(zip(GRADIENTS, reference.backward(dout, None, q, k, v, out, lse, args)[:3], strict=True))


def wrong_outputs(oracles: dict[str, Oracle], results: Results, peer: Results) -> set[str]:
    return {name for name, oracle in oracles.items() if oracle.judge(results[name], peer[name]).is_wrong}


@pytest.mark.slow
@cases
def test_an_oracle_is_exact_on_its_sample(direction, shape):
    inputs = tensors(direction, shape)
    results, oracles = exact(inputs, shape.causal), DIRECTIONS[direction].oracles(inputs, shape.causal)
    assert tuple(oracles) == tuple(results) == DIRECTIONS[direction].outputs
    for name, oracle in oracles.items():
        errors = oracle.errors(results[name])
        assert errors.relative is not None and errors.relative < 1e-12
        assert errors.max_abs is not None and errors.max_abs < 1e-12
        # Unfused PyTorch in bf16 loses a few bits of the eight, and no more.
        assert oracle.yardstick.relative is not None and 1e-3 < oracle.yardstick.relative < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "inside"),
    [("fwd", {"out": [0, 3]}), ("bwd", {"dq": [0, 1, 4, 5], "dk": [0, 2], "dv": [0, 2]})],
    ids=["fwd", "bwd"],
)
def test_the_sample_is_two_heads_of_the_last_batch_with_both_ends(direction, inside):
    """Forward: two query heads; backward: two K/V heads, with all their query heads."""
    shape = GROUPED[direction]
    inputs = tensors(direction, shape)
    oracles = DIRECTIONS[direction].oracles(inputs, shape.causal)
    for name, result in exact(inputs, shape.causal).items():
        for head in range(result.shape[1]):
            for row in (0, shape.seqlen - 1):
                spoilt = result.clone()
                spoilt[1, head, row, 3] += 1.0
                found = oracles[name].errors(spoilt).max_abs
                assert found == pytest.approx(1.0 if head in inside[name] else 0.0), (name, head, row)


def test_dout_counts():
    shape = GROUPED["bwd"]
    q, k, v, dout = inputs = tensors("bwd", shape)
    doubled = DIRECTIONS["bwd"].oracles((q, k, v, 2 * dout), shape.causal)
    for name, grad in exact(inputs, shape.causal).items():
        torch.testing.assert_close(doubled[name].exact, 2 * doubled[name].pick(grad), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["normal", "outliers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@cases
def test_results_that_are_rounded_once_are_right(direction, shape, dtype, distribution):
    inputs = tensors(direction, shape, dtype, distribution)
    results = {name: x.to(dtype) for name, x in exact(inputs, shape.causal).items()}
    for name, oracle in DIRECTIONS[direction].oracles(inputs, shape.causal).items():
        accuracy = oracle.judge(results[name], results[name])
        assert not accuracy.is_wrong and accuracy.distance == 0.0 and accuracy.non_finite == 0
        assert accuracy.relative is not None and 0 < accuracy.relative < torch.finfo(dtype).eps


@pytest.mark.parametrize("shape", SHAPES["bwd"], ids=lambda shape: shape.id)
def test_the_cpu_path_of_the_operator_is_right(shape):
    *inputs, dout = tensors("bwd", shape)
    args = reference.plain_args(inputs[0], Band.of(shape.causal, (None, None)))
    out, lse, _ = reference.forward(*inputs, args)
    # Computed from the rounded output, as in every kernel.
    grads = dict(zip(GRADIENTS, reference.backward(dout, None, *inputs, out, lse, args)[:3], strict=True))
    for name, oracle in DIRECTIONS["bwd"].oracles((*inputs, dout), shape.causal).items():
        accuracy = oracle.judge(grads[name])
        assert not accuracy.is_wrong and accuracy.distance is None, name


def _set(name: str, place: tuple, value: float) -> Callable[[Results], object]:
    return lambda results: results[name].__setitem__(place, value)


EVERY = slice(None)
# The mistake, what it does to correct results, and the outputs that it makes wrong.
MISTAKES: list[tuple[str, Callable[[Results], object], set[str]]] = [
    ("scaled by half a percent", lambda x: x["out"].mul_(1.005), {"out"}),
    ("the last row without its mask", lambda x: x["out"][:, :, -1].copy_(x["out"][:, :, 0]), {"out"}),
    ("not written", _set("out", (0, 1, 7), torch.nan), {"out"}),
    ("zero outside the sample", _set("out", (0, 1), 0.0), {"out"}),
    ("one large entry", lambda x: x["out"][-1, 0, 5, 0].add_(0.1), {"out"}),
    ("dq scaled by two percent", lambda x: x["dq"].mul_(1.02), {"dq"}),
    ("dk without the scale", lambda x: x["dk"].mul_(8**0.5), {"dk"}),
    ("half of a group", lambda x: [x[name].mul_(0.5) for name in ("dk", "dv")], {"dk", "dv"}),
    ("dv not written", _set("dv", (0, 1, 7), torch.nan), {"dv"}),
    ("dk zero outside the sample", _set("dk", (0, 1), 0.0), {"dk"}),
    ("dq without its last block", _set("dq", (EVERY, EVERY, slice(-64, None)), 0.0), {"dq"}),
    ("dk and dv exchanged", lambda x: x.update(dk=x["dv"], dv=x["dk"]), {"dk", "dv"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "expected"), [one[1:] for one in MISTAKES], ids=[one[0] for one in MISTAKES])
def test_a_wrong_result_is_found_and_the_others_are_not_blamed(spoil, expected):
    direction = "fwd" if expected == {"out"} else "bwd"
    inputs, causal = tensors(direction, GROUPED[direction]), GROUPED[direction].causal
    right = {name: x.bfloat16() for name, x in exact(inputs, causal).items()}
    wrong = {name: x.clone() for name, x in right.items()}
    spoil(wrong)
    assert wrong_outputs(DIRECTIONS[direction].oracles(inputs, causal), wrong, right) == expected


def test_gradients_of_the_full_mask_are_wrong_for_the_causal_one():
    inputs = tensors("bwd", GROUPED["bwd"])
    right, full = ({name: x.bfloat16() for name, x in exact(inputs, causal).items()} for causal in (True, False))
    assert wrong_outputs(DIRECTIONS["bwd"].oracles(inputs, True), full, right) == set(GRADIENTS)


def output(shape: Shape) -> tuple[Oracle, Tensor]:
    """The oracle of an output, and the exact output."""
    inputs = tensors("fwd", shape)
    return DIRECTIONS["fwd"].oracles(inputs, shape.causal)["out"], exact(inputs, shape.causal)["out"]


def test_without_the_reference_peer_the_sample_still_judges():
    oracle, out = output(SHAPES["fwd"][0])
    right = oracle.judge(out.bfloat16())
    assert right.distance is None and not right.is_wrong
    assert oracle.judge((1.02 * out).bfloat16()).is_wrong


def test_a_broken_reference_peer_does_not_make_others_wrong():
    oracle, out = output(GROUPED["fwd"])
    right = out.bfloat16()
    # Outside the sample, and in it.
    for index in [(0, 1, 7), (-1, 0, 0)]:
        broken = right.clone()
        broken[index] = torch.nan
        assert oracle.judge(broken, broken).is_wrong and not oracle.judge(right, broken).is_wrong


def test_not_a_number_is_none_and_wrong():
    oracle, out = output(SHAPES["fwd"][1])
    accuracy = oracle.judge(torch.full_like(out, torch.nan).bfloat16())
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
