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
from profiling import versions
from profiling.machine import ROOT
from profiling.version_worker import CALLS, Cell, VersionWorker, WallTimer
from profiling.versions import Settings, VersionError

SMALL = Settings(directions=("bwd",), head_dims=(8,), masks=("causal",), lengths=(16,), tokens=32, hidden=16, rounds=4)


class FakeVersion:
    """A version whose calls take `call_ms`; from the call `fails_at` on, `time` fails."""

    def __init__(self, log: list[str], name: str, call_ms: float, result: float = 1.0, fails_at: int = 99) -> None:
        self.log, self.name, self.call_ms, self.result, self.fails_at = log, name, call_ms, result, fails_at
        self.timed = 0

    def ask(self, what: str, *arguments: Any) -> Any:
        self.log.append(f"{what} {self.name}")
        if what == "compile":
            return 3
        if what == "prepare":
            if self.result == 0.0:
                raise VersionError("no kernel")
            return [torch.full((4,), self.result)]
        self.timed += 1
        if self.timed >= self.fails_at:
            raise VersionError("lost")
        return 10, self.call_ms


def run(*fakes: FakeVersion, settings: Settings = SMALL) -> versions.CellResult:
    (found,) = versions.run_versions({fake.name: fake for fake in fakes}, settings)
    return found


def test_versions_take_turns_and_ratios_are_speeds_over_the_first() -> None:
    log: list[str] = []
    found = run(FakeVersion(log, "old", 3.0), FakeVersion(log, "new", 2.0))
    assert log[:4] == ["compile old", "compile new", "prepare old", "prepare new"]
    assert log[4:] == ["time old", "time new", "time new", "time old"] * 2
    assert found.ratio("new", "old") == pytest.approx(1.5) and not versions.failures([found])
    times, means = versions.tables([found], ["old", "new"])
    assert times.columns == ("call", "old ms", "spread", "new ms", "spread", "over old")
    assert times.rows == (("bwd plain d8 causal s16", "3.0000", "0.0%", "2.0000", "0.0%", "1.500"),)
    assert means.rows == (("bwd plain", "1.500"),)


def test_other_results_and_failures_are_reported() -> None:
    log: list[str] = []
    fakes = FakeVersion(log, "old", 1.0), FakeVersion(log, "wrong", 1.0, 1.1), FakeVersion(log, "nan", 1.0, torch.nan)
    failing = FakeVersion(log, "none", 1.0, 0.0), FakeVersion(log, "lost", 1.0, fails_at=2)
    found = run(*fakes, *failing)
    assert set(found.samples) == {"old", "wrong", "nan"}
    lines = versions.failures([found])
    assert [line.split(": ", 1)[1] for line in lines] == [
        "none: no kernel", "lost: lost", "wrong: results differ by 0.1", "nan: results differ by inf",
    ]  # fmt: skip
    table = versions.tables([found], ["old", "none", "wrong"])[0]
    assert table.rows[0][3:6] == ("-", "-", "-")


def test_cells() -> None:
    cells = Settings(calls=("plain", "dropout"), lengths=(512, 16384)).cells()
    assert len(cells) == 2 * 2 * 3 * 2 * 2
    assert cells[0] == Cell("fwd", "plain", 64, "full", 512, 32, 32)
    assert cells[-1] == Cell("bwd", "dropout", 256, "causal", 16384, 1, 8)
    with pytest.raises(ValueError, match="'rope': choose from plain, deterministic"):
        Settings(calls=("rope",)).cells()


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("call", CALLS)
def test_a_worker_repeats_its_results(direction: str, call: str) -> None:
    cell = Cell(direction, call, 8, "causal", 16, 2, 2)
    results = []
    for _ in range(2):
        worker = VersionWorker(WallTimer(), torch.device("cpu"))
        with pytest.raises(AssertionError, match="prepare comes first"):
            worker.time()
        results.append(worker.prepare(cell, 3, 0.1))
        calls, call_ms = worker.time()
        assert calls >= 2 and call_ms > 0
    assert len(results[0]) == {"fwd": 1, "bwd": 3}[direction]
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*results, strict=True))


def test_a_version_is_a_folder_or_a_commit() -> None:
    with versions.folder_of(str(ROOT)) as folder:
        assert (folder / "cute_flash").resolve() == ROOT / "cute_flash"
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


@pytest.mark.processes
def test_the_command_with_two_checkouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second checkout scales queries twice, which the comparison of results must find."""
    shutil.copytree(ROOT / "cute_flash", tmp_path / "cute_flash", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "cute_flash" / "__init__.py").open("a") as file:
        file.write("\n_attn = attn\ndef attn(q, k, v, **options):\n    return _attn(2 * q, k, v, **options)\n")
    out = tmp_path / "versions.json"
    small = ["--head-dims", "8", "--lengths", "16", "--masks", "full", "--tokens", "32", "--hidden", "16"]
    quick = ["--rounds", "2", "--ms", "0.1", "--directions", "fwd", "--out", str(out)]
    status = cli.main(["versions", f"old={ROOT}", f"same={ROOT}", f"new={tmp_path}", *small, *quick])
    output = capsys.readouterr().out
    assert status == cli.FAILED
    assert "fwd plain d8 full s16: new: results differ by" in output and "same: results" not in output
    (cell,) = json.loads(out.read_text())["cells"]
    assert set(cell["versions"]) == {"old", "same", "new"}
    assert cell["differences"]["same"] == 0.0 < versions.AGREEMENT < cell["differences"]["new"]


@pytest.mark.parametrize("arguments", [["old=."], ["old=.", "old=.."], ["old=.", "new"], ["old=.", "=."]])
def test_versions_need_names(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["versions", *arguments]) == cli.NOT_MEASURED
    assert "expected at least two NAME=VERSION with different names" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("raise ImportError", "old: its process ended with exit status 1; it may be too old for this profiling"),
        # The installed package provides the other modules if it is editable, and they are missing otherwise.
        ("", "old: (modules of .* were imported beside|its process ended with exit status 1)"),
    ],
)
def test_a_version_that_cannot_be_measured(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cute_flash").mkdir()
    (tmp_path / "cute_flash" / "__init__.py").write_text(content)
    assert cli.main(["versions", f"old={tmp_path}", f"new={ROOT}"]) == cli.NOT_MEASURED
    assert re.search(message, capsys.readouterr().err)
