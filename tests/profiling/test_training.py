"""`profiling training` with a small model on the CPU, with a fake clock, and its kernels on a fake GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ARCHS
from profiling.documents import doc_results
from profiling.peers.integrations import ATTENTIONS, ON_CPU, OURS, Attention
from profiling.studies import training
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.recording import RecordingGpu, kernels_of
from tests.profiling.fakes import FakeTimer, tools

PEER = "SDPA"

pytestmark = pytest.mark.usefixtures("few_calls")


def attention(name, timer, call_ms, spoil=lambda out: out, reason=None):
    """Attention that takes `call_ms` in each of the two layers."""

    def attend(q, k, v):
        timer.now_ms += call_ms
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return spoil(scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2))

    def make():
        if reason:
            raise ImportError(reason)
        return attend

    return Attention(name, make, is_ours=name == OURS)


@pytest.fixture
def run(monkeypatch):
    """`run(ours=..., peer=...)`: a record in which ours takes 2 ms a step, and the peer 4 ms."""

    def measure(ours=None, peer=None):
        timer = FakeTimer()
        both = [attention(OURS, timer, 1.0, **ours or {}), attention(PEER, timer, 2.0, **peer or {})]
        monkeypatch.setattr(training, "ON_CPU", both)
        return training.STUDY.measure(training.SMALL, tools(timer))

    return measure


def test_tokens_per_second(run):
    record = run()
    assert [cell["seqlen"] for cell in record["cells"]] == [16, 32]
    for cell in record["cells"]:
        assert cell["batch"] * cell["seqlen"] == 64
        assert cell["sides"][OURS]["tokens_per_s"] == pytest.approx(64 / 2e-3, rel=1e-3)
        assert cell["sides"][PEER]["tokens_per_s"] == pytest.approx(64 / 4e-3, rel=1e-3)
    assert not training.STUDY.failures(record) and not training.STUDY.has_failed(record)
    assert training.table(record).rows[0] == (OURS, "32,000", "2.0", "32,000", "2.0")
    assert training.summary(record) == (
        "Tokens per second of cute_flash over those of the fastest other library: "
        "2.000 to 2.000 × at S = 16 (the other is SDPA); 2.000 to 2.000 × at S = 32 (the other is SDPA)."
    )
    assert training.table(record).rows[1] == (PEER, "16,000", "4.0", "16,000", "4.0")
    assert "Commit `c` ([data](results/h200/" in doc_results.training_line(record)


@pytest.mark.parametrize("spoil", [lambda out: 1.5 * out, lambda out: out * torch.nan], ids=["wrong", "NaN"])
def test_a_peer_with_other_results_is_not_timed(run, spoil):
    record = run(peer={"spoil": spoil})
    assert all(set(cell["sides"]) == {OURS} for cell in record["cells"])
    assert "not timed" in str(training.STUDY.failures(record)[0]) and not training.STUDY.has_failed(record)
    assert training.summary(record) == "No other library was measured."


def test_an_integration_that_fails_and_a_peer_that_is_not_available(run):
    def fail(out):
        raise RuntimeError("no kernel")

    record = run(ours={"spoil": fail})
    assert training.STUDY.has_failed(record)
    assert str(training.STUDY.failures(record)[0]) == f"S = 16, {OURS}: RuntimeError: no kernel"
    assert training.table(record).rows == ((PEER, "16,000", "4.0", "16,000", "4.0"),)
    record = run(peer={"reason": "no SDPA"})
    assert str(training.STUDY.failures(record)[0]) == f"S = 16, {PEER}: not available: ImportError: no SDPA"
    assert not training.STUDY.has_failed(record)


def test_without_a_gpu_nothing_runs_there():
    reasons = {one.unavailable(torch.device("cuda")) for one in ATTENTIONS}
    assert torch.cuda.is_available() or reasons == {"no CUDA device"}


@pytest.mark.slow
def test_all_integrations_give_the_same_results():
    assert [one.name for one in ON_CPU] == [
        OURS, "flash_attn names", "transformers", "cute_flash.flex_attention",
    ]  # fmt: skip
    cell = training.measure_length(32, training.SMALL, tools(FakeTimer()))
    assert not cell["failures"] and max(cell["differences"].values()) < 1e-5 and len(cell["sides"]) == 4


def test_kernels_are_compiled_before_the_steps():
    """Plain attention has one forward and three backward kernels, and that with a block mask others."""
    settings = replace(
        training.SMALL, model=training.Model(2, 256, 4, 2, 96), lengths=(256,), tokens=256, dtype="bfloat16"
    )
    gpu = RecordingGpu(ARCHS["sm_90"])
    with use_gpu(gpu), claiming_cuda(), launching_operators():
        keys = kernels_of(training.kernels(settings, tools(FakeTimer())))
    names = [key.kernel for key in keys]
    assert sum(name.startswith("fwd_sm90") for name in names) == 2
    assert sum(name.startswith("bwd_sm90") for name in names) == 2
    assert len(names) <= 8 and not gpu.keys
