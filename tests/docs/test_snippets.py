"""Every Python block of README.md and docs/ runs on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import snippets
from tests.docs.pages import PAGES, ROOT, commands, name, read

# Pages whose Python blocks are excerpts of the source.
EXCERPTS = {"docs/architecture.md"}


def _pages() -> list:
    """The pages with Python blocks; those that call torch.compile have the marker `compiles`."""
    found = []
    for page in PAGES:
        code = "\n".join(snippets.python_blocks(page))
        if code and name(page) not in EXCERPTS:
            marks = [pytest.mark.compiles] if "torch.compile(" in code else []
            found.append(pytest.param(page, id=name(page), marks=marks))
    return found


@pytest.mark.parametrize("page", _pages())
def test_python_blocks_run(page: Path) -> None:
    snippets.run(page, "cpu")


def test_readme_and_the_first_pages_have_code() -> None:
    assert len(snippets.python_blocks(ROOT / "README.md")) == 1
    assert snippets.python_blocks(ROOT / "docs" / "index.md")
    numbers = re.findall(r"^\*\*(\d+)\. ", read(ROOT / "docs" / "cheatsheet.md"), re.MULTILINE)
    assert numbers == [str(n + 1) for n in range(12)]
    assert len(snippets.python_blocks(ROOT / "docs" / "cheatsheet.md")) == 13


def test_the_readme_begins_with_two_commands_that_need_no_gpu() -> None:
    assert [" ".join(words) for words in commands(ROOT / "README.md")][:2] == ["make demo", "make test"]
    first_screen = "\n".join(read(ROOT / "README.md").splitlines()[:15])
    assert "make test" in first_screen and "**No GPU?** Every call also runs on the CPU" in first_screen


def test_code_for_a_gpu_is_made_smaller() -> None:
    code = 'torch.randn(2, 16, 4096, 128, device="cuda"); window=(1024, 0); softcap=30.0; [0, 1000, 4096]'
    smaller = 'torch.randn(2, 16, 64, 128, device="cpu"); window=(16, 0); softcap=30.0; [0, 15, 64]'
    assert snippets.on_cpu(code) == smaller
    assert snippets.on_cpu("torch.randn(1, 8192)") == "torch.randn(1, 8192)"
