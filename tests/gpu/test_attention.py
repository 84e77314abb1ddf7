"""`attn` and `attn_varlen` on a GPU against the fp64 oracle: out, LSE and all gradients, with and without features."""

import time

import pytest
import torch

from cute_flash import reference
from cute_flash.jit.kernels import cache_info
from cute_flash.spec.band import Band
from tests.cases import CAUSAL, FULL
from tests.combinations import VarlenCombination, gradients
from tests.covering import covering
from tests.feature_gradients import assert_feature_gradients, assert_outputs, weights
from tests.gpu import calls, support
from tests.gpu.calls import ALL, BF16, CALLS, FORWARD, Call, dense, varlen
from tests.lengths import Lengths

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory", "known_rng")]


def on_gpu(case):
    return {name: x.cuda() for name, x in case.tensors().items()}


def check(call: Call, second_yardstick: bool, repetitions: int) -> None:
    """Check all results. Deterministic gradients have the same bits in every repetition."""
    case, tensors, douts = call.case, call.tensors(), call.weights()
    found = assert_feature_gradients(call.attend, case, tensors, douts, second_yardstick=second_yardstick)
    if isinstance(case, VarlenCombination):
        real, unused = sum(case.lengths.queries), case.lengths.unused_keys().cuda()
        assert not found["q"][real:].any(), "dq of padding"
        assert not found["k"][unused].any() and not found["v"][unused].any(), "dk, dv of keys of no sequence"
    for _ in range(repetitions if call.deterministic else 0):
        again = gradients(call.attend, tensors, douts)
        assert all(torch.equal(again[name], x) for name, x in found.items()), "other bits"


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id, indirect=True)
def test_gradients(call):
    check(call, second_yardstick=bool(call.one.features), repetitions=20)
    if call.out_fp32:
        out = call.attend(call.tensors())[0]
        assert out.dtype == torch.float32
        assert (out != out.to(call.one.dtype)).float().mean() > 0.5 * (out != 0).float().mean(), "out: rounded"


@pytest.mark.parametrize("call", FORWARD, ids=lambda call: call.id, indirect=True)
def test_forward(call):
    x = call.tensors()
    out, lse, *most = call.case.attend(x, return_max_logit=call.max_logit)
    exact, rough = (call.case.dense(by, x) for by in (reference.dense, reference.dense_low_precision))
    assert_outputs((out, lse), exact, rough)
    assert len(most) == call.max_logit
    if most:
        softcap = call.one.features.get("softcap", 0.0)
        assert_max_logit(most[0], call.case, x, atol=1e-5 + 1e-6 * softcap)


def assert_max_logit(most, case, x, atol):
    """Compare with the CPU path in fp64."""
    on_cpu = {name: tensor.cpu() for name, tensor in x.items()}
    q, k = (on_cpu[name].double() for name in "qk")
    args = case.args(on_cpu)._replace(dropout=0.0, rng=None, return_max_logit=True)
    torch.testing.assert_close(most.double().cpu(), reference.forward(q, k, k, args)[2], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("band", (FULL, CAUSAL, Band(20, 0)), ids=str)
def test_max_logit_of_falling_and_rising_scores(band, family):
    """Negative scores that rise and fall along the keys. Rows past the end do not count."""
    case = dense(2, 2, 2, 257, 700, 128, BF16, band)
    x = on_gpu(case)
    x["q"], x["k"] = x["q"].abs(), -x["k"].abs() * torch.linspace(2, 1, 700, device="cuda").bfloat16()[:, None]
    most = case.attend(x, return_max_logit=True)[2]
    assert_max_logit(most, case, x, atol=1e-5)
    assert (most < 0).all()


def test_random_calls(family, request, record_property):
    """Forward and backward of many calls, dense and varlen; all failures are reported at the end."""
    count, failed, records = request.config.getoption("--combinations"), [], []
    before, begin = cache_info(), time.perf_counter()
    for seed in range(count):
        call = calls.drawn(seed, family)
        try:
            check(call, second_yardstick=True, repetitions=1)
            records.append(support.record_of(call))
        except AssertionError as error:
            failed.append(f"{seed}: {call}: {error}")
    after, seconds = cache_info(), time.perf_counter() - begin
    compiled, loaded = after.compiles - before.compiles, after.disk_hits - before.disk_hits
    ran = (
        f"{family}: {count} combinations in {seconds:.0f} s, {compiled} kernels compiled, {loaded} loaded, "
        f"{len(failed)} failed"
    )
    print(ran)
    record_property("combinations", ran)
    if (folder := request.config.getoption("--support")) is not None:
        support.write(folder, family, ran, records)
    assert not failed, "\n".join([ran, *failed[:20]])


SOME = dense(1, 1, 2, 130, 200, 128, BF16, CAUSAL, {"softcap": 4.0, "alibi": 2})
SCALED = {
    "dense": (dense(1, 1, 2, 130, 200, 64, BF16, CAUSAL), (-0.3, 0.0, 1e-3, 2.5)),
    "softcap, ALiBi": (SOME, (-0.3, 0.0, 2.5, 1e6)),
    "varlen": (varlen(Lengths([70, 129], [70, 200]), 2, 1, 64), (-0.3, 0.0, 2.5)),
}


@pytest.mark.parametrize(
    ("case", "scale"), [pytest.param(case, x, id=f"{name} {x}") for name, (case, xs) in SCALED.items() for x in xs]
)
def test_any_finite_scale(case, scale, family):
    x = on_gpu(case)
    exact, rough = (case.dense(by, x, scale) for by in (reference.dense, reference.dense_low_precision))
    assert_outputs(case.attend(x, scale=scale), exact, rough)


@pytest.mark.parametrize("scale", (-0.3, 1.5))
@pytest.mark.parametrize(
    "case", (dense(1, 1, 2, 150, 200, 64), dense(2, 2, 2, 257, 391, 128, BF16, CAUSAL, ALL)), ids=("plain", "features")
)
def test_gradients_of_any_scale(case, scale, family):
    x = on_gpu(case)
    assert_feature_gradients(lambda x: case.attend(x, scale=scale), case, x, weights(case, "cuda", True), scale)


SPREAD = covering(
    [
        (dense(1, 2, 1, 300, 1500, d, dtype, band), growth)
        for d in (64, 128, 192, 256)
        for dtype in calls.DTYPES
        for band in (FULL, CAUSAL)
        for growth in (1.0, 30.0, -30.0)
    ],
    lambda item: (item[0].head_dim, item[0].dtype, item[0].band, item[1]),
)


@pytest.mark.parametrize(("case", "growth"), SPREAD, ids=lambda x: x if isinstance(x, float) else Call(x, "").id[1:])
def test_scores_that_grow_along_the_keys(case, growth, family):
    """Rising, falling and steeply rising maxima: every path of the rescaling, and of a speculative row max."""
    x = on_gpu(case)
    x["k"] = x["k"] * torch.linspace(1, 1 + abs(growth), 1500, device="cuda", dtype=case.dtype)[:, None]
    if growth < 0:
        x["k"] = x["k"].flip(2).contiguous()
    exact, rough = (case.dense(by, x) for by in (reference.dense, reference.dense_low_precision))
    assert_outputs(case.attend(x), exact, rough)
