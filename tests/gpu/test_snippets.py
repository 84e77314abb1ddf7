"""The Python blocks of README.md and docs/ that use CUDA run unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import snippets
from tests.docs.pages import PAGES, name

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page", [x for x in PAGES if '"cuda"' in "".join(snippets.python_blocks(x))], ids=name)
def test_python_blocks_run(page: Path) -> None:
    snippets.run(page, "cuda")
