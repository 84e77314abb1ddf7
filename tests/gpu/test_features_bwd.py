"""Gradients with softcap, ALiBi, sinks and dropout on a GPU, by every family, against the fp64 oracle."""

import math
import time

import pytest
import torch

import cute_flash
from cute_flash.jit.compile import cache_info
from tests import cases
from tests.combinations import gradients
from tests.feature_gradients import assert_feature_gradients, weights
from tests.gpu import feature_combinations as made
from tests.gpu import support
from tests.gpu.captured import Captured

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory", "known_rng")]


def on_gpu(case):
    return {name: x.cuda() for name, x in case.tensors().items()}


def attending(case, **more):
    return lambda x: case.attend(x, **more)


def check(case, with_lse=False, **more):
    tensors, douts = on_gpu(case), weights(case, "cuda", with_lse)
    return assert_feature_gradients(attending(case, **more), case, tensors, douts, more.get("scale"))


@pytest.mark.parametrize("case", made.CASES, ids=str)
def test_against_the_oracle(case, family):
    check(case)


@pytest.mark.parametrize("case", made.CASES[:8], ids=str)
def test_through_the_lse_with_other_values(case, family):
    check(made.with_other_values(case), with_lse=True)


@pytest.mark.parametrize("scale", (-0.3, 1.5))
def test_scale(scale, family):
    check(made.CASES[5], scale=scale)


def test_random_combinations(family, request, record_property):
    """Forward and backward of many calls, dense and varlen; all failures are reported at the end."""
    count, failed, records = request.config.getoption("--combinations"), [], []
    before, begin = cache_info(), time.perf_counter()
    for seed in range(count):
        case, kind, with_lse = made.drawn(seed), made.kind_of(seed), seed % 2 == 1
        try:
            found = check(case, with_lse, deterministic=kind.deterministic)
            if kind.deterministic:
                again = gradients(attending(case, deterministic=True), on_gpu(case), weights(case, "cuda", with_lse))
                assert all(torch.equal(again[name], x) for name, x in found.items()), "other bits"
            records.append(support.record_of(case, kind, family))
        except AssertionError as error:
            failed.append(f"{seed}: {case}: {error}")
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


@pytest.mark.parametrize("case", made.DETERMINISTIC, ids=str)
def test_deterministic_gradients_have_the_same_bits(case, family):
    tensors, douts = on_gpu(case), weights(case, "cuda", True)
    attend = attending(case, deterministic=True)
    first = assert_feature_gradients(attend, case, tensors, douts)
    for _ in range(10):
        again = gradients(attend, tensors, douts)
        assert all(torch.equal(again[name], first[name]) for name in tensors)


def test_rows_without_keys(family):
    """dq is exactly 0. A sink of such a row gets the gradient of the LSE, for any gradient of the output."""
    case = made.CASES[16]
    assert (case.seqlen_q, case.seqlen_k) == (333, 129) and "sinks" in case.features
    tensors, (dout, dlse) = on_gpu(case), weights(case, "cuda", True)
    for part in (0.0, 1.0):
        found = gradients(attending(case), tensors, (dout, dlse * part))
        assert not found["q"][:, :, : 333 - 129].any()
    tensors["sinks"][0] = -math.inf
    found = gradients(attending(case), tensors, (dout, dlse))
    assert found["sinks"][0] == 0 and found["sinks"].isfinite().all()


def test_memory_as_bshd(family):
    case = made.CASES[5]
    douts = weights(case, "cuda", True)
    tensors = on_gpu(case)
    for name in "qkv":
        tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert_feature_gradients(attending(case), case, tensors, douts)


def test_compiled_training_step_equals_eager():
    case = made.CASES[5]
    tensors, douts = on_gpu(case), weights(case, "cuda", False)
    eager = gradients(attending(case), tensors, douts)
    compiled = gradients(torch.compile(attending(case), fullgraph=True), tensors, douts)
    for name, x in eager.items():
        torch.testing.assert_close(compiled[name], x, rtol=0.02, atol=0.02 * x.abs().max().item())


def test_captured_training_step(monkeypatch):
    """Each replay has a new dropout mask, and its gradients use this mask; checked by the linearity of out in v."""
    monkeypatch.undo()
    q, k, v = (x.requires_grad_() for x in cases.make_inputs(cases.Case(1, 2, 2, 200, 300, 64), torch.bfloat16, "cuda"))
    slopes = torch.tensor([0.01, 0.1], device="cuda", requires_grad=True)

    def step():
        out = cute_flash.attn(q, k, v, dropout=0.5, alibi=slopes, softcap=5.0).float()
        return out.detach().sum(), *torch.autograd.grad(out.sum(), (q, k, v, slopes))

    captured, sums = Captured.of(step), []
    for _ in range(3):
        total, *grads = captured.replay()
        sums.append(total.item())
        assert all(x.isfinite().all() for x in grads)
        torch.testing.assert_close((grads[2].double() * v.double()).sum().item(), sums[-1], rtol=0.02, atol=2.0)
    assert len(set(sums)) == 3


def test_dropout_and_weights_agree_between_the_directions():
    """With v = 1, and dout = 1 in column 0 and 0 elsewhere, column 0 of out and column 0 of dv have the same sum.

    Both sums are that of all weights after dropout.
    """
    case = made.CASES[9]
    tensors = on_gpu(case)
    tensors["v"] = torch.ones_like(tensors["v"])
    dout, dlse = (torch.zeros_like(x) for x in weights(case, "cuda", False))
    dout[..., 0] = 1.0
    out = attending(case)(tensors)[0]
    dv = gradients(attending(case), tensors, (dout, dlse))["v"]
    torch.testing.assert_close(dv[..., 0].double().sum(), out[..., 0].double().sum(), rtol=2e-3, atol=0.1)


def test_count_of_kernels_stays_small():
    from cute_flash.spec.arch import detect
    from tests.gpu import families

    wanted = set(made.keys(detect(0), families.runnable(), 300))
    assert len([key for key in wanted if "process" not in key.kernel]) <= 320
