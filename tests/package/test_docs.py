"""The Python examples of docs/operators.md run, and what they assert holds."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks and all("assert_close" in block for block in blocks)
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
