"""`python -m tests.gpu.suite`: the log of a run that is stopped and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import os, pytest
def test_right(): pass
def test_wrong(): assert os.path.exists("mended"), "not mended"
@pytest.mark.parametrize("name", ["two words", "fatal"])
def test_names(name):
    if name == "fatal" and not os.path.exists("mended"): os._exit(9)
def test_skipped(): pytest.skip("no")
"""


def suite(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.gpu.suite", "log.jsonl", "--jobs", "1", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.processes
@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_tests_that_have_not_passed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    stopped = suite(tmp_path, "--", "test_some.py")
    assert stopped.returncode == 1, stopped.stderr
    assert "1 failed, 2 passed, 2 not run" in stopped.stdout
    assert "failed test_some.py::test_wrong: AssertionError: not mended" in stopped.stdout
    late = suite(tmp_path, "--limit-s", "0.001", "--", "test_some.py")
    assert late.returncode == 1 and "1 failed, 2 passed, 2 not run" in late.stdout
    (tmp_path / "mended").touch()
    done = suite(tmp_path, "--", "test_some.py")
    # The sources are the same, so a test that failed and then passed is a finding.
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 flaky, 3 passed, 1 skipped, 0 not run" in done.stdout
    assert "flaky test_some.py::test_wrong: AssertionError: not mended" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert "sources" in lines[0]["facts"]
    names = [line["test"] for line in lines[1:]]
    # What had passed ran once.
    assert names.count("test_some.py::test_right") == 1 and names.count("test_some.py::test_wrong") == 2
    assert suite(tmp_path, "--summary").stdout.startswith("cutlass_dsl: ")
    text = (tmp_path / "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(text.replace(lines[0]["facts"]["sources"], "0123456789abcdef"))
    refused = suite(tmp_path, "--", "test_some.py")
    assert refused.returncode == 2 and "of other sources" in refused.stderr
