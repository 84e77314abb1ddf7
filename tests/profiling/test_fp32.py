"""`profiling fp32` with fake peers and a fake clock on the CPU, and with cute_flash on a fake GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from profiling.bench.suites import Suite
from profiling.documents import doc_results
from profiling.measure.shapes import Shape
from profiling.peers.cute_flash import our_peer
from profiling.studies import fp32
from tests.fakes.cuda import claiming_cuda
from tests.fakes.gpu import fake_gpu
from tests.fakes.recording import kernels_of
from tests.profiling.fakes import FakePeer, FakeTimer, tools

SMALL = fp32.Settings(head_dims=(8,), lengths=(16, 32), rounds=2, ms=2.0)
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("few_calls")


@pytest.fixture(autouse=True)
def small_suite(monkeypatch):
    monkeypatch.setattr(fp32, "SUITE", Suite(64, 32, (16, 32), (8,)))
    monkeypatch.setattr(fp32, "MATH_LENGTH", 16)


def peers(timer, ours_ms=1.0, **spoils):
    times = {fp32.EFFICIENT: 3.0, fp32.MATH: 6.0}
    ours = FakePeer(fp32.OURS, timer, ours_ms, is_ours=True, **spoils)
    return [ours, *(FakePeer(name, timer, ms) for name, ms in times.items())]


@pytest.fixture
def run(monkeypatch):
    """`run(ours_ms=..., spoil=...)`: the record of a study with fake peers."""

    def measure(chosen=None, **spoils):
        timer = FakeTimer()
        monkeypatch.setattr(fp32, "peers", lambda: (chosen or peers)(timer, **spoils))
        return fp32.STUDY.measure(SMALL, tools(timer))

    return measure


def test_speed_and_errors_of_all_peers(run):
    record = run()
    # Two masks, of one length; then two masks, lengths and directions.
    assert len(record["accuracy"]) == 2 * len(fp32.DISTRIBUTIONS) and len(record["cells"]) == 8
    assert len(fp32.steps(SMALL, tools(FakeTimer()))) == 2 + 8
    for cell in record["cells"]:
        has_math = cell["shape"]["seqlen"] == 16
        assert set(cell["sides"]) == {fp32.OURS, fp32.EFFICIENT, *((fp32.MATH,) if has_math else ())}
        assert fp32.ratio(cell, fp32.EFFICIENT) == pytest.approx(3.0)
        assert cell["sides"][fp32.OURS]["tflops"] == pytest.approx(cell["flops"] / 1e9)
    for cell in record["accuracy"]:
        assert set(cell["largest"]) == set(fp32.OUTPUTS)
        for errors in cell["errors"].values():
            assert all(error["max"] < 1e-4 * max(1.0, cell["largest"][name]) for name, error in errors.items())
    assert not fp32.failures(record) and not fp32.STUDY.has_failed(record)
    text = {table.title: table for table in fp32.tables(record)}
    assert list(text) == ["fwd fp32", "bwd fp32", "Geometric means", "Error against fp64, worst of all shapes"]
    assert text["Geometric means"].rows[0][:4] == ("forward, over sdpa-efficient", "4", "3.00", "3.00")
    assert text["Geometric means"].rows[1][:4] == ("forward, over sdpa-math", "2", "6.00", "6.00")
    assert [row[:2] for row in text["fwd fp32"].rows] == [
        ("D=8 causal", "16"), ("D=8 causal", "32"), ("D=8 full", "16"), ("D=8 full", "32"),
    ]  # fmt: skip


def test_gradients_are_prepared_on_the_stream_of_the_graph(monkeypatch):
    timer = FakeTimer()
    seen = []

    class Watched(FakePeer):
        def prepare_backward(self, *args):
            seen.append(timer.is_on_stream)
            return super().prepare_backward(*args)

    monkeypatch.setattr(fp32, "peers", lambda: [Watched(fp32.OURS, timer)])
    found = fp32.measure_speed(SMALL.shapes()[0], "bwd", SMALL, tools(timer))
    assert seen == [True] and not found["failures"]


@pytest.mark.parametrize("spoil", [lambda out: out.mul_(1.01), lambda out: out.fill_(torch.nan)], ids=["1 %", "NaN"])
def test_an_error_beyond_that_of_math_fails(run, spoil):
    record = run(spoil=spoil)
    assert fp32.STUDY.has_failed(record)
    assert "cute_flash: out: more than 2 times the error of sdpa-math" in "\n".join(map(str, fp32.failures(record)))
    json.dumps(record, allow_nan=False)


def test_a_peer_that_fails_is_left_out(run):
    def fail(out):
        raise RuntimeError("no kernel")

    def chosen(timer):
        ours, efficient, math = peers(timer)
        return [ours, replace(efficient, spoil=fail), math]

    record = run(chosen)
    assert not fp32.STUDY.has_failed(record)
    assert "sdpa-efficient: RuntimeError: no kernel" in str(fp32.STUDY.failures(record)[0])
    assert fp32.summary_table(record).rows[0][1:4] == ("0", "-", "-")


def test_inputs_are_of_their_distribution():
    shape = Shape(1, 2, 2, 512, 64, False)
    made = {name: fp32.random_inputs(shape, CPU, 0, name) for name in fp32.DISTRIBUTIONS}
    assert all(x.dtype == torch.float32 for inputs in made.values() for x in inputs)
    for i in range(3):
        assert torch.equal(made["3 sigma"][i], 3 * made["normal"][i])
        changed = (made["outliers"][i] != made["normal"][i]).float().mean()
        assert 0.0003 < changed < 0.003 and made["outliers"][i].abs().max() > 30
    assert all(torch.equal(inputs[3], made["normal"][3]) for inputs in made.values())


def test_torch_computes_without_tf32_and_is_left_as_it_was():
    torch.set_float32_matmul_precision("high")
    try:
        with fp32.exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.slow
def test_kernels_of_a_run_are_all_compiled_before_it(monkeypatch):
    """A run launches no kernel that `kernels` did not name."""
    monkeypatch.setattr(fp32, "peers", lambda: [our_peer(fp32.OURS)])
    with fake_gpu("sm_90") as gpu, claiming_cuda():
        keys = kernels_of(fp32.kernels(SMALL, tools(FakeTimer())))
        assert not gpu.keys
        record = fp32.STUDY.measure(SMALL, tools(FakeTimer()))
    assert not fp32.failures(record)
    assert set(gpu.keys) == set(keys) and len(keys) == len(set(keys))
    assert {key.kernel for key in keys} >= {"split_fp32_fwd", "fwd_sm80_fp32", "split_fp32_bwd", "bwd_sm80_fp32"}


def test_tables_of_the_documents(run):
    record = run()
    speed = doc_results.fp32_speed(record)
    assert speed.columns == ("full / causal", "S = 16", "S = 32", "mean")
    assert [row[0].split(",")[1] for row in speed.rows] == [" D = 8"] * 2
    assert all(row[1:] == ("3.00 / 3.00", "3.00 / 3.00", "**3.00**") for row in speed.rows)
    line = doc_results.fp32_line(record)
    assert "3.00 × (3.00 or more) the speed of EFFICIENT_ATTENTION forward" in line and "Commit `c`." in line
    accuracy = doc_results.fp32_accuracy(record)
    assert len(accuracy.rows) == len(fp32.DISTRIBUTIONS) * len(fp32.OUTPUTS)
    assert accuracy.rows[0][0] == "normal, out" and accuracy.rows[0][1].count(" / ") == 2
