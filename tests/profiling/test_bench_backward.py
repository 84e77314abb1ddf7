"""The backward direction of the benchmark, with fake peers on the CPU."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend

from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ARCHS
from profiling.measure.launches import needed_kernels
from profiling.measure.shapes import Shape
from profiling.peers.cute_flash import our_peer
from profiling.peers.directions import calls_of
from profiling.peers.sdpa import sdpa_peer
from tests.fakes.cuda import claiming_cuda
from tests.fakes.recording import kernels_of
from tests.profiling.fakes import SETTINGS, SMALL, CpuGpu, FakePeer, FakeTimer, bench, failures, notes

pytestmark = pytest.mark.usefixtures("few_calls")

BACKWARD = replace(SETTINGS, direction="bwd")
GROUPED = Shape(batch=2, heads=6, heads_kv=2, seqlen=70, head_dim=16, causal=False)
LABELS = {f"normal {name}" for name in ("dq", "dk", "dv")}


bench = partial(bench, settings=BACKWARD)


@pytest.mark.parametrize("shape", [SMALL, GROUPED, replace(GROUPED, causal=True)], ids=lambda shape: shape.id)
def test_speeds_and_errors_of_a_good_run(shape):
    timer = FakeTimer()
    ours = FakePeer("cute_flash", timer, call_ms=0.5, is_ours=True)
    peers = [FakePeer("sdpa-flash", timer, 1.0), FakePeer("fa3", timer, 0.4, is_bshd=True)]
    run = bench(timer, [ours, *peers], [shape], settings=replace(BACKWARD, outliers=True))
    (cell,) = run.cells
    assert cell.key == f"bwd-bf16-{shape.id}"
    assert cell.flops == 2.5 * shape.flops()
    assert cell.results["cute_flash"].tflops == pytest.approx(2.5 * shape.flops() / 0.5e-3 / 1e12)
    assert cell.ratio("cute_flash", "sdpa-flash") == pytest.approx(2.0) and run.best_peer(cell) == "fa3"
    labels = LABELS | {label.replace("normal", "outliers") for label in LABELS}
    assert set(cell.yardstick) == labels
    for result in cell.results.values():
        assert result.error is None and not result.is_wrong and set(result.accuracy) == labels
        # Sums may have any order.
        assert result.is_repeatable is None
    for label in LABELS:
        found, yardstick = cell.results["cute_flash"].accuracy[label], cell.yardstick[label]
        assert found.relative is not None and yardstick.relative is not None
        assert 1e-4 < found.relative < yardstick.relative
        assert cell.results["fa3"].accuracy[label].distance == 0.0
    assert cell.worst_error_ratio("cute_flash", "fa3") == 1.0
    assert failures(run) == [] and notes(run) == []


@pytest.mark.parametrize("causal", [False, True])
def test_real_peers_through_autograd(causal):
    peer = sdpa_peer("sdpa-flash", SDPBackend.MATH)
    run = bench(FakeTimer(), [our_peer(), peer], [replace(GROUPED, causal=causal)])
    (cell,) = run.cells
    for result in cell.results.values():
        assert result.error is None and not result.is_wrong and len(result.accuracy) == 3
    assert all(cell.results[peer.name].accuracy[label].distance == 0.0 for label in LABELS)
    # The implementation differs from the peer's, which does not compute Δ from a rounded output.
    for label in ("normal dq", "normal dk"):
        distance = cell.results["cute_flash"].accuracy[label].distance
        assert distance is not None and 0.0 < distance < 1e-2


def test_bytes_are_those_of_the_gradients_too():
    timer = FakeTimer()
    run = bench(timer, [FakePeer("a", timer)], [GROUPED], facts=lambda: {"l2_bytes": 100_000})
    # Q, O, dO, dQ of six heads, K, V, dK, dV of two in bf16, and the LSE in fp32.
    expected = 2 * 70 * (4 * (6 + 2) * 16 * 2 + 6 * 4)
    assert run.cells[0].working_set_bytes == expected and expected > 100_000
    # The forward pass would fit.
    assert run.cells[0].exceeds_l2 is True
    assert bench(timer, [FakePeer("a", timer)], [GROUPED], settings=SETTINGS).cells[0].working_set_bytes < 100_000


def test_other_bits_are_allowed_and_wrong_values_are_not():
    timer, calls = FakeTimer(), []

    def differ(dq, dk, dv):
        calls.append(1)
        # One unit in the last place of one entry.
        dq[0, 0, -1, 0] *= 1 + 2**-7 * (len(calls) % 2)

    ours = FakePeer("cute_flash", timer, is_ours=True, spoil_gradients=differ)
    run = bench(timer, [ours, FakePeer("sdpa-flash", timer)])
    assert len(calls) > 2 and not run.cells[0].results["cute_flash"].is_wrong
    assert failures(run) == []


def test_sums_that_are_not_zeroed_again_are_detected():
    timer, calls = FakeTimer(), []

    def add_up(dq, dk, dv):
        calls.append(1)
        dq *= len(calls)

    ours = FakePeer("cute_flash", timer, is_ours=True, spoil_gradients=add_up)
    run = bench(timer, [ours, FakePeer("sdpa-flash", timer)])
    accuracy = run.cells[0].results["cute_flash"].accuracy
    assert {label for label, found in accuracy.items() if found.is_wrong} == {"normal dq"}
    # The error is that of the last call; the first was correct.
    assert accuracy["normal dq"].relative == pytest.approx(len(calls) - 1, rel=1e-2)
    assert "cute_flash: wrong in dq on normal inputs" in failures(run)[0]


def unwritten(dq, dk, dv):
    dk[0, 0, 3] = torch.nan


def forget_a_query_head(dq, dk, dv):
    dv *= 2 / 3


def transpose_heads(dq, dk, dv):
    dq.copy_(dq.flip(1))


@pytest.mark.parametrize(
    ("spoil", "label"), [(unwritten, "normal dk"), (forget_a_query_head, "normal dv"), (transpose_heads, "normal dq")]
)
def test_a_wrong_peer_is_never_the_best(spoil, label):
    timer = FakeTimer()
    fast_and_wrong = FakePeer("fa3", timer, 0.1, spoil_gradients=spoil)
    ours = FakePeer("cute_flash", timer, is_ours=True)
    run = bench(timer, [ours, FakePeer("sdpa-flash", timer, 2.0), fast_and_wrong], [GROUPED])
    (cell,) = run.cells
    wrong = {name for name, found in cell.results["fa3"].accuracy.items() if found.is_wrong}
    assert wrong == {label} and not cell.results["cute_flash"].is_wrong
    assert run.best_peer(cell) == "sdpa-flash"
    assert failures(run) == [] and f"fa3: wrong in {label.split()[1]}" in notes(run)[0]


def test_a_gradient_of_another_shape_is_an_error():
    timer = FakeTimer()

    class Expanded(FakePeer):
        """A peer that returns dk and dv for every query head, as if K/V heads were not shared."""

        def prepare_backward(self, *inputs):
            call = super().prepare_backward(*inputs)
            return lambda: tuple(x.repeat_interleave(6 // x.shape[1], dim=1) for x in call())

    class Missing(FakePeer):
        def prepare_backward(self, *inputs):
            call = super().prepare_backward(*inputs)
            return lambda: call()[:2]

    run = bench(timer, [Expanded("a", timer), Missing("b", timer)], [GROUPED])
    results = run.cells[0].results
    assert results["a"].error == "ValueError: dk of shape (2, 6, 70, 16), expected (2, 2, 70, 16)"
    assert results["b"].error == "ValueError: 2 tensors, expected dq, dk, dv"


def test_the_forward_runs_once_in_its_context_on_the_timers_stream_and_is_not_timed():
    timer, forwards, entered = FakeTimer(), [], []

    class Slow(FakePeer):
        @contextmanager
        def context(self):
            entered.append(self.name)
            yield
            entered.pop()

        def prepare_backward(self, *inputs):
            forwards.append(timer.is_on_stream and entered == [self.name])
            timer.now_ms += 1000.0
            return super().prepare_backward(*inputs)

    run = bench(timer, [Slow("a", timer, 0.25)])
    assert forwards == [True]
    assert run.cells[0].results["a"].round_ms == pytest.approx((0.25,) * 3)


def test_no_backward_kernel_is_the_error_of_the_cell():
    timer = FakeTimer()

    def refuse(dq, dk, dv):
        raise NotImplementedError("there is no backward kernel yet")

    ours = FakePeer("cute_flash", timer, is_ours=True, spoil_gradients=refuse)
    run = bench(timer, [ours, FakePeer("sdpa-flash", timer)])
    assert run.cells[0].tflops("sdpa-flash") and run.cells[0].tflops("cute_flash") is None
    assert "there is no backward kernel yet" in failures(run)[0]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("kernels", ["auto", "sm80"])
def test_kernels_of_a_run_are_all_compiled_before_it(direction, kernels):
    """A run launches no kernel that `needed_kernels` did not name."""
    launched = []

    def launch(key, operands):
        launched.append(key)
        for name in ("out", "lse", "dq", "dk", "dv"):
            if isinstance(operands.get(name), torch.Tensor):
                operands[name].zero_()

    shapes = [SMALL, GROUPED, replace(GROUPED, causal=True)]
    settings, ours = replace(SETTINGS, direction=direction, kernels=kernels), [our_peer(kernels=kernels)]
    with use_gpu(CpuGpu(ARCHS["sm_90"], launch)), claiming_cuda():
        peers = [*ours, FakePeer("fa3", FakeTimer(), 1.0)]
        calls = calls_of(peers, shapes, (direction,), torch.bfloat16, torch.device("cpu"))
        keys = kernels_of(needed_kernels(calls))
        assert not launched
        bench(FakeTimer(), ours, shapes, settings=settings)
    assert set(launched) == set(keys) and len(keys) == len(set(keys))
    mains = {key.kernel for key in keys} & {"fwd_sm80", "fwd_sm90", "bwd_sm80", "bwd_sm90"}
    family = "sm90" if kernels == "auto" else kernels
    assert mains == {f"fwd_{family}", *[f"bwd_{family}"] * (direction == "bwd")}


def test_a_refused_call_does_not_stop_the_run():
    wide = replace(GROUPED, head_dim=520)
    with use_gpu(CpuGpu(ARCHS["sm_90"], lambda key, operands: None)), claiming_cuda():
        assert needed_kernels(calls_of([our_peer()], [wide], ("fwd",), torch.bfloat16, torch.device("cpu"))) == []
