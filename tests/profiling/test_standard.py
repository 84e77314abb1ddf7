"""Standard attention beside cute_flash: the measurement with fakes, the counters of a fake `ncu`, and the tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from cute_flash import reference
from cute_flash.spec.band import Band
from profiling import __main__ as cli
from profiling.counters import ncu
from profiling.counters.ncu_metrics import METRICS, Profile
from profiling.documents import plot_standard
from profiling.documents.plot_style import style, svg
from profiling.measure import machine
from profiling.measure.accuracy import random_inputs
from profiling.measure.shapes import Shape
from profiling.measure.study import NOT_MEASURED, OK, Tools
from profiling.peers.directions import DIRECTIONS
from profiling.studies import standard, standard_bytes, standard_report
from profiling.studies.standard import OURS, PEERS, STANDARD, Settings
from tests.fakes.cuda import claiming_cuda
from tests.fakes.gpu import fake_gpu
from tests.fakes.recording import kernels_of
from tests.profiling.fakes import FakePeer, FakeTimer, tools

pytestmark = pytest.mark.usefixtures("few_calls")
CPU = torch.device("cpu")


# ---- standard attention


@pytest.mark.parametrize("causal", [False, True])
def test_standard_attention_is_attention(causal: bool) -> None:
    shape = Shape(2, 3, 3, 40, 16, causal)
    q, k, v = random_inputs(shape, torch.float64, CPU, 0)
    exact = reference.dense(q, k, v, Band.of(causal, (None, None)))[0]
    torch.testing.assert_close(PEERS[0].prepare(q, k, v, causal)(), exact)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_standard_attention(causal: bool) -> None:
    shape = Shape(1, 2, 2, 24, 8, causal)
    q, k, v = (x.requires_grad_() for x in random_inputs(shape, torch.float64, CPU, 0))
    dout = torch.randn(q.shape, dtype=torch.float64)
    exact = torch.autograd.grad(reference.dense(q, k, v, Band.of(causal, (None, None)))[0], (q, k, v), dout)
    for found, expected in zip(PEERS[0].prepare_backward(q, k, v, dout, causal)(), exact, strict=True):
        torch.testing.assert_close(found, expected)


def test_shapes_have_scores_that_fit() -> None:
    shapes = Settings().shapes()
    assert {shape.seqlen for shape in shapes} == {512, 1024, 2048, 4096, 8192, 16384, 32768}
    assert all(standard.score_bytes(shape) <= standard.MAX_SCORE_BYTES for shape in shapes)
    # Short sequences keep the tokens of the paper suite, long ones fill the limit.
    assert {shape.batch * shape.seqlen for shape in shapes if shape.seqlen <= 4096} == {16384}
    assert {standard.score_bytes(shape) for shape in shapes if shape.seqlen >= 16384} == {8 << 30}


def test_a_shape_is_fitted() -> None:
    shape = Shape(4, 8, 8, 64, 16, True)
    half = standard.score_bytes(shape) // 2
    assert standard.fit(shape, half) == replace(shape, batch=2)
    assert standard.fit(shape, half // 4) == replace(shape, batch=1, heads=4, heads_kv=4)
    with pytest.raises(ValueError, match="S = 64"):
        standard.fit(shape, 64)


def test_bytes_by_definition() -> None:
    shape = Shape(1, 1, 1, 4096, 64, False)
    matrix, tensor = 2 * 4096 * 4096, 2 * 4096 * 64
    assert standard.standard_bytes(shape, "fwd") == 4 * matrix + 6 * tensor
    assert standard.standard_bytes(replace(shape, causal=True), "bwd") == 9 * matrix + 12 * tensor


def test_kernels_to_compile() -> None:
    with fake_gpu("sm_90"), claiming_cuda():
        names = {key.kernel for key in kernels_of(standard.kernels(TINY, tools(FakeTimer())))}
    assert {"fwd_sm90", "bwd_sm90"} <= names


# ---- time and memory


@pytest.fixture
def timer(monkeypatch) -> FakeTimer:
    timer = FakeTimer()
    pair = FakePeer(STANDARD, timer, 6.0), FakePeer(OURS, timer, 2.0, is_ours=True)
    monkeypatch.setattr(standard, "PEERS", pair)
    return timer


TINY = Settings((16,), (8,), ("full",), rounds=2, ms=4.0, max_score_bytes=1 << 12)
SHAPE = Shape(1, 2, 2, 16, 8, False)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_cell(timer: FakeTimer, direction: str, monkeypatch) -> None:
    monkeypatch.setattr(Tools, "peak_bytes", lambda self, call: 100)
    cell = standard.measure_cell(SHAPE, direction, TINY, tools(timer))
    ours, other = cell["results"][OURS], cell["results"][STANDARD]
    assert other["ms"] == pytest.approx(6.0) and ours["ms"] == pytest.approx(2.0)
    assert len(ours["round_ms"]) == 2 and ours["peak_bytes"] == 100
    assert cell["timer"] == "graph" and cell["key"] == f"{direction}-d8-full-s16-b1h2"
    assert cell["distance"] == (0.0 if direction == "fwd" else None)
    assert cell["model_bytes"] == {
        STANDARD: standard.standard_bytes(SHAPE, direction),
        OURS: SHAPE.hbm_bytes("bf16", direction),
    }


def test_large_cells_are_timed_by_events(timer: FakeTimer, monkeypatch) -> None:
    monkeypatch.setattr(standard, "MAX_GRAPH_SCORE_BYTES", 0)
    cell = standard.measure_cell(SHAPE, "fwd", TINY, replace(tools(timer), timer=None))
    assert cell["timer"] == "event" and cell["results"][OURS]["ms"] == pytest.approx(2.0)


def test_a_failure_is_recorded(timer: FakeTimer, monkeypatch) -> None:
    def out_of_memory(self: Tools, call: Any) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Tools, "peak_bytes", out_of_memory)
    result = standard.measure_cell(SHAPE, "fwd", TINY, tools(timer))["results"][STANDARD]
    assert result["ms"] == pytest.approx(6.0)
    assert result["peak_bytes"] is None and "out of memory" in result["error"]


def test_a_dry_run_writes_both_files(tmp_path, capsys) -> None:
    out = tmp_path / "standard.json"
    assert cli.main(("standard", "--dry-run", "--lengths", "16", "--masks", "causal", "--out", str(out))) == OK
    data, text = json.loads(out.read_text()), out.with_suffix(".txt").read_text()
    assert [cell["direction"] for cell in data["cells"]] == ["fwd", "bwd"] and data["is_dry_run"]
    assert data["machine"]["source_digest"] in text and data["cells"][0]["distance"] < 0.02
    assert "| 2 to 8 x faster" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_measured(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for argv in (("standard",), ("standard", "--bytes", "--out", "/nowhere/x.json"), ("numerics", "--gpu")):
        assert cli.main(argv) == NOT_MEASURED
        assert "no CUDA device" in capsys.readouterr().err


# ---- bytes


def launch(kernel: str, read: float, write: float) -> Profile:
    return Profile(kernel, {METRICS["dram_read_bytes"]: read, METRICS["dram_write_bytes"]: write})


def profiles(settings: Settings) -> list[Profile]:
    """Profiles of each case: two launches of standard attention, one of cute_flash, evictions and markers."""
    marker, found = launch(f"at::{standard_bytes.MARKER}(long)", 7.0, 7.0), []
    for case in standard_bytes.cases(settings):
        calls = [launch("gemm", 40.0, 30.0), launch("softmax", 20.0, 10.0)]
        found += calls if case.peer == STANDARD else [launch("cute_flash_fwd", 5.0, 1.0)]
        found += [marker, launch("reduce_kernel", 1e9, 4.0), marker]
    return found


BYTES = Settings((16,), (8,), ("full",))


def test_bytes_are_summed_over_the_launches_of_a_case() -> None:
    cases = standard_bytes.cases(BYTES)
    assert [(case.peer, case.direction) for case in cases] == [
        (STANDARD, "fwd"), (OURS, "fwd"), (STANDARD, "bwd"), (OURS, "bwd"),
    ]  # fmt: skip
    found = standard_bytes.counted(profiles(BYTES), cases)
    (cell, _) = found.values()
    # Bytes that the call left in L2 are counted when the following read evicts them; the bytes of that read are not.
    assert cell[STANDARD] == {"read": 60.0, "write": 44.0, "launches": 2, "kernels": ["gemm", "softmax"]}
    assert (cell[OURS]["read"], cell[OURS]["write"], cell[OURS]["launches"]) == (5.0, 5.0, 1)


def test_a_report_of_other_cases_is_refused() -> None:
    with pytest.raises(ncu.NcuError, match="7 marker kernels in the report, expected 8"):
        standard_bytes.counted(profiles(BYTES)[:-1], standard_bytes.cases(BYTES))


def test_a_case_without_launches_is_left_out() -> None:
    found = [one for one in profiles(BYTES) if one.kernel != "cute_flash_fwd"]
    assert all(set(cell) == {STANDARD} for cell in standard_bytes.counted(found, standard_bytes.cases(BYTES)).values())


def csv_of(found: Sequence[Profile]) -> str:
    names = ("dram__bytes_read.sum", "dram__bytes_write.sum")
    lines = [",".join(f'"{name}"' for name in ("ID", "Kernel Name", *names)), '"","","byte","byte"']
    for i, one in enumerate(found):
        lines.append(",".join(f'"{value}"' for value in (i, one.kernel, *(one.values[name] for name in names))))
    return "\n".join(lines) + "\n"


def test_one_process_is_profiled_in_one_pass() -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> tuple[int, str]:
        commands.append(command)
        return 0, csv_of(profiles(BYTES)) if "--import" in command else "==PROF== Report\n"

    texts: list[str] = []
    found = standard_bytes.count(BYTES, "ncu", run, texts.append)
    assert len(found) == 2 and len(commands) == 2 and "spin_kernel" in texts[0]
    profiled = " ".join(commands[0])
    assert "--cache-control none" in profiled and "--profile-from-start off" in profiled
    assert "--metrics dram__bytes_read.sum,dram__bytes_write.sum" in profiled
    assert profiled.endswith("-m profiling.studies.standard_bytes --lengths 16 --head-dims 8 --masks full")


@pytest.mark.parametrize(
    ("status", "output", "error"),
    [(1, "==ERROR== ERR_NVGPUCTRPERM", ncu.NotPermittedError), (9, "no such option", ncu.NcuError)],
)
def test_a_profiler_that_fails(status: int, output: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        standard_bytes.count(BYTES, "ncu", lambda command: (status, output))


# ---- tables and the figure


def record() -> dict[str, Any]:
    """A record: twice as fast, 16 and 32 times less memory, 20 times fewer bytes at the shorter length."""
    settings = Settings((512, 4096), (64,), ("full",))
    cells = []
    for shape in settings.shapes():
        for direction in DIRECTIONS:
            times = {STANDARD: (2.0, 8e6 * shape.seqlen / 256), OURS: (1.0, 1e6)}
            results = {name: {"ms": ms, "peak_bytes": int(peak), "error": None} for name, (ms, peak) in times.items()}
            key = f"{direction}-{shape.id}"
            cells.append({"key": key, "shape": asdict(shape), "direction": direction, "results": results})
    moved = {name: {"read": size, "write": 0.0, "launches": 1} for name, size in ((STANDARD, 20e6), (OURS, 1e6))}
    facts = {"gpu": "NVIDIA H200", "git_commit": "0123456789", "source_digest": "x", "torch": "2", "date": "today"}
    data = {"cells": cells, "machine": facts, "settings": {}, "bytes": {"cells": {cells[0]["key"]: moved}}}
    return json.loads(json.dumps({**data, "left_out": []}))


def test_claims_are_answered() -> None:
    table = standard_report.claims(record())
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["2 to 8 x faster"] == ("2.0 x", "-", "2.0 x", "-")
    assert rows["memory, all lengths"][0] == "16.0 x (N 512) to 128.0 x (N 4096)"
    assert rows["HBM bytes, all counted lengths"] == ("20.0 x", "-", "-", "-")
    assert rows["about 25 x fewer HBM bytes, N = 4096"] == ("-",) * 4


def test_every_cell_has_a_line() -> None:
    table = standard_report.cells(record(), "fwd")
    assert len(table.rows) == 2 and table.rows[0][1:4] == ("2.000", "1.000", "2.0")
    assert table.rows[0][-3:] == ("20", "1", "20.0") and table.rows[1][-1] == "-"


def test_failures_are_listed() -> None:
    data = record()
    data["cells"][0]["results"][STANDARD]["error"] = "OutOfMemoryError: 8 GiB"
    assert len(standard_report.failures(data)) == 1


def test_the_figure_shows_three_ratios() -> None:
    with style():
        figure = plot_standard.standard(record(), "title")
        assert "commit 0123456" in svg(figure)
    lines = [[list(line.get_ydata()) for line in axes.lines] for axes in figure.axes]
    assert lines == [[[2.0, 2.0], [2.0, 2.0]], [[20.0]], [[16.0, 128.0], [16.0, 128.0]]]


# ---- the command that counts bytes


def test_counters_are_added_to_the_record_of_the_times(tmp_path, capsys) -> None:
    out, csv = tmp_path / "standard.json", tmp_path / "counters.csv"
    data = record()
    data["bytes"] = None
    out.write_text(json.dumps(data))
    settings = Settings((512,), (64,), ("full",))
    csv.write_text(csv_of(profiles(settings)))
    argv = ("standard", "--bytes", "--csv", str(csv), "--out", str(out), "--lengths", "512", "--head-dims", "64")
    assert cli.main(argv) == OK
    written = json.loads(out.read_text())
    assert set(written["bytes"]["cells"]) == {"fwd-d64-full-s512-b32h32", "bwd-d64-full-s512-b32h32"}
    assert written["bytes"]["machine"] == data["machine"]
    assert "10.4" in out.with_suffix(".txt").read_text()
    assert "standard: 0 MB in 2 launches" in capsys.readouterr().out


def test_a_dry_run_prints_the_command(capsys) -> None:
    assert cli.main(("standard", "--bytes", "--dry-run", "--out", "x.json")) == OK
    said = capsys.readouterr().out
    assert "--lengths 1024,4096,16384" in said and said.count("cute_flash ") == 12


def test_counters_of_other_source_are_refused(tmp_path, capsys, monkeypatch) -> None:
    out = tmp_path / "standard.json"
    out.write_text(json.dumps(record()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "facts", lambda: {"gpu": "NVIDIA H200", "source_digest": "y"})
    assert cli.main(("standard", "--bytes", "--out", str(out))) == NOT_MEASURED
    assert "other source" in capsys.readouterr().err


def test_the_case_parses_its_arguments(monkeypatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(standard_bytes, "call_all", seen.append)
    standard_bytes.main(("--lengths", "16,32", "--head-dims", "8", "--masks", "full"))
    assert seen == [Settings((16, 32), (8,), ("full",))]
