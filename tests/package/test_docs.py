"""The Python examples of docs/ run on the CPU, and print what the pages show.

The blocks of a page run in order, in one namespace. A `text` block directly after a `python` block is its output.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
PAGES = {str(path.relative_to(DOCS)): EXAMPLE.findall(path.read_text(encoding="utf-8")) for path in DOCS.rglob("*.md")}


@pytest.mark.parametrize("page", sorted(name for name, examples in PAGES.items() if examples))
def test_the_examples_run(page: str) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "example"}
    for code, expected in PAGES[page]:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(DOCS / page), "exec"), names)
        if expected:
            assert printed.getvalue().rstrip() == expected.rstrip()


def test_all_features_have_an_example() -> None:
    pages = [str(path.relative_to(DOCS)) for path in (DOCS / "features").glob("*.md")]
    assert pages and all(PAGES[page] for page in pages)
