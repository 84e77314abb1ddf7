"""The command line as a whole, with fake peers on the CPU in place of the registry."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
import torch

from profiling import __main__ as cli
from profiling.bench import bench as bench_module
from profiling.bench.suites import Suite
from profiling.measure import study
from profiling.measure.study import FAILED, NOT_MEASURED, OK
from tests.profiling.fakes import FakePeer, FakeTimer, tools

pytestmark = pytest.mark.usefixtures("few_calls")


@pytest.fixture
def bench(monkeypatch):
    """`bench(ours_ms=..., args)`: exit status of a bench in which the peer takes 1 ms."""

    def run(*args: str, ours_ms: float = 0.5, peer_reason: str | None = None, **spoils) -> int:
        timer = FakeTimer()
        peers = [
            FakePeer("cute_flash", timer, ours_ms, is_ours=True, **spoils),
            FakePeer("sdpa-flash", timer, backward_reason=peer_reason),
            FakePeer("fa3", timer, reason="no folder"),
        ]
        monkeypatch.setattr(bench_module, "select", lambda names, kernels="auto": peers)
        monkeypatch.setattr(study.arch, "has_gpu", lambda: True)
        monkeypatch.setattr(study, "Tools", lambda: tools(timer))
        return cli.main(("bench", "--lengths", "16", "--ms", "2", "--rounds", "2", *args))

    monkeypatch.setitem(bench_module.SUITES, "quick", Suite(64, 32, (16, 32), (8,), ("causal",)))
    real = bench_module.MatrixProduct.of
    monkeypatch.setattr(
        bench_module.MatrixProduct, "of", lambda settings, *rest: real(replace(settings, ceiling_size=16), *rest)
    )
    return run


def test_bench_prints_the_tables_and_writes_the_file(bench, tmp_path, capsys):
    out = tmp_path / "run.json"
    assert bench("--out", str(out)) == OK
    printed = capsys.readouterr()
    assert "fwd bf16, D=8, causal" in printed.out and "| 16 " in printed.out and "2.00" in printed.out
    assert "fa3 is not available: no folder" in printed.err and "[2/2]" in printed.err
    data = json.loads(out.read_text())
    assert data["is_complete"] and data["unavailable"] == {"fa3": "no folder"}
    assert data["settings"]["rounds"] == 2 and data["cells"][0]["shape"]["batch"] == 4


def test_the_backward_is_measured_by_those_who_can(bench, tmp_path, capsys):
    out = tmp_path / "run.json"
    assert bench("--direction", "bwd", "--out", str(out)) == OK
    printed = capsys.readouterr().out
    assert "bwd bf16, D=8, causal" in printed and "2.00" in printed and "normal dq: Frobenius" in printed
    assert "All cells, bwd" in printed
    data = json.loads(out.read_text())
    (cell,) = data["cells"]
    assert data["settings"]["direction"] == "bwd" and cell["key"].startswith("bwd-bf16-d8-causal-s16")
    # 4 batches of 4 heads, half of 10 S^2 D each, in 0.5 ms.
    assert cell["flops"] == 5 * 4 * 4 * 16**2 * 8
    assert cell["results"]["cute_flash"]["tflops"] == pytest.approx(cell["flops"] / 0.5e-3 / 1e12)


def test_a_peer_without_a_backward_is_listed_and_only_there(bench, capsys):
    assert bench("--direction", "bwd", peer_reason="no gradients") == OK
    assert "sdpa-flash is not available: no gradients" in capsys.readouterr().err
    assert bench("--direction", "fwd", peer_reason="no gradients") == OK
    assert "no gradients" not in capsys.readouterr().err


def test_wrong_gradients_of_ours_decide_the_exit_status(bench, capsys):
    def spoil(dq, dk, dv):
        dv.zero_()

    assert bench("--direction", "bwd", spoil_gradients=spoil) == FAILED
    assert "cute_flash: wrong in dv on normal inputs" in capsys.readouterr().out
    assert bench("--direction", "fwd", spoil_gradients=spoil) == OK


def test_base_decides_the_exit_status(bench, tmp_path, capsys):
    base = tmp_path / "base.json"
    assert bench("--out", str(base)) == OK
    assert bench("--base", str(base), ours_ms=0.4) == OK
    assert bench("--base", str(base), ours_ms=0.51) == OK
    capsys.readouterr()
    assert bench("--base", str(base), ours_ms=0.6) == FAILED
    assert "regression" in capsys.readouterr().out
    assert bench("--base", str(base), "--threshold", "0.5", ours_ms=0.6) == OK


def test_a_base_that_shares_no_cell_does_not_pass(bench, tmp_path, capsys):
    base = tmp_path / "base.json"
    bench("--out", str(base))
    base.write_text(json.dumps({**json.loads(base.read_text()), "cells": []}))
    assert bench("--base", str(base)) == FAILED
    assert "none of the base has a ratio to sdpa-flash" in capsys.readouterr().out


def test_a_wrong_output_of_ours_decides_the_exit_status(bench, capsys):
    def spoil(out):
        out.zero_()

    assert bench(spoil=spoil) == FAILED
    assert "cute_flash: wrong" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert cli.main(("bench",)) == NOT_MEASURED
    assert (
        "flash_attn are not available: no CUDA device\npython -m profiling: nothing was measured"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "args", [("--providers", "fa5"), ("--masks", "diagonal"), ("--base", "no-such-file.json"), ("--reference", "fa5")]
)
def test_wrong_arguments_are_named(args, capsys):
    assert cli.main(("bench", *args)) == NOT_MEASURED
    assert args[1] in capsys.readouterr().err


@pytest.mark.parametrize("name", [one.name for one in cli.COMMANDS])
def test_examples_of_the_help_can_be_typed(name, capsys):
    with pytest.raises(SystemExit):
        cli.main((name, "--help"))
    _, found, examples = capsys.readouterr().out.partition("\nexamples:\n")
    assert found
    for line in examples.splitlines():
        words = shlex.split(line, comments=True)
        assert words[:4] == ["python", "-m", "profiling", name]
        cli._parser().parse_args(words[3:])


def test_the_list_of_commands_fits_on_a_screen(capsys):
    assert cli.main(()) == NOT_MEASURED
    printed = capsys.readouterr().out
    assert all(f"    {one.name}" in printed for one in cli.COMMANDS) and len(printed.splitlines()) <= 30
