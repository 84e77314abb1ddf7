"""`profiling training` with a small model on the CPU, with a fake clock, and its kernels on a fake GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.arch import ARCHS
from profiling import __main__ as cli
from profiling.documents import doc_results
from profiling.studies import training
from profiling.studies.training_sides import CPU_SIDES, OURS, SIDES, Side
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.recording import RecordingGpu
from tests.profiling.fakes import FakeTimer

CPU = torch.device("cpu")
PEER = "SDPA"

pytestmark = pytest.mark.usefixtures("few_calls")


def side(name, timer, call_ms, spoil=lambda out: out):
    """Attention that takes `call_ms` in each of the two layers."""

    def attend(q, k, v):
        timer.now_ms += call_ms
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return spoil(scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2))

    return Side(name, lambda: attend, is_ours=name == OURS)


def tools(timer, sides, **others):
    facts = {"gpu": "fake", "git_commit": "0123456789"}
    others = {"unavailable": lambda side: None, **others}
    return training.Tools(timer, CPU, lambda: facts, dict, sides, **others)


def test_tokens_per_second_of_all_sides():
    timer, saved = FakeTimer(), []
    sides = [side(OURS, timer, 1.0), side(PEER, timer, 2.0)]
    run = tools(timer, sides, save=lambda record: saved.append(json.dumps(record)))
    record = training.run_training(training.SMALL, run)
    assert json.loads(saved[-1])["is_complete"] and not json.loads(saved[-2])["is_complete"]
    assert [cell["seqlen"] for cell in record["cells"]] == [16, 32]
    for cell in record["cells"]:
        assert cell["batch"] * cell["seqlen"] == 64
        assert cell["sides"][OURS]["tokens_per_s"] == pytest.approx(64 / 2e-3, rel=1e-3)
        assert cell["sides"][PEER]["tokens_per_s"] == pytest.approx(64 / 4e-3, rel=1e-3)
    assert not training.failures(record) and not training.has_failed(record)
    assert training.table(record).rows[0] == (OURS, "32,000", "2.0", "32,000", "2.0")
    assert training.summary(record) == (
        "Tokens per second of cute_flash over those of the fastest other library: "
        "2.000 to 2.000 × at S = 16 (the other is SDPA); 2.000 to 2.000 × at S = 32 (the other is SDPA)."
    )


@pytest.mark.parametrize("spoil", [lambda out: 1.5 * out, lambda out: out * torch.nan], ids=["wrong", "NaN"])
def test_a_side_with_other_results_is_not_timed(spoil):
    timer = FakeTimer()
    sides = [side(OURS, timer, 1.0), side(PEER, timer, 2.0, spoil)]
    record = training.run_training(training.SMALL, tools(timer, sides))
    assert all(set(cell["sides"]) == {OURS} for cell in record["cells"])
    assert "not timed" in training.failures(record)[0] and not training.has_failed(record)
    assert training.summary(record) == "No other library was measured."


def test_a_side_of_ours_that_fails():
    timer = FakeTimer()

    def fail(out):
        raise RuntimeError("no kernel")

    record = training.run_training(training.SMALL, tools(timer, [side(OURS, timer, 1.0, fail), side(PEER, timer, 2.0)]))
    assert training.has_failed(record)
    assert training.failures(record)[0] == f"S = 16, {OURS}: RuntimeError: no kernel"
    assert training.table(record).rows == ((PEER, "16,000", "4.0", "16,000", "4.0"),)


def test_a_side_that_is_not_available():
    timer = FakeTimer()
    sides = [side(OURS, timer, 1.0), side(PEER, timer, 2.0)]
    reasons = {PEER: "ImportError: no SDPA"}
    record = training.run_training(training.SMALL, tools(timer, sides, unavailable=lambda side: reasons.get(side.name)))
    assert training.failures(record)[0] == f"S = 16, {PEER}: not available: ImportError: no SDPA"
    assert not training.has_failed(record)


def test_without_a_gpu_no_side_is_available():
    assert torch.cuda.is_available() or {one.unavailable() for one in SIDES} == {"no CUDA device"}


def test_all_ways_of_cute_flash_give_the_same_results():
    timer = FakeTimer()
    sides = [*training.ON_CPU["sides"], side(PEER, timer, 1.0)]
    assert [one.name for one in sides] == [*CPU_SIDES, PEER]
    cell = training.measure_length(32, training.SMALL, tools(timer, sides))
    assert not cell["failures"] and max(cell["differences"].values()) < 1e-5


def test_kernels_are_compiled_before_the_steps():
    """Plain attention has one forward and three backward kernels, and that with a block mask others."""
    settings = replace(
        training.SMALL, model=training.Model(2, 256, 4, 2, 96), lengths=(256,), tokens=256, dtype="bfloat16"
    )
    gpu = RecordingGpu(ARCHS["sm_90"])
    with use_gpu(gpu), claiming_cuda(), launching_operators():
        keys = training.needed_kernels(settings, tools(FakeTimer(), training.ON_CPU["sides"]))
    names = [key.kernel for key in keys]
    assert sum(name.startswith("fwd_sm90") for name in names) == 2
    assert sum(name.startswith("bwd_sm90") for name in names) == 2
    assert len(names) <= 8 and not gpu.keys


def test_command(tmp_path, capsys):
    path = tmp_path / "training.json"
    assert cli.main(["training", "--dry-run", "--out", str(path)]) == cli.OK
    record = json.loads(path.read_text())
    assert record["is_complete"] and all(set(cell["sides"]) == set(CPU_SIDES) for cell in record["cells"])
    assert "attention through" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert cli.main(["training"]) == cli.NOT_MEASURED


def test_documents(tmp_path, monkeypatch):
    timer = FakeTimer()
    record = training.run_training(training.SMALL, tools(timer, [side(OURS, timer, 1.0), side(PEER, timer, 2.0)]))
    monkeypatch.setattr(doc_results, "TRAINING", "training.json")
    (tmp_path / "training.json").write_text(json.dumps(record))
    assert doc_results.training_steps(tmp_path).rows[1] == (PEER, "16,000", "4.0", "16,000", "4.0")
    assert doc_results.training_line(tmp_path).endswith("Commit `0123456` ([data](training.json)).")
