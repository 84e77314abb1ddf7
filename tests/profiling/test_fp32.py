"""`profiling fp32` with fake peers and a fake clock on the CPU, and with cute_flash on a fake GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import cute_flash
from cute_flash.spec import arch
from profiling import __main__ as cli
from profiling.bench.suites import Suite
from profiling.documents import doc_results
from profiling.measure import machine
from profiling.measure.shapes import Shape
from profiling.peers.cute_flash import CuteFlash
from profiling.studies import fp32
from tests.fakes.cuda import claiming_cuda
from tests.fakes.gpu import fake_gpu
from tests.profiling.fakes import FakePeer, FakeTimer

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


def tools(timer, **others):
    return fp32.Tools(timer, CPU, facts=lambda: {"gpu": "fake", "git_commit": "c"}, card_state=dict, **others)


def test_speed_and_errors_of_all_sides():
    timer, saved, lines = FakeTimer(), [], []
    run = tools(timer, save=lambda record: saved.append(json.dumps(record)), progress=lines.append)
    record = fp32.run_fp32(SMALL, peers(timer), run)
    assert record["is_complete"] and json.loads(saved[-1])["is_complete"]
    assert not json.loads(saved[-2])["is_complete"]
    # Two masks, of one length; then two masks, lengths and directions.
    assert len(record["accuracy"]) == 2 * len(fp32.DISTRIBUTIONS) and len(record["cells"]) == 8
    assert len(lines) == 2 + 8 and lines[0].startswith("accuracy d8-full-s16")
    for cell in record["cells"]:
        has_math = cell["shape"]["seqlen"] == 16
        assert set(cell["sides"]) == {fp32.OURS, fp32.EFFICIENT, *((fp32.MATH,) if has_math else ())}
        assert fp32.ratio(cell, fp32.EFFICIENT) == pytest.approx(3.0)
        assert cell["sides"][fp32.OURS]["tflops"] == pytest.approx(cell["flops"] / 1e9)
    for cell in record["accuracy"]:
        assert set(cell["largest"]) == set(fp32.OUTPUTS)
        for errors in cell["errors"].values():
            assert all(error["max"] < 1e-4 * max(1.0, cell["largest"][name]) for name, error in errors.items())
    assert not fp32.failures(record) and not fp32.has_failed(record)
    text = {table.title: table for table in fp32.tables(record)}
    assert list(text) == ["fwd fp32", "bwd fp32", "Geometric means", "Error against fp64, worst of all shapes"]
    assert text["Geometric means"].rows[0][:4] == ("forward, over sdpa-efficient", "4", "3.00", "3.00")
    assert text["Geometric means"].rows[1][:4] == ("forward, over sdpa-math", "2", "6.00", "6.00")
    assert [row[:2] for row in text["fwd fp32"].rows] == [
        ("D=8 causal", "16"), ("D=8 causal", "32"), ("D=8 full", "16"), ("D=8 full", "32"),
    ]  # fmt: skip


def test_gradients_are_prepared_on_the_stream_of_the_graph():
    timer = FakeTimer()
    seen = []

    class Watched(FakePeer):
        def prepare_backward(self, *args):
            seen.append(timer.is_on_stream)
            return super().prepare_backward(*args)

    shape = SMALL.shapes()[0]
    found = fp32.measure_speed(shape, "bwd", [Watched(fp32.OURS, timer)], SMALL, tools(timer))
    assert seen == [True] and not found["failures"]


@pytest.mark.parametrize("spoil", [lambda out: out.mul_(1.01), lambda out: out.fill_(torch.nan)], ids=["1 %", "NaN"])
def test_an_error_beyond_that_of_math_fails(spoil):
    timer = FakeTimer()
    record = fp32.run_fp32(SMALL, peers(timer, spoil=spoil), tools(timer))
    assert fp32.has_failed(record)
    assert "out of cute_flash has more than 2 times the error of sdpa-math" in "\n".join(fp32.failures(record))
    json.dumps(record, allow_nan=False)


def test_a_side_that_fails_is_left_out():
    timer = FakeTimer()

    def fail(out):
        raise RuntimeError("no kernel")

    sides = peers(timer)
    record = fp32.run_fp32(SMALL, [sides[0], replace(sides[1], spoil=fail), sides[2]], tools(timer))
    assert not fp32.has_failed(record)
    assert "sdpa-efficient: RuntimeError: no kernel" in fp32.failures(record)[0]
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


def test_kernels_of_a_run_are_all_compiled_before_it():
    """A run launches no kernel that `kernel_keys` did not name."""
    timer = FakeTimer()
    with fake_gpu("sm_90") as gpu, claiming_cuda():
        record = fp32.run_fp32(SMALL, [CuteFlash(fp32.OURS)], tools(timer))
        assert cute_flash.attn(*(torch.randn(1, 1, 8, 8) for _ in range(3))).dtype == torch.float32
    assert not fp32.failures(record)
    keys = fp32.kernel_keys(SMALL, arch.ARCHS["sm_90"])
    assert set(gpu.keys) <= set(keys) and len(keys) == len(set(keys))
    assert {key.kernel for key in keys} >= {"split_fp32_fwd", "fwd_sm80_fp32", "split_fp32_bwd", "bwd_sm80_fp32"}


def test_command(monkeypatch, tmp_path, capsys):
    timer, compiled, out = FakeTimer(), [], tmp_path / "fp32.json"
    monkeypatch.setattr(machine, "facts", lambda: {"gpu": "fake"})
    monkeypatch.setattr(machine, "card_state", dict)
    monkeypatch.setattr(torch, "device", lambda name, real=torch.device: real("cpu"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cli, "GraphTimer", lambda: timer)
    monkeypatch.setattr(fp32, "peers", lambda: peers(timer))
    monkeypatch.setattr(cli, "precompile_keys", lambda keys, jobs: compiled.extend(keys))
    argv = f"fp32 --head-dims 8 --lengths 16 --masks causal --rounds 2 --ms 2 --out {out}".split()
    assert cli.main(argv) == cli.NOT_MEASURED
    assert "no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(cli.arch, "has_gpu", lambda: True)
    monkeypatch.setattr(cli.arch, "detect", lambda index: arch.ARCHS["sm_90"])
    assert cli.main([*argv, "--masks", "diagonal"]) == cli.NOT_MEASURED and not compiled
    assert cli.main(argv) == cli.OK
    assert compiled and json.loads(out.read_text())["is_complete"]
    printed = capsys.readouterr().out
    assert "fwd fp32" in printed and "Geometric means" in printed and "3.00" in printed


def test_tables_of_the_documents(tmp_path):
    timer = FakeTimer()
    record = fp32.run_fp32(SMALL, peers(timer), tools(timer))
    path = tmp_path / doc_results.FP32
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record))
    speed = doc_results.fp32_speed(tmp_path)
    assert speed.columns == ("full / causal", "S = 16", "S = 32", "mean")
    assert [row[0].split(",")[1] for row in speed.rows] == [" D = 8"] * 2
    assert all(row[1:] == ("3.00 / 3.00", "3.00 / 3.00", "**3.00**") for row in speed.rows)
    line = doc_results.fp32_line(tmp_path)
    assert "3.00 × (3.00 or more) the speed of EFFICIENT_ATTENTION forward" in line and "Commit `c`." in line
    accuracy = doc_results.fp32_accuracy(tmp_path)
    assert len(accuracy.rows) == len(fp32.DISTRIBUTIONS) * len(fp32.OUTPUTS)
    assert accuracy.rows[0][0] == "normal, out" and accuracy.rows[0][1].count(" / ") == 2
