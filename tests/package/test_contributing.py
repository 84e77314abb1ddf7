"""CONTRIBUTING.md names targets, files and folders that exist, and targets install their requirements."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.lock.sample import QUICK, SAMPLE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"make ([a-z][a-z-]+)", PAGE))
    assert targets >= {"lint", "test", "test-fast", "lock", "gpu-test"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_exist() -> None:
    folders = "api|spec|planning|runtime|jit|kernels|device|reference|tests|docs|docker|profiling"
    paths = set(re.findall(rf"(?<![\w/.-])(?:{folders})/[\w/]+(?:\.\w+)?", PAGE))
    assert len(paths) > 20
    for path in paths:
        assert any((root / path).exists() for root in (ROOT, ROOT / "cute_flash")), path


def test_the_numbers_of_kernels_of_the_lock() -> None:
    (digests,) = json.loads((ROOT / "tests" / "lock" / "digests.json").read_text(encoding="utf-8")).values()
    by_host = sum(isinstance(digest, dict) for digest in digests.values())
    numbers = {int(number) for number in re.findall(r"(\d+)\s+(?:kernels|cases of \[the lock)", PAGE)}
    assert numbers == {len(digests), len(QUICK), len(SAMPLE), by_host}
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert re.findall(r"hash of the machine code of (\d+) kernels", performance) == [str(len(digests))]


def test_the_demo_installs_no_tools() -> None:
    """`make demo` installs the package; other targets also install the extras of developers."""
    commands = {}
    for target in ("demo", "lint"):
        argv = ["make", "-n", "-B", "-C", str(ROOT), target]
        lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
        commands[target] = [line for line in lines if "pip install" in line]
    assert [line.split()[-1] for line in commands["demo"]] == ["."]
    assert [line.split()[-1] for line in commands["lint"]] == ["'.[dev,bench,docs]'"]
    assert not any("--quiet" in line for lines in commands.values() for line in lines)
