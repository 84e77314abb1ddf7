"""`profiling versions`: with fake versions, and with two checkouts in processes on the CPU."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiling import __main__ as cli
from profiling.measure.machine import ROOT
from profiling.measure.study import FAILED, NOT_MEASURED, Record
from profiling.measure.workers import TaskFailed, Unusable
from profiling.peers.cute_flash import OPTIONS
from profiling.tune import version_worker, versions
from profiling.tune.version_worker import Cell, VersionWorker, WallTimer, some_elements
from profiling.tune.versions import Settings, Version
from tests.profiling.fakes import FakeTimer, tools

SMALL = Settings(directions=("bwd",), head_dims=(8,), masks=("causal",), lengths=(16,), tokens=32, hidden=16, rounds=4)


class FakeVersion:
    """A version whose calls take `call_ms`; from the call `fails_at` on, `time` fails."""

    def __init__(self, log: list[str], name: str, call_ms: float, result: float = 1.0, fails_at: int = 99) -> None:
        self.log, self.name, self.call_ms, self.result, self.fails_at = log, name, call_ms, result, fails_at
        self.timed = 0

    def ask(self, what: str, *arguments: Any) -> Any:
        self.log.append(f"{what} {self.name}")
        if what == "compile":
            return 3, 1
        if what == "prepare":
            if self.result == 0.0:
                raise TaskFailed("no kernel")
            return [torch.full((4,), self.result)]
        self.timed += 1
        if self.timed >= self.fails_at:
            raise TaskFailed("lost")
        return 10, self.call_ms


def run(*fakes: FakeVersion) -> Record:
    """The record of one cell."""
    study = versions.study_of({fake.name: Version(".", "abc", fake.ask) for fake in fakes})
    return json.loads(json.dumps(study.measure(SMALL, tools(FakeTimer())), allow_nan=False))


def lines_of(record: Record) -> list[str]:
    return [str(failure) for failure in versions.failures(record)]


def test_versions_take_turns_and_speeds_are_over_the_first() -> None:
    log: list[str] = []
    record = run(FakeVersion(log, "old", 3.0), FakeVersion(log, "new", 2.0))
    assert log[:4] == ["compile old", "compile new", "prepare old", "prepare new"]
    assert log[4:] == ["time old", "time new", "time new", "time old"] * 2
    assert versions.speed(record["cells"][0], "new", "old") == pytest.approx(1.5) and not lines_of(record)
    assert record["kernels"] == dict.fromkeys(("old", "new"), "3 kernels, 1 of them compiled now")
    times, means = versions.tables(record)
    assert times.columns == ("cell", "old ms", "spread", "new ms", "spread", "speed over old")
    assert times.rows == (("bwd plain d8 causal s16", "3.0000", "0.0%", "2.0000", "0.0%", "1.500"),)
    assert (means.columns, means.rows) == (("", "new", "cells"), (("bwd plain", "1.500", "1"),))


def test_other_results_and_failures_are_reported_and_not_timed() -> None:
    log: list[str] = []
    fakes = FakeVersion(log, "old", 1.0), FakeVersion(log, "wrong", 1.0, 1.1), FakeVersion(log, "nan", 1.0, torch.nan)
    failing = FakeVersion(log, "none", 1.0, 0.0), FakeVersion(log, "lost", 1.0, fails_at=2)
    record = run(*fakes, *failing)
    (cell,) = record["cells"]
    assert set(cell["versions"]) == {"old"} and not {"time wrong", "time nan"} & set(log)
    assert [line.removeprefix("bwd plain d8 causal s16, ") for line in lines_of(record)] == [
        "none: no kernel",
        "lost: lost",
        "wrong: not timed: results differ from those of old by 0.1",
        "nan: not timed: results differ from those of old by inf",
    ]
    table, *means = versions.tables(record)
    assert table.rows[0][3:6] == ("-", "-", "-") and not means
    assert cell["differences"]["nan"] is None and record["versions"]["old"] == {"version": ".", "source_digest": "abc"}


@pytest.mark.parametrize(("result", "reason"), [(0.0, "no kernel"), (torch.nan, "not timed: NaN or infinity")])
def test_nothing_is_compared_with_a_base_that_fails(result: float, reason: str) -> None:
    log: list[str] = []
    record = run(FakeVersion(log, "old", 1.0, result), FakeVersion(log, "new", 1.0))
    assert not record["cells"][0]["versions"] and f"bwd plain d8 causal s16, old: {reason}" in lines_of(record)


def test_cells() -> None:
    cells = Settings(features=("plain", "dropout"), lengths=(512, 16384)).cells()
    assert len(cells) == 2 * 2 * 3 * 2 * 2
    assert cells[0] == Cell("fwd", "plain", 64, "full", 512, 32, 32)
    assert cells[-1] == Cell("bwd", "dropout", 256, "causal", 16384, 1, 8)
    for wrong, message in ((Settings(lengths=(0,)), "must be 1 or more"), (Settings(masks=()), "an empty list")):
        with pytest.raises(ValueError, match=message):
            wrong.cells()


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("feature", OPTIONS)
def test_a_worker_repeats_its_results(direction: str, feature: str) -> None:
    cell = Cell(direction, feature, 8, "causal", 16, 2, 2)
    results = []
    for _ in range(2):
        worker = VersionWorker(WallTimer(), torch.device("cpu"))
        with pytest.raises(AssertionError, match="prepare comes first"):
            worker.time()
        results.append(worker.prepare(cell, 3, 0.1))
        calls, call_ms = worker.time()
        assert calls >= 2 and call_ms > 0
    assert len(results[0]) == {"fwd": 1, "bwd": 3 + (feature == "bias_gradient")}[direction]
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_column_is_compared(head_dim: int) -> None:
    columns = torch.arange(head_dim).expand(16384, 2048 // head_dim, head_dim).float()
    chosen = some_elements(columns)
    assert len(chosen.unique()) == head_dim and chosen.numel() <= 2**20
    assert torch.equal(some_elements(columns[0]), columns[0].flatten())


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_worker_says_whether_it_can_go_on(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = VersionWorker(FakeTimer(is_lost=is_lost), torch.device("cpu"))
    monkeypatch.setattr(version_worker, "_worker", lambda packages: worker)
    with pytest.raises(Unusable if is_lost else KeyError, match="'rope'"):
        version_worker.request(ROOT, "prepare", Cell("fwd", "rope", 8, "full", 16, 1, 1), 0, 0.1)


def test_a_version_is_a_folder_or_a_commit() -> None:
    with versions.folder_of(str(ROOT)) as folder:
        assert (folder / "cute_flash" / "api.py").read_text() == (ROOT / "cute_flash" / "api.py").read_text()
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(ROOT / "cute_flash" / "version.py", "cute_flash/version.py")

    def git(command: list[str], **_: Any) -> SimpleNamespace:
        known = command == ["git", "archive", "abc123", "cute_flash"]
        return SimpleNamespace(returncode=0 if known else 128, stdout=content.getvalue(), stderr=b"no such\nref")

    with versions.folder_of("abc123", git) as folder:
        assert (folder / "cute_flash" / "version.py").exists()
    assert not folder.exists()
    message = "'nothing' is neither a folder with cute_flash nor a commit here: no such ref"
    with pytest.raises(ValueError, match=message), versions.folder_of("nothing", git):
        pass


def changed_checkout(folder: Path, query: str) -> None:
    """Copy the package to a folder. Its `attn` passes the value of an expression as q."""
    shutil.copytree(ROOT / "cute_flash", folder / "cute_flash", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "cute_flash" / "__init__.py").open("a") as file:
        file.write(
            f"\nimport os\n_attn = attn\ndef attn(q, k, v, **options):\n    return _attn({query}, k, v, **options)"
        )


@pytest.mark.processes
def test_the_command_with_two_checkouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them has other queries, which the comparison of results must find."""
    changed_checkout(tmp_path, "2 * q")
    out = tmp_path / "versions.json"
    small = ["--head-dims", "8", "--lengths", "16", "--masks", "full", "--tokens", "32", "--hidden", "16"]
    quick = ["--rounds", "2", "--ms", "0.1", "--directions", "fwd", "--out", str(out)]
    status = cli.main(["versions", f"old={ROOT}", f"same={ROOT}", f"new={tmp_path}", *small, *quick])
    output = capsys.readouterr().out
    assert status == FAILED
    assert "fwd plain d8 full s16, new: not timed: results differ from those of old by" in output
    (cell,) = json.loads(out.read_text())["cells"]
    assert set(cell["versions"]) == {"old", "same"}
    assert cell["differences"]["same"] == 0.0 < versions.AGREEMENT < cell["differences"]["new"]


def test_wrong_names_are_refused_before_a_process_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["versions", "old=nothing", "new=.", "--features", "rope"]) == NOT_MEASURED
    assert "--features 'rope': choose from plain, dropout" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["old=."], ["old=.", "old=.."], ["old=.", "new"], ["old=.", "=."]])
def test_versions_need_names(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["versions", *arguments]) == NOT_MEASURED
    assert "expected at least two NAME=VERSION with different names" in capsys.readouterr().err


@pytest.mark.processes
def test_a_process_that_dies_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "cute_flash", tmp_path / "cute_flash", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "cute_flash" / "__init__.py").open("a") as file:
        file.write(
            "\n_attn = attn\ndef attn(q, k, v, **options):\n    assert q.shape[-1] == 8 or os.kill(os.getpid(), 9)"
        )
        file.write("\n    return _attn(q, k, v, **options)\nimport os\n")
    options = "--head-dims 16,8 --lengths 16 --masks full --tokens 32 --hidden 16 --rounds 1 --ms 0.1 --directions fwd"
    assert cli.main(["versions", f"old={ROOT}", f"new={tmp_path}", *options.split()]) == FAILED
    found = capsys.readouterr()
    assert "new: kernels are compiled at their first call: its process ended with signal 9" in found.out
    assert "- fwd plain d16 full s16, new: its process ended with signal 9" in found.out
    lines = [line.split() for line in found.out.splitlines() if line.startswith("| fwd plain d8 full s16")]
    assert len(lines) == 1 and float(lines[0][-2]) > 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("raise ImportError", "old: its process ended with exit status 1; it may be too old for this profiling"),
        # The installed package provides the other modules if it is editable, and they are missing otherwise.
        ("", "old: (ImportError: cute_flash.* was imported from|its process ended with exit status 1)"),
    ],
)
def test_a_version_that_cannot_be_measured(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cute_flash").mkdir()
    (tmp_path / "cute_flash" / "__init__.py").write_text(content)
    assert cli.main(["versions", f"old={tmp_path}", f"new={ROOT}"]) == NOT_MEASURED
    assert re.search(message, capsys.readouterr().err)
